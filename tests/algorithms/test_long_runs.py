"""Algorithms on data that is large, on many processes, and through kill -9: real files, processes and signals."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_worker import bits, data, prepared
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

import quantplug
from quantplug.algorithms.gptq import GPTQ
from quantplug.core.calibration import parking
from quantplug.core.calibration.parking import Parking
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import ArtefactError, CalibrationError

WORKER = Path(__file__).parents[1] / "gptq_worker.py"


@pytest.fixture(autouse=True)
def _one_thread():
    """As the workers have, since sums of several threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5)).eval()


class InPlace(nn.Module):
    """Views of one memory that are written, and a buffer that is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        y = self.first(self.norms(x))
        left, right = y[:, :4], y[:, 4:]
        z = self.second(y)
        left.add_(z[:, :4])
        self.seen.add_(z.mean(0))
        right.mul_(self.seen[4:])
        return self.third(y) + self.seen


ALGORITHMS: list[Any] = [quantplug.Equalize(), quantplug.Smooth(alpha=0.5), GPTQ(), quantplug.CorrectBiases()]


@pytest.mark.parametrize("model", ["in place", "ours"])
def test_what_waits_in_a_file_changes_no_bit(model, monkeypatch):
    made = []
    opened = tempfile.TemporaryFile

    def opening(**given):
        made.append(1)
        return opened(**given)

    monkeypatch.setattr(tempfile, "TemporaryFile", opening)
    net = InPlace().eval() if model == "in place" else small()
    shape = (6, 8) if model == "in place" else (2, 3, 8, 8)
    batches = [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    found = []
    for budget in (2**28, 0):
        monkeypatch.setattr(parking, "BUDGET", budget)
        graph = torch.export.export(net, (batches[0],)).module()
        for algorithm in ALGORITHMS[:2]:
            algorithm.apply(graph, batches)
        ready = quantplug.prepare_pt2e(graph, quantplug.get_quantizer("xnnpack").set_global("int8"))
        quantplug.calibrate(ready, batches, progress=False)
        for algorithm in ALGORITHMS[2:]:
            algorithm.apply(ready, batches)
        assert bool(made) == (budget == 0)
        found.append(bits(ready) | {"output": quantplug.convert_pt2e(ready)(batches[0])})
    assert same(*found)


class Cached(nn.Module):
    """Layers each with a cache, the first of which is read again at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for place in range(4):
            self.register_buffer(f"cache{place}", torch.zeros(1000, 8))

    def forward(self, x, start):
        positions = start + torch.arange(len(x))
        for place, layer in enumerate(self.layers):
            cache = self.get_buffer(f"cache{place}")
            cache.index_copy_(0, positions, layer(x))
            x = x + cache[: len(x)].softmax(0)
        return x + self.cache0[: len(x)]


def test_what_waits_of_a_batch_is_the_caches_that_were_written_and_are_read_again(monkeypatch):
    batches = [
        (torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)), torch.zeros(1).long()) for seed in (0, 1)
    ]
    ready = quantplug.prepare_pt2e(
        torch.export.export(Cached().eval(), batches[0]).module(),
        quantplug.get_quantizer("xnnpack").set_global("int4_dynamic"),
    )
    quantplug.calibrate(ready, batches, progress=False)
    sizes, parked = [], Parking.parked

    def counting(place, values, held=()):
        found = parked(place, values, held)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(Parking, "parked", counting)
    assert len(GPTQ().apply(ready, batches)) == 4
    assert 32_000 <= max(sizes) < 40_000  # bytes, of which one cache has 32,000
    assert torch.equal(ready.get_buffer("cache0"), torch.zeros(1000, 8))


