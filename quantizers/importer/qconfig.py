"""torch.ao's `QConfig` as a `QuantizationConfig`: its observers become torchao's of the same name and options."""

from typing import Any

import torch
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationConfig, QuantizationSpec

from quantplug.core.errors import ConfigError
from quantplug.quantizers.importer.dtypes import STORAGE

_OBSERVERS = (
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "PerChannelMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "HistogramObserver",
    "PlaceholderObserver",
)
_FAKE_QUANTIZES = ("FakeQuantize", "FusedMovingAvgObsFakeQuantize", "FixedQParamsFakeQuantize")
_FLOAT = (torch.float32, torch.float64)


def from_qconfig(qconfig: Any, activation: QuantizationSpec | None = None) -> QuantizationConfig | None:
    """Returns the config of a `QConfig`, or None for float.

    Args:
        qconfig: torch.ao's, or anything with `activation` and `weight` constructors; None is float.
        activation: what observes the input where the `QConfig` fixes qparams; those are of the output.

    Raises:
        ConfigError: an observer or a scheme has no counterpart in torchao.
    """
    if qconfig is None:
        return None
    if not hasattr(qconfig, "activation") or not hasattr(qconfig, "weight"):
        raise ConfigError(f"A QConfigMapping holds a {type(qconfig).__name__}; give a QConfig or None for float.")
    made, weight = qconfig.activation(), qconfig.weight()
    output, weight_spec = _spec(made, qconfig), _spec(weight, qconfig)
    is_qat = hasattr(made, "fake_quant_enabled") or hasattr(weight, "fake_quant_enabled")
    if output is None and weight_spec is None:
        return None
    if output is not None and getattr(output, "is_dynamic", False):
        if output.dtype == torch.float16:
            output = None
        return QuantizationConfig(output, None, weight_spec, None, is_qat)
    entering = activation if isinstance(output, FixedQParamsQuantizationSpec) else output
    return QuantizationConfig(entering, output, weight_spec, None, is_qat)


def reuses_input(qconfig: Any) -> bool:
    """Tells whether a `QConfig` only says that the output is in the scale of the input."""
    return qconfig is not None and type(qconfig.activation()).__name__ == "ReuseInputObserver"


def _spec(made: Any, qconfig: Any) -> Any:
    """Returns the spec of an observer or fake quantize, None for float."""
    fake = type(made).__name__ if hasattr(made, "fake_quant_enabled") else ""
    observer = getattr(made, "activation_post_process", made)
    name = type(observer).__name__
    if name == "NoopObserver" or (name == "PlaceholderObserver" and observer.dtype in _FLOAT):
        return None
    if fake and fake not in _FAKE_QUANTIZES:
        raise ConfigError(f"{qconfig} has the fake quantize {fake}; choose one of {list(_FAKE_QUANTIZES)}.")
    if name == "FixedQParamsObserver":
        return _fixed(observer)
    if name not in _OBSERVERS:
        raise ConfigError(f"{qconfig} has the observer {name}; choose one of {[*_OBSERVERS, 'FixedQParamsObserver']}.")
    if getattr(observer, "qscheme", None) == torch.per_channel_affine_float_qparams:
        raise ConfigError(
            f"{qconfig} has float zero points, which no quantize operator of PT2E has; choose "
            "torch.per_channel_symmetric."
        )
    return QuantizationSpec(observer_or_fake_quant_ctr=_constructor(observer, fake), **_numbers(observer))


def _fixed(observer: Any) -> FixedQParamsQuantizationSpec:
    return FixedQParamsQuantizationSpec(
        STORAGE.get(observer.dtype, observer.dtype),
        float(observer.scale),
        int(observer.zero_point),
        observer.quant_min,
        observer.quant_max,
        observer.qscheme,
    )


def _numbers(observer: Any) -> dict[str, Any]:
    dtype = STORAGE.get(observer.dtype, observer.dtype)
    if dtype.is_floating_point:
        return {"dtype": dtype, "is_dynamic": observer.is_dynamic}
    scheme = getattr(observer, "qscheme", None) or torch.per_tensor_affine
    found = {"dtype": dtype, "qscheme": scheme, "is_dynamic": bool(getattr(observer, "is_dynamic", False))}
    if hasattr(observer, "ch_axis"):
        found["ch_axis"] = observer.ch_axis
    # The observer's own numbers: a reduced range is halved in them already.
    return found | {"quant_min": observer.quant_min, "quant_max": observer.quant_max}


def _constructor(observer: Any, fake: str) -> Any:
    name = type(observer).__name__
    options = {option: _plain(getattr(observer, option, None)) for option in _options(name)}
    given = {option: found for option, found in options.items() if found is not None}
    made = getattr(pt2e, name)
    return getattr(pt2e, fake).with_args(observer=made, **given) if fake else made.with_args(**given)


def _options(name: str) -> tuple[str, ...]:
    more = {"HistogramObserver": ("bins",), "PlaceholderObserver": ()}
    moving = ("averaging_constant",) if name.startswith("MovingAverage") else ()
    return ("eps", *moving, *more.get(name, ()))


def _plain(found: Any) -> Any:
    return found.item() if isinstance(found, torch.Tensor) else found
