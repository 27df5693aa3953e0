"""Searches for the range to quantize: histograms -> (low, high), all rows at once.

Between two bin edges values are taken to be spread evenly. Then the mean squared error of a
quantizer has a closed form. With F the cumulative distribution, G(t) = integral of F up to t, v the
largest representable value, s the step and t_q the midpoints between neighbouring representable
values,

    E[(x - Q(x))^2] = E[(x - v)^2] - 2 s * sum_q G(t_q)

(summation by parts of the sum over cells; clipping on both sides is part of it), so that one table
look-up per integer level gives the exact error, whatever the number of bins.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantplug.core.observers.grid import GridHistogram
from quantplug.core.observers.scheme import Scheme

Ranges = tuple[Tensor, Tensor]
# Largest number of table look-ups in one pass; small enough for the second-level cache.
LOOKUPS = 1 << 17
# Factors by which an end is pulled in: four per octave, down to the thousandth that bins still resolve.
COARSE = tuple(2.0 ** (-i / 4) for i in range(40))
# Then nine factors around the best one, in ever finer steps of an octave.
FINE = (1 / 16, 1 / 64)
# Rounding of a share, relative.
ROUNDING = 2.0**-50
# Bins of magnitudes that the entropy search looks at, as in TensorRT's notes.
ENTROPY_BINS = 2048


class Sums(NamedTuple):
    """What the error of a range is looked up in; positions are in bins from the window's start.

    Attributes:
        counts: values in a bin, float64 [rows, bins].
        below: values below a bin's lower edge, float64 [rows, bins].
        integral: integral of `below` up to that edge, float64 [rows, bins].
        moments: number, sum and sum of squares of all positions, float64 [rows, 3].
        start: index of the first bin, float64 [rows].
        width: bin width, float64 [rows].
    """

    counts: Tensor
    below: Tensor
    integral: Tensor
    moments: Tensor
    start: Tensor
    width: Tensor


def sums_of(histogram: GridHistogram) -> Sums:
    """Returns the sums of a histogram."""
    counts = histogram.counts.double()
    below = counts.cumsum(1) - counts
    pieces = below + counts / 2
    centre = torch.arange(counts.shape[1], device=counts.device, dtype=torch.float64) + 0.5
    moments = torch.stack([counts.sum(1), counts @ centre, counts @ (centre * centre + 1 / 12)], 1)
    return Sums(
        counts, below, pieces.cumsum(1) - pieces, moments, histogram.start.double(), histogram.width
    )  # fmt: skip


def squared_error(sums: Sums, scheme: Scheme, low: Tensor, high: Tensor) -> Tensor:
    """Returns the mean squared quantization error of candidate ranges.

    Args:
        sums: of `rows` histograms.
        scheme: how a range becomes scale and zero point.
        low: lower ends, float32 [rows, candidates].
        high: upper ends, float32 [rows, candidates].

    Returns:
        float64 [rows, candidates], in squared units of the data.
    """
    scale, zero = scheme.qparams(low, high)
    step = scale.double()
    return levels_error(sums, step, (scheme.quant_max - zero) * step, scheme.steps)


def levels_error(sums: Sums, step: Tensor, largest: Tensor, steps: int) -> Tensor:
    """Returns the mean squared error of rounding to the nearest of the values `largest - i * step`, 0 <= i <= steps.

    Args:
        sums: of `rows` histograms.
        step: distances of the values, float64 [rows, candidates].
        largest: largest values, float64 [rows, candidates].
        steps: number of distances.
    """
    step, largest = step / sums.width[:, None], largest / sums.width[:, None] - sums.start[:, None]
    index = torch.arange(steps, device=step.device, dtype=torch.float64) + 0.5
    middle = largest[..., None] - index * step[..., None]
    area = _integral(sums, middle.flatten(1)).view(middle.shape).sum(2)
    number, first, second = (m[:, None] for m in sums.moments.unbind(1))
    error = second - 2 * largest * first + largest * largest * number - 2 * step * area
    # The difference of two large sums: what is left below zero is rounding.
    return error.clamp(min=0) * sums.width[:, None] ** 2 / number.clamp(min=1)


def _integral(sums: Sums, position: Tensor) -> Tensor:
    bins = sums.counts.shape[1]
    inside = position.clamp(0, bins)
    index = inside.long().clamp(max=bins - 1)
    rest = inside - index
    value = sums.counts.gather(1, index).mul_(rest).mul_(0.5).add_(sums.below.gather(1, index)).mul_(rest)
    value += sums.integral.gather(1, index)
    return value.add_((position - inside).clamp_(min=0).mul_(sums.moments[:, :1]))


def in_blocks(search: Callable[[GridHistogram], Ranges], histogram: GridHistogram, lookups: int) -> Ranges:
    """Runs a search that makes `lookups` table look-ups a row on so many rows at a time that memory stays bounded."""
    step = max(1, LOOKUPS // max(1, lookups))
    rows = histogram.counts.shape[0]
    parts = [search(GridHistogram(*(field[i : i + step] for field in histogram))) for i in range(0, rows, step)]
    return torch.cat([low for low, _ in parts]), torch.cat([high for _, high in parts])


def full_range(histogram: GridHistogram) -> Ranges:
    """Returns the smallest range with zero that holds every value; [0, 0] where there is none."""
    return histogram.low.clamp(max=0), histogram.high.clamp(min=0)


def _pick(sums: Sums, scheme: Scheme, low: Tensor, high: Tensor) -> Tensor:
    """Returns the index of each row's candidate of least error, the first of equals, int64 [rows, 1]."""
    return squared_error(sums, scheme, low, high).argmin(1, keepdim=True)


