"""What trains in place of an observer, so that one spec serves calibration and training.

Before: the observer that a spec makes for `prepare_pt2e`. After: for `prepare_qat_pt2e`, a fake quantize of the
same dtype, range, scheme, axis and smallest scale, around an observer that suits values which change from step to
step. Fake quantizes that a spec makes itself stay as they are.

Observers that gather everything they ever saw (min-max, histogram, percentile, mse, entropy) would keep the ranges
of the first steps for ever; a moving average of the batches' extremes stands for them. What is computed from
parameters alone, a weight, is seen whole in every step: its range is that of the moment, as after training.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchao.quantization.pt2e import (
    AffineQuantizedObserverBase,
    FakeQuantize,
    FakeQuantizeBase,
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    UniformQuantizationObserverBase,
)

from quantplug.core import observers as own
from quantplug.core.observers import DataObserver
from quantplug.core.observers.groups import GroupFakeQuantize
from quantplug.core.observers.rowwise import RowFakeQuantize, RowObserver
from quantplug.core.observers.straight_through import CHOOSE_QPARAMS, HalfFakeQuantize, RunTimeFakeQuantize
from quantplug.core.specs.stored_dtypes import HALF_DTYPES, STORAGE_DTYPES, stored_range

# torchao's observers that gather what they saw, and those that follow it.
_FOLLOWING: Mapping[type[Any], type[Any]] = {
    MinMaxObserver: MovingAverageMinMaxObserver,
    HistogramObserver: MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver: MovingAveragePerChannelMinMaxObserver,
}
_OWN = frozenset(kind for kinds in own.OBSERVERS.values() for kind in kinds)
_OWN_MOVING = own.OBSERVERS["moving_average"]
# The weight of the newest batch in a moving average: torchao's for what data makes, all of it for what is whole.
_OF_DATA, _OF_NOW = 0.01, 1.0


def fake_quantize(observer: nn.Module, of_constants: bool = False) -> nn.Module:
    """Returns the fake quantize that trains where an observer would calibrate.

    Args:
        observer: what a spec makes; it has seen nothing.
        of_constants: whether it is to see what is computed from parameters alone.

    Returns:
        A fake quantize; the observer itself where it is one, or where its tensor is left float.

    Raises:
        TypeError: the observer's quantization has no form for training.
    """
    given: Any = getattr(observer, "dtype", None)
    if isinstance(observer, FakeQuantizeBase) or _rounds_nothing(observer):
        return observer
    if given in HALF_DTYPES:
        return HalfFakeQuantize(given)
    if isinstance(observer, AffineQuantizedObserverBase):
        return _of_blocks(observer, of_constants)
    if isinstance(observer, RowObserver):
        return RowFakeQuantize(observer.granularity, observer.dtype, observer.quant_min, observer.quant_max)
    if isinstance(observer, FixedQParamsObserver):
        fixed: nn.Module = FixedQParamsFakeQuantize(observer=_gives(observer))
        return fixed
    _require_integers(observer)
    if _is_dynamic(observer):
        return _of_run_time(observer)
    following = _following(observer, of_constants)
    fake: nn.Module = FakeQuantize(observer=_gives(following))
    return fake


def _rounds_nothing(observer: Any) -> bool:
    """Tells whether a tensor keeps its numbers: it stays float."""
    return getattr(observer, "dtype", None) == torch.float32


def _is_dynamic(observer: Any) -> bool:
    return bool(getattr(observer, "is_dynamic", False))


def _gives(observer: nn.Module) -> Callable[..., nn.Module]:
    """Returns a constructor of an observer that is made already."""
    return lambda **arguments: observer


def _require_integers(observer: Any) -> None:
    if not isinstance(observer, PlaceholderObserver | UniformQuantizationObserverBase):
        raise TypeError(f"{type(observer).__name__} has no form for training, since it gives no uniform range")
    if observer.dtype.is_floating_point:
        raise TypeError(f"{observer.dtype} has no form for training, since torch fakes the rounding to integers only")
    if isinstance(observer, PlaceholderObserver) and not _is_dynamic(observer):
        raise TypeError("it has no form for training, since it has a range only where the spec is dynamic")


def _of_blocks(observer: nn.Module, of_constants: bool) -> nn.Module:
    if not of_constants:
        raise TypeError(
            f"{type(observer).__name__} has no form for training, since scales of blocks are found in weights only"
        )
    return GroupFakeQuantize(_gives(observer))


def _of_run_time(observer: Any) -> nn.Module:
    """Returns a fake quantize of what convert makes of a dynamic observer, whatever that one would gather."""
    dtype, scheme = STORAGE_DTYPES[observer.dtype], observer.qscheme or torch.per_tensor_affine
    if scheme not in CHOOSE_QPARAMS:
        raise TypeError(f"{scheme} has no form for training, since a range of run time is found for a whole tensor")
    return RunTimeFakeQuantize(dtype, *stored_range(observer), scheme, float(observer.eps))


def _following(observer: Any, of_constants: bool) -> nn.Module:
    constant = _OF_NOW if of_constants else _OF_DATA
    if type(observer) in _OWN:
        return _own_following(observer, constant)
    if type(observer) in _FOLLOWING:
        return _torchaos_following(observer, constant)
    # One that follows already, or of a class of the user's, which knows best.
    kept: nn.Module = observer
    return kept


def _own_following(observer: DataObserver, constant: float) -> nn.Module:
    kind: type[Any] = _OWN_MOVING[observer.per_channel]
    if type(observer) is kind:
        return observer
    options = {"power_of_two": observer.scheme.power_of_two, "nonfinite": observer.nonfinite}
    following: nn.Module = kind(averaging_constant=constant, **options, **_arguments(observer))
    return following


def _torchaos_following(observer: UniformQuantizationObserverBase, constant: float) -> nn.Module:
    following: nn.Module = _FOLLOWING[type(observer)](averaging_constant=constant, **_arguments(observer))
    return following


def _arguments(observer: UniformQuantizationObserverBase) -> dict[str, Any]:
    """Returns the arguments that give another observer the same integers and scheme."""
    # A range that was declared counts by its own middle, one that is halved comes halved already.
    declared = ("quant_min", "quant_max") if observer.has_customized_qrange else ("reduce_range",)
    names = (*declared, "dtype", "qscheme", *(("ch_axis",) if hasattr(observer, "ch_axis") else ()))
    given = {name: getattr(observer, name) for name in names}
    return {**given, "eps": float(observer.eps), "is_dynamic": _is_dynamic(observer)}
