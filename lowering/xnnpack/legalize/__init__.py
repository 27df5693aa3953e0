"""Makes a q/dq graph say only what XNNPACK's integer kernels can carry out.

Before: any q/dq graph. After: a graph that computes the same numbers, in which every operator is either
one that the serializer writes correctly or one that is marked to stay float, with the reason. ExecuTorch 1.4's
own partitioner takes many of these constructs and writes programs that do not load or are wrong.
"""

from collections.abc import Callable
from functools import partial

from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import describe, operator_name
from quantplug.core.qdq.calls import QuantizedCall, quantized_calls
from quantplug.core.qdq.qparams import folded
from quantplug.lowering.rewrites.attention import any_attention_is_products
from quantplug.lowering.rewrites.broadcasting import expansions_are_broadcast
from quantplug.lowering.rewrites.constants import numbers_are_constants
from quantplug.lowering.rewrites.functions import functions_have_kernels
from quantplug.lowering.rewrites.masks import hidden_is_summed
from quantplug.lowering.rewrites.norms import norms_are_rows, reductions_are_rows
from quantplug.lowering.rewrites.parts import parts_of_open_rows_are_products
from quantplug.lowering.signed import signed_integers
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.steps import Step, every_node, run
from quantplug.lowering.xnnpack.batches import products_are_of_batches
from quantplug.lowering.xnnpack.legalize import conditions
from quantplug.lowering.xnnpack.legalize.depthwise import LARGE_DEPTHWISE, small_if_depthwise
from quantplug.lowering.xnnpack.legalize.integers import (
    casts_of_integers_are_conversions,
    clamps_as_fusable_activations,
    narrow_ranges_as_clamps,
    one_dequantize_per_use,
    quantize_scalars,
    read_tables_by_row,
)
from quantplug.lowering.xnnpack.legalize.movement import (
    aliases_are_clones,
    concatenations_share_qparams,
    contiguous_constants,
    copies_of_integers_are_views,
    dynamic_linears_over_rows,
    moves_keep_qparams,
    pads_of_integers_are_moves,
    pads_stay_quantized,
    single_taps_have_own_scales,
    softmax_over_rows,
    spell_out_slopes,
)
from quantplug.lowering.xnnpack.legalize.patches import (
    narrow_convolutions_are_linear,
    patches_if_float,
    tiles_are_linear,
)
from quantplug.lowering.xnnpack.legalize.products import (
    GEMMS,
    NO_INTEGER_KERNEL,
    WEIGHT_ONLY,
    constant_biases_are_float,
    float_rows_between_integers_are_images,
    narrow_weights_name_four_bits,
    own_constant,
    own_constants_per_use,
    takes_run_time_scales,
    yields_integers_if_static,
)
from quantplug.lowering.xnnpack.legalize.refusals import (
    MEANS,
    PORTABLE,
    SCALES_OUT_OF_RANGE,
    Legalized,
    Refusal,
    activation_of_integers,
    adds_less_than_a_step,
    means_of_one_size,
    refused,
    reshapes_one_open_size,
    resizes_by_ratios,
)
from quantplug.lowering.xnnpack.rewrites import AT_LOWERING

_ONE_EACH = every_node(conditions.one_integer_reader)
_PRODUCTS = every_node(conditions.product)

__all__ = [
    "Legalized",
    "activation_of_integers",
    "adds_less_than_a_step",
    "legalize",
    "means_of_one_size",
    "patches_if_float",
    "read_tables_by_row",
    "reshapes_one_open_size",
    "resizes_by_ratios",
    "runs_alone",
    "small_if_depthwise",
    "steps",
    "takes_run_time_scales",
    "yields_integers_if_static",
]


def legalize(working: fx.GraphModule, accepts: Callable[[fx.Node], bool] | None = None) -> Legalized:
    """Rewrites a q/dq graph in place for XNNPACK.

    Args:
        working: a private copy; nodes and buffers are added to it, operators keep their names.
        accepts: which operators XNNPACK may take; None for all.

    Returns:
        The operators that XNNPACK cannot take as they stand, with the reason.

    Raises:
        LoweringError: an operator has no kernel in XNNPACK and none in the runtime's portable library.
    """
    found = Legalized()
    run(steps(found, accepts), working)
    return found


