"""The calibration engine: what it accepts, what it refuses, and that its results do not depend on how it ran."""

import copy
import json
import random
from typing import Any

import pytest
import torch
from calibration_models import ConvLinearQuantizer, Net, batches, exported, prepared, qparams
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import quantplug
from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.coverage import coverage, coverage_table
from quantplug.core.errors import ArtefactError, CalibrationError, ModelError
from quantplug.core.files.whole import beside
from quantplug.core.observers import OBSERVERS, observer
from quantplug.core.observers import session as session_module


def by_plain_forward(name, data, **options):
    model = prepared(name, **options)
    with torch.no_grad():
        for batch in data:
            model(batch)
    return model


@pytest.mark.parametrize("name", [*sorted(OBSERVERS), "torchao"])
def test_e16_equals_a_plain_loop_over_the_batches(name):
    model = prepared(name)
    result = calibrate(model, batches(), progress=False)
    assert (result.batches, result.samples) == (6, 24)
    assert qparams(model) == qparams(by_plain_forward(name, batches()))


@pytest.mark.parametrize("waiting", [0, 5000])
def test_results_do_not_depend_on_when_small_tensors_are_counted(waiting, monkeypatch):
    data = batches()
    expected = qparams(by_plain_forward("mse", data))
    monkeypatch.setattr(session_module, "WAITING", waiting)
    model = prepared("mse")
    calibrate(model, data)
    assert qparams(model) == expected
    monkeypatch.setattr(session_module, "SMALL", 100)
    model = prepared("mse")
    calibrate(model, data)
    assert qparams(model) == expected


def test_e16_loaders_of_every_kind_and_limit():
    data = batches(5)
    expected = qparams(by_plain_forward("minmax", data[:3]))
    name = "x"
    loaders = [
        data,
        (batch for batch in data),
        [(batch,) for batch in data],
        [[batch] for batch in data],
        [{name: batch} for batch in data],
        DataLoader(TensorDataset(torch.cat(data)), batch_size=4),
    ]
    for loader in loaders:
        model = prepared("minmax")
        assert calibrate(model, loader, limit=3).batches == 3
        assert qparams(model) == expected
    model = prepared("minmax")
    calibrate(model, [(batch, torch.zeros(4)) for batch in data], 3, inputs=lambda pair: pair[0])
    assert qparams(model) == expected


def test_keyword_nested_and_dynamic_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, pair, *, bias):
            return self.layer(x + pair["b"] - pair["a"]) + bias

    def sample(rows):
        return {"x": torch.randn(rows, 4), "pair": {"a": torch.ones(4), "b": torch.ones(4)}, "bias": torch.ones(1)}

    first = sample(3)
    rows = torch.export.Dim("rows", min=1, max=64)
    shapes = {"x": {0: rows}, "pair": {"a": None, "b": None}, "bias": None}
    program = torch.export.export(
        Two().eval(), (first["x"], first["pair"]), {"bias": first["bias"]}, dynamic_shapes=shapes
    )
    model = prepare_pt2e(program.module(), ConvLinearQuantizer(observer("minmax"), observer("minmax", True)))
    assert calibrate(model, [sample(5), tuple(sample(2).values())]).samples == 7
    with pytest.raises(CalibrationError, match=r"Input 'x' of batch 0 has shape \[5, 3\], expected \[\*, 4\]"):
        calibrate(model, [{**sample(5), "x": torch.randn(5, 3)}])


