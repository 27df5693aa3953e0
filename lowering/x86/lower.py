"""From a q/dq graph to a module of oneDNN kernels.

Before: the result of `convert_pt2e`. After: an `X86Program`; the converted model is not changed.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.graph.meta import PAIR
from quantplug.core.patterns.rules import apply
from quantplug.lowering.halves import spell_out_halves
from quantplug.lowering.placement import place, record
from quantplug.lowering.program import require_float_dtype
from quantplug.lowering.rewrites.folding import all_constant_expressions_are_folded
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting
from quantplug.lowering.x86.attention import OPEN_MASKS
from quantplug.lowering.x86.bfloat16 import compute_in_half, is_half_for_free
from quantplug.lowering.x86.cleaning import clean
from quantplug.lowering.x86.geometry import step_aside
from quantplug.lowering.x86.integer_flow import move
from quantplug.lowering.x86.kernels.embedding import EMBEDDINGS
from quantplug.lowering.x86.kernels.epilogues import fuse
from quantplug.lowering.x86.kernels.pooling import AVERAGES
from quantplug.lowering.x86.kernels.products import products
from quantplug.lowering.x86.kernels.weight_only import WEIGHT_ONLY
from quantplug.lowering.x86.row_scales import spell_out_rows
from quantplug.lowering.x86.running.autotune import always_integer, measured, measured_half
from quantplug.lowering.x86.running.program import X86Program


def lower(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    autotune: bool = False,
    float_dtype: torch.dtype = torch.float32,
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

    Returns:
        A program that runs eagerly; operators without integer kernel stay float, and `ops` says why.

    Raises:
        ModelError: `converted` is no graph module.
        LoweringError: it still has observers, the inputs do not fit, or `float_dtype` is another dtype.
    """
    source = require_graph_module(converted, "lower")
    _require_inputs(source, example_inputs)
    module = starting(source)
    require_float_dtype(float_dtype)
    recorded = record(module.graph)
    spell_plainly(module.graph)
    all_constant_expressions_are_folded(module)
    folded = {operator.node for operator in recorded} - {node.name for node in module.graph.nodes}
    halves = spell_out_halves(module.graph)
    rows = spell_out_rows(module.graph)
    clean(module, example_inputs)
    apply(module.graph, OPEN_MASKS)
    move(module.graph)
    choose = measured(module, example_inputs) if autotune else always_integer
    apply(module.graph, (*products(choose), *WEIGHT_ONLY, *AVERAGES, *EMBEDDINGS))
    pair = max((PAIR.get(node, 0) for node in module.graph.nodes), default=0)
    fuse(module.graph)
    step_aside(module.graph)
    if float_dtype == torch.bfloat16:
        compute_in_half(module.graph, lambda product: None)
    elif autotune:
        compute_in_half(module.graph, measured_half(is_half_for_free))
    finish(module)
    program = X86Program(module, example_inputs, dynamic_shapes, pair=pair)
    ops = place(recorded, program.module.graph, ("onednn", "quantized"), folded)
    reasons = rows | halves
    program.ops = tuple(replace(o, reason=reasons[o.node]) if o.reason and o.node in reasons else o for o in ops)
    return program


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
