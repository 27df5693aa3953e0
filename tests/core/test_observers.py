"""Observers against literal, slow implementations of the same definitions, and against torchao's."""

import bisect
import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.quantization.pt2e import HistogramObserver as TorchaoHistogram
from torchao.quantization.pt2e import MinMaxObserver as TorchaoMinMax
from torchao.quantization.pt2e import PerChannelMinMaxObserver as TorchaoPerChannelMinMax

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers import OBSERVERS, DataObserver, GridObserver, observer
from quantplug.core.observers.grid import GridHistogram, counted, empty
from quantplug.core.observers.search import (
    COARSE,
    FINE,
    kl_divergences,
    magnitudes,
    mse_range,
    squared_error,
    sums_of,
)
from quantplug.core.observers.together import find_ranges
from quantplug.core.observers.walk import STUCK

AFFINE, SYMMETRIC = torch.per_tensor_affine, torch.per_tensor_symmetric
CPU = torch.device("cpu")
GRIDS = sorted(name for name, (kind, _) in OBSERVERS.items() if issubclass(kind, GridObserver))


def made(name: str, per_channel: bool = False, **options) -> Any:
    return observer(name, per_channel, **options)()


def heavy_tailed(count: int = 20000, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.standard_t(2.5, count).astype(np.float32))


def histogram_of(values: torch.Tensor, bins: int) -> GridHistogram:
    rows = values.reshape(1, -1)
    return counted(empty(1, bins, CPU), rows, rows.amin(1), rows.amax(1))


def literal_counts(values: np.ndarray, bins: int) -> tuple[int, int, list[int]]:
    """Tries bin widths from the finest up until the window holds all values and zero, then counts one by one."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    exponent = -126
    while math.floor(high / 2.0**exponent) - math.floor(low / 2.0**exponent) >= bins:
        exponent += 1
    start = math.floor(low / 2.0**exponent)
    counts = [0] * bins
    for value in values:
        counts[math.floor(float(value) / 2.0**exponent) - start] += 1
    return exponent, start, counts


def literal_error(histogram: GridHistogram, scale: float, zero: int, quant_min: int, quant_max: int) -> float:
    """Integrates (x - Q(x))^2 over every bin of a quantizer."""
    return literal_distortion(histogram, [(q - zero) * scale for q in range(quant_min, quant_max + 1)])


def literal_distortion(histogram: GridHistogram, values: list[float]) -> float:
    """Integrates the squared distance to the nearest value over every bin, cut half-way between values."""
    width, start = float(histogram.width), int(histogram.start)
    cuts = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    total = 0.0
    for j, count in enumerate(histogram.counts[0].tolist()):
        if count == 0:
            continue
        left, right = (start + j) * width, (start + j + 1) * width
        edges = [left, *[c for c in cuts if left < c < right], right]
        for a, b in itertools.pairwise(edges):
            value = values[bisect.bisect(cuts, (a + b) / 2)]
            total += count / width * ((b - value) ** 3 - (a - value) ** 3) / 3
    return total / int(histogram.counts.sum())


def literal_walk(histogram: GridHistogram, cells: int) -> tuple[float, float]:
    """Caffe2's walk: quantiles move in steps, on the side where a step cuts more bins, until the error rises."""
    width, offset = float(histogram.width), int(histogram.start)
    first, last = (math.floor(float(end) / width) - offset for end in (histogram.low, histogram.high))
    sums = np.cumsum(histogram.counts[0].numpy())
    start, end, alpha, beta, least, best = first, last, 0.0, 1.0, math.inf, (first, last + 1)
    while alpha < beta:
        left, right = start, end
        while left < end and sums[left] < (alpha + 1e-5) * sums[-1]:
            left += 1
        while right > start and sums[right] > (beta - 1e-5) * sums[-1]:
            right -= 1
        if left - start > end - right:
            alpha, moved = alpha + 1e-5, (left, end)
        else:
            beta, moved = beta - 1e-5, (start, right)
        if moved == (start, end):
            continue
        start, end = moved
        edges = min(start, -offset), max(end + 1, -offset)
        step = (edges[1] - edges[0]) * width / cells
        error = literal_distortion(histogram, [(edges[0] + offset) * width + (i + 0.5) * step for i in range(cells)])
        if error > least:
            break
        least, best = error, edges
    return (best[0] + offset) * width, (best[1] + offset) * width


