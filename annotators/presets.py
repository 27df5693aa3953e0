"""Config presets: what users and backends start from.

A preset is a plain `QuantizationConfig` of torchao's. Equal arguments give the very same object, so that
configs can be compared.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torchao.quantization.pt2e import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerAxis,
    PerToken,
    PlaceholderObserver,
)
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationConfig, QuantizationSpec

from quantplug.core.errors import ConfigError
from quantplug.core.observers import OBSERVERS
from quantplug.core.observers import observer as make_observer
from quantplug.core.observers.rowwise import Granularity, RowFakeQuantize, RowObserver
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints

MODES = ("static", "dynamic", "weight_only")
# Scales below 2**-12 underflow in kernels that multiply s_in * s_w / s_out in fixed point.
SMALLEST_SCALE = 2**-12


@cache
def activation_spec(
    dtype: torch.dtype = torch.int8,
    quant_min: int = -128,
    quant_max: int = 127,
    *,
    symmetric: bool = False,
    mode: str = "static",
    observer: str = "histogram",
    is_qat: bool = False,
    eps: float = SMALLEST_SCALE,
) -> QuantizationSpec | None:
    """Returns the per-tensor spec of activations, or None where the mode leaves them float.

    Args:
        dtype: torch.int8, torch.uint8 or torch.int16.
        quant_min: smallest integer.
        quant_max: largest integer.
        symmetric: whether zero stays at zero; affine ranges use the integers better after a relu.
        mode: "static", "dynamic" or "weight_only".
        observer: how calibration finds the range, a name of `OBSERVERS`.
        is_qat: whether the spec makes fake quantizes for training instead of observers.
        eps: the smallest scale that the observer gives.

    Raises:
        ConfigError: the mode or the observer does not exist.
    """
    _known("mode", mode, MODES)
    _known("observer", observer, OBSERVERS)
    if mode == "weight_only":
        return None
    return QuantizationSpec(
        dtype=dtype,
        quant_min=quant_min,
        quant_max=quant_max,
        qscheme=torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine,
        is_dynamic=mode == "dynamic",
        observer_or_fake_quant_ctr=(
            _fake_quantize(mode == "dynamic", symmetric, eps) if is_qat else _observer(mode == "dynamic", observer, eps)
        ),
    )


def _fake_quantize(dynamic: bool, symmetric: bool, eps: float) -> Any:
    if dynamic:
        latest = MovingAverageMinMaxObserver.with_args(averaging_constant=1)
        return FakeQuantize.with_args(observer=latest, eps=eps)
    if symmetric:  # torch's fused operator divides the range of -128..127 by 127.5, its observers by 127
        return FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, eps=eps)
    return FusedMovingAvgObsFakeQuantize.with_args(eps=eps)


def _observer(dynamic: bool, observer: str, eps: float) -> Any:
    return PlaceholderObserver.with_args(eps=eps) if dynamic else make_observer(observer, eps=eps)


@cache
def weight_spec(
    quant_min: int = -127,
    quant_max: int = 127,
    *,
    per_channel: bool = True,
    symmetric: bool = True,
    is_qat: bool = False,
    observer: str = "minmax",
    dtype: torch.dtype = torch.int8,
    eps: float = SMALLEST_SCALE,
) -> QuantizationSpec:
    """Returns the spec of weights.

    Args:
        quant_min: smallest integer; -127 keeps the range symmetric.
        quant_max: largest integer.
        per_channel: one scale for each output channel, or one for the tensor.
        symmetric: whether zero points are fixed in the middle.
        is_qat: whether the spec makes fake quantizes for training instead of observers.
        observer: how the range is found, a name of `OBSERVERS`; "mse" keeps more at 4 bits.
        dtype: of the stored integers.
        eps: the smallest scale that the observer gives.

    Raises:
        ConfigError: the observer does not exist.
    """
    moving = MovingAveragePerChannelMinMaxObserver if per_channel else MovingAverageMinMaxObserver
    constructor = (
        # torch's fused operator rounds symmetric scales otherwise than its observers, and takes channels on
        # axis 0 only: what was trained would not be what is converted.
        FakeQuantize.with_args(observer=moving, eps=eps) if is_qat else make_observer(observer, per_channel, eps=eps)
    )
    return QuantizationSpec(
        dtype=dtype,
        quant_min=quant_min,
        quant_max=quant_max,
        qscheme=_WEIGHT_SCHEMES[per_channel, symmetric],
        ch_axis=0,
        observer_or_fake_quant_ctr=constructor,
    )


# (per channel, symmetric) -> scheme
_WEIGHT_SCHEMES = {
    (True, True): torch.per_channel_symmetric,
    (True, False): torch.per_channel_affine,
    (False, True): torch.per_tensor_symmetric,
    (False, False): torch.per_tensor_affine,
}


@cache
def row_spec(*, is_qat: bool = False, granularity: Granularity = PerToken()) -> QuantizationSpec:  # noqa: B008
    """Returns the spec of int8 activations with a scale and zero point for each row, chosen at run time.

    Linear layers take it as it is; for convolutions it becomes one scale for each sample of the batch.

    Args:
        is_qat: whether the spec makes fake quantizes for training instead of observers.
        granularity: torchao's `PerToken()` for rows along the last dimension, `PerAxis(0)` for samples.

    Raises:
        ConfigError: another granularity.
    """
    if granularity not in (PerToken(), PerAxis(0)):
        raise ConfigError(
            f"A range of run time has the granularity {granularity}; choose PerToken() for rows or PerAxis(0) for "
            "samples."
        )
    made = RowFakeQuantize if is_qat else RowObserver
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        is_dynamic=True,
        observer_or_fake_quant_ctr=made.with_args(granularity=granularity),
    )


@cache
def per_row(config: QuantizationConfig) -> QuantizationConfig:
    """Returns a dynamic config whose input activations get a scale for each row instead of one for the tensor.

    Args:
        config: of int8 activations, such as `get_symmetric_quantization_config(is_dynamic=True)`.

    Raises:
        ConfigError: its activations are not dynamic int8 of the whole range.
    """
    spec = config.input_activation
    found = None if spec is None or not spec.is_dynamic else (spec.dtype, spec.qscheme, spec.quant_min, spec.quant_max)
    if found != (torch.int8, torch.per_tensor_affine, -128, 127):
        raise ConfigError(
            f"A scale for each row is chosen at run time, for -128..127 of torch.int8, and the config has "
            f"{'activations that are not dynamic' if found is None else found}; pass a dynamic config of that range."
        )
    return replace(config, input_activation=row_spec(is_qat=config.is_qat))


@cache
def int32_bias_spec() -> QuantizationSpec:
    """Returns the bias spec that asks annotators for an int32 bias with scale s_input * s_weight."""
    return QuantizationSpec(dtype=torch.int32, observer_or_fake_quant_ctr=PlaceholderObserver)


@cache
def get_float16_quantization_config(is_qat: bool = False) -> QuantizationConfig:
    """Returns the config that stores weights in float16 and computes as before.

    Args:
        is_qat: taken for the sake of one way to call; training has nothing to learn from a cast.
    """
    return QuantizationConfig(None, None, QuantizationSpec(torch.float16, PlaceholderObserver), None, is_qat)


@cache
def get_symmetric_quantization_config(
    is_per_channel: bool = False,
    is_qat: bool = False,
    is_dynamic: bool = False,
    act_qmin: int = -128,
    act_qmax: int = 127,
    weight_qmin: int = -127,
    weight_qmax: int = 127,
    *,
    is_weight_only: bool = False,
    observer: str = "histogram",
    weight_observer: str = "minmax",
    int32_bias: bool = False,
) -> QuantizationConfig:
    """Returns the int8 config with symmetric weights and affine activations.

    Args:
        is_per_channel: one weight scale for each output channel instead of one for the tensor.
        is_qat: for quantization-aware training.
        is_dynamic: activation scales are computed at run time.
        act_qmin: smallest activation integer.
        act_qmax: largest activation integer.
        weight_qmin: smallest weight integer.
        weight_qmax: largest weight integer.
        is_weight_only: activations stay float.
        observer: how calibration finds activation ranges, a name of `OBSERVERS`.
        weight_observer: how the range of weights is found, a name of `OBSERVERS`.
        int32_bias: biases become int32 with a derived scale instead of staying float.

    Raises:
        ConfigError: both dynamic and weight-only, an int32 bias with either of them, or an unknown observer.
    """
    if is_dynamic and is_weight_only:
        raise ConfigError("A config is dynamic or weight-only, found both; dynamic quantizes activations at run time.")
    if int32_bias and (is_dynamic or is_weight_only):
        raise ConfigError("int32_bias=True needs static activations, whose scales are known; leave the bias float.")
    mode = "dynamic" if is_dynamic else "weight_only" if is_weight_only else "static"
    activation = activation_spec(torch.int8, act_qmin, act_qmax, mode=mode, observer=observer, is_qat=is_qat)
    weight = weight_spec(weight_qmin, weight_qmax, per_channel=is_per_channel, is_qat=is_qat, observer=weight_observer)
    bias = int32_bias_spec() if int32_bias else None
    return QuantizationConfig(activation, None if is_dynamic else activation, weight, bias, is_qat)


def get_xnnpack_quantization_config(is_per_channel: bool = True, **options: Any) -> QuantizationConfig:
    """Returns the static int8 config with biases as XNNPACK's kernels hold them: int32, scale s_input * s_weight.

    With the rounding of the bias in it, the reference model and the kernels agree except at ties. In
    training biases stay float. ExecuTorch 1.4's own partitioner fails on integer biases: for it, use
    `get_symmetric_quantization_config`, which leaves them float.

    Args:
        is_per_channel: one weight scale for each output channel instead of one for the tensor.
        options: as for `get_symmetric_quantization_config`.

    Raises:
        ConfigError: an option has an unknown value.
    """
    options.setdefault("int32_bias", not options.get("is_qat", False))
    return get_symmetric_quantization_config(is_per_channel, **options)


def config_for(
    dtypes: DTypeConfig, *, is_qat: bool = False, observer: str = "histogram", weight_observer: str = "minmax"
) -> QuantizationConfig:
    """Returns the config that a dtype config asks for: one object gives the specs of all four ports.

    Ranges are the bounds of the constraints, or all of the dtype; the smallest scale is the bound on scales.
    Weights are symmetric by channel and activations affine, unless `qschemes` begins with another scheme.

    Args:
        dtypes: the dtypes with constraints of each port.
        is_qat: for quantization-aware training.
        observer: how calibration finds activation ranges, a name of `OBSERVERS`.
        weight_observer: how the range of weights is found, a name of `OBSERVERS`.

    Raises:
        ConfigError: an observer does not exist.
    """
    activations = [_activation(dtypes.at(port), dtypes.mode, observer, is_qat) for port in ("input", "output")]
    weight = _weight(dtypes.at("weight"), weight_observer, is_qat)
    bias = int32_bias_spec() if dtypes.bias == torch.int32 and not is_qat else None
    return QuantizationConfig(*activations, weight, bias, is_qat)


def _activation(
    taken: DTypeWithConstraints | None, mode: str, observer: str, is_qat: bool
) -> QuantizationSpec | FixedQParamsQuantizationSpec | None:
    if taken is None or taken.dtype.is_floating_point:
        return _half(taken)
    low, high = taken.range
    symmetric = torch.per_tensor_symmetric in taken.qschemes[:1] or taken.zero_point_exact_match == 0
    if taken.scale_exact_match is not None:
        scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
        zero_point = taken.zero_point_exact_match or 0
        return FixedQParamsQuantizationSpec(taken.dtype, taken.scale_exact_match, zero_point, low, high, scheme)
    eps = taken.scale_min_lower_bound or SMALLEST_SCALE
    return activation_spec(
        taken.dtype, low, high, symmetric=symmetric, mode=mode, observer=observer, is_qat=is_qat, eps=eps
    )


def _weight(taken: DTypeWithConstraints | None, observer: str, is_qat: bool) -> QuantizationSpec | None:
    if taken is None or taken.dtype.is_floating_point:
        return _half(taken)
    low, high = taken.range
    by_scheme = {scheme: asked for asked, scheme in _WEIGHT_SCHEMES.items()}
    per_channel, symmetric = by_scheme.get(taken.qschemes[0], (True, True)) if taken.qschemes else (True, True)
    # A symmetric range loses its lowest integer, so that a weight and its negative are equally precise.
    low = max(low, -high) if taken.dtype.is_signed and symmetric else low
    return weight_spec(
        low, high, per_channel=per_channel, symmetric=symmetric, is_qat=is_qat, observer=observer, dtype=taken.dtype,
        eps=taken.scale_min_lower_bound or SMALLEST_SCALE,
    )  # fmt: skip


def _half(taken: DTypeWithConstraints | None) -> QuantizationSpec | None:
    """Returns the spec of tensors in half precision, which are cast and not observed."""
    return None if taken is None else QuantizationSpec(taken.dtype, PlaceholderObserver.with_args(dtype=taken.dtype))


def _known(what: str, found: str, choices: Any) -> None:
    if found not in choices:
        raise ConfigError(f"There is no {what} '{found}'; choose one of {sorted(choices)}.")
