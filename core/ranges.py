"""Quantization parameters of an observer, also of torchao's histogram observer, in reasonable time.

Before: an observer with statistics. After: its scale and zero point.

torchao's `HistogramObserver` looks for the range with the least L2 error by a walk over the quantiles of
its histogram (the norm minimization of Caffe2's quantization server), one tensor comparison for each of
up to 200,000 steps. Which ranges the walk visits depends on the cumulative histogram alone, the error
only says where to stop. So the visited ranges are found by scalar arithmetic and their errors in batches.
Two things differ from torchao: the number of quantized values is that of the observer's own
`quant_min..quant_max`, where torchao takes that of the dtype, and a tensor that never varied keeps its range.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import HistogramObserver

# The granularity of the quantiles, as in Caffe2 and torchao.
_STEP = 1e-5
# What repeated addition and subtraction of the step give, in the same order and so with the same rounding.
_LOW_QUANTILES = np.cumsum(np.concatenate(([0.0], np.full(100_000, _STEP))))
_HIGH_QUANTILES = np.cumsum(np.concatenate(([1.0], np.full(100_000, -_STEP))))
# Ranges whose errors are computed at once; most searches stop early, and 32 x 2048 floats stay in cache.
_FIRST_BATCH, _LARGEST_BATCH = 4, 32


def calculate_qparams(observer: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns an observer's scale and zero point."""
    if type(observer) is HistogramObserver:
        low, high = histogram_range(observer)
        # torchao has no public way from a range to qparams; the alternative is a second copy of its rounding.
        from_range: Any = observer._calculate_qparams
        scale, zero_point = from_range(low, high)
        return scale, zero_point
    calculate: Any = observer.calculate_qparams
    scale, zero_point = calculate()
    return scale, zero_point


def histogram_range(observer: HistogramObserver) -> tuple[Tensor, Tensor]:
    """Returns the (low, high) range of a torchao histogram observer with the least expected L2 error.

    The search stops at the first visited range that is worse than the one before.
    """
    levels = observer.quant_max - observer.quant_min + 1
    start, end = _least_error(observer.histogram, observer.max_val.item() - observer.min_val.item(), levels)
    width = (observer.max_val - observer.min_val) / observer.bins
    return observer.min_val + width * start, observer.min_val + width * (end + 1)


def _least_error(histogram: Tensor, spread: float, levels: int) -> tuple[int, int]:
    best = (0, histogram.numel() - 1)
    if spread == 0.0:
        return best
    least, size = float("inf"), _FIRST_BATCH
    visited = _visited_ranges(histogram)
    while batch := list(islice(visited, size)):
        for bins, error in zip(batch, _errors(histogram, spread / histogram.numel(), batch, levels), strict=True):
            if error > least:
                return best
            least, best = error, bins
        size = min(2 * size, _LARGEST_BATCH)
    return best


def _visited_ranges(histogram: Tensor) -> Iterator[tuple[int, int]]:
    """Yields the (first, last) bins that the walk visits, each cutting a little more from the cheaper side.

    The low quantile only moves when a bin is cut; the high one also moves in vain, which is skipped at once.
    """
    total = torch.sum(histogram).item()
    # torchao compares float32 sums with quantiles rounded to float32; so do we, to visit the same bins.
    sums = torch.cumsum(histogram, dim=0).cpu().numpy()
    highs = (_HIGH_QUANTILES * total).astype(np.float32)
    cut_low, cut_high = 0, 0
    start, end = 0, len(sums) - 1
    while start < end:
        next_low = np.float32(_LOW_QUANTILES[cut_low + 1] * total)
        left = start + int(np.searchsorted(sums[start:end], next_low, side="left"))
        if left == start:
            # Nothing to cut below, so the high quantile falls until it cuts the last bin off.
            falls = len(highs) - int(np.searchsorted(highs[::-1], sums[end], side="left"))
            cut_high = max(cut_high, falls - 1)
        if cut_high + 1 >= len(highs) or _LOW_QUANTILES[cut_low] >= _HIGH_QUANTILES[cut_high]:
            return
        right = start + int(np.searchsorted(sums[start + 1 : end + 1], highs[cut_high + 1], side="right"))
        if left - start > end - right:
            cut_low, moved = cut_low + 1, (left, end)
        else:
            cut_high, moved = cut_high + 1, (start, right)
        if moved != (start, end):
            start, end = moved
            yield moved


def _errors(histogram: Tensor, width: float, ranges: list[tuple[int, int]], levels: int) -> list[float]:
    """Returns the expected L2 error of quantizing the histogram to each range.

    A bin's values are taken as uniform within it. Its error has three parts: where its first value lies
    in a quantization step, the steps that it covers whole, and where its last value lies.
    """
    first = torch.tensor([r[0] for r in ranges], device=histogram.device).unsqueeze(1)
    steps = [width * (r[1] - r[0] + 1) / levels for r in ranges]
    step = torch.tensor(steps, dtype=torch.float32, device=histogram.device).unsqueeze(1)
    begin = (torch.arange(histogram.numel(), device=histogram.device) - first) * width
    end = begin + width
    first_step = torch.clamp(torch.div(begin, step, rounding_mode="floor"), 0, levels - 1)
    last_step = torch.clamp(torch.div(end, step, rounding_mode="floor"), 0, levels - 1)
    density, half = histogram / width, step / 2
    error = density * _cubes(begin - (first_step + 0.5) * step, half)
    error += (last_step - first_step - 1) * (density * _cubes(-half, half))
    error += density * _cubes(-half, end - (last_step * step + half))
    return error.sum(1).tolist()


def _cubes(begin: Tensor, end: Tensor) -> Tensor:
    """Returns the integral of x^2 from begin to end."""
    return (end * end * end - begin * begin * begin) / 3
