"""Histograms on a power-of-two grid: values -> exact counts that can be rebinned and merged without loss.

Bin j of a row covers [j * w, (j + 1) * w) with w = 2**exponent, for j in start .. start + bins - 1.
A row's exponent is the smallest one whose window covers the row's values and zero. A wider range
doubles w, which adds neighbouring bins, so that the counts never depend on the order in which data
came or on how it was split among processes: merging is exact, associative and commutative.

(Dividing a float32 by a power of two is exact unless the quotient is subnormal, that is unless the
value is smaller than 2**-100 of the range; such a negative value may be counted one bin higher.)
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Below 2**-126 the reciprocal of a bin width would overflow float32.
MIN_EXPONENT = -126
# Elements scaled at a time: one core's second-level cache holds them, and a call costs little beside them.
GRAIN = 1 << 17
# The same where torch has several threads: too few for ATen to wake its thread pool, whose barriers cost
# more than the work where other processes hold a core.
SHARED_GRAIN = (1 << 15) - 64
# Grains counted at a time.
GRAINS = 8
# Counters side by side for one bin: a rectified tensor hits one bin with every second element, and a
# store to it would have to be forwarded to the next load.
LANES = 4
# Upper bound of the counters that one pass over several rows writes.
COUNTERS = 1 << 24


class GridHistogram(NamedTuple):
    """Counts of the values of `rows` tensors or channels.

    Attributes:
        low: smallest value of each row, float32 [rows]; inf where a row has none.
        high: largest value, float32 [rows]; -inf where a row has none.
        exponent: the bin width is 2**exponent, int64 [rows].
        start: index of the first bin, int64 [rows].
        counts: int64 [rows, bins].
    """

    low: Tensor
    high: Tensor
    exponent: Tensor
    start: Tensor
    counts: Tensor

    @property
    def width(self) -> Tensor:
        """Bin widths, float64 [rows]."""
        return torch.ldexp(torch.ones_like(self.exponent, dtype=torch.float64), self.exponent)


def empty(rows: int, bins: int, device: torch.device) -> GridHistogram:
    """Returns the histogram of no data."""
    infinity = torch.full((rows,), float("inf"), device=device)
    exponent, start = covering_grid(infinity, -infinity, bins)
    return GridHistogram(
        infinity, -infinity, exponent, start, torch.zeros(rows, bins, dtype=torch.int64, device=device)
    )


def covering_grid(low: Tensor, high: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Returns exponent and start of the finest grid whose `bins` bins cover [min(low, 0), max(high, 0)] of each row."""
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    mantissa, first = torch.frexp((high - low) / bins)
    exponent = torch.where(mantissa == 0, MIN_EXPONENT, first.long() - 2).clamp(min=MIN_EXPONENT)
    for _ in range(3):  # frexp leaves the answer within three exponents from here
        too_fine = _bin_of(high, exponent) - _bin_of(low, exponent) >= bins
        exponent = exponent + too_fine.long()
    return exponent, _bin_of(low, exponent)


def _bin_of(value: Tensor, exponent: Tensor) -> Tensor:
    return torch.floor(torch.ldexp(value, -exponent)).long()


def rebinned(histogram: GridHistogram, exponent: Tensor, start: Tensor) -> Tensor:
    """Returns a histogram's counts on a grid that is equal, or coarser and covers it, int64 [rows, bins]."""
    if torch.equal(histogram.exponent, exponent) and torch.equal(histogram.start, start):
        return histogram.counts
    bins = histogram.counts.shape[1]
    index = histogram.start[:, None] + torch.arange(bins, device=start.device)
    index = (index >> (exponent - histogram.exponent).clamp(0, 62)[:, None]) - start[:, None]
    # Bins outside the new window are empty: it covers every value seen.
    return torch.zeros_like(histogram.counts).scatter_add_(1, index.clamp(0, bins - 1), histogram.counts)


def merged(first: GridHistogram, second: GridHistogram) -> GridHistogram:
    """Returns the histogram of both's data; exact, in either order."""
    low, high = torch.minimum(first.low, second.low), torch.maximum(first.high, second.high)
    exponent, start = _joint_grid(first, low, high)
    counts = rebinned(first, exponent, start) + rebinned(second, exponent, start)
    return GridHistogram(low, high, exponent, start, counts)


def counted(before: GridHistogram, values: Tensor, low: Tensor, high: Tensor) -> GridHistogram:
    """Returns `before` with more values counted.

    Args:
        before: counts so far; not changed.
        values: finite float32 [rows, n].
        low: smallest new value of each row that must lie in the window, float32 [rows].
        high: largest one.
    """
    low, high = torch.minimum(before.low, low), torch.maximum(before.high, high)
    exponent, start = _joint_grid(before, low, high)
    counts = rebinned(before, exponent, start) + bin_counts(values, exponent, start, before.counts.shape[1])
    return GridHistogram(low, high, exponent, start, counts)


