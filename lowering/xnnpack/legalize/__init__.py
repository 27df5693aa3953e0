"""Makes a q/dq graph say only what XNNPACK's integer kernels can carry out.

Before: any q/dq graph. After: a graph that computes the same numbers, in which every operator is either
one that the serializer writes correctly or one that is marked to stay float, with the reason. ExecuTorch 1.4's
own partitioner takes many of these constructs and writes programs that do not load or are wrong.
"""

from collections.abc import Callable

from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import describe, operands, operator_name
from quantplug.core.qdq.qparams import folded, quantized_output
from quantplug.lowering.xnnpack.legalize.activations import (
    clamps_as_fusable_activations,
    find_slopes_of_other_ranks,
    narrow_ranges_as_clamps,
)
from quantplug.lowering.xnnpack.legalize.depthwise import large_depthwise_is_sum
from quantplug.lowering.xnnpack.legalize.images import dynamic_linears_over_rows, softmax_over_rows
from quantplug.lowering.xnnpack.legalize.integers import one_dequantize_per_use, quantize_scalars, signed_integers
from quantplug.lowering.xnnpack.legalize.legalized import Legalized
from quantplug.lowering.xnnpack.legalize.means import find_means_that_grow
from quantplug.lowering.xnnpack.legalize.movement import (
    aliases_are_clones,
    concatenations_share_qparams,
    contiguous_constants,
    copies_of_integers_are_views,
    find_reshapes_of_open_sizes,
    find_resizing_by_other_factors,
    moves_keep_qparams,
    one_open_size_if_1d,
    pads_stay_quantized,
    resizes_by_ratios,
    spell_out_pooling,
    spell_out_slopes,
)
from quantplug.lowering.xnnpack.legalize.narrow import narrow_convolutions_are_linear, patches_if_float
from quantplug.lowering.xnnpack.legalize.operators import GEMMS, after_activation, calls, replace_operand
from quantplug.lowering.xnnpack.legalize.patches import patches_are_linear
from quantplug.lowering.xnnpack.legalize.products import (
    adds_less_than_a_step,
    convolutions_by_dimension,
    find_wide_output_paddings,
    fold_constant_biases,
    fold_weights_without_integer_kernel,
    narrow_weights_name_four_bits,
    own_constants_per_use,
    separate_weight_only_biases,
)
from quantplug.lowering.xnnpack.legalize.ratios import find_scale_ratios_out_of_range
from quantplug.lowering.xnnpack.rewrites import AT_LOWERING

__all__ = [
    "Legalized",
    "adds_less_than_a_step",
    "legalize",
    "one_open_size_if_1d",
    "patches_if_float",
    "resizes_by_ratios",
    "runs_alone",
]


def legalize(working: fx.GraphModule) -> Legalized:
    """Rewrites a q/dq graph in place for XNNPACK.

    Args:
        working: a private copy; nodes and buffers are added to it, operators keep their names.

    Returns:
        The operators that XNNPACK cannot take as they stand, with the reason.

    Raises:
        LoweringError: an operator has no kernel in XNNPACK and none in the runtime's portable library.
    """
    steps: tuple[Callable[[fx.GraphModule], None], ...] = (
        _operators_of_the_runtime,
        contiguous_constants,
        signed_integers,
        one_dequantize_per_use,
        narrow_weights_name_four_bits,
        convolutions_by_dimension,
        fold_constant_biases,
        patches_are_linear,
        narrow_convolutions_are_linear,
        aliases_are_clones,
        copies_of_integers_are_views,
        spell_out_pooling,
        spell_out_slopes,
        clamps_as_fusable_activations,
        narrow_ranges_as_clamps,
        quantize_scalars,
        moves_keep_qparams,
        concatenations_share_qparams,
        pads_stay_quantized,
        softmax_over_rows,
        dynamic_linears_over_rows,
    )
    for step in steps:
        step(working)
    found = Legalized()
    separate_weight_only_biases(working, found)
    fold_weights_without_integer_kernel(working, found)
    large_depthwise_is_sum(working, found)
    one_dequantize_per_use(working)
    own_constants_per_use(working)
    find_scale_ratios_out_of_range(working, found)
    find_means_that_grow(working, found)
    find_slopes_of_other_ranks(working, found)
    find_wide_output_paddings(working, found)
    find_resizing_by_other_factors(working, found)
    find_reshapes_of_open_sizes(working, found)
    erase_dead_code(working.graph)
    _drop_unread_constants(working)
    working.graph.lint()
    working.recompile()
    return found


def _drop_unread_constants(working: fx.GraphModule) -> None:
    """Export would store them in the file."""
    read = [str(node.target) for node in working.graph.find_nodes(op="get_attr")]
    for name in [name for name, _ in (*working.named_parameters(), *working.named_buffers())]:
        if not any(name == target or name.startswith(f"{target}.") for target in read):
            owner, _, leaf = name.rpartition(".")
            delattr(working.get_submodule(owner), leaf)


def runs_alone(node: fx.Node) -> bool:
    """Tells whether an operator can be taken out of the integer domain by conversions around it alone."""
    return operator_name(node) not in GEMMS and quantized_output(after_activation(node)) is not None


def _operators_of_the_runtime(working: fx.GraphModule) -> None:
    """Operators that the runtime does not have at all become those that it has, in float."""
    for node in calls(working, ("aten::conv3d",)):
        for operand in (operands(node)["weight"], operands(node)["bias"]):
            value = folded(operand) if isinstance(operand, fx.Node) else None
            if value is not None:
                replace_operand(working, node, operand, value, "volume")
    for rewrite in AT_LOWERING:
        rewrite(working)
    for node in calls(working, ("aten::conv3d", "aten::conv_transpose3d")):
        raise LoweringError(
            f"{describe(node)} has no kernel in XNNPACK and none in ExecuTorch's portable library, "
            "which convolve over one or two dimensions; replace the layer or use another backend."
        )
    for node in calls(working, (f"aten::adaptive_max_pool{dimensions}d" for dimensions in (1, 2, 3))):
        raise LoweringError(
            f"{describe(node)} has no kernel in XNNPACK and none in ExecuTorch's portable library, and is a max_pool "
            "only where its windows have one static size and nobody reads the positions; choose an output size that "
            "divides the input's, or use another backend."
        )