class Recurrent(nn.Module):
    """A layer that reads a buffer itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.of_state, self.of_input = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("state", torch.randn(4, 32))

    def forward(self, x):
        found = torch.tanh(self.of_state(self.state) + self.of_input(x))
        self.state.copy_(found)
        return found


@pytest.mark.parametrize("recipe", [[GPTQ()], "accurate"], ids=["gptq", "accurate"])
def test_a_layer_that_reads_a_buffer_which_the_model_writes_is_rounded(recipe):
    model, batches = Recurrent().eval(), [torch.randn(4, 32) for _ in range(4)]
    state = model.get_buffer("state").clone()
    artefact = quantplug.quantize(
        model, (batches[0],), "x86", batches, "int4_weight_only", recipe=recipe, progress=False
    )
    assert any("2 layers' weights rounded anew" in str(done) for done in artefact.applied)
    assert torch.equal(model.get_buffer("state"), state)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    views=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 39), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=8
    ),
    kind=st.sampled_from([torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.bool]),
    budget=st.sampled_from([0, 50, 10**6]),
)
def test_views_of_one_memory_stay_views_of_one(sizes, views, kind, budget):
    bases = [torch.arange(size).to(kind) for size in sizes]
    given = {}
    for name, (base, start, length, step) in enumerate(views):
        chosen = bases[base % len(bases)]
        given[name] = (chosen[start % len(chosen) :][:length:step], [None, 3])
    with Parking(budget) as place:
        for _ in range(3):
            others = [place.parked({"x": torch.full((size,), 7.0)}) for size in sizes]
            waiting = place.parked(given)
            assert all(torch.equal(value[0], given[name][0]) for name, value in waiting.values().items())
            found = waiting.taken()
            assert all(bool((other.taken()["x"] == 7).all()) for other in others)
            assert all(torch.equal(value[0], given[name][0]) and value[1] == [None, 3] for name, value in found.items())
            for now in (found, given):
                now[0][0].fill_(1)
            assert all(torch.equal(value[0], given[name][0]) for name, value in found.items())
            given = found


def test_a_batch_that_is_a_view_of_all_data_takes_its_own_bytes_alone():
    every = torch.randn(1000, 1000)
    with Parking(0) as place:
        parked = place.parked(every[10:12])
        assert sum(region.size for region in parked.regions) <= 2 * 1000 * 4 + 16
        assert torch.equal(parked.taken(), every[10:12])


def test_an_input_that_the_model_writes_is_not_the_callers():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x.add_(1))

    x = torch.zeros(3, 4)
    graph = torch.export.export(Writes().eval(), (torch.zeros(3, 4),)).module()
    quantplug.Smooth(alpha=0.5).apply(graph, [x])
    assert bool((x == 0).all())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_of_a_run_that_ends_early(error, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(parking, "BUDGET", 0)
    model, files = prepared(), []

    def breaks(self, *given):
        files.append(list(tmp_path.iterdir()))
        raise error("stopped")

    monkeypatch.setattr(GPTQ, "_round", breaks)
    with pytest.raises(error):
        GPTQ().apply(model, iter(data()))
    assert files == [[]]  # the file has no name


def test_a_full_disk_is_a_sentence(monkeypatch):
    monkeypatch.setattr(parking, "BUDGET", 0)

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CalibrationError, match=r"fails \(No space left on device\); free that place, or .* TMPDIR"):
        GPTQ().apply(prepared(), data())


def ranks(count, scenario, folder):
    """Runs one worker for each rank and returns what each wrote; None for one that died."""
    run_ranks(count, WORKER, "rank", folder, scenario, timeout=200)
    files = [folder / f"rank{rank}.pt" for rank in range(count)]
    return [torch.load(file) if file.exists() else None for file in files]


def alone():
    model = prepared()
    GPTQ().apply(model, iter(data()))
    return bits(model)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_end_with_the_bits_of_one_process_with_all_data(count, tmp_path):
    found, wanted = ranks(count, "", tmp_path), alone()
    for rank in found:
        assert rank["error"] == ""
        assert same(rank["bits"], wanted)
    assert not list(tmp_path.glob("run*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "first", "second"),
    [
        ("spoiled", "rank 1: Input 'x' of batch 1", "Input 'x' of batch 1 has shape"),
        ("nan", "NaN or infinity in what 'conv2d'", "NaN or infinity in what 'conv2d'"),
        ("killed", "Rank 0 of 2 lost another process", None),
    ],
)
def test_a_rank_that_fails_is_an_error_on_all(scenario, first, second, tmp_path):
    found = ranks(2, scenario, tmp_path)
    for rank, wanted in zip(found, (first, second), strict=True):
        if wanted is None:
            assert rank is None
        else:
            assert wanted in rank["error"]
            assert rank["clean"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_ends_with_the_same_bits(tmp_path, monkeypatch):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, str(WORKER), "slow", str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    while process.poll() is None and not path.exists():
        time.sleep(0.02)
    time.sleep(0.4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {row[0] for row in torch.load(path)["weights"]}
    assert 0 < len(kept) < 5
    with pytest.raises(CalibrationError, match=r"was written for another model .*batches"):
        GPTQ(checkpoint=path).apply(prepared(), data()[::-1])
    with pytest.raises(CalibrationError, match=r"was written for another model .*options"):
        GPTQ(damping=0.02, checkpoint=path).apply(prepared(), data())
    rounded = []
    round_ = GPTQ._round

    def rounding(self, weight, *given):
        rounded.append(weight.paths[0])
        return round_(self, weight, *given)

    monkeypatch.setattr(GPTQ, "_round", rounding)
    model = prepared()
    GPTQ(checkpoint=path).apply(model, data())
    assert kept.isdisjoint(rounded)
    assert len(kept) + len(rounded) == 5
    assert not path.exists()
    assert same(bits(model), alone())


def test_a_file_that_is_no_checkpoint_is_a_sentence_and_stays(tmp_path):
    path = tmp_path / "run"
    path.write_bytes(b"something else")
    with pytest.raises(ArtefactError, match="is no calibration checkpoint"):
        GPTQ(checkpoint=path).apply(prepared(), data())
    assert path.read_bytes() == b"something else"
    with pytest.raises(ArtefactError, match="There is no folder"):
        GPTQ(checkpoint=tmp_path / "none" / "run").apply(prepared(), data())


@pytest.mark.slow
def test_bars_show_the_time_left_on_a_terminal_and_can_be_switched_off(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    given: dict[str, Any] = {"backend": "xnnpack", "calibration": batches, "recipe": ALGORITHMS}
    quantplug.quantize(small(), (batches[0],), **given)
    shown = capfd.readouterr().err
    assert all(step in shown for step in ("calibrate", "Equalize", "Smooth", "GPTQ", "correct biases"))
    assert "weights/s" in shown
    assert "0:00:00" in shown
    quantplug.quantize(small(), (batches[0],), **given, progress=False)
    quantplug.tune(small(), (batches[0],), batches, at_least=-99.0, recipe=[GPTQ()], progress=False)
    assert capfd.readouterr().err == ""
    quantplug.tune(small(), (batches[0],), batches, at_least=-99.0, recipe=[GPTQ()])
    assert "GPTQ" not in capfd.readouterr().err


@pytest.mark.slow
def test_weights_in_pieces_are_as_near_to_float_as_whole_ones(monkeypatch):
    levels = []
    for rows in (256, 10**6):
        monkeypatch.setattr("quantplug.algorithms.pieces._ROWS", rows)
        levels.append(GPTQ().apply(prepared(), data()))
    for name, layer in levels[0].items():
        assert layer.after == pytest.approx(levels[1][name].after, abs=0.2)


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.mul_(2))))


@pytest.mark.parametrize("algorithm", [quantplug.Equalize(), quantplug.Smooth()])
@pytest.mark.parametrize("budget", [2**28, 0])
def test_batches_stay_what_they_are_where_a_model_writes_its_input(algorithm, budget, monkeypatch):
    monkeypatch.setattr(parking, "BUDGET", budget)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    before = [batch.clone() for batch in batches]
    algorithm.apply(torch.export.export(WritesItsInput().eval(), (torch.randn(4, 8),)).module(), batches)
    assert all(map(torch.equal, batches, before))


def test_a_bar_inside_a_bar_is_not_shown(capfd, monkeypatch):
    """As where the metric of a search calibrates something; rich refuses two at a time."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar(shown=True, total=1, step="outside") as outer:
        with progress_bar(shown=True, total=1, step="inside") as inner:
            inner()
        outer()
    shown = capfd.readouterr().err
    assert "outside" in shown
    assert "inside" not in shown
