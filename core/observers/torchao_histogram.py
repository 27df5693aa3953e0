"""Quantization parameters of an observer, also of torchao's histogram observer, in reasonable time.

Before: an observer with statistics. After: its scale and zero point.

torchao 0.18's `HistogramObserver` looks for the range with the least L2 error by a walk over the quantiles of
its histogram (the norm minimization of Caffe2's quantization server), one tensor comparison for each of
up to 200,000 steps. Which ranges the walk visits depends on the cumulative histogram alone, the error
only says where to stop. So the visited ranges are found by scalar arithmetic and their errors in batches.
Two things differ from torchao: the number of quantized values is that of the observer's own
`quant_min..quant_max`, where torchao takes that of the dtype, and a tensor that never varied keeps its range.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

from quantplug.core.observers.walk import visited_ranges
from quantplug.core.peers.torchao_names import qparams_arithmetic, qparams_of_range

# Ranges whose errors are computed at once; most searches stop early, and 32 x 2048 floats stay in cache.
_FIRST_BATCH, _LARGEST_BATCH = 4, 32


# Of these two and the classes that inherit from them.
_OF_MIN_AND_MAX = (MinMaxObserver.calculate_qparams, PerChannelMinMaxObserver.calculate_qparams)


def calculate_qparams(observer: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns an observer's scale and zero point."""
    if type(observer) is HistogramObserver:
        return qparams_of_range(observer, *histogram_range(observer))
    calculate: Any = observer.calculate_qparams
    scale, zero_point = calculate()
    return scale, zero_point


def calculate_qparams_together(observers: Iterable[nn.Module]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Returns scale and zero point of every observer that keeps a minimum and a maximum as torchao's do.

    They are computed as if all observers of one configuration were the channels of one: the arithmetic is
    elementwise, so the numbers are those of each alone. Observers of other kinds, and those of a group in
    which one has seen NaN or nothing, are left out.
    """
    alike: defaultdict[Hashable, list[Any]] = defaultdict(list)
    for observer in observers:
        method: Any = getattr(type(observer), "calculate_qparams", None)
        if method in _OF_MIN_AND_MAX and observer.min_val.numel():  # type: ignore[operator]
            alike[_configuration(observer)].append(observer)
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for group in alike.values():
        low, high = (torch.cat([getattr(o, name).reshape(-1) for o in group]) for name in ("min_val", "max_val"))
        if bool((low <= high).all()):
            sizes = [observer.min_val.numel() for observer in group]
            scale, zero_point = (_parts(every, sizes) for every in qparams_of_range(group[0], low, high))
            found |= zip(group, zip(scale, zero_point, strict=True), strict=True)
    return found


def _parts(every: Tensor, sizes: list[int]) -> list[Tensor]:
    # Copies, as a view would keep the numbers of all observers alive, and in the files, beside its own.
    return [part.clone() for part in torch.split(every, sizes)]


def _configuration(observer: Any) -> Hashable:
    names = ("qscheme", "dtype", "quant_min", "quant_max", "has_customized_qrange")
    own = (qparams_arithmetic(type(observer)), observer.min_val.device, observer.min_val.dtype, float(observer.eps))
    return (*own, *(getattr(observer, name) for name in names))


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
    visited = visited_ranges(histogram)
    while batch := list(islice(visited, size)):
        for bins, error in zip(batch, _errors(histogram, spread / histogram.numel(), batch, levels), strict=True):
            if error > least:
                return best
            least, best = error, bins
        size = min(2 * size, _LARGEST_BATCH)
    return best


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
    density, reach = histogram / width, step / 2
    error = density * _cubes(begin - (first_step + 0.5) * step, reach)
    error += (last_step - first_step - 1) * (density * _cubes(-reach, reach))
    error += density * _cubes(-reach, end - (last_step * step + reach))
    return error.sum(1).tolist()


def _cubes(begin: Tensor, end: Tensor) -> Tensor:
    """Returns the integral of x^2 from begin to end."""
    return (end * end * end - begin * begin * begin) / 3
