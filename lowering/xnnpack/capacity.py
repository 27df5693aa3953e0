"""Open sizes in a program keep the ranges that they were exported with.

Before: an exported program and what ExecuTorch makes of it. After: a program whose memory is planned for the whole
range of every open size, or an error: ExecuTorch's passes trace the graph again and note conditions of the example's
sizes as if they held for all.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from quantplug.core.errors import LoweringError


def require_limits(graph: fx.Graph) -> None:
    """Refuses open sizes without an upper limit, as ExecuTorch plans all memory beforehand.

    Raises:
        LoweringError: an input's size may be anything; a program would take no more than the example's.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        for dim, limit in enumerate(_limits(node.meta.get("val"))):
            if limit is None:
                raise LoweringError(
                    f"Size {dim} of input {index} ('{node.name}') is open without an upper limit, and an ExecuTorch "
                    "program plans its memory beforehand; export with torch.export.Dim(..., max=...)."
                )


@contextlib.contextmanager
def one_way_to_convolve() -> Iterator[None]:
    """Lets tracing convolve in one way, whatever the sizes.

    oneDNN and NNPACK have ways of their own for fewer than 16 images. Where torch may choose, it compares the sizes,
    and each pass of ExecuTorch that traces the graph makes 15 of a limit of 64.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the flags of oneDNN warn of a processor without TF32
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
            yield


Sizes = dict[str, list[int | None]]


def largest_sizes(exported: ExportedProgram) -> Sizes:
    """Returns the largest sizes of the inputs by name; to be asked before ExecuTorch's passes narrow them."""
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    found = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    return {name: list(_limits(found[name])) for name in names}


def require_capacity(largest: Sizes, program: Any) -> None:
    """Holds the sizes that a program's inputs may have against those that were exported.

    Args:
        largest: what `largest_sizes` returned of the exported program.
        program: what ExecuTorch made of it.

    Raises:
        LoweringError: the program takes less.
    """
    plan = program.execution_plan[0]
    for index, ((name, wanted), place) in enumerate(zip(largest.items(), plan.inputs, strict=True)):
        planned = list(getattr(plan.values[place].val, "sizes", ()))
        if planned and any(most is not None and have < most for have, most in zip(planned, wanted, strict=True)):
            raise LoweringError(
                f"ExecuTorch plans input {index} ('{name}') with at most {planned}, and it was exported with up to "
                f"{wanted}; export with the smaller limits, or with example inputs of the largest sizes."
            )


def require_within(largest: Sizes, inputs: Sequence[Any]) -> None:
    """Holds a call's inputs against the sizes that the program was exported for.

    Raises:
        LoweringError: one is larger.
    """
    for index, ((name, most), given) in enumerate(zip(largest.items(), inputs, strict=True)):
        sizes = given.shape if isinstance(given, Tensor) else ()
        for dim, (have, limit) in enumerate(zip(sizes, most, strict=False)):
            if limit is not None and have > limit:
                raise LoweringError(
                    f"Size {dim} of input {index} ('{name}') is {have}, and the program was exported for at most "
                    f"{limit}; pass it in parts, or export with a larger limit."
                )


def _limits(value: Any) -> Iterator[int | None]:
    """Yields the largest that each size of a tensor may be, None where nothing limits it."""
    sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, Tensor) else ()
    for size in sizes:
        if isinstance(size, int):
            yield size
        else:
            upper = size.node.shape_env.bound_sympy(size.node.expr).upper
            yield int(upper) if upper.is_Integer else None  # torch's own infinity calls itself finite
