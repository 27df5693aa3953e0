"""The way of a backend's author: what `new-backend` writes, a row and a rule more, and what three mistakes are told."""

import importlib
import sys
from functools import partial

import pytest
import torch

from quantplug import scaffold
from quantplug.annotators.activation import known_range
from quantplug.annotators.elementwise import binary
from quantplug.conformance import CHECKS, verdicts
from quantplug.core.errors import PatternError
from quantplug.core.graph.editing import call
from quantplug.core.patterns.language import op, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import dequantize, qparams, quantize
from quantplug.lowering.rules import lower_by_rules
from quantplug.quantizers.framework.derived import derive


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = scaffold.new_backend("authored_npu", tmp_path_factory.mktemp("author"))
    sys.path.insert(0, str(folder / "src"))
    yield importlib.import_module("authored_npu.backend"), importlib.import_module("authored_npu.lowering")
    sys.path.remove(str(folder / "src"))


@torch.library.custom_op("authored_sums::add", mutates_args=())
def add(one: torch.Tensor, other: torch.Tensor, ratios: list[float], zero_points: list[int]) -> torch.Tensor:
    real = (one.float() - zero_points[0]) * ratios[0] + (other.float() - zero_points[1]) * ratios[1]
    return torch.clamp(real.round() + zero_points[2], -128, 127).to(torch.int8)


@add.register_fake
def _(one, other, ratios, zero_points):
    return torch.empty_like(one + other)


def to_add(match, forgotten=False):
    one, other, out = (qparams(match[name]) for name in ("one", "other", "out"))
    zero_points = [0 if forgotten else one.zero_point, other.zero_point, out.zero_point]
    args = (match["a"], match["b"], [one.scale / out.scale, other.scale / out.scale], zero_points)
    return call(match.root, torch.ops.authored_sums.add.default, args, match["op"], torch.int8)


SUM = quantize(
    input=op(
        "add",
        self=dequantize(input=value("a"), name="one"),
        other=dequantize(input=value("b"), name="other"),
        name="op",
    ),
    name="out",
)


def with_sums(package, to_kernel=to_add):
    backend, lowering = package
    rules = (*lowering.RULES, Rule(SUM, to_kernel))
    lower = partial(lower_by_rules, rules=rules, library="authored_sums")
    return derive(backend.BACKEND, "authored", add=(binary("add", activations=()),), lowering=lower)


def failures(backend, *rules):
    return {check: verdict.reason for _, check, verdict in verdicts(backend, *rules) if verdict.status == "failed"}


@pytest.mark.slow
def test_r01_r02_b26_what_new_backend_writes_with_a_row_and_a_rule_more_passes_the_kit(package):
    found = [(check, verdict.status) for _, check, verdict in verdicts(with_sums(package))]
    assert {status for _, status in found} == {"passed", "skipped"}
    assert {check for check, status in found if status == "passed"} == set(CHECKS) - {"emulated", "rescaled"}


def test_r01_a_misspelt_operand_is_told_when_it_is_written():
    with pytest.raises(PatternError, match=r"Operator 'linear' has no operand \['inptu'\]; its schema offers .*Tensor"):
        op("linear", inptu=value("x"))


def test_r01_b26_a_claim_without_a_rule_is_told_with_the_remedy(package):
    backend, _ = package
    found = failures(derive(backend.BACKEND, "claims", add=(known_range("sigmoid"),)), "sigmoid")
    assert found == {
        "delegated": "'sigmoid' is claimed and runs float: no integer kernel for aten.sigmoid.default in this place; "
        "lower it, or let the row refuse it with where(...)"
    }


def test_r01_r08_a_forgotten_zero_point_is_told_by_what_differs_and_where(package):
    found = failures(with_sums(package, partial(to_add, forgotten=True)), "add")
    assert set(found) == {"level"}
    assert found["level"].startswith("the program against the q/dq graph, on the calibration data: ")
    assert found["level"].endswith("dB; declared: one step")


@pytest.mark.slow
def test_r02_a_lowering_that_is_not_there_is_told_by_its_name(package):
    backend, _ = package
    found = failures(derive(backend.BACKEND, "lost", lowering="authored_npu.lowring:lower"), "linear")
    assert found == {
        "lowered": "The lowering 'authored_npu.lowring:lower' of backend 'lost' is not there (ModuleNotFoundError: No "
        "module named 'authored_npu.lowring'); correct the name 'package.module:function', or install what it imports."
    }
