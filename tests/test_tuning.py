"""The search for configs: a planted culprit, the budget on real programs, logs that resume."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError
from quantplug.core.specs.levels import sqnr
from quantplug.tuning import Job, run_trial, tune, written

WIDTH = 16


class Block(nn.Module):
    """A layer behind a norm with a channel of numbers that are much larger than the others."""

    def __init__(self, outlier):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.norm.weight[0] *= outlier
            self.layer.weight[:, 0] /= outlier

    def forward(self, x):
        return torch.tanh(self.layer(self.norm(x)))


class Planted(nn.Module):
    """Blocks of which one is the culprit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(outlier) for outlier in (1.0, 300.0, 1.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batches(count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, WIDTH, generator=generator) for _ in range(count)]


MODEL, DATA = Planted().eval(), batches()
FRESH = batches(4, seed=5)


class Agreement:
    """A metric of a user's: decibels on fresh data; counts its calls and breaks off after some."""

    def __init__(self, breaks_after=1000):
        self.calls, self.breaks_after = 0, breaks_after

    def __call__(self, run):
        if self.calls == self.breaks_after:
            raise KeyboardInterrupt
        self.calls += 1
        with torch.no_grad():
            found = [run(x) for x in FRESH]
            found = [value[0] if isinstance(value, (tuple, list)) else value for value in found]
            return min(60.0, sqnr(torch.cat(found), torch.cat([MODEL(x) for x in FRESH])))


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_the_culprit_alone_is_moved_and_the_real_program_keeps_the_metric(backend, tmp_path):
    metric = Agreement()
    tuned = tune(MODEL, (DATA[0],), DATA, metric, backend=backend, candidates=["int8", None], drop=60.0 - 25.0)
    assert tuned.is_met
    assert tuned.base == 60.0
    assert tuned.scopes == (("*", "int8"), ("blocks.1.layer", None))
    assert tuned.trials[0].scopes == (("*", "int8"),)
    assert tuned.trials[0].metric < 25 <= tuned.best.metric
    assert tuned.best.cost == pytest.approx(1 / 3)
    artefact = quantplug.quantize(MODEL, (DATA[0],), backend, DATA, quantizer=tuned.quantizer, progress=False)
    assert Agreement()(artefact) >= 25 - 0.5
    floats = [row.module_path for row in artefact.report.rows if row.operator == "linear" and not row.quantized]
    assert floats == ["blocks.1.layer"]
    replayed = Plan.from_json(tuned.plan.json()).quantizer()
    exported = torch.export.export(MODEL, (DATA[0],)).module()
    assert plan_of(quantplug.prepare_pt2e(exported, replayed)) == tuned.plan
    assert json.loads(tuned.to_json())["scopes"] == [list(scope) for scope in tuned.scopes]
    assert "blocks.1.layer: float keeps 25" in str(tuned)
    costs = [(trial.cost, trial.metric) for trial in tuned.pareto()]
    assert costs == sorted(costs)