@pytest.mark.parametrize("name", sorted(OBSERVERS))
def test_empty_batches_leave_no_trace(name):
    program = torch.export.export(Net().eval(), (batches(1)[0],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    models = [
        prepare_pt2e(program.module(), ConvLinearQuantizer(observer(name), observer("minmax", True))) for _ in range(3)
    ]
    full, empty = batches(1)[0], batches(1)[0][:0]
    calibrate(models[0], [full])
    calibrate(models[1], [empty, full, empty])
    assert qparams(models[0]) == qparams(models[1])
    assert set(calibrate(models[2], [empty]).problems.values()) == {"no data reached it"}


GOOD = torch.zeros(4, 3, 12, 12)
WRONG = {
    "empty": ([], "the loader yielded no batch"),
    "tensor": (GOOD, "wrap it in a list"),
    "dict": ({"x": GOOD}, "wrap it in a list"),
    "number": (7, "cannot be iterated"),
    "shape": ([GOOD[:2]], r"Input 'x' of batch 0 has shape \[2, 3, 12, 12\], expected \[4, 3, 12, 12\]"),
    "rank": ([GOOD[0]], r"has shape \[3, 12, 12\]"),
    "dtype": ([GOOD, GOOD.double()], "Input 'x' of batch 1 has dtype torch.float64, expected torch.float32"),
    "count": ([(GOOD, 1)], r"has 2 inputs but the model takes 1 \(x\)"),
    "name": ([{"image": GOOD}], r"they differ in \['image', 'x'\]"),
    "no tensor": ([[3]], "is of type int"),
    "nan": ([GOOD, GOOD / 0], "Input 'x' of batch 1 holds NaN or infinity"),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("kind", sorted(WRONG))
@pytest.mark.parametrize("name", ["mse", "torchao"])
def test_wrong_loaders_are_refused_and_leave_no_trace(kind, name):
    loader, words = WRONG[kind]
    model = prepared(name)
    calibrate(model, batches(2))
    before = qparams(model)
    with pytest.raises(CalibrationError, match=words) as caught:
        calibrate(model, loader)  # type: ignore[arg-type]
    assert str(caught.value).endswith(".")
    assert qparams(model) == before


def test_batches_beyond_the_exported_sizes_are_one_sentence():
    """Also with values that the model does not know."""
    shapes = ({0: torch.export.Dim("batch", min=2, max=8)},)
    module = torch.export.export(
        nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), (torch.ones(4, 3).long(),), dynamic_shapes=shapes
    ).module()
    model = quantplug.prepare_pt2e(module, quantplug.get_quantizer("x86"))
    for batch in (torch.ones(9, 3).long(), torch.full((4, 3), 7)):
        with pytest.raises(CalibrationError, match=r"^The model does not take batch 1 \(.*\); yield batches") as error:
            calibrate(model, [torch.ones(4, 3).long(), batch], progress=False)
        assert "\n" not in str(error.value)


def test_a_used_up_generator_is_named():
    loader = iter_once = (batch for batch in batches(2))
    list(iter_once)
    with pytest.raises(CalibrationError, match="generator that was used up"):
        calibrate(prepared(), loader)


def test_models_that_are_not_prepared_are_refused():
    for model, words in (
        (exported(), "without observers"),
        (nn.Linear(2, 2), "found Linear"),
        (torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), "ExportedProgram"),
    ):
        with pytest.raises(ModelError, match=words):
            calibrate(model, [torch.ones(1, 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": 2.5},
        {"device": "nowhere"},
        {"misfit": "no"},
        {"constant": "no"},
        {"nonfinite": "no"},
        {"dead": "no"},
        {"tolerance": 2.0},
        {"check_every": 0},
        {"checkpoint_every": 0},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(CalibrationError, match=next(iter(options))):
        calibrate(prepared(), batches(1), **options)


def test_an_unknown_option_is_a_sentence_with_the_nearest_one():
    words = r"^calibrate has no option 'chekpoint' \(did you mean 'checkpoint'\?\); choose among limit, progress, .*\.$"
    with pytest.raises(CalibrationError, match=words):
        calibrate(prepared(), batches(1), chekpoint="run.ckpt")  # type: ignore[call-arg]


class Divides(nn.Module):
    """Makes infinity out of a batch that holds a zero: the data is finite, a value inside is not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(1 / x))


def dividing(name="mse", size=4):
    torch.manual_seed(0)
    model = torch.export.export(Divides().eval(), (torch.ones(size, 4),)).module()
    kind = name if name != "torchao" else "minmax"
    made = ConvLinearQuantizer(observer(kind), observer("minmax", True))
    if name == "torchao":
        from torchao.quantization.pt2e import MinMaxObserver

        made = ConvLinearQuantizer(MinMaxObserver, observer("minmax", True))
    return prepare_pt2e(model, made)


@pytest.mark.parametrize("size", [4, 5000])
def test_values_inside_the_model_are_checked_and_named(size):
    data = [torch.rand(size, 4) + 1 for _ in range(3)]
    data.insert(1, data[0] * torch.tensor([0.0, 1, 1, 1]))
    with pytest.raises(CalibrationError, match=r"Batch 1: MSEObserver of '(mul|reciprocal|div)"):
        calibrate(dividing(size=size), data)
    for name in ("mse", "minmax", "torchao"):
        skipping, clean = dividing(name, size), dividing(name, size)
        result = calibrate(skipping, data, nonfinite="skip")
        calibrate(clean, [data[0], *data[2:]])
        assert [s.index for s in result.skipped] == [1]
        assert result.batches == 3
        assert qparams(skipping) == qparams(clean)
    result = calibrate(dividing(size=size), data, nonfinite="report")
    assert result.batches == 4
    spoiled = {o.place.split("'")[1]: o.nonfinite_elements for o in result.observers}
    assert sum(spoiled.values()) >= size


def test_all_batches_skipped_is_an_error():
    with pytest.raises(CalibrationError, match="all 2 batches were skipped"):
        calibrate(prepared(), [GOOD / 0, GOOD / 0], nonfinite="skip")


def test_dead_constant_and_silent_values_are_found_and_named():
    model = prepared("minmax")
    with torch.no_grad():
        model.get_parameter("first.bias")[2] = -1000
    result = calibrate(model, batches())
    problems = " ".join(f"{place}: {what}" for place, what in result.problems.items())
    assert "'relu' (aten.relu.default): 1 of 8 channels never changed (2)" in problems
    active = [o for o in result.observers if o.place.startswith("'conv2d_1'")]
    assert active[0].channels == 8
    assert active[0].silent_channels == ()
    assert "it saw the single value 0" in str(calibrate(prepared(), [GOOD]).problems["input 'x'"])
    assert json.loads(json.dumps(result.to_dict()))["batches"] == 6
    unused = prepared("minmax")
    calls = [n for n in unused.graph.nodes if n.op == "call_module" and "post_process" in str(n.target)]
    last = calls[-1]
    last.replace_all_uses_with(last.args[0])
    last.args = (next(n for n in unused.graph.nodes if n.op == "placeholder"),)
    empty = type(unused.get_submodule(last.target))(dtype=torch.int8)
    unused.set_submodule(last.target, empty)
    unused.graph.eliminate_dead_code()
    unused.recompile()
    assert calibrate(unused, batches()).batches == 6


def test_channels_that_wake_up_late_are_not_silent():
    seen = {}
    for data in ([GOOD, GOOD], [GOOD, GOOD, batches(1)[0]]):
        result = calibrate(prepared("mse"), data)
        seen[len(data)] = next(o for o in result.observers if o.place.startswith("'conv2d_1'")).silent_channels
    assert seen == {2: tuple(range(8)), 3: ()}


def test_stops_when_ranges_have_settled():
    same = batches(1) * 40
    model = prepared("mse")
    result = calibrate(model, same, tolerance=0.01, check_every=4)
    assert result.converged
    assert result.batches == 12
    growing = [batch * 1.2**i for i, batch in enumerate(same[:20])]
    assert not calibrate(prepared("mse"), growing, tolerance=0.01, check_every=2).converged
    long, short = prepared("mse"), prepared("mse")
    rest = batches(64)
    calibrate(long, rest)
    stopped = calibrate(short, rest, tolerance=0.05, check_every=4)
    assert stopped.converged
    assert stopped.batches < 64
    ranges = [[m for m in model.modules() if hasattr(m, "ranges")] for model in (long, short)]
    for full, early in zip(*ranges, strict=True):
        width = full.ranges()[1] - full.ranges()[0]
        assert bool(((full.ranges()[1] - early.ranges()[1]).abs() <= 0.15 * width).all())


def test_seed_makes_a_shuffling_loader_repeatable_and_leaves_the_generators_alone():
    loader = DataLoader(TensorDataset(torch.cat(batches(8))), batch_size=4, shuffle=True)
    found: list[dict[str, Any]] = []
    for seed in (3, 3, 4):
        model = prepared("moving_average", averaging_constant=0.5)
        torch.manual_seed(len(found)), random.seed(5)
        before = torch.get_rng_state(), random.getstate()
        calibrate(model, loader, limit=2, seed=seed)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        found.append(qparams(model))
    assert found[0] == found[1] != found[2]


def test_a_shared_observer_counts_a_tensor_once_and_twins_run_once():
    model = exported()
    made = ConvLinearQuantizer(observer("mse"), observer("minmax", True))
    model = prepare_pt2e(model, made)
    plain = copy.deepcopy(model)
    calls = [
        n for n in model.graph.nodes if n.op == "call_module" and len(n.users) and "post_process_0" in str(n.target)
    ]
    model.add_submodule("twin", copy.deepcopy(model.get_submodule(calls[0].target)))
    with model.graph.inserting_after(calls[0]):
        again = model.graph.call_module(calls[0].target, calls[0].args)
        twin = model.graph.call_module("twin", calls[0].args)
    next(iter(calls[0].users)).replace_input_with(calls[0], again)
    assert twin.users == {}
    model.recompile()
    calibrate(model, batches())
    calibrate(plain, batches())
    shared = model.get_submodule(calls[0].target)
    assert torch.equal(shared.state.counts, plain.get_submodule(calls[0].target).state.counts)
    assert model.twin.state is shared.state


def test_observers_on_one_tensor_with_other_options_are_no_twins():
    model = prepared("moving_average", averaging_constant=0.5)
    call = next(n for n in model.graph.nodes if n.op == "call_module" and "post_process_0" in str(n.target))
    first = model.get_submodule(call.target)
    model.add_submodule("slower", observer("moving_average", averaging_constant=0.1)(quant_min=-128, quant_max=127))
    with model.graph.inserting_after(call):
        model.graph.call_module("slower", call.args)
    model.recompile()
    calibrate(model, batches())
    alone = observer("moving_average", averaging_constant=0.1)()
    for batch in batches():
        alone(batch)
    assert torch.equal(model.slower.max_val, alone.max_val)
    assert not torch.equal(model.slower.max_val, first.max_val)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*sorted(OBSERVERS), "torchao"])
@pytest.mark.parametrize("stop", [2, 3, 6])
def test_resuming_gives_the_same_bits(name, stop, tmp_path):
    path = tmp_path / "run.ckpt"
    whole = prepared(name)
    calibrate(whole, batches(6), seed=1)

    def dying():
        for i, batch in enumerate([*batches(6), GOOD]):
            if i == stop:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        calibrate(prepared(name), dying(), seed=1, checkpoint=path, checkpoint_every=1)
    assert path.exists()
    resumed = prepared(name)
    result = calibrate(resumed, batches(6), seed=1, checkpoint=path, checkpoint_every=1)
    assert (result.batches, result.resumed_at, result.samples) == (6, stop, 24)
    assert qparams(resumed) == qparams(whole)
    assert not path.exists()


def test_checkpoints_of_other_models_and_broken_ones_are_refused(tmp_path):
    path = tmp_path / "run.ckpt"

    def dying():
        yield from batches(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(prepared("mse"), dying(), checkpoint=path, checkpoint_every=1)
    with pytest.raises(CalibrationError, match="written for another model"):
        calibrate(prepared("minmax"), batches(2), checkpoint=path)
    assert calibrate(prepared("minmax"), batches(2), checkpoint=path, resume=False).resumed_at == 0
    path.write_bytes(b"junk")
    with pytest.raises(ArtefactError, match="is no calibration checkpoint"):
        calibrate(prepared("mse"), batches(2), checkpoint=path)
    with pytest.raises(ArtefactError, match="There is no folder"):
        calibrate(prepared("mse"), batches(2), checkpoint=tmp_path / "no" / "run", checkpoint_every=1)


def killed_after(model, data, path):
    """Runs into an interrupt behind all batches of the data, with a checkpoint written after each."""

    def dying():
        yield from data
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, dying(), checkpoint=path, checkpoint_every=1)


def test_a_checkpoint_of_other_weights_options_or_batches_is_refused(tmp_path):
    path, data = tmp_path / "run.ckpt", batches(4)
    killed_after(prepared("percentile"), data[:3], path)
    with pytest.raises(CalibrationError, match="another model \\('weights"):
        calibrate(prepared("percentile", seed=1), data, checkpoint=path)
    with pytest.raises(CalibrationError, match=r"another model \('activation_post_process_0: .* 99.0"):
        calibrate(prepared("percentile", percentile=99.0), data, checkpoint=path)
    with pytest.raises(CalibrationError, match="Batch 2 is not the one that the checkpoint"):
        calibrate(prepared("percentile"), data[::-1], checkpoint=path)
    killed_after(prepared("moving_average"), data[:3], tmp_path / "average")
    with pytest.raises(CalibrationError, match=r"another model \('activation_post_process_0: .* 0.5"):
        calibrate(prepared("moving_average", averaging_constant=0.5), data, checkpoint=tmp_path / "average")
    for few, limit in ((data[:2], None), (data, 2)):
        with pytest.raises(CalibrationError, match="has seen 3 batches and this run stopped at 2"):
            calibrate(prepared("percentile"), few, limit, checkpoint=path)
    assert calibrate(prepared("percentile"), data, checkpoint=path).resumed_at == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, None)
            for key in ("fingerprint", "states", "buffers", "activity", "widened", "counts", "convergence", "random")
        ),
        ("states", lambda states: {name: ((torch.zeros(2),), 0) for name in states}),
        ("states", lambda states: dict.fromkeys(states, 3)),
        ("counts", (1, 2)),
        ("convergence", (torch.zeros(2), None)),
        ("format", torch.zeros(2)),
        ("last", 3),
    ],
)
def test_a_checkpoint_that_holds_something_else_is_one_sentence(key, value, tmp_path):
    def stops():
        yield from batches()[:2]
        raise KeyboardInterrupt

    path, model = tmp_path / "run", prepared("histogram")
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, stops(), progress=False, checkpoint=path, checkpoint_every=1)
    content = torch.load(path, weights_only=True)
    torch.save({**content, key: value(content[key]) if callable(value) else value}, path)
    with pytest.raises(ArtefactError, match=r"is no calibration checkpoint .*; delete it\.$") as error:
        calibrate(model, batches(), progress=False, checkpoint=path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_format_is_refused_and_may_be_begun_anew(tmp_path):
    path, data = tmp_path / "run", batches(3)
    killed_after(prepared(), data[:2], path)
    torch.save({**torch.load(path, weights_only=True), "format": 3}, path)
    with pytest.raises(
        ArtefactError, match=r"is a calibration checkpoint of format 3, .*; delete it or pass resume=False"
    ):
        calibrate(prepared(), data, checkpoint=path)
    assert calibrate(prepared(), data, checkpoint=path, resume=False).resumed_at == 0


def test_what_a_killed_write_left_is_removed(tmp_path):
    path = tmp_path / "run.ckpt"
    beside(path).write_bytes(b"half")
    calibrate(prepared(), batches(2), checkpoint=path)
    assert not list(tmp_path.iterdir())


def test_no_batch_is_taken_that_is_not_used():
    data = iter([*batches(2), GOOD])
    calibrate(prepared("minmax"), data, limit=2)
    assert next(data) is GOOD
    same = iter(batches(1) * 40)
    assert calibrate(prepared("minmax"), same, tolerance=0.01, check_every=2).batches == 6
    assert len(list(same)) == 34


@pytest.mark.parametrize("name", ["mse", "torchao"])
def test_batches_that_do_not_fit_can_be_skipped(name):
    data = batches(3)
    model, clean = prepared(name), prepared(name)
    result = calibrate(model, [data[0], data[1][:2], data[1], {"y": GOOD}, data[2], [3]], misfit="skip")
    calibrate(clean, data)
    assert [(s.index, s.reason.partition(";")[0]) for s in result.skipped][:1] == [
        (1, "Input 'x' of batch 1 has shape [2, 3, 12, 12], expected [4, 3, 12, 12]")
    ]
    assert [s.index for s in result.skipped] == [1, 3, 5]
    assert qparams(model) == qparams(clean)
    with pytest.raises(CalibrationError, match="all 1 batches were skipped"):
        calibrate(prepared(name), [GOOD[0]], misfit="skip")


def test_constant_observers_and_silent_channels_can_raise():
    model = prepared("minmax")
    with torch.no_grad():
        model.get_parameter("first.bias")[2] = -1000
    with pytest.raises(CalibrationError, match=r"'relu' .*\(1 of 8 channels never changed \(2\)\)"):
        calibrate(model, batches(), constant="raise")
    assert not model.activation_post_process_0.has_data
    with pytest.raises(CalibrationError, match=r"input 'x' \(it saw the single value 0\)"):
        calibrate(prepared("mse"), [GOOD], constant="raise")
    assert calibrate(prepared("mse"), batches(), constant="raise").batches == 6


def test_observers_of_other_libraries_settle_by_what_they_saw():
    growing = [batch * 1.2**i for i, batch in enumerate(batches(1) * 20)]
    assert not calibrate(prepared("torchao"), growing, tolerance=0.01, check_every=2).converged
    assert calibrate(prepared("torchao"), batches(1) * 20, tolerance=0.01, check_every=2).batches == 6


def test_calibrated_models_convert_and_agree_with_float():
    torch.manual_seed(0)
    floating = exported()
    data = batches(4)
    for name in ("minmax", "histogram", "mse"):
        model = prepared(name)
        calibrate(model, data)
        converted = convert_pt2e(model)
        expected, found = floating(data[0]), converted(data[0])
        assert 10 * torch.log10(expected.var() / (expected - found).var()) > 30


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_a_model_for_training_is_calibrated_as_by_its_own_calls(backend):
    """Ranges may begin with those of data; a fake quantize keeps the state of an observer of ours as a dictionary."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    graph = torch.export.export(model, (batches[0],)).module()
    one, other = (quantplug.prepare_qat_pt2e(graph, quantplug.get_quantizer(backend)).eval() for _ in range(2))
    assert quantplug.calibrate(one, [*batches, torch.full((2, 3, 8, 8), torch.nan)], nonfinite="skip", progress=False)
    with torch.no_grad():
        for x in batches:
            other(x)
    scales = [{n: v for n, v in each.state_dict().items() if n.endswith("scale")} for each in (one, other)]
    assert scales[0]
    assert all(torch.equal(scales[0][name], scales[1][name]) for name in scales[1])


def test_coverage_says_how_the_integers_are_used():
    model = prepared("minmax")
    calibrate(model, batches())
    assert coverage(model) == []
    model = prepared("mse")
    calibrate(model, batches())
    rows = coverage(model)
    assert len(rows) >= 4
    assert all(0 < row.levels_used <= 1 and 0 <= row.clipped < 0.05 for row in rows)
    assert "levels used" in coverage_table(rows)
    with pytest.raises(CalibrationError, match="has seen no data"):
        coverage(prepared("mse"))


def test_progress_shows_count_rate_and_remaining_time_on_a_terminal(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    calibrate(prepared(), batches(4), limit=3)
    shown = capfd.readouterr().err
    assert "3/3" in shown
    assert "batches/s" in shown
    assert "0:00:00" in shown


def test_progress_is_silent_where_there_is_no_terminal(capfd):
    calibrate(prepared(), batches(2), progress=True)
    assert capfd.readouterr().err == ""
