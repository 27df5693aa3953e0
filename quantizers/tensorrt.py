"""What TensorRT's explicit quantization takes, as declarations: symmetric int8 and entropy calibration.

Activations are int8 with one scale and zero point 0, weights int8 with one scale for each output channel (NVIDIA,
"Working with Quantized Types", TensorRT documentation). Engines are built elsewhere, from the q/dq graph.
"""

from functools import partial

import torch

from quantplug.annotators.activation import clamps
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.matmul import matmul
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import config_for
from quantplug.annotators.residual import residual
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

ACTIVATION = DTypeWithConstraints(torch.int8, zero_point_exact_match=0, qschemes=(torch.per_tensor_symmetric,))
WEIGHT = DTypeWithConstraints(
    torch.int8, zero_point_exact_match=0, qschemes=(torch.per_channel_symmetric, torch.per_tensor_symmetric)
)
INT8 = DTypeConfig("int8", input=ACTIVATION, output=ACTIVATION, weight=WEIGHT)

TENSORRT = Backend(
    name="tensorrt",
    summary="q/dq graphs for TensorRT-like engines (symmetric int8, entropy calibration)",
    annotators=(
        residual(convolution(dims=(2, 3), activations=("relu",))).writing_float(),
        convolution(dims=(1, 2, 3), activations=("relu",)).writing_float(),
        transposed_convolution(dims=(1, 2, 3), activations=("relu",)).writing_float(),
        linear(activations=("relu",)).writing_float(),
        matmul("matmul", "bmm").writing_float(),
        binary("add").writing_float(),
        concatenation("cat"),
        pooling("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
        clamps("relu"),
        movement().writing_float(),
    ),
    configs={"int8": partial(config_for, INT8, observer="entropy")},
    dtypes=(INT8,),
    weight_bits=8,
    lowering="quantplug.lowering.reference:lower",
)


class TensorRTQuantizer(BackendQuantizer):
    """Quantizes for engines that take symmetric int8 q/dq graphs."""

    backend = TENSORRT