def literal_kl(counts: list[int], kept: int, levels: int) -> float:
    """KL(P, Q) as the TensorRT notes describe it, with loops."""
    reference = [float(c) for c in counts[:kept]]
    reference[-1] += sum(counts[kept:])
    groups: list[list[int]] = [[] for _ in range(levels)]
    for j in range(kept):
        groups[j * levels // kept].append(j)
    candidate = [0.0] * kept
    for group in groups:
        filled = [j for j in group if counts[j] > 0]
        for j in filled:
            candidate[j] = sum(counts[k] for k in group) / len(filled)
    total_p, total_q = sum(reference), sum(candidate)
    divergence = 0.0
    for p, q in zip(reference, candidate, strict=True):
        if p > 0:
            if q == 0:
                return math.inf
            divergence += p / total_p * math.log((p / total_p) / (q / total_q))
    return divergence


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**40), 2.0**40, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-40),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([16, 64, 256]),
)
def test_histogram_equals_literal_counting(values, bins):
    found = histogram_of(torch.tensor(values, dtype=torch.float32), bins)
    exponent, start, counts = literal_counts(np.array(values, dtype=np.float32), bins)
    assert int(found.exponent) == exponent
    assert int(found.start) == start
    assert found.counts[0].tolist() == counts


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(GRIDS), st.booleans())
def test_merging_is_exact_in_any_order_and_split(seed, name, per_channel):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 8, (6,), generator=generator).tolist()
    batches = [torch.randn(3, 5, 40, generator=generator) * 4.0**e for e in exponents]
    whole = made(name, per_channel, bins=64, **({"ch_axis": 1} if per_channel else {}))
    parts = [copy.deepcopy(whole) for _ in range(3)]
    whole.observe(batches)
    for i, batch in enumerate(reversed(batches)):
        parts[i % 3](batch)
    merged = whole.merged(parts[2].state, whole.merged(parts[0].state, parts[1].state))
    assert all(torch.equal(a, b) for a, b in zip(merged, whole.state, strict=True))


def test_large_tensors_and_channels_last_count_every_element():
    values = heavy_tailed(2 * 9 * 128 * 160).view(2, 9, 128, 160)
    for tensor in (values, values.to(memory_format=torch.channels_last), values.transpose(1, 3)):
        seen = made("mse")
        seen(tensor)
        exponent, start = int(seen.state.exponent), int(seen.state.start)
        index = np.floor(values.double().numpy().ravel() * 2.0**-exponent).astype(np.int64) - start
        assert seen.state.counts[0].tolist() == np.bincount(index, minlength=4096).tolist()


@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
@pytest.mark.parametrize(("low", "high"), [(-8, 7), (-128, 127), (-3, 12)])
def test_squared_error_equals_piecewise_integration(scheme, low, high):
    seen = made("mse", qscheme=scheme, quant_min=low, quant_max=high, bins=64)
    seen(heavy_tailed(500))
    ends = torch.tensor([[0.05, 0.3, 0.8, 1.0]])
    state = seen.state
    found = squared_error(sums_of(state), seen.scheme, state.low[:, None] * ends, state.high[:, None] * ends)
    scales, zeros = seen.scheme.qparams(state.low[:, None] * ends, state.high[:, None] * ends)
    expected = [
        literal_error(state, s, z, low, high) for s, z in zip(scales[0].tolist(), zeros[0].tolist(), strict=True)
    ]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
