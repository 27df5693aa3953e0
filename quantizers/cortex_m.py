"""What CMSIS-NN kernels run on Arm Cortex-M, as declarations: ExecuTorch's `cortex_m` operators.

Activations are int8 with one scale; weights symmetric int8, per channel for convolutions, per tensor for
linear layers; biases int32. Convolutions and pooling read channels-last tensors, which the lowering arranges.
"""

import torch

from quantplug.annotators.activation import known_range, own_range
from quantplug.annotators.constraints import (
    depthwise_or_whole,
    equal_shapes,
    even_sides,
    images_with_batch,
    in_integers,
    last_dimension,
    plain_windows,
)
from quantplug.annotators.convolution import convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.matmul import matmul
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.annotators.shape import movement
from quantplug.annotators.weighted import per_tensor_weight
from quantplug.core.named import named
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

_ROWS = (
    convolution(dims=(2,)).where(images_with_batch, depthwise_or_whole, even_sides),
    per_tensor_weight(linear()),
    binary("add", activations=("relu", "hardtanh", "clamp")).where(equal_shapes),
    binary("mul", activations=()).where(equal_shapes),
    matmul("bmm"),
    pooling("max_pool2d", "avg_pool2d").where(images_with_batch, plain_windows),
    known_range("softmax").where(last_dimension),
    own_range("sigmoid", "tanh", "silu"),
    movement(("view", "reshape", "flatten", "permute", "transpose", "contiguous", "clone", "dropout")),
)

CORTEX_M = Backend(
    name="cortex_m",
    summary="ExecuTorch programs on CMSIS-NN kernels (Arm Cortex-M)",
    annotators=tuple(row.where(in_integers((torch.int8,))) for row in _ROWS),
    configs={"int8": lambda **options: get_symmetric_quantization_config(True, int32_bias=True, **options)},
    transforms=tuple(
        named(f"quantplug.lowering.rewrites.{each}")
        for each in ("folding:computed_weights_are_folded", "products:products_are_linear", "means:means_are_poolings")
    ),
    lowering="quantplug.lowering.cortex_m:lower",
    weight_bits=8,
)


class CortexMQuantizer(BackendQuantizer):
    """Quantizes to int8 for CMSIS-NN's kernels on Arm Cortex-M, for `.pte` programs; the extra `cortex-m` lowers."""

    backend = CORTEX_M