def steps(found: Legalized, accepts: Callable[[fx.Node], bool] | None = None) -> tuple[Step[fx.GraphModule], ...]:
    """Returns what is done to a graph, in this order.

    Args:
        found: what is told of operators that XNNPACK does not take.
        accepts: which operators XNNPACK may take; None for all.
    """
    return (
        Step("attention as products", partial(any_attention_is_products, taken=accepts)),
        Step("operators that the runtime has", _operators_of_the_runtime),
        Step("one spelling", _spelled_plainly, leaves=(every_node(conditions.plain),)),
        Step("contiguous constants", contiguous_constants, leaves=(every_node(conditions.contiguous),)),
        Step("pads of integers between conversions", pads_of_integers_are_moves, needs=(every_node(conditions.plain),)),
        Step("signed integers", _signed_integers, leaves=(every_node(conditions.signed),)),
        Step("one dequantize for each integer reader", one_dequantize_per_use, leaves=(_ONE_EACH,)),
        Step("four bits named", narrow_weights_name_four_bits),
        Step("constant biases in float", constant_biases_are_float, leaves=(every_node(conditions.float_bias),)),
        Step("patches side by side as linear layers", tiles_are_linear),
        Step("narrow convolutions as linear layers", narrow_convolutions_are_linear),
        Step("aliases as copies", aliases_are_clones),
        Step("copies of integers as views", copies_of_integers_are_views),
        Step("slopes spelled out", spell_out_slopes),
        Step("clamps behind kernels as activations", clamps_as_fusable_activations),
        Step("narrow ranges as clamps", narrow_ranges_as_clamps, leaves=(every_node(conditions.whole_range),)),
        Step("numbers as constants", quantize_scalars, leaves=(every_node(conditions.quantized_operands),)),
        Step("moves in one scale", moves_keep_qparams),
        Step("concatenations in one scale", concatenations_share_qparams, leaves=(every_node(conditions.joined),)),
        Step("pads of integers yield integers", pads_stay_quantized, leaves=(_ONE_EACH,)),
        Step("softmax over rows", softmax_over_rows),
        Step("dynamic linear layers over rows", dynamic_linears_over_rows),
        Step("scales of run time for each kernel", single_taps_have_own_scales),
        Step("weight-only layers", partial(_weight_only, found)),
        Step("products without integer kernel", _refusing(found.floats, NO_INTEGER_KERNEL), leaves=(_PRODUCTS,)),
        Step("float convolutions of rows as images", float_rows_between_integers_are_images),
        Step("large depthwise convolutions as sums", _refusing(found.floats, LARGE_DEPTHWISE)),
        Step("one dequantize for each integer reader, again", one_dequantize_per_use, leaves=(_ONE_EACH,)),
        Step("constants of its own for each product", own_constants_per_use, leaves=(conditions.own_constants,)),
        Step("operators that stay float", _refusing(found.floats, SCALES_OUT_OF_RANGE, MEANS)),
        Step("operators that stay portable", _refusing(found.portable, *PORTABLE)),
        Step("casts of integers as conversions", partial(casts_of_integers_are_conversions, taken=accepts)),
        Step("single numbers of open rows as products", parts_of_open_rows_are_products),
        Step("numbers beside floats as constants", numbers_are_constants),
        Step("what is hidden as sums", partial(hidden_is_summed, taken=accepts)),
        Step("expansions as broadcasts", partial(expansions_are_broadcast, taken=accepts)),
        Step("functions that have kernels", partial(functions_have_kernels, taken=accepts)),
        Step("reductions as rows", partial(reductions_are_rows, taken=accepts)),
        Step("norms as rows", partial(norms_are_rows, taken=accepts)),
        Step("products of batches as they are", partial(products_are_of_batches, taken=accepts)),
        Step("nothing that is not read", finish),
    )


def _weight_only(found: Legalized, working: fx.GraphModule) -> None:
    found.weight_only |= refused(working, WEIGHT_ONLY)
    found.floats |= found.weight_only


def _refusing(reasons: dict[str, str], *refusals: Refusal) -> Callable[[fx.GraphModule], None]:
    """Returns the change that rewrites what is refused and adds the reasons."""

    def change(working: fx.GraphModule) -> None:
        for refusal in refusals:
            reasons.update(refused(working, refusal))

    return change


def _signed_integers(working: fx.GraphModule) -> None:
    signed_integers(working.graph)


def _spelled_plainly(working: fx.GraphModule) -> None:
    """What the runtime's operators made plain is spelled so: a product by an expression that was folded is a layer."""
    spell_plainly(working.graph)


def runs_alone(node: fx.Node) -> bool:
    """Tells whether an operator can be taken out of the integer domain by conversions around it alone."""
    return operator_name(node) not in GEMMS and QuantizedCall.of(node).output is not None


def _operators_of_the_runtime(working: fx.GraphModule) -> None:
    """Operators that the runtime does not have at all become those that it has, in float."""
    for call in quantized_calls(working.graph, ("aten::conv3d",)):
        for operand in (call.weight, call.bias):
            value = folded(operand) if isinstance(operand, fx.Node) else None
            if value is not None:
                own_constant(call.node, operand, value, "volume")
    for rewrite in AT_LOWERING:
        rewrite(working)
    for call in quantized_calls(working.graph, ("aten::conv3d", "aten::conv_transpose3d")):
        raise LoweringError(
            f"{describe(call.node)} has no kernel in XNNPACK and none in ExecuTorch's portable library, "
            "which convolve over one or two dimensions; replace the layer or use another backend."
        )
    for call in quantized_calls(working.graph, (f"aten::adaptive_max_pool{dimensions}d" for dimensions in (1, 2, 3))):
        raise LoweringError(
            f"{describe(call.node)} has no kernel in XNNPACK and none in ExecuTorch's portable library, and is a "
            "max_pool only where its windows have one static size and nobody reads the positions; choose an output "
            "size that divides the input's, or use another backend."
        )