@pytest.mark.parametrize("data", [heavy_tailed(3000), heavy_tailed(3000).relu(), heavy_tailed(3000) + 4])
def test_mse_range_equals_literal_search(scheme, data):
    seen = made("mse", qscheme=scheme, quant_min=-8, quant_max=7, bins=256)
    seen(data)
    low, high = min(0.0, float(data.min())), max(0.0, float(data.max()))
    sides = [(0, 1)] if scheme is SYMMETRIC else [(0,), (1,)]

    def error(factors):
        ends = [torch.tensor([e * torch.tensor(f)]).float() for e, f in zip((low, high), factors, strict=True)]
        scale, zero = seen.scheme.qparams(*ends)
        return literal_error(seen.state, float(scale), int(zero), -8, 7)

    def best(current, side, options):
        tried = [[o if i in side else f for i, f in enumerate(current)] for o in options]
        return min(tried, key=error)

    factors = best([1.0, 1.0], (0, 1), COARSE)
    if scheme is AFFINE:
        for side in sides:
            factors = best(factors, side, COARSE)
    for fine in FINE:
        for side in sides:
            factors = best(factors, side, [min(1.0, factors[side[0]] * 2 ** (j * fine)) for j in range(4, -5, -1)])
    expected_error = error(factors)
    ends = seen.ranges()
    scale, zero = seen.scheme.qparams(*ends)
    assert literal_error(seen.state, float(scale), int(zero), -8, 7) == pytest.approx(expected_error, rel=1e-6)
    assert [float(e) for e in ends] == pytest.approx([low * factors[0], high * factors[1]], rel=1e-5)


@pytest.mark.parametrize("data", [heavy_tailed(4000), heavy_tailed(4000).relu(), heavy_tailed(4000).abs() + 3])
@pytest.mark.parametrize(("low", "high"), [(-8, 7), (0, 100)])
def test_histogram_range_equals_a_literal_walk(data, low, high):
    seen = made("histogram", dtype=torch.uint8 if low == 0 else torch.int8, quant_min=low, quant_max=high, bins=256)
    seen(data)
    start, end = literal_walk(seen.state, high - low + 1)
    ends = max(start, min(0.0, float(data.min()))), min(end, float(data.max()))
    least = mse_range(seen.state, seen.scheme)
    error, smallest = (
        float(squared_error(sums_of(seen.state), seen.scheme, *(torch.tensor([[float(e)]]) for e in candidate)))
        for candidate in (ends, least)
    )
    expected = ends if error <= STUCK * smallest else tuple(map(float, least))
    assert [float(e) for e in seen.ranges()] == pytest.approx(expected, rel=1e-6)


def test_histogram_loses_no_more_than_torchaos():
    for data in (heavy_tailed(100_000), heavy_tailed(100_000).relu(), torch.rand(100_000) - 0.2):
        ours, theirs = made("histogram", dtype=torch.int8), TorchaoHistogram(dtype=torch.int8)
        ours(data), theirs(data)
        assert sqnr(data, ours) > sqnr(data, theirs) - 0.3


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 100.0])
@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
def test_percentile_is_within_one_bin_of_the_datas(percentile, scheme):
    data = heavy_tailed(50000)
    seen = made("percentile", qscheme=scheme, percentile=percentile)
    seen.observe(list(data.split(7000)))
    width = float(seen.state.width)
    low, high = (float(e) for e in seen.ranges())
    if scheme is SYMMETRIC:
        assert high == pytest.approx(np.percentile(data.abs().numpy(), percentile, method="inverted_cdf"), abs=width)
        assert low == -high
    else:
        expected = np.percentile(data.numpy(), [(100 - percentile) / 2, (100 + percentile) / 2], method="inverted_cdf")
        assert [low, high] == pytest.approx(expected, abs=width)


def test_e12_divergence_equals_the_notes_literally():
    counts = histogram_of(heavy_tailed(3000).abs(), 128).counts
    kept = torch.arange(16, 129)
    found = kl_divergences(counts, kept, 16)[0].tolist()
    expected = [literal_kl(counts[0].tolist(), i, 16) for i in kept.tolist()]
    assert found == [pytest.approx(e, rel=1e-9, abs=1e-12) for e in expected]


@pytest.mark.parametrize("data", [heavy_tailed(5000), heavy_tailed(5000).relu()])
def test_e12_entropy_threshold_equals_a_literal_search(data):
    seen = made("entropy", qscheme=SYMMETRIC, quant_min=-16, quant_max=15, bins=256, stride=1)
    seen(data)
    folded = magnitudes(seen.state)
    counts = folded.counts[0].tolist()
    counts[0] = counts[1]
    used = max(j for j, c in enumerate(counts) if c) + 1
    best = min(range(16, used + 1), key=lambda i: literal_kl(counts, i, 16))
    expected = min((best + 0.5) * float(folded.width), float(data.abs().max()))
    scale, zero = seen.calculate_qparams()
    assert float(seen.ranges()[1]) == pytest.approx(expected)
    assert int(zero) == 0
    assert float(scale) == pytest.approx(expected / 15.5)


