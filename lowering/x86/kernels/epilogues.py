"""What follows a kernel, fused into it.

Before: `kernel (float32) -> relu -> quantize` and parts of it. After: one kernel that yields the quantized result.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from quantplug.core.graph.facts import operands
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.patterns.language import Match, Op, op, single_use
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import QParams, qparams, quantize
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.x86.kernels.calls import (
    CONVOLUTION,
    LINEAR,
    NO_SCALARS,
    UNBOUNDED,
    bounded,
    end_in,
    end_objection,
    ending,
    kernel,
    with_output,
)
from quantplug.lowering.x86.kernels.images import as_images


def fuse(graph: fx.Graph) -> None:
    """Fuses unary functions, clamps and output quantization into the kernels; the graph stays functional."""
    apply(graph, UNARIES)
    apply(graph, INTEGER_CLAMPS)
    apply(graph, OUTPUTS)
    as_images(graph)


def _unary(
    function: Op, name: str, scalars: Callable[[fx.Node], list[Any] | str], algorithm: str = "approximate"
) -> Rule:
    def rewrite(match: Match) -> fx.Node | str:
        given = operands(match.root)
        numbers = scalars(match.root)
        if isinstance(numbers, str):
            return numbers
        node: fx.Node = match["kernel"]
        reason = end_objection(node, name)
        if reason:
            return reason
        end_in(node, name, numbers, given.get(algorithm, ""))
        return node

    return Rule(function, rewrite)


def _nothing(function: fx.Node) -> list[Any]:
    return NO_SCALARS


def _bounds(function: fx.Node) -> list[Any] | str:
    found = clamp_bounds(function)
    if found is None:
        return "its bounds are tensors"
    return [end if bound is None else float(bound) for bound, end in zip(found, UNBOUNDED, strict=True)]


def _slope(function: fx.Node) -> list[Any]:
    return [operands(function)["negative_slope"]]


def _unaries(name: str) -> Iterator[Rule]:
    source = single_use(kernel(name))
    yield _unary(op("relu", self=source), "relu", _nothing)
    yield from (_unary(op(clamp, self=source), "hardtanh", _bounds) for clamp in CLAMPS if clamp != "relu")
    yield _unary(op("hardswish", self=source), "hardswish", _nothing)
    yield _unary(op("silu", self=source), "swish", _nothing)
    gate = op("sigmoid", self=kernel(name))
    yield _unary(
        op(
            "mul.Tensor", self=kernel(name), other=single_use(gate), commutative=("self", "other"), where=(_used_twice,)
        ),
        "swish",
        _nothing,
    )
    if name == LINEAR:
        yield _unary(op("gelu", self=source), "gelu", _nothing)
        yield _unary(op("leaky_relu", self=source), "leaky_relu", _slope)
        yield _unary(op("tanh", self=source), "tanh", _nothing)


def _used_twice(match: Match) -> str | None:
    return None if len(match["kernel"].users) == 2 else "the product is used elsewhere too"


UNARIES = (*_unaries(CONVOLUTION), *_unaries(LINEAR))


def _fuse_output(match: Match) -> fx.Node | str:
    found, params = with_output(match), qparams(match.root)
    return found if isinstance(found, str) or _ends_at(found, params) else bounded(found, params)


def _ends_at(node: fx.Node, params: QParams) -> bool:
    """Lets a kernel's function end at the bounds of a range narrower than its dtype, where it can have bounds."""
    name, numbers, _ = ending(operands(node))
    bounds = _ENDS.get(name, lambda numbers: None)(numbers)
    if params.is_full_range or bounds is None or end_objection(node, "hardtanh"):
        return False
    first, last = params.bounds
    end_in(node, "hardtanh", [min(max(bound, first), last) for bound in bounds])
    return True


# function of a kernel -> the bounds of its results, from its numbers
_ENDS: dict[str, Callable[[Any], tuple[float, float] | None]] = {
    "none": lambda numbers: UNBOUNDED,
    "relu": lambda numbers: (0.0, UNBOUNDED[1]),
    "hardtanh": lambda numbers: tuple(numbers),
}
INTEGER_CLAMPS = tuple(rule for name in (CONVOLUTION, LINEAR) for rule in clamp_rules(single_use(kernel(name, None))))
OUTPUTS = tuple(Rule(quantize(input=single_use(kernel(name, None))), _fuse_output) for name in (CONVOLUTION, LINEAR))
