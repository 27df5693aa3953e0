"""A slice of the fuzzer: some seeds in every run, more of them in the slow one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fuzz import check
from fuzz.check import judged
from fuzz.command import CONFIGS, main
from fuzz.generate import generated
from fuzz.model import Input, Model, Step
from fuzz.shrink import shrunk, written

# Operators with defects that are known, each until it is mended.
KNOWN: frozenset[str] = frozenset()


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(7, 13))
def test_random_models_on_x86_are_no_suspects(seed):
    verdict = judged(generated(seed, CONFIGS["x86"], KNOWN), "x86")
    assert verdict.outcome in ("passed", "refused"), verdict.told


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "models"), [("x86", 30), ("xnnpack", 8), ("openvino", 8), ("cortex_m", 8)])
def test_the_command_finds_no_suspect(backend, models):
    assert main(["--backend", backend, "--models", str(models), "--configs", "int8", "--without", ",".join(KNOWN)]) == 0


def test_a_seed_gives_one_model():
    assert generated(11).source() == generated(11).source() != generated(12).source()


def _linears() -> Model:
    steps = [
        Step(
            f"v{i}", "linear", (f"self.m{i} = nn.Linear(8, 8)",), (f"v{i} = torch.relu(self.m{i}({x}))",), (x,), (3, 8)
        )
        for i, x in enumerate(("x0", "v0", "v1", "v2"))
    ]
    return Model(1, (Input("x0", (3, 8)),), tuple(steps), ("v3",), "tensor")


def test_a_program_beside_its_graph_is_a_suspect_and_shrinks_to_a_test(monkeypatch, tmp_path):
    """A kernel that loses a step of 16 is found in the net, which shrinks to one layer."""
    called = check.X86Program.__call__
    monkeypatch.setattr(check.X86Program, "__call__", lambda self, *inputs: called(self, *inputs) * 0.9)
    assert judged(_linears(), "x86").outcome == "suspect"
    small = shrunk(_linears(), "x86")
    assert len(small.steps) == 1
    path = written(small, "x86", "numbers 10 % low", tmp_path)
    scope: dict = {}
    exec(path.read_text(), scope)
    with pytest.raises(AssertionError, match="differ"):
        scope["test_a_model_of_the_fuzzer_is_no_suspect"]()
    monkeypatch.undo()
    scope["test_a_model_of_the_fuzzer_is_no_suspect"]()


def test_state_that_stands_still_is_found_by_the_second_call(monkeypatch):
    """A program that answers every call like the first."""
    answers: dict[Any, Any] = {}
    called = check.X86Program.__call__

    def frozen(self, *inputs):
        return answers.setdefault(id(self), called(self, *inputs))

    monkeypatch.setattr(check.X86Program, "__call__", frozen)
    verdict = judged(replace(_linears(), seed=2), "x86", saves=False)
    assert verdict.outcome == "suspect"
    assert "call 1" in verdict.told


@pytest.mark.slow
def test_a_worker_that_dies_costs_one_seed(monkeypatch, capfd):
    """The seed at which a process ends is a suspect; the others are judged."""
    monkeypatch.setenv("FUZZ_DIES_AT", "8")
    assert main(["--models", "3", "--seed", "7", "--configs", "int8", "--without", ",".join(KNOWN)]) == 1
    told = capfd.readouterr().out
    assert "suspect 8: the process ended with 70" in told
    assert "3 models" in told


def test_inputs_differ_between_calls_and_open_batches_in_size():
    model = replace(_linears(), is_dynamic=True)
    sizes = [model.batch(number)[0].shape[0] for number in range(3)]
    assert sizes == [3, 5, 1]
    assert not torch.equal(model.batch(0)[0][0], model.batch(1)[0][0])