def test_e12_entropy_of_few_numbers_keeps_them_all():
    """A histogram of fewer numbers than bins is no distribution: its least divergence is a matter of chance."""
    for seed in range(8):
        data = torch.randn(400, generator=torch.Generator().manual_seed(seed))
        seen = made("entropy", qscheme=SYMMETRIC)
        seen(data)
        assert sqnr(data, seen) > 38


def sqnr(data: torch.Tensor, seen: DataObserver) -> float:
    scale, zero = seen.calculate_qparams()
    back = torch.fake_quantize_per_tensor_affine(data, float(scale), int(zero), seen.quant_min, seen.quant_max)
    return float(10 * torch.log10(data.square().mean() / (data - back).square().mean()))


@pytest.mark.parametrize("name", ["entropy", "mse", "histogram", "percentile"])
def test_e12_searches_beat_minmax_on_heavy_tails(name):
    data = heavy_tailed(200_000)
    bits: dict[str, Any] = {"quant_min": -8, "quant_max": 7, "qscheme": SYMMETRIC}
    ranged, searched = made("minmax", **bits), made(name, **bits)
    ranged(data), searched(data)
    assert sqnr(data, searched) > sqnr(data, ranged) + 2


@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
def test_e11_symmetric_zero_points_are_zero(scheme):
    for name in OBSERVERS:
        seen = made(name, qscheme=scheme)
        seen(heavy_tailed(4000) + 1)
        assert scheme is AFFINE or int(seen.calculate_qparams()[1]) == 0


@settings(max_examples=80, deadline=None)
@given(
    st.floats(-1e6, 1e6, width=32),
    st.floats(-1e6, 1e6, width=32),
    st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.quint8]),
    st.sampled_from([AFFINE, SYMMETRIC]),
    st.sampled_from([1e-7, 2.0**-12, 0.5]),
)
def test_minmax_gives_torchaos_bits(a, b, dtype, scheme, eps):
    ours, theirs = made("minmax", dtype=dtype, qscheme=scheme, eps=eps), TorchaoMinMax(dtype, scheme, eps=eps)
    for seen in (ours, theirs):
        seen(torch.tensor([a, b]))
    for mine, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine.double(), other.double())


def test_per_channel_minmax_gives_torchaos_bits():
    data = heavy_tailed(6 * 7 * 8).view(6, 7, 8)
    options = {"dtype": torch.int8, "qscheme": torch.per_channel_symmetric, "quant_min": -127, "quant_max": 127}
    for axis in (0, 1, 2):
        ours = made("minmax", True, ch_axis=axis, **options)
        theirs = TorchaoPerChannelMinMax(ch_axis=axis, **options)
        ours(data), theirs(data)
        assert torch.equal(ours.calculate_qparams()[0], theirs.calculate_qparams()[0])


@pytest.mark.parametrize("name", sorted(OBSERVERS))
def test_per_channel_equals_each_channel_alone(name):
    data = heavy_tailed(4 * 600).view(4, 600) * torch.tensor([[1.0], [10.0], [0.01], [0.0]])
    options: dict[str, Any] = {} if name not in GRIDS else {"bins": 512}
    together = made(name, True, quant_min=-8, quant_max=7, qscheme=torch.per_channel_symmetric, **options)
    together(data)
    for channel in range(4):
        alone = made(name, quant_min=-8, quant_max=7, qscheme=SYMMETRIC, **options)
        alone(data[channel])
        assert float(together.calculate_qparams()[0][channel]) == float(alone.calculate_qparams()[0])