def mse_range(histogram: GridHistogram, scheme: Scheme) -> Ranges:
    """Finds the range of least mean squared error (Nagel et al., "A White Paper on Neural Network Quantization", 3.1).

    Both ends of the full range are pulled in by the best common factor of `COARSE`, then (unless
    symmetric) each by its own, then each is refined in the steps of `FINE`. Where levels are finer than
    bins, clipping never pays and the full range stays.
    """
    if scheme.steps >= histogram.counts.shape[1]:
        return full_range(histogram)
    return in_blocks(lambda part: _mse_rows(part, scheme), histogram, len(COARSE) * scheme.steps)


def _mse_rows(histogram: GridHistogram, scheme: Scheme) -> Ranges:
    sums, ends = sums_of(histogram), torch.stack(full_range(histogram), 1)
    coarse = torch.tensor(COARSE, device=ends.device)
    factor = coarse[_pick(sums, scheme, ends[:, :1] * coarse, ends[:, 1:] * coarse)].expand(-1, 2)
    sides = [slice(0, 2)] if scheme.symmetric else [slice(0, 1), slice(1, 2)]
    if not scheme.symmetric:
        for side in sides:
            factor = _best_factor(sums, scheme, ends, factor, side, coarse.expand(len(ends), -1))
    for fine in FINE:
        around = 2.0 ** (torch.arange(4, -5, -1, device=ends.device) * fine)
        for side in sides:
            options = (factor[:, side][:, :1] * around).clamp(max=1)
            factor = _best_factor(sums, scheme, ends, factor, side, options)
    return (ends * factor)[:, 0], (ends * factor)[:, 1]


def _best_factor(sums: Sums, scheme: Scheme, ends: Tensor, factor: Tensor, side: slice, options: Tensor) -> Tensor:
    """Returns the factors [rows, 2] with one side (or both) replaced by each row's best option."""
    tried = factor[:, :, None].repeat(1, 1, options.shape[1])
    tried[:, side] = options[:, None]
    low, high = (ends[:, :, None] * tried).unbind(1)
    best = _pick(sums, scheme, low, high)
    return tried.gather(2, best[:, None].expand(-1, 2, -1))[:, :, 0]


