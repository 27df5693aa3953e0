"""Observers that keep a histogram and search it for the range that loses least.

The histogram lies on a power-of-two grid (`grid.py`), so its memory is fixed, its counts are exact,
and merging the histograms of several processes gives the histogram of all their data. What range is
best is a question of the search: norm minimization (`walk.py`), least squared error, a percentile or least
divergence (`search.py`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers import grid, search, walk
from quantplug.core.observers.base import DataObserver
from quantplug.core.observers.grid import GridHistogram
from quantplug.core.observers.seen import State


class GridObserver(DataObserver):
    """Base of the observers with a histogram.

    Args:
        bins: bins of the window (per channel 1024), a power of two; the data covers at least half of them.
        **options: those of `DataObserver`.
    """

    form = GridHistogram
    options: ClassVar[tuple[str, ...]] = ("bins",)

    def __init__(self, bins: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.bins = bins or (1024 if self.per_channel else 4096)
        if self.bins < 16 or self.bins & (self.bins - 1):
            raise ConfigError(f"{type(self).__name__} has {self.bins} bins; pass a power of two of at least 16.")

    def updated(self, state: State | None, rows: Tensor) -> State:
        """Returns the histogram with the values of one more tensor."""
        low, high, finite = self.checked_extremes(rows)
        before = grid.empty(rows.shape[0], self.bins, rows.device) if state is None else GridHistogram(*state)
        if before.low.shape != low.shape:
            raise CalibrationError(
                f"{self.where()} has seen {before.low.shape[0]} channels and was given {low.shape[0]}; set the spec's "
                f"ch_axis (now {self.ch_axis}) to the axis that keeps its size."
            )
        if finite is None:
            return grid.counted(before, rows, low, high)
        after = grid.counted(before, torch.where(finite, rows, 0), low, high)
        spoiled = (~finite).sum(1, keepdim=True)
        return after._replace(counts=after.counts.scatter_add(1, -after.start[:, None], -spoiled))

    def merged(self, first: State, second: State) -> State:
        """Returns the histogram of both's data; exact."""
        return grid.merged(GridHistogram(*first), GridHistogram(*second))

    @property
    def histogram(self) -> GridHistogram | None:
        """The counts so far, or None before the first data."""
        state = self.state
        return None if state is None else GridHistogram(*state)


class HistogramObserver(GridObserver):
    """Range where a walk over the quantiles stops to lower the L2 error (`walk.norm_range`)."""

    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the range where the walk ends."""
        return walk.norm_range(GridHistogram(*state), self.scheme)


class MSEObserver(GridObserver):
    """Range of least squared error (`search.mse_range`)."""

    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the range of least squared error."""
        return search.mse_range(GridHistogram(*state), self.scheme)


class PercentileObserver(GridObserver):
    """Range that holds a given share of the values (`search.percentile_range`).

    Args:
        percentile: share in percent, above 50 up to 100.
        **options: those of `GridObserver`.
    """

    options = ("bins", "percentile")

    def __init__(self, percentile: float = 99.99, **options: Any) -> None:
        super().__init__(**options)
        if not 50 < percentile <= 100:
            raise ConfigError(f"{type(self).__name__} has percentile {percentile}; choose one above 50, up to 100.")
        self.percentile = float(percentile)

    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the range between the percentiles."""
        return search.percentile_range(GridHistogram(*state), self.scheme, self.percentile)


class EntropyObserver(GridObserver):
    """Range of least divergence between the distributions before and after (`search.entropy_range`).

    Args:
        stride: step between the numbers of kept bins that are tried: 1 is the search of the notes, 8 finds
            nearly the same threshold in an eighth of the time.
        **options: those of `GridObserver`.
    """

    options = ("bins", "stride")

    def __init__(self, stride: int = 8, **options: Any) -> None:
        super().__init__(**options)
        if stride < 1:
            raise ConfigError(f"{type(self).__name__} has stride {stride}; choose at least 1.")
        self.stride = stride

    def search(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the range of least divergence."""
        return search.entropy_range(GridHistogram(*state), self.scheme, self.stride)


class PerChannelHistogramObserver(HistogramObserver):
    """Norm minimization, along one axis."""

    per_channel = True


class PerChannelMSEObserver(MSEObserver):
    """Least squared error, along one axis."""

    per_channel = True


class PerChannelPercentileObserver(PercentileObserver):
    """Percentile, along one axis."""

    per_channel = True


class PerChannelEntropyObserver(EntropyObserver):
    """Least divergence, along one axis."""

    per_channel = True
