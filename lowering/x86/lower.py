"""From a q/dq graph to a module of oneDNN kernels.

Before: the result of `convert_pt2e`. After: an `X86Program`; the converted model is not changed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.graph.meta import PAIR
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.placement import place, record
from quantplug.lowering.program import require_float_dtype
from quantplug.lowering.starting import starting
from quantplug.lowering.steps import run
from quantplug.lowering.x86.running.compiled import require_compiler
from quantplug.lowering.x86.running.packaged import X86Package
from quantplug.lowering.x86.running.program import X86Program
from quantplug.lowering.x86.steps import Told, steps


def lower(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    autotune: bool = False,
    float_dtype: torch.dtype = torch.float32,
    constants: Mapping[str, Any] | None = None,
) -> X86Program:
    """Lowers a q/dq graph to oneDNN quantized kernels.

    Args:
        converted: what `convert_pt2e` returned.
        example_inputs: inputs as for `torch.export.export`.
        dynamic_shapes: which sizes may vary, as for `torch.export.export`; needed again to save the program.
        autotune: time the integer and the float kernels of each convolution and linear here and now, on the
            shapes of the example inputs, and leave the layer float where that is faster; `ops` says so. What stays
            float computes in bfloat16 where that is faster.
        float_dtype: torch.bfloat16 lets all products that stay float (attention's too) compute in it, which
            is faster on processors with AMX; sums, normalizations and the outputs stay float32.
        constants: numbers, or lists of them, that the program and its file carry along by name.

    Returns:
        A program that runs eagerly; operators without integer kernel stay float, and `ops` says why.

    Raises:
        ModelError: `converted` is no graph module.
        LoweringError: it still has observers, the inputs do not fit, or `float_dtype` is another dtype.
    """
    source = require_graph_module(converted, "lower")
    _require_inputs(source, example_inputs)
    module = starting(source, integer_products=False)
    require_float_dtype(float_dtype)
    recorded, told = record(module.graph), Told()
    run(steps(example_inputs, told, autotune=autotune, float_dtype=float_dtype), module)
    pair = max((PAIR.get(node, 0) for node in module.graph.nodes), default=0)
    program = X86Program(module, example_inputs, dynamic_shapes, pair=pair, constants=constants)
    ops = place(recorded, program.module.graph, ("onednn", "quantized"), told.folded)
    program.ops = tuple(
        replace(o, reason=told.reasons[o.node]) if o.reason and o.node in told.reasons else o for o in ops
    )
    return program


def lower_to_package(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    float_dtype: torch.dtype = torch.float32,
) -> X86Package:
    """Lowers a q/dq graph to oneDNN quantized kernels and compiles what lies between them (AOTInductor).

    Args:
        converted: what `convert_pt2e` returned.
        example_inputs: inputs as for `torch.export.export`.
        dynamic_shapes: as for `lower`.
        float_dtype: as for `lower`.

    Raises:
        ModelError: `converted` is no graph module.
        LoweringError: as for `lower`, or there is no C++ compiler, or the model writes a buffer.
    """
    require_compiler()
    plain = pytree.tree_map_only(Tensor, Tensor.contiguous, example_inputs)  # as the package makes whatever it is given
    return X86Package.of(lower(converted, plain, dynamic_shapes=dynamic_shapes, float_dtype=float_dtype))


def _require_inputs(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> None:
    observers = [node for node in module.graph.nodes if node.op == "call_module" and node.users]
    if observers:
        raise LoweringError(
            f"The model still calls module '{observers[0].target}' at node '{observers[0].name}'; "
            "convert it with `convert_pt2e` before lowering."
        )
    if not isinstance(example_inputs, tuple):
        raise LoweringError(
            f"example_inputs is {type(example_inputs).__name__}; pass a tuple as for `torch.export.export`."
        )
