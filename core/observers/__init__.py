"""Observers: tensors that flow through a prepared model -> scale and zero point.

All have torchao's observer interface and work in torchao's own prepare and convert. A name chooses
one: `observer("mse", per_channel=True, eps=2**-12)` gives a constructor for a QuantizationSpec.
"""

from typing import Any

from torchao.quantization.pt2e import ObserverOrFakeQuantizeConstructor

from quantplug.core.errors import ConfigError
from quantplug.core.observers.base import DataObserver
from quantplug.core.observers.histogram import (
    EntropyObserver,
    GridObserver,
    HistogramObserver,
    MSEObserver,
    PercentileObserver,
    PerChannelEntropyObserver,
    PerChannelHistogramObserver,
    PerChannelMSEObserver,
    PerChannelPercentileObserver,
)
from quantplug.core.observers.minmax import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PerChannelMovingAverageMinMaxObserver,
)
from quantplug.core.observers.seen import NonFiniteError, State

OBSERVERS: dict[str, tuple[type[DataObserver], type[DataObserver]]] = {
    "minmax": (MinMaxObserver, PerChannelMinMaxObserver),
    "moving_average": (MovingAverageMinMaxObserver, PerChannelMovingAverageMinMaxObserver),
    "histogram": (HistogramObserver, PerChannelHistogramObserver),
    "percentile": (PercentileObserver, PerChannelPercentileObserver),
    "mse": (MSEObserver, PerChannelMSEObserver),
    "entropy": (EntropyObserver, PerChannelEntropyObserver),
}
"""Observers by name, each as (per tensor, per channel)."""


def observer(name: str, per_channel: bool = False, **options: Any) -> ObserverOrFakeQuantizeConstructor:
    """Returns a constructor for `QuantizationSpec.observer_or_fake_quant_ctr`.

    Args:
        name: one of `OBSERVERS`.
        per_channel: one range for each channel; the spec gives the axis.
        **options: arguments of the observer's class, e.g. `eps`, `percentile`, `power_of_two`.

    Raises:
        ConfigError: no observer has that name, or it does not take an option.
    """
    if name not in OBSERVERS:
        raise ConfigError(f"There is no observer '{name}'; choose one of {sorted(OBSERVERS)}.")
    kind = OBSERVERS[name][per_channel]
    try:
        kind(**options)
    except TypeError as error:
        raise ConfigError(f"Observer '{name}' does not take the options {options} ({error}).") from error
    return kind.with_args(**options)


__all__ = [
    "OBSERVERS",
    "DataObserver",
    "EntropyObserver",
    "GridObserver",
    "HistogramObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "NonFiniteError",
    "PerChannelEntropyObserver",
    "PerChannelHistogramObserver",
    "PerChannelMSEObserver",
    "PerChannelMinMaxObserver",
    "PerChannelMovingAverageMinMaxObserver",
    "PerChannelPercentileObserver",
    "PercentileObserver",
    "State",
    "observer",
]
