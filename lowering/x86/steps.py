"""The steps from a q/dq graph to oneDNN's kernels, in their order, and what holds between them.

Before: a lowering's own copy of a q/dq graph. After: the graph of an `X86Program`. Notes of what they found stand in
`Told`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import operands, operator_name, rank
from quantplug.core.graph.meta import REASON
from quantplug.core.graph.traits import moves
from quantplug.core.patterns.language import Match
from quantplug.core.patterns.rules import apply
from quantplug.core.qdq.nodes import is_quantize
from quantplug.core.qdq.qparams import qparams
from quantplug.lowering.halves import spell_out_halves
from quantplug.lowering.rewrites.attention import shared_heads_are_rows
from quantplug.lowering.rewrites.folding import all_constant_expressions_are_folded
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.steps import Step, every_node
from quantplug.lowering.x86.attention import OPEN_MASKS
from quantplug.lowering.x86.bfloat16 import KERNELS, compute_in_half, is_half_for_free
from quantplug.lowering.x86.cleaning import clean
from quantplug.lowering.x86.geometry import step_aside
from quantplug.lowering.x86.integer_flow import STATIC_DEQUANTIZE, move
from quantplug.lowering.x86.kernels.calls import output_objection
from quantplug.lowering.x86.kernels.embedding import EMBEDDINGS
from quantplug.lowering.x86.kernels.epilogues import fuse
from quantplug.lowering.x86.kernels.pooling import AVERAGES
from quantplug.lowering.x86.kernels.products import products
from quantplug.lowering.x86.kernels.weight_only import WEIGHT_ONLY
from quantplug.lowering.x86.row_scales import spell_out_rows
from quantplug.lowering.x86.running.autotune import always_integer, measured, measured_half

_PRODUCTS = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::linear")


@dataclass
class Told:
    """What steps tell of operators that get no kernel.

    Attributes:
        folded: names of those that became constants.
        reasons: of others, by their names.
    """

    folded: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)


def steps(
    example_inputs: tuple[Any, ...], told: Told, *, autotune: bool = False, float_dtype: torch.dtype = torch.float32
) -> tuple[Step[fx.GraphModule], ...]:
    """Returns the steps of a lowering.

    Args:
        example_inputs: what the graph is called with.
        told: gets what the steps tell.
        autotune: whether to time integer and float kernels.
        float_dtype: of products that stay float.
    """
    half_at_will = float_dtype == torch.bfloat16

    def to_kernels(module: fx.GraphModule) -> None:
        choose = measured(module, example_inputs) if autotune else always_integer
        apply(module.graph, (*products(choose), *WEIGHT_ONLY, *AVERAGES, *EMBEDDINGS))

    def to_half(module: fx.GraphModule) -> None:
        if half_at_will or autotune:
            compute_in_half(module.graph, (lambda product: None) if half_at_will else measured_half(is_half_for_free))

    return (
        Step("spell plainly", lambda module: spell_plainly(module.graph), leaves=(IS_PLAIN,)),
        Step("fold constants", lambda module: _fold(module, told)),
        Step("spell out what is stored or scaled otherwise", lambda module: _spell_out(module, told)),
        Step("clean", lambda module: clean(module, example_inputs), leaves=(HAS_VALUES, IS_UNSIGNED)),
        Step("attention", _attend),
        Step("move integers", lambda module: move(module.graph), needs=(HAS_VALUES,), leaves=(MOVES_INTEGERS,)),
        Step("kernels", to_kernels, needs=(IS_PLAIN, HAS_VALUES, IS_UNSIGNED), leaves=(HAS_REASONS,)),
        Step("fuse", lambda module: fuse(module.graph), needs=(HAS_VALUES,), leaves=(IS_FUSED, IS_OF_IMAGES)),
        Step("step aside", lambda module: step_aside(module.graph), needs=(HAS_VALUES, IS_OF_IMAGES)),
        Step("compute in half", to_half, needs=(HAS_VALUES, IS_FUSED)),
        Step("finish", finish, leaves=(HAS_VALUES, HAS_REASONS, IS_FUSED, IS_OF_IMAGES)),
    )


def _fold(module: fx.GraphModule, told: Told) -> None:
    before = {node.name for node in module.graph.nodes}
    all_constant_expressions_are_folded(module)
    told.folded |= before - {node.name for node in module.graph.nodes}


def _attend(module: fx.GraphModule) -> None:
    apply(module.graph, OPEN_MASKS)
    shared_heads_are_rows(module)


def _spell_out(module: fx.GraphModule, told: Told) -> None:
    halves, rows = spell_out_halves(module.graph), spell_out_rows(module.graph)
    told.reasons |= rows | halves


def _without_value(node: fx.Node) -> str | None:
    return "has no value" if node.op in ("call_function", "get_attr") and "val" not in node.meta else None


def _spelled_otherwise(node: fx.Node) -> str | None:
    return "is not spelled plainly" if operator_name(node) in ("aten::convolution", "aten::addmm") else None


def _signed(node: fx.Node) -> str | None:
    if not is_quantize(node) or operands(node)["dtype"] != torch.int8 or REASON.on(node):
        return None
    return "quantizes to int8, and nothing says why" if qparams(node).is_static else None


def _moves_floats(node: fx.Node) -> str | None:
    is_left = moves(node) and isinstance(STATIC_DEQUANTIZE.match(node.all_input_nodes[0]), Match)
    return "moves what it could move in integers" if is_left else None


def _without_reason(node: fx.Node) -> str | None:
    is_left = operator_name(node) in _PRODUCTS and not REASON.on(node)
    return "has no kernel, and nothing says why" if is_left else None


def _not_fused(node: fx.Node) -> str | None:
    source = operands(node)["input"] if is_quantize(node) else None
    if not isinstance(source, fx.Node) or source.target not in KERNELS or len(source.users) > 1:
        return None
    return None if output_objection(qparams(node)) else "quantizes what its kernel could yield in integers"


def _of_no_images(node: fx.Node) -> str | None:
    given = operands(node) if node.target in KERNELS else {}
    dimensions = len(given.get("stride", ()))
    is_image = dimensions in (0, 2, 3) and (not dimensions or rank(given["qx"]) == dimensions + 2)
    return None if is_image else "convolves what is no batch of images or volumes"


IS_PLAIN = every_node(_spelled_otherwise)
HAS_VALUES = every_node(_without_value)
IS_UNSIGNED = every_node(_signed)
MOVES_INTEGERS = every_node(_moves_floats)
HAS_REASONS = every_node(_without_reason)
IS_FUSED = every_node(_not_fused)
IS_OF_IMAGES = every_node(_of_no_images)
