"""What TensorRT's explicit quantization takes, as declarations: symmetric int8 and entropy calibration.

Activations are int8 with one scale and zero point 0, weights int8 with one scale for each output channel; beside float
activations those of a linear may have four bits, with one scale for 64 or 128 input channels. Which operators are
quantized follows NVIDIA's guide, "Q/DQ Layer-Placement Recommendations": all inputs of products, and their results only
where an operator of integers reads them; the summand that a product's kernel adds. Clamps go into what they follow
("Layer Fusion Catalog": relu and clip with any convolution); softmax, norms and other functions stay float.
"""

from functools import partial

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from quantplug.annotators.activation import clamps
from quantplug.annotators.constraints import one_group_or_scale
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.groupwise import FOUR_BITS, groups_of, in_groups, no_groups, whole_groups
from quantplug.annotators.linear import linear
from quantplug.annotators.matmul import matmul
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import config_for, get_symmetric_quantization_config
from quantplug.annotators.residual import residual
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.named import named
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints, group_size
from quantplug.core.specs.levels import Level
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

_LEAST = 2**-23  # of scales, which are float32: the least that torch's observers give
ACTIVATION = DTypeWithConstraints(
    torch.int8, scale_min_lower_bound=_LEAST, zero_point_exact_match=0, qschemes=(torch.per_tensor_symmetric,)
)
WEIGHT = DTypeWithConstraints(
    torch.int8,
    scale_min_lower_bound=_LEAST,
    zero_point_exact_match=0,
    qschemes=(torch.per_channel_symmetric, torch.per_tensor_symmetric),
)
INT8 = DTypeConfig("int8", input=ACTIVATION, output=ACTIVATION, weight=WEIGHT)
INT4 = DTypeConfig("int4_weight_only", weight=DTypeWithConstraints(torch.int8, *FOUR_BITS))
_REWRITES = "quantplug.lowering.rewrites"
_WEIGHT_ONLY = partial(get_symmetric_quantization_config, is_weight_only=True)

_FUSED = tuple(name for name in CLAMPS if name not in ("clamp_min", "clamp_max"))
_PRODUCTS = (
    convolution((1, 2, 3), _FUSED).where(no_groups),
    transposed_convolution((1, 2, 3), _FUSED).where(no_groups, one_group_or_scale),
    linear(_FUSED).where(whole_groups, groups_of(64, 128)).accepting(INT8, INT4),
)


def _of_products(row: Annotator) -> Annotator:
    """Returns a row at the level of its inputs: ONNX divides by a scale, so that a tie there differs by a step."""
    return row.writing_float().within(Level.APPROXIMATE)


def stored_bits(weight: QuantizationSpec, activation: QuantizationSpec | None) -> int:
    """Returns how many bits a file takes for each number of a weight."""
    return 8 if group_size(weight) is None else 4


TENSORRT = Backend(
    name="tensorrt",
    summary="ONNX files for TensorRT's explicit quantization (needs the extra 'onnx')",
    annotators=(
        *(_of_products(residual(row, _FUSED).accepting(INT8)) for row in _PRODUCTS),
        *map(_of_products, _PRODUCTS),
        _of_products(matmul("matmul", "bmm", activations=("relu",))),
        binary("add").needing_company().within(Level.APPROXIMATE),
        concatenation("cat").needing_company(),
        pooling("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d").needing_company(),
        clamps("relu"),
        movement().writing_float(),
    ),
    configs={
        "int8": partial(config_for, INT8, observer="entropy"),
        "int4_weight_only": partial(in_groups, _WEIGHT_ONLY, group_size=128),
    },
    dtypes=(INT8,),
    weight_bits=stored_bits,
    lowering="quantplug.lowering.onnx.tensorrt:lower",
    transforms=(
        named(f"{_REWRITES}.folding:computed_weights_are_folded"),
        named(f"{_REWRITES}.products:products_are_linear"),
        named(f"{_REWRITES}.attention:any_attention_is_products"),
        named(f"{_REWRITES}.movement:split_is_slices"),  # the exporter writes sequences, which TensorRT does not read
        named(f"{_REWRITES}.means:means_are_poolings"),  # the guide quantizes AveragePool, and is silent on reductions
    ),
)


class TensorRTQuantizer(BackendQuantizer):
    """Quantizes for TensorRT (`.onnx` files): symmetric int8, calibrated by entropy; the extra `onnx` lowers."""

    backend = TENSORRT