@pytest.mark.few(1)
@pytest.mark.parametrize(("evaluate", "cost"), [("reference", "multiplications"), ("program", "size")])
def test_without_a_metric_decibels_are_measured_of_graphs_or_programs(evaluate, cost):
    tuned = tune(MODEL, (DATA[0],), DATA, backend="x86", at_least=25.0, evaluate=evaluate, cost=cost)
    assert tuned.is_met
    assert dict(tuned.scopes).keys() == {"*", "blocks.1.layer"}
    exported = torch.export.export(MODEL, (DATA[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, tuned.quantizer)
    quantplug.calibrate(prepared, DATA, progress=False)
    found = torch.cat([quantplug.convert_pt2e(prepared)(x) for x in DATA])
    assert sqnr(found, torch.cat([MODEL(x) for x in DATA])) == pytest.approx(tuned.best.metric, abs=0.5)


def test_a_search_that_broke_off_goes_on_from_its_log_with_the_same_result(tmp_path):
    log = tmp_path / "trials.jsonl"
    given: dict[str, Any] = {"backend": "x86", "candidates": ["int8", None], "drop": 35.0}
    whole = Agreement()
    wanted = tune(MODEL, (DATA[0],), DATA, whole, **given)
    broken = Agreement(breaks_after=2)
    with pytest.raises(KeyboardInterrupt):
        tune(MODEL, (DATA[0],), DATA, broken, log=log, **given)
    assert len(log.read_text().splitlines()) == 1 + 2
    rest = Agreement()
    assert tune(MODEL, (DATA[0],), DATA, rest, log=log, **given) == wanted
    assert rest.calls == whole.calls - 2
    again = Agreement(breaks_after=0)
    assert tune(MODEL, (DATA[0],), DATA, again, log=log, **given) == wanted


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
import test_tuning as t
class Slow(t.Agreement):
    def __call__(self, run):
        time.sleep(0.3)
        return super().__call__(run)
Slow.__name__ = "Agreement"
t.tune(t.MODEL, (t.DATA[0],), t.DATA, Slow(), log={log!r}, backend="x86", candidates=["int8", None], drop=0.0)
"""


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_a_log_that_can_be_read(tmp_path):
    log, folder = tmp_path / "trials.jsonl", os.path.dirname(__file__)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(folder=folder, log=str(log))])
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    made = len(log.read_text().splitlines()) - 1
    assert made >= 2
    given: dict[str, Any] = {"backend": "x86", "candidates": ["int8", None], "drop": 0.0}
    whole, rest = Agreement(), Agreement()
    wanted = tune(MODEL, (DATA[0],), DATA, whole, **given)
    assert tune(MODEL, (DATA[0],), DATA, rest, log=log, **given) == wanted
    assert rest.calls == whole.calls - made


def test_a_trial_is_a_job_that_can_be_sent():
    job = Job(MODEL, (DATA[0],), DATA, Agreement(), backend="x86")
    sent = pickle.loads(pickle.dumps(job))
    scopes = (("*", "int8"), ("blocks.1.layer", None))
    assert run_trial(sent, scopes) == run_trial(job, scopes)


def test_scopes_are_as_a_person_would_write_them():
    layers = {f"layers.{n}.{name}": "int8" for n in range(3) for name in ("up", "down")}
    assert written(layers, "int8") == (("*", "int8"),)
    dynamic = {f"layers.{n}.down": "int8_dynamic" for n in range(3)}
    assert written({**layers, **dynamic}, "int8") == (("*", "int8"), ("layers.*.down", "int8_dynamic"))
    assert written({**layers, "layers.1.up": None}, "int8") == (("*", "int8"), ("layers.1.up", None))
    around = {**layers, "layers.0": None}
    expected = (("*", "int8"), ("layers.0", None), ("layers.0.up", "int8"), ("layers.0.down", "int8"))
    assert written(around, "int8") == expected


def test_operators_of_the_model_itself_have_a_scope_too():
    """Also where nothing but float is good enough."""
    model = nn.Linear(WIDTH, 4).eval()
    tuned = tune(model, (DATA[0],), DATA, backend="x86", candidates=["int8", None], at_least=150.0)
    assert tuned.is_met
    assert tuned.scopes == (("*", "int8"), ("", None))
    assert tuned.best.cost == 1
    assert tuned.plan.nodes == ()


def test_a_budget_out_of_reach_gives_the_best_and_says_so():
    with pytest.warns(UserWarning, match="No trial keeps 1000"):
        tuned = tune(MODEL, (DATA[0],), DATA, backend="x86", candidates=["int8"], at_least=1000.0)
    assert not tuned.is_met
    assert tuned.scopes == (("*", "int8"),)
    assert "does not keep 1000" in str(tuned)


def test_a_metric_that_is_infinite_of_the_float_model_needs_a_number_that_is_asked_for():
    """As decibels against the float model are."""

    def metric(run):
        return float(sqnr(torch.cat([run(x) for x in FRESH]), torch.cat([MODEL(x) for x in FRESH])))

    found = tune(MODEL, (DATA[0],), DATA, metric, backend="x86", at_least=10)
    assert found.is_met
    assert "float inf" in str(found)
    assert json.loads(found.to_json())["best"]["metric"] >= 10
    with pytest.raises(ConfigError, match="infinite, from which nothing can drop; pass at_least="):
        tune(MODEL, (DATA[0],), DATA, metric, backend="x86")


@pytest.mark.parametrize("recipe", ["accurate", [quantplug.Smooth(alpha=0.5)]])
def test_recipes_are_applied_in_each_trial_to_the_graph_that_they_are_for(recipe):
    plain, better = (
        tune(MODEL, (DATA[0],), DATA, Agreement(), backend="x86", candidates=["int8"], drop=200, recipe=given)
        for given in ((), recipe)
    )
    assert better.best.metric > plain.best.metric + 1


def test_bad_input_is_a_sentence(tmp_path):
    example = (DATA[0],)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"candidates": ["int9"]}, "has no config 'int9'"),
        ({"candidates": [None]}, "begin with one of"),
        ({"candidates": ["int8", "int8"]}, "different names"),
        ({"drop": -1}, "drop takes a number from 0 on, found -1"),
        ({"evaluate": "file"}, "evaluate takes one of"),
        ({"cost": "time"}, "cost takes one of"),
        ({"trials": 0}, "trials takes a number from 1 on"),
        ({"at_least": float("nan")}, "at_least takes a finite number"),
        ({"backend": "none"}, "none"),
    )
    for options, sentence in wrong:
        with pytest.raises(ConfigError, match=sentence):
            tune(MODEL, example, DATA, Agreement(), **options)
    with pytest.raises(ConfigError, match="pass at_least=decibels"):
        tune(MODEL, example, DATA)
    answers: tuple[Any, ...] = (float("nan"), "good", None, True)
    for answer in answers:
        with pytest.raises(ConfigError, match="The metric returned"):
            tune(MODEL, example, DATA, MagicMock(return_value=answer))
    with pytest.raises(CalibrationError):
        tune(MODEL, example, [], Agreement())
    log = tmp_path / "log.jsonl"
    tune(MODEL, example, DATA, Agreement(), log=log, backend="x86", candidates=["int8"], drop=60)
    with pytest.raises(ArtefactError, match="of a search with another candidates"):
        tune(MODEL, example, DATA, Agreement(), log=log, backend="x86", drop=60)
    with pytest.raises(ArtefactError, match="of a search with another calibration"):
        tune(MODEL, example, FRESH, Agreement(), log=log, backend="x86", candidates=["int8"], drop=60)
    log.write_text("{")
    with pytest.raises(ArtefactError, match="is no log of a search"):
        tune(MODEL, example, DATA, Agreement(), log=log, backend="x86")
