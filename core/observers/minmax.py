"""Observers that keep ends only: the extremes of all data, or a moving average of each batch's.

Sources: the min-max and moving-average ranges of Jacob et al., "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", arXiv:1712.05877, section 3.1.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers.base import DataObserver
from quantplug.core.observers.seen import State


class Extremes(NamedTuple):
    """Smallest and largest value of each row, float32 [rows]."""

    low: Tensor
    high: Tensor


class Averages(NamedTuple):
    """Averaged ends of each row, float32 [rows], and the number of batches behind them, int64 [rows]."""

    low: Tensor
    high: Tensor
    batches: Tensor


class MinMaxObserver(DataObserver):
    """Quantizes the whole range that was seen; merging is exact."""

    dynamic = True
    form: ClassVar[type[Any]] = Extremes

    def updated(self, state: State | None, rows: Tensor) -> State:
        """Returns the extremes of both."""
        low, high, _ = self.checked_extremes(rows)
        if state is None:
            return Extremes(low, high)
        self.check_channels(state[0], low)
        return Extremes(torch.minimum(state[0], low), torch.maximum(state[1], high))

    def merged(self, first: State, second: State) -> State:
        """Returns the extremes of both; exact."""
        return Extremes(torch.minimum(first[0], second[0]), torch.maximum(first[1], second[1]))

    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the extremes."""
        return _nothing_as_zero(state[0]), _nothing_as_zero(state[1])

    def check_channels(self, before: Tensor, now: Tensor) -> None:
        """Refuses a tensor with another number of channels than those before.

        Raises:
            CalibrationError: the numbers differ.
        """
        if before.shape != now.shape:
            raise CalibrationError(
                f"{self.where()} has seen {before.shape[0]} channels and was given {now.shape[0]}; set the spec's "
                f"ch_axis (now {self.ch_axis}) to the axis that keeps its size."
            )


class MovingAverageMinMaxObserver(MinMaxObserver):
    """Quantizes the moving average of the batches' extremes; the result depends on the batches' order.

    Args:
        averaging_constant: weight of the newest batch, in (0, 1].
        **options: those of `DataObserver`.

    Merging gives the mean of both averages, weighted by their numbers of batches: it lies between
    the two, and equals a single run's only if the averages agree.
    """

    ordered = True
    form = Averages
    options = ("averaging_constant",)

    def __init__(self, averaging_constant: float = 0.01, **options: Any) -> None:
        if not 0 < averaging_constant <= 1:
            raise ConfigError(
                f"{type(self).__name__} has averaging_constant {averaging_constant}; choose one above 0, up to 1."
            )
        super().__init__(**options)
        self.averaging_constant = averaging_constant

    def updated(self, state: State | None, rows: Tensor) -> State:
        """Returns the averages after one more batch."""
        low, high, _ = self.checked_extremes(rows)
        if state is None:
            return Averages(low, high, torch.ones_like(low, dtype=torch.int64))
        self.check_channels(state[0], low)
        # Increments as torchao adds them; a batch without finite values in a row has no say there.
        steps = [torch.where(torch.isfinite(n), n - o, 0) for n, o in zip((low, high), state[:2], strict=True)]
        ends = [old + self.averaging_constant * step for old, step in zip(state[:2], steps, strict=True)]
        return Averages(ends[0], ends[1], state[2] + 1)

    def merged(self, first: State, second: State) -> State:
        """Returns the averages weighted by the numbers of batches."""
        total = first[2] + second[2]
        share = (second[2].double() / total).float()
        low, high = (old + share * (new - old) for old, new in zip(first[:2], second[:2], strict=True))
        return Averages(low, high, total)


class PerChannelMinMaxObserver(MinMaxObserver):
    """Min-max along one axis."""

    per_channel = True
    dynamic = False


class PerChannelMovingAverageMinMaxObserver(MovingAverageMinMaxObserver):
    """Moving average of extremes along one axis."""

    per_channel = True
    dynamic = False


def _nothing_as_zero(end: Tensor) -> Tensor:
    """Gives channels that never had a finite value the range of a channel of zeros."""
    return torch.where(torch.isfinite(end), end, torch.zeros_like(end))
