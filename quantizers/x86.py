"""What oneDNN's int8 kernels run on x86, as declarations.

Activations are uint8 with one scale, weights symmetric int8 with one scale for each output channel.
"""

import warnings
from dataclasses import replace
from functools import cache

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.activation import clamps
from quantplug.annotators.constraints import (
    enough_work,
    equal_windows,
    known_number,
    not_dynamic,
    padding_counts,
    unsigned_if_dynamic,
    weights_alone,
    whole_windows,
)
from quantplug.annotators.convolution import CLAMPS, convolution
from quantplug.annotators.embedding import embedding
from quantplug.annotators.groupwise import no_groups
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import activation_spec, weight_spec
from quantplug.annotators.residual import residual
from quantplug.annotators.shape import COPIES, VIEWS, concatenation, movement
from quantplug.core.errors import ConfigError
from quantplug.core.levels import Level
from quantplug.lowering.x86.processor import kernels_saturate
from quantplug.lowering.xnnpack.rewrites.movement import split_is_slices
from quantplug.quantizers.backend import Backend
from quantplug.quantizers.quantizer import BackendQuantizer

__all__ = ["X86", "X86Quantizer", "get_x86_quantization_config"]


def get_x86_quantization_config(
    is_qat: bool = False,
    is_dynamic: bool = False,
    reduce_range: bool | None = None,
    *,
    is_weight_only: bool = False,
    symmetric: bool = False,
    observer: str = "histogram",
    weight_observer: str = "minmax",
) -> QuantizationConfig:
    """Returns the int8 config of oneDNN kernels: uint8 activations, per-channel int8 weights.

    Args:
        is_qat: for quantization-aware training.
        is_dynamic: activation scales are computed at run time.
        reduce_range: activations of 7 bits, for machines without VNNI, whose 16-bit sums of products saturate. None
            asks this processor, and warns where it takes 7 bits; give True or False for a model that runs elsewhere.
        is_weight_only: activations stay float.
        symmetric: int8 activations around 0; the kernels take them as uint8 around 128, which is as fast.
        observer: how calibration finds activation ranges, a name of `OBSERVERS`.
        weight_observer: how the range of weights is found, a name of `OBSERVERS`.

    Raises:
        ConfigError: both dynamic and weight-only, or an unknown observer.
    """
    if is_dynamic and is_weight_only:
        raise ConfigError("A config is dynamic or weight-only, found both; dynamic quantizes activations at run time.")
    mode = "dynamic" if is_dynamic else "weight_only" if is_weight_only else "static"
    if reduce_range is None:
        reduce_range = mode != "weight_only" and _reduced_here()
    return _config(mode, is_qat, reduce_range, symmetric, observer, weight_observer)


@cache
def _config(
    mode: str, is_qat: bool, reduce_range: bool, symmetric: bool, observer: str, weight_observer: str
) -> QuantizationConfig:
    """Returns the very same object for equal arguments, so that configs can be compared."""
    top = 127 if reduce_range else 255
    dtype, low = (torch.int8, -(top + 1) // 2) if symmetric else (torch.uint8, 0)
    activation = activation_spec(
        dtype, low, low + top, symmetric=symmetric, mode=mode, observer=observer, is_qat=is_qat
    )
    weight = weight_spec(-128, 127, per_channel=True, is_qat=is_qat, observer=weight_observer)
    return QuantizationConfig(activation, None if mode == "dynamic" else activation, weight, None, is_qat)


@cache
def _reduced_here() -> bool:
    """Tells whether activations must have 7 bits on this processor, and warns once if so."""
    if kernels_saturate():
        warnings.warn(
            "This processor has no VNNI, so int8 activations for x86 take 7 bits here, which its kernels add up "
            "without overflow; pass reduce_range=True to say so yourself, or False for a model that runs elsewhere.",
            stacklevel=3,
        )
    return kernels_saturate()


# A vision transformer's patches and head gain it 1.4 dB in float, for 0.7 % of its multiplications.
SMALL_SHARE = 0.01
# Measured: from here on a convolution gains more than it takes to find the range of its input and to quantize it.
AT_RUN_TIME = (no_groups, unsigned_if_dynamic, enough_work(512))

# The kernel over volumes ends in no function: a clamp behind it is one of its integers, so those it has to write.
_VOLUMES = convolution((3,), CLAMPS, "conv3d").where(no_groups, not_dynamic)
CLAMPED_VOLUMES = replace(
    _VOLUMES, patterns=tuple(pair for pair in _VOLUMES.patterns if pair[0] not in ("conv3d", "conv3d_bn"))
)

X86 = Backend(
    name="x86",
    summary="oneDNN kernels through torch, eager or compiled (VNNI, AMX)",
    annotators=(
        residual(convolution(dims=(2,))).where(no_groups).writing_float(),
        residual(linear()).where(no_groups).writing_float(),
        convolution(dims=(1, 2), activations=(*CLAMPS, "hardswish", "silu"))
        .where(*AT_RUN_TIME)
        .writing_float()
        .sparing_ends(SMALL_SHARE),
        convolution((3,), (), "conv3d").where(*AT_RUN_TIME).writing_float().sparing_ends(SMALL_SHARE),
        CLAMPED_VOLUMES,
        linear(activations=(*CLAMPS, "hardswish", "silu", "gelu", "leaky_relu", "tanh"))
        .where(no_groups)
        .writing_float()
        .sparing_ends(SMALL_SHARE),
        concatenation("cat").writing_float().within(Level.EXACT),
        pooling("max_pool2d").within(Level.EXACT),
        # Averages of float tensors stay float: to quantize the tensor takes longer than to average it.
        pooling("avg_pool2d", own_output=True, follows=("x",)).where(whole_windows, padding_counts).writing_float(),
        pooling("adaptive_avg_pool2d", own_output=True, follows=("x",)).where(equal_windows).writing_float(),
        pooling("mean", own_output=True, follows=("x",)).where(known_number).writing_float(),
        # A table of integers is a fourth of the memory, not faster, and costs a BERT half a decibel or more.
        embedding().where(weights_alone).within(Level.EXACT),
        clamps("relu", "relu6", "hardtanh", "clamp").within(Level.EXACT),
        movement((*VIEWS, *COPIES)).writing_float().within(Level.EXACT),
    ),
    configs={
        "int8": get_x86_quantization_config,
        "int8_dynamic": lambda **options: get_x86_quantization_config(is_dynamic=True, **options),
        "int8_weight_only": lambda **options: get_x86_quantization_config(is_weight_only=True, **options),
    },
    lowering="quantplug.lowering.x86:lower",
    transforms=(split_is_slices,),
    kernels="x86",
)


class X86Quantizer(BackendQuantizer):
    """Quantizes for oneDNN on x86."""

    backend = X86
