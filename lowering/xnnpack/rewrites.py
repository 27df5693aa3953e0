"""Rewrites of a float graph that let more of it run on XNNPACK's integer kernels.

Before: an exported ATen graph, float, about to be annotated (`transform_for_annotation`). After: a graph that
computes the same numbers with operators that XNNPACK has in int8: pieces that only move data are written as
the moves that it knows, activations as the products of activations that it knows.

Each rewrite takes a graph module, changes it in place and returns it. None looks at annotations, so the same
passes serve any quantizer for this target.
"""

from collections.abc import Callable

from torch import fx

from quantplug.core.graph.lazy import compiled_once
from quantplug.lowering.rewrites.activations import (
    clamp_is_activation,
    elu_is_plain,
    glu_is_product,
    hardsigmoid_is_clamp,
    rrelu_is_leaky_relu,
    silu_is_product,
    single_slope_is_leaky_relu,
)
from quantplug.lowering.rewrites.attention import (
    attention_is_contiguous,
    attention_is_products,
    repeated_heads_are_grouped,
)
from quantplug.lowering.rewrites.complex import complex_numbers_are_pairs
from quantplug.lowering.rewrites.constants import (
    batch_norm_is_depthwise,
    numbers_are_constants,
)
from quantplug.lowering.rewrites.dimensions import (
    convolution_3d_is_2d,
    global_pooling_is_2d,
    pooling_1d_is_2d,
    pooling_3d_is_2d,
    sample_is_batch,
    scalars_have_dimensions,
)
from quantplug.lowering.rewrites.folding import (
    all_constant_expressions_are_folded,
    computed_weights_are_folded,
    constant_expressions_are_folded,
)
from quantplug.lowering.rewrites.gelu import written_gelu_is_one
from quantplug.lowering.rewrites.movement import (
    circular_padding_is_joined,
    index_is_slices,
    lone_concatenation_is_copy,
    patches_are_views,
    repeats_are_joined,
    roll_is_slices,
    select_is_slice,
    shuffle_is_permutation,
    split_is_slices,
    squeeze_is_view,
    still_permutation_is_view,
    strided_slice_is_view,
    view_is_reshape,
    view_of_view_is_view,
)
from quantplug.lowering.rewrites.pooling import (
    adaptive_max_pooling_is_plain,
    average_pooling_is_depthwise,
    global_pooling_is_mean,
    indexed_pooling_is_plain,
    spatial_mean_keeps_dims,
)
from quantplug.lowering.rewrites.products import parts_of_open_layers_are_layers, products_are_linear
from quantplug.lowering.rewrites.recurrence import cells_are_layers, outside_of_states, recurrence_is_unrolled
from quantplug.lowering.rewrites.selection import unread_rows_are_not_computed
from quantplug.lowering.xnnpack.cached_attention import cached_attention_is_custom_sdpa

__all__ = ["ALL", "AT_LOWERING", "Rewrite", "outside_of_states", "rewrite_for_xnnpack"]

Rewrite = Callable[[fx.GraphModule], fx.GraphModule]

# What the runtime of ExecuTorch 1.4 lacks altogether, in float too, or computes wrongly.
_RUNNABLE: tuple[Rewrite, ...] = (
    complex_numbers_are_pairs,
    view_is_reshape,
    rrelu_is_leaky_relu,
    elu_is_plain,
    sample_is_batch,
    circular_padding_is_joined,
    adaptive_max_pooling_is_plain,
    convolution_3d_is_2d,
    pooling_3d_is_2d,
)
# For a q/dq graph that comes to the lowering, perhaps without these rewrites; nothing of it will be trained.
AT_LOWERING: tuple[Rewrite, ...] = (
    all_constant_expressions_are_folded,
    single_slope_is_leaky_relu,
    attention_is_contiguous,
    cached_attention_is_custom_sdpa,
    *_RUNNABLE,
)

ALL: tuple[Rewrite, ...] = (
    constant_expressions_are_folded,
    computed_weights_are_folded,
    written_gelu_is_one,
    products_are_linear,
    *_RUNNABLE,
    pooling_1d_is_2d,
    indexed_pooling_is_plain,
    global_pooling_is_2d,
    recurrence_is_unrolled,
    cells_are_layers,
    repeated_heads_are_grouped,
    attention_is_products,
    split_is_slices,
    select_is_slice,
    index_is_slices,
    patches_are_views,
    roll_is_slices,
    shuffle_is_permutation,
    repeats_are_joined,
    strided_slice_is_view,
    parts_of_open_layers_are_layers,
    squeeze_is_view,
    still_permutation_is_view,
    lone_concatenation_is_copy,
    unread_rows_are_not_computed,
    view_of_view_is_view,
    global_pooling_is_mean,
    spatial_mean_keeps_dims,
    average_pooling_is_depthwise,
    batch_norm_is_depthwise,
    silu_is_product,
    glu_is_product,
    hardsigmoid_is_clamp,
    clamp_is_activation,
    numbers_are_constants,
    scalars_have_dimensions,
)


def rewrite_for_xnnpack(model: fx.GraphModule) -> fx.GraphModule:
    """Applies every rewrite in an order in which none undoes another.

    Args:
        model: an exported graph module; it is changed in place and returned.
    """
    with compiled_once(model):
        for rewrite in ALL:
            rewrite(model)
    return model
