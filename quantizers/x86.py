"""What oneDNN's int8 kernels run on x86, as declarations.

Activations are uint8 with one scale, weights symmetric int8 with one scale for each output channel.
"""

from quantplug.annotators.activation import clamps
from quantplug.annotators.constraints import not_dynamic
from quantplug.annotators.convolution import CLAMPS, convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.embedding import embedding
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import get_x86_quantization_config
from quantplug.annotators.residual import residual
from quantplug.annotators.shape import COPIES, VIEWS, concatenation, movement
from quantplug.quantizers.backend import Backend
from quantplug.quantizers.quantizer import BackendQuantizer

__all__ = ["X86", "X86Quantizer", "get_x86_quantization_config"]

X86 = Backend(
    name="x86",
    summary="oneDNN kernels through torch, eager or compiled (VNNI, AMX)",
    annotators=(
        residual(convolution(dims=(2,))).writing_float(),
        residual(linear()).writing_float(),
        # Which functions a convolution can end in depends on its dimensions; none takes scales of run time.
        convolution(dims=(2,), activations=(*CLAMPS, "hardswish", "silu")).where(not_dynamic).writing_float(),
        convolution(dims=(1,), activations=("relu",)).where(not_dynamic).writing_float(),
        convolution(dims=(3,), activations=()).where(not_dynamic).writing_float(),
        linear(activations=(*CLAMPS, "gelu", "leaky_relu", "tanh")).writing_float(),
        binary("add"),
        concatenation("cat"),
        pooling("max_pool2d"),
        pooling("avg_pool2d"),
        pooling("adaptive_avg_pool2d", "mean", own_output=True),
        embedding(),
        clamps("relu", "relu6", "hardtanh", "clamp"),
        movement((*VIEWS, *COPIES)).writing_float(),
    ),
    configs={
        "int8": get_x86_quantization_config,
        "int8_dynamic": lambda **options: get_x86_quantization_config(is_dynamic=True, **options),
        "int8_weight_only": lambda **options: get_x86_quantization_config(is_weight_only=True, **options),
    },
    lowering="quantplug.lowering.x86:lower",
)


class X86Quantizer(BackendQuantizer):
    """Quantizes for oneDNN on x86."""

    backend = X86