@pytest.mark.parametrize("name", sorted(OBSERVERS))
@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
def test_power_of_two_scales_cover_the_range(name, scheme):
    plain, rounded = made(name, qscheme=scheme), made(name, qscheme=scheme, power_of_two=True)
    data = heavy_tailed(5000)
    plain(data), rounded(data)
    scale, least = float(rounded.calculate_qparams()[0]), float(plain.calculate_qparams()[0])
    assert math.frexp(scale)[0] == 0.5
    if name in ("minmax", "percentile", "entropy"):
        assert least <= scale < 2 * least


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.uint8, (0, 127)), (torch.int8, (-64, 63)), (torch.quint8, (0, 127))]
)
def test_reduced_range(dtype, expected):
    seen = made("mse", dtype=dtype, reduce_range=True)
    seen(heavy_tailed(1000))
    assert (seen.quant_min, seen.quant_max) == expected
    assert expected[0] <= int(seen.calculate_qparams()[1]) <= expected[1]


@pytest.mark.parametrize("name", sorted(OBSERVERS))
def test_ranges_found_together_are_those_found_alone(name):
    sizes = [1.0, 100.0, 1e-3, 7.0]
    together = [made(name) for _ in sizes]
    for seen, size in zip(together, sizes, strict=True):
        seen(heavy_tailed(3000, seed=int(size)) * size)
    alone = [copy.deepcopy(seen).calculate_qparams() for seen in together]
    find_ranges(together)
    assert all(seen.seen.range is not None for seen in together)
    assert [seen.calculate_qparams() for seen in together] == alone


@pytest.mark.parametrize("name", sorted(OBSERVERS))
@pytest.mark.parametrize("per_channel", [False, True])
def test_state_dict_round_trip(name, per_channel, tmp_path):
    first, second = made(name, per_channel), made(name, per_channel)
    first(heavy_tailed(600).view(3, 200))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(first.calculate_qparams()[0], second.calculate_qparams()[0])
    assert torch.equal(first.min_val, second.min_val)
    third = copy.deepcopy(first)
    third(100 * torch.ones(3, 1))
    assert not torch.equal(third.max_val, first.max_val)


def test_a_parameter_is_read_once_and_at_its_latest_value():
    weight = torch.nn.Parameter(heavy_tailed(640).view(4, 160))
    seen = made("mse", True)
    for _ in range(3):
        seen(weight)
    once = made("mse", True)
    once(weight.detach())
    assert torch.equal(seen.calculate_qparams()[0], once.calculate_qparams()[0])
    with torch.no_grad():
        weight.mul_(3)
    assert torch.allclose(seen.calculate_qparams()[0], 3 * once.calculate_qparams()[0])
    seen(torch.full((4, 1), 1000.0))
    assert seen.seen.constant is None
    assert float(seen.max_val.max()) == 1000
    assert not dict(seen.named_parameters())


AWKWARD = {
    "denormal": torch.tensor([1e-42, -3e-41, 0.0]),
    "one element": torch.tensor(3.5),
    "zeros": torch.zeros(100),
    "huge": torch.tensor([3.4e38, -3.4e38, 1.0]),
    "outlier": torch.cat([torch.randn(1000), torch.tensor([1e30])]),
    "half": torch.randn(100).half(),
    "bfloat16": torch.randn(100).bfloat16(),
    "double": torch.randn(100).double(),
    "int64": torch.arange(-5, 50),
    "constant": torch.full((10,), -7.0),
    "far from zero": torch.full((10,), 1e20) + 1e15 * torch.arange(10),
}


@pytest.mark.parametrize("name", sorted(OBSERVERS))
@pytest.mark.parametrize("scheme", [AFFINE, SYMMETRIC])
@pytest.mark.parametrize("kind", sorted(AWKWARD))
def test_awkward_data_gives_a_finite_positive_scale(name, scheme, kind):
    seen = made(name, qscheme=scheme)
    seen(torch.empty(0, 3))
    assert not seen.has_data
    seen(AWKWARD[kind])
    scale, zero = seen.calculate_qparams()
    assert bool(torch.isfinite(scale).all())
    assert float(scale) >= seen.eps
    assert seen.quant_min <= int(zero) <= seen.quant_max
    if kind in ("half", "one element", "int64", "constant"):
        data = AWKWARD[kind].float()
        back = torch.fake_quantize_per_tensor_affine(data, float(scale), int(zero), seen.quant_min, seen.quant_max)
        clipped = float(data.abs().max()) if name in ("entropy", "percentile") else 0.0
        assert float((back - data).abs().max()) <= 4 * float(scale) + 0.6 * clipped


