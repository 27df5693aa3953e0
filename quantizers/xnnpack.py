"""What XNNPACK's int8 kernels run, as declarations.

Activations are int8 with one scale, weights symmetric int8 with one scale or one for each output channel.
"""

from quantplug.annotators.activation import clamps, known_range, own_range
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import get_symmetric_quantization_config, get_xnnpack_quantization_config
from quantplug.annotators.shape import COPIES, VIEWS, concatenation, movement
from quantplug.lowering.xnnpack.rewrites import ALL
from quantplug.quantizers.backend import Backend
from quantplug.quantizers.quantizer import BackendQuantizer

__all__ = ["XNNPACK", "XNNPACKQuantizer", "get_symmetric_quantization_config"]

XNNPACK = Backend(
    name="xnnpack",
    summary="ExecuTorch programs on XNNPACK kernels (ARM, x86, WebAssembly)",
    annotators=(
        convolution(dims=(1, 2)),
        transposed_convolution(dims=(2,)),
        linear(),
        binary("add"),
        binary("sub"),
        binary("mul"),
        concatenation("cat"),
        # The max-pool kernel compares integers in one scale; the mean kernel rescales.
        pooling("max_pool2d"),
        pooling("adaptive_avg_pool2d", "mean", own_output=True),
        known_range("sigmoid"),
        known_range("tanh"),
        own_range("hardswish", "gelu", "leaky_relu", "elu"),
        clamps("relu", "relu6", "hardtanh", "clamp"),
        movement((*VIEWS, *COPIES, "pad", "constant_pad_nd")),
    ),
    configs={
        "int8": get_xnnpack_quantization_config,
        "int8_per_tensor": lambda **options: get_xnnpack_quantization_config(False, **options),
        "int8_dynamic": lambda **options: get_symmetric_quantization_config(True, is_dynamic=True, **options),
    },
    lowering="quantplug.lowering.xnnpack:lower",
    transforms=ALL,
)


class XNNPACKQuantizer(BackendQuantizer):
    """Quantizes for XNNPACK."""

    backend = XNNPACK
