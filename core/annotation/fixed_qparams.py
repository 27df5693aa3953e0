"""Input edges that take over the fixed qparams of their producer.

Before: annotations in which the output of a sigmoid, a softmax or a tanh has fixed qparams and its reader a spec of
its own. After: the reader's edge shares the producer's numbers where it may. Without it the tensor would be quantized
twice, once fixed and once observed, and every such edge would cost a requantization in the kernel graph.
"""

from collections.abc import Mapping

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.core.annotation.claims import Claims
from quantplug.core.annotation.kernel_dtypes import KernelDtypes
from quantplug.core.specs.dtypes import smallest_scale
from quantplug.core.specs.scaling import finds_range
from quantplug.core.specs.stored_dtypes import stored_range


def inherit_fixed(claims: Claims, dtypes: KernelDtypes) -> None:
    """Lets input edges take over the fixed qparams of their producer.

    An edge that other inputs share keeps its own spec: the fixed range of one input need not hold for the others.
    """
    for node, annotation in claims.annotations.items():
        shared = _shared_inputs(node, annotation.input_qspec_map)
        for source, spec in annotation.input_qspec_map.items():
            fixed = claims.resolve(SharedQuantizationSpec(source), {})
            if (
                isinstance(spec, QuantizationSpec)
                and isinstance(fixed, FixedQParamsQuantizationSpec)
                and source not in shared
                and _can_be_fixed(spec, fixed)
                and not dtypes.refuse(claims.piece_of[node], fixed)
            ):
                annotation.input_qspec_map[source] = SharedQuantizationSpec(source)


def _can_be_fixed(spec: QuantizationSpec, fixed: FixedQParamsQuantizationSpec) -> bool:
    """Tells whether fixed numbers are such as a spec may come to, whose observer makes no rule for scales."""
    if spec.is_dynamic or fixed.dtype != spec.dtype or stored_range(fixed) != stored_range(spec):
        return False
    if not finds_range(spec) or fixed.scale < smallest_scale(spec):
        return False
    if spec.qscheme is not torch.per_tensor_symmetric:
        return spec.qscheme in (torch.per_tensor_affine, None)
    low, high = stored_range(spec)
    middles = (0,) if spec.dtype.is_signed else ((low + high) // 2, (low + high + 1) // 2)
    return fixed.zero_point in middles


def _shared_inputs(node: fx.Node, specs: Mapping[fx.Node, QuantizationSpecBase | None]) -> set[fx.Node]:
    edges = (spec.edge_or_node for spec in specs.values() if isinstance(spec, SharedQuantizationSpec))
    return {edge[0] for edge in edges if isinstance(edge, tuple) and edge[1] is node}