def quantile(histogram: GridHistogram, share: Tensor) -> Tensor:
    """Returns the values below which given shares of each row lie.

    Args:
        histogram: of `rows` rows.
        share: float64 [rows, k], within 0..1.

    Returns:
        float32 [rows, k], within [low, high]; off the smallest value with that share at or below it by at
        most one bin width.
    """
    total = histogram.counts.sum(1, keepdim=True).double()
    upto = histogram.counts.double().cumsum(1)
    wanted = share * total
    # A share like 0.999 is off by its last bit, which must not ask for one value more than the 999 of 1000.
    wanted = torch.where((wanted - wanted.round()).abs() < total * ROUNDING, wanted.round(), wanted)
    index = torch.searchsorted(upto, wanted.contiguous()).clamp(max=upto.shape[1] - 1)
    held = histogram.counts.gather(1, index).double()
    inside = (wanted - (upto.gather(1, index) - held)) / held.clamp(min=1)
    value = (histogram.start[:, None] + index + inside.clamp(0, 1)) * histogram.width[:, None]
    return torch.minimum(torch.maximum(value.float(), histogram.low[:, None]), histogram.high[:, None])


def magnitudes(histogram: GridHistogram) -> GridHistogram:
    """Returns the histogram of the absolute values; exact, since zero is a bin edge."""
    bins = histogram.counts.shape[1]
    index = torch.arange(bins, device=histogram.start.device) - histogram.start[:, None]
    mirrored = -1 - torch.arange(bins, device=histogram.start.device) - histogram.start[:, None]
    counts = _taken(histogram.counts, index) + _taken(histogram.counts, mirrored)
    high = torch.maximum(-histogram.low, histogram.high)
    low = torch.minimum(high, torch.zeros_like(high))
    return GridHistogram(low, high, histogram.exponent, torch.zeros_like(histogram.start), counts)


def _taken(counts: Tensor, index: Tensor) -> Tensor:
    inside = (index >= 0) & (index < counts.shape[1])
    return torch.where(inside, counts.gather(1, index.clamp(0, counts.shape[1] - 1)), 0)


def percentile_range(histogram: GridHistogram, scheme: Scheme, percentile: float) -> Ranges:
    """Returns the range that holds `percentile` percent of the values (McKinstry et al., arXiv:1809.04191, section 3).

    Symmetric schemes cut the largest magnitudes, others half of the rest on each side.
    """
    rows = histogram.counts.shape[0]
    share = torch.full((rows, 1), percentile / 100, dtype=torch.float64, device=histogram.low.device)
    if scheme.symmetric:
        high = quantile(magnitudes(histogram), share)[:, 0]
        return _known(-high, histogram), _known(high, histogram)
    low, high = quantile(histogram, (1 - share) / 2)[:, 0], quantile(histogram, (1 + share) / 2)[:, 0]
    return _known(low, histogram).clamp(max=0), _known(high, histogram).clamp(min=0)


def _known(end: Tensor, histogram: GridHistogram) -> Tensor:
    return torch.where(histogram.low <= histogram.high, end, torch.zeros_like(end))


def entropy_range(histogram: GridHistogram, scheme: Scheme, stride: int) -> Ranges:
    """Finds the threshold of least Kullback-Leibler divergence (Migacz, "8-bit Inference with TensorRT", GTC 2017).

    For each number i of kept magnitude bins from the number of levels to the first that keeps all
    (in steps of `stride`; the notes try each): P is the first i bins with everything beyond added to the last, Q
    the first i bins merged into the levels (bin j into level floor(j * levels / i)) and spread evenly
    over each level's non-empty bins; i with the least KL(P, Q) gives the threshold (i + 1/2) bin widths,
    at most the largest magnitude. The first bin takes its neighbour's count: it holds a rectifier's zeros,
    which cost nothing to quantize but would outweigh all else (TensorRT's published calibrators do so
    too). A candidate whose last bin is empty although values lie beyond it has
    no finite divergence. Levels are the integers of one sign, or all of them where an affine scheme meets
    data of one sign. Where levels are finer than bins the full range stays, and where fewer numbers were seen
    than bins are in use: their histogram is no distribution, and the least divergence a matter of chance.
    """
    folded = _coarser(magnitudes(histogram))
    folded.counts[:, 0] = folded.counts[:, 1]
    one_sided = (histogram.low >= 0) | (histogram.high <= 0)
    threshold = folded.high.clone()
    for sided in (False, True):
        rows = (one_sided == sided).nonzero()[:, 0]
        levels = scheme.steps + 1 if sided and not scheme.symmetric else (scheme.steps + 2) // 2
        if len(rows) and levels < folded.counts.shape[1]:
            part = GridHistogram(*(field[rows] for field in folded))
            threshold[rows] = _thresholds(part, levels, stride)
    low, high = full_range(histogram)
    limit = threshold.clamp(min=0)
    return torch.maximum(low, -limit), torch.minimum(high, limit)