EXTREMES = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf, 1e30, 1.0]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(EXTREMES) | st.floats(width=32), max_size=12), min_size=1, max_size=3),
    st.sampled_from(DTYPES), st.sampled_from(sorted(OBSERVERS)), st.sampled_from([AFFINE, SYMMETRIC]), st.booleans(),
)  # fmt: skip
def test_any_data_gives_an_error_or_a_correct_range(batches, dtype, name, scheme, lenient):
    seen = made(name, qscheme=scheme, nonfinite="report" if lenient else "raise")
    tensors = [torch.tensor(batch, dtype=torch.float64) for batch in batches]
    if not dtype.is_floating_point:
        tensors = [tensor.nan_to_num(0).clamp(0, 100) for tensor in tensors]
    tensors = [tensor.to(dtype) for tensor in tensors]
    exact = torch.cat(tensors).float()
    finite = exact[torch.isfinite(exact)]
    if not lenient and len(finite) < len(exact):
        with pytest.raises(CalibrationError, match="NaN or infinite"):
            [seen(tensor) for tensor in tensors]
        return
    for tensor in tensors:
        seen(tensor)
    if not len(exact):
        with pytest.raises(CalibrationError, match="has seen no data"):
            seen.calculate_qparams()
        return
    scale, zero = seen.calculate_qparams()
    assert bool(torch.isfinite(scale).all())
    assert float(scale) >= seen.eps
    assert seen.quant_min <= int(zero) <= seen.quant_max
    assert seen.seen.nonfinite_elements == len(exact) - len(finite)
    if name == "minmax" and len(finite):
        assert (float(seen.min_val), float(seen.max_val)) == (float(finite.min()), float(finite.max()))
        reach = float(scale) * (seen.quant_max - seen.quant_min)
        assert reach >= 0.999 * max(0.0, float(finite.max())) - 0.999 * min(0.0, float(finite.min()))


@pytest.mark.parametrize("bins", [16, 4096, 16384])
def test_large_tensors_count_exactly_whatever_the_number_of_bins(bins):
    data = heavy_tailed(1_200_000)
    seen = made("mse", bins=bins)
    seen(data)
    width, start = float(seen.state.width), int(seen.state.start)
    expected = np.bincount(np.floor(data.double().numpy() / width).astype(np.int64) - start, minlength=bins)
    assert (seen.state.counts[0].numpy() == expected).all()


@pytest.mark.parametrize("name", sorted(OBSERVERS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_refused_or_left_out(name, bad):
    good = heavy_tailed(1000)
    spoiled = torch.cat([good, torch.tensor([bad])])
    strict, lenient, clean = made(name), made(name, nonfinite="report"), made(name)
    with pytest.raises(CalibrationError, match="1 NaN or infinite values among 1001"):
        strict(spoiled)
    assert not strict.has_data
    lenient(spoiled)
    clean(good)
    assert lenient.seen.nonfinite_elements == 1
    assert [t.tolist() for t in lenient.calculate_qparams()] == [t.tolist() for t in clean.calculate_qparams()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"quant_min": 0, "quant_max": 255}, "lies within -128..127"),
        ({"quant_min": 5, "quant_max": 9}, "holds 0"),
        ({"qscheme": torch.per_channel_affine}, "choose one of"),
        ({"eps": 0.0}, "eps 0.0"),
        ({"is_dynamic": True}, "cannot be dynamic"),
        ({"bins": 1000}, "power of two"),
        ({"nonfinite": "ignore"}, "choose 'raise' or 'report'"),
        ({"wrong": 1}, "does not take the options"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        observer("mse", **options)
    with pytest.raises(ConfigError, match="choose one of"):
        observer("msee")


def test_wrong_tensors_are_refused():
    for tensor in (torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(CalibrationError, match="only real numbers"):
            made("minmax")(tensor)
    seen = made("mse", True, ch_axis=2)
    with pytest.raises(CalibrationError, match="channel axis 2"):
        seen(torch.zeros(3, 3))
    seen(torch.zeros(3, 3, 4))
    with pytest.raises(CalibrationError, match="4 channels and was given 3"):
        seen(torch.zeros(3, 3, 3))
    with pytest.raises(CalibrationError, match="has seen no data"):
        made("minmax").calculate_qparams()