def _joint_grid(before: GridHistogram, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    if torch.equal(before.low, low) and torch.equal(before.high, high):
        return before.exponent, before.start
    return covering_grid(low, high, before.counts.shape[1])


def bin_counts(values: Tensor, exponent: Tensor, start: Tensor, bins: int) -> Tensor:
    """Returns how many values of each row fall into each bin of its grid, int64 [rows, bins].

    Args:
        values: finite float32 [rows, n], inside the grids' windows.
        exponent: int64 [rows].
        start: int64 [rows].
        bins: bins of a row.
    """
    rows, length = values.shape
    if rows == 1:
        return _counts_of_one(values[0], int(exponent[0]), int(start[0]), bins)
    step = max(1, min(COUNTERS // bins, GRAINS * SHARED_GRAIN // max(1, length)))
    blocks = [_counts_of_block(values[i : i + step], exponent[i : i + step], start[i : i + step], bins)
              for i in range(0, rows, step)]  # fmt: skip
    return torch.cat(blocks)


def _counts_of_block(values: Tensor, exponent: Tensor, start: Tensor, bins: int) -> Tensor:
    rows = values.shape[0]
    factor = torch.ldexp(torch.ones(rows, device=values.device), -exponent)
    offset = torch.arange(rows, device=values.device) * bins - start
    index = (values * factor[:, None]).floor_().to(torch.int64).add_(offset[:, None])
    return torch.bincount(index.view(-1), minlength=rows * bins).view(rows, bins)


def _counts_of_one(values: Tensor, exponent: int, start: int, bins: int) -> Tensor:
    """Counts one row, in as many threads as torch has: its own bincount uses one."""
    available = torch.get_num_threads() if values.device.type == "cpu" else 1
    grain = SHARED_GRAIN if available > 1 else GRAIN
    threads = max(1, min(available, values.numel() // (2 * GRAINS * grain)))
    # Half the bytes written and read again where the counters' numbers fit.
    dtype = torch.int16 if LANES * bins <= torch.iinfo(torch.int16).max else torch.int32
    scratch = _scratch(values.device, grain, dtype).sets(threads)
    offset = scratch[0].lane * bins - start
    totals = [torch.zeros(bins, dtype=torch.int64, device=values.device) for _ in scratch]
    # Conversion to integers drops fractions, which is floor where nothing is negative.
    negative = start < 0
    shares = [(share, 2.0**-exponent, negative, offset, total, arrays)
            for share, total, arrays in zip(values.tensor_split(threads), totals, scratch, strict=True)]  # fmt: skip
    if threads == 1:
        _count_share(*shares[0])
    else:
        # Threads of their own for each call: a pool would not survive a fork.
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_count_share, *zip(*shares, strict=True)))
    return torch.stack(totals).sum(0, keepdim=True)


def _count_share(
    values: Tensor, factor: float, negative: bool, offset: Tensor, total: Tensor, scratch: "_Arrays"
) -> None:
    for chunk in torch.split(values, len(scratch.index)):
        for part, index in zip(torch.split(chunk, len(offset)), scratch.parts, strict=False):
            size = part.numel()
            scaled = torch.mul(part, factor, out=scratch.scaled[:size])
            index[:size].copy_(scaled.floor_() if negative else scaled).add_(offset[:size])
        counters = torch.bincount(scratch.index[: chunk.numel()], minlength=LANES * len(total))
        total += counters.view(LANES, -1).sum(0)


class _Arrays:
    """Arrays to work in: fresh megabytes would cost a page fault for every 4 KB of every chunk."""

    def __init__(self, device: torch.device, grain: int, dtype: torch.dtype) -> None:
        self.scaled = torch.empty(grain, device=device)
        self.index = torch.empty(GRAINS * grain, dtype=dtype, device=device)
        self.parts = torch.split(self.index, grain)
        self.lane = (torch.arange(grain, device=device) % LANES).to(dtype)


class _Scratch(threading.local):
    """The arrays of one calling thread, a set for each thread that it starts."""

    def __init__(self, *kind: Any) -> None:
        self._kind = kind
        self._sets: list[_Arrays] = []

    def sets(self, count: int) -> list[_Arrays]:
        while len(self._sets) < count:
            self._sets.append(_Arrays(*self._kind))
        return self._sets[:count]


@cache
def _scratch(device: torch.device, grain: int, dtype: torch.dtype) -> _Scratch:
    return _Scratch(device, grain, dtype)