def _coarser(folded: GridHistogram) -> GridHistogram:
    """Adds neighbouring bins of each row until no more than `ENTROPY_BINS` are in use."""
    counts, exponent = folded.counts, folded.exponent
    while (wide := counts[:, ENTROPY_BINS:].any(1)).any():
        pairs = torch.zeros_like(counts)
        pairs[:, : counts.shape[1] // 2] = counts.view(len(counts), -1, 2).sum(2)
        counts, exponent = torch.where(wide[:, None], pairs, counts), exponent + wide.long()
    return folded._replace(counts=counts[:, :ENTROPY_BINS].contiguous(), exponent=exponent)


def _thresholds(folded: GridHistogram, levels: int, stride: int) -> Tensor:
    kept = torch.arange(levels, folded.counts.shape[1] + 1, stride, device=folded.counts.device)
    return in_blocks(lambda part: (_kept_range(part, kept, levels),) * 2, folded, len(kept) * levels)[0]


def _kept_range(folded: GridHistogram, kept: Tensor, levels: int) -> Tensor:
    divergence = kl_divergences(folded.counts, kept, levels)
    filled = (folded.counts > 0) * torch.arange(1, folded.counts.shape[1] + 1, device=kept.device)
    # The first candidate that keeps everything is the last one.
    stride = int(kept[1] - kept[0]) if len(kept) > 1 else 1
    divergence = divergence.masked_fill(kept - stride >= filled.amax(1, keepdim=True), math.inf)
    few = folded.counts.sum(1) < filled.amax(1)
    best, index = divergence.masked_fill(few[:, None], math.inf).min(1)
    threshold = torch.minimum(((kept[index] + 0.5) * folded.width).float(), folded.high)
    # No candidate at all where the data fills fewer bins than there are levels, or are too few.
    return torch.where(torch.isfinite(best), threshold, folded.high)


def kl_divergences(counts: Tensor, kept: Tensor, levels: int) -> Tensor:
    """Returns KL(P, Q) of each row for each number of kept bins, float64 [rows, candidates]; inf where undefined.

    Args:
        counts: magnitudes in each bin, int64 [rows, bins].
        kept: candidates i, int64 [candidates], from `levels` to `bins`.
        levels: levels that Q has.
    """
    value = counts.double()
    total = value.sum(1, keepdim=True)
    inside = _before(value).index_select(1, kept)
    beyond = total - inside
    last = value.index_select(1, kept - 1)
    own = _before(torch.xlogy(value, value)).index_select(1, kept - 1) + torch.xlogy(last + beyond, last + beyond)
    edges = (torch.arange(levels + 1, device=kept.device) * kept[:, None] + levels - 1) // levels
    group = _before(value).index_select(1, edges.view(-1)).view(len(counts), *edges.shape).diff(dim=2)
    filled = _before((counts > 0).double()).index_select(1, edges.view(-1)).view(len(counts), *edges.shape).diff(dim=2)
    # A level without values has no say; one value in it stands for none, since log 0 is slow as well as infinite.
    spread = torch.log(group.clamp(min=1) / filled.clamp(min=1))
    cross = (group * spread).sum(2) + beyond * spread[..., -1]
    divergence = (own - cross) / total + torch.log(inside / total)
    defined = (inside > 0) & ((beyond == 0) | (last > 0))
    return torch.where(defined, divergence, math.inf)


def _before(value: Tensor) -> Tensor:
    return torch.nn.functional.pad(value.cumsum(1), (1, 0))
