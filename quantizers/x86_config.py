"""The config presets of the x86 backend, which depend on what this processor's kernels add up without overflow."""

import warnings
from functools import cache

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.presets import activation_spec, weight_spec
from quantplug.core.errors import ConfigError, QuantplugWarning
from quantplug.core.specs.limits import ONEDNN_PAIRS

# oneDNN scales in float32. The bound of 2**-12, which kernels of fixed point need, takes a bit from the weights of a
# linear of 4096 features, and all but a few steps from quiet signals.
SMALLEST = torch.finfo(torch.float32).eps
# Seven bits and one more integer, which still fits: with -64..63 a resnet18 of random weights keeps 1 dB less.
WEIGHTS = {7: (-64, 64), 8: (-128, 127)}


def get_x86_quantization_config(
    is_qat: bool = False,
    is_dynamic: bool = False,
    reduce_range: bool = False,
    *,
    weight_bits: int | None = None,
    per_channel: bool = True,
    is_weight_only: bool = False,
    symmetric: bool = False,
    observer: str = "histogram",
    weight_observer: str = "minmax",
) -> QuantizationConfig:
    """Returns the int8 config of oneDNN kernels: uint8 activations, per-channel int8 weights.

    Args:
        is_qat: for quantization-aware training.
        is_dynamic: activation scales are computed at run time.
        reduce_range: activations of 7 bits, as torchao has it for machines without VNNI, whose kernels overflow.
        weight_bits: 8, or 7 for machines without VNNI: it does the same at less cost. None asks this processor, and
            warns where it takes 7; give a number for a model that runs elsewhere. Fewer would be stored in 8 bits.
        per_channel: one weight scale for each output channel, or one for the tensor.
        is_weight_only: activations stay float.
        symmetric: int8 activations around 0; the kernels take them as uint8 around 128, which is as fast.
        observer: how calibration finds activation ranges, a name of `OBSERVERS`.
        weight_observer: how the range of weights is found, a name of `OBSERVERS`.

    Raises:
        ConfigError: both dynamic and weight-only, other bits than 7 or 8, or an unknown observer.
    """
    if is_dynamic and is_weight_only:
        raise ConfigError("A config is dynamic or weight-only, found both; dynamic quantizes activations at run time.")
    mode = "dynamic" if is_dynamic else "weight_only" if is_weight_only else "static"
    if weight_bits not in (None, *WEIGHTS):
        raise ConfigError(
            f"weight_bits is {weight_bits!r}, and the kernels store 8 bits; give 8, 7 for machines without VNNI, or "
            "None to ask this one, or take config 'int4_weight_only'."
        )
    if weight_bits is None:
        weight_bits = 7 if mode != "weight_only" and not reduce_range and _overflows_here() else 8
    return _config(mode, is_qat, reduce_range, weight_bits, per_channel, symmetric, observer, weight_observer)


@cache
def _config(
    mode: str,
    is_qat: bool,
    reduce_range: bool,
    weight_bits: int,
    per_channel: bool,
    symmetric: bool,
    observer: str,
    weight_observer: str,
) -> QuantizationConfig:
    """Returns the very same object for equal arguments, so that configs can be compared."""
    top = 127 if reduce_range else 255
    dtype, low = (torch.int8, -(top + 1) // 2) if symmetric else (torch.uint8, 0)
    activation = activation_spec(
        dtype, low, low + top, symmetric=symmetric, mode=mode, observer=observer, is_qat=is_qat, eps=SMALLEST
    )
    weight = weight_spec(
        *WEIGHTS[weight_bits], per_channel=per_channel, is_qat=is_qat, observer=weight_observer, eps=SMALLEST
    )
    return QuantizationConfig(activation, None if mode == "dynamic" else activation, weight, None, is_qat)


@cache
def _overflows_here() -> bool:
    """Tells whether products of 8 bits overflow on this processor, and warns once if so."""
    saturate = ONEDNN_PAIRS.breaks(2 * 255 * WEIGHTS[8][1])
    if saturate:
        warnings.warn(
            "This processor has no VNNI, so weights for x86 take 7 bits here, whose products its kernels add up "
            "without overflow; pass weight_bits=7 to say so yourself, or 8 for a model that runs elsewhere.",
            QuantplugWarning,
            stacklevel=3,
        )
    return saturate
