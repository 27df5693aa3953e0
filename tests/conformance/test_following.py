"""Rows behind the outputs of other rows: what only two rows together break, the kit finds."""

from dataclasses import replace

import pytest
import torch

from quantplug.annotators.activation import known_range
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import activation_spec, get_symmetric_quantization_config
from quantplug.annotators.shape import movement
from quantplug.conformance import judge, trials
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.quantizers.framework.backend import Backend

UINT8 = activation_spec(torch.uint8, 0, 255)


def under(row, spec):
    """A row whose kernel takes and gives activations of a spec of its own."""
    return replace(
        row, decide=lambda match, c: row.decide(match, replace(c, input_activation=spec, output_activation=spec))
    )


def backend(*rows):
    lowering = "quantplug.lowering.reference:lower"
    return Backend("npu", rows, {"int8": get_symmetric_quantization_config}, lowering)


def found(made, check):
    """The verdicts of one check, by form, of rows alone and of rows behind others."""
    tried = {f"{trial.claim.label} {trial.form.name}": judge(trial, check) for trial in trials(made)}
    behind = {name: verdict for name, verdict in tried.items() if "-behind-" in name}
    return {name: verdict for name, verdict in tried.items() if name not in behind}, behind


MIXED = backend(linear(()), under(binary("add", (), shared_inputs=True), UINT8))


@pytest.mark.slow
def test_b26_int8_layers_are_tried_before_a_uint8_sum_and_the_other_way_round():
    _, behind = found(MIXED, "level")
    assert {name: verdict.status for name, verdict in behind.items()} == {
        "linear aten.linear.default-behind-linear": "passed",
        "linear aten.linear.default-behind-add": "passed",
        "add aten.add.Tensor-behind-linear": "passed",
        "add aten.add.Tensor-behind-add": "passed",
    }


@pytest.mark.slow
def test_b26_a_core_that_cannot_requantize_what_two_rows_disagree_about_fails_only_behind(monkeypatch):
    monkeypatch.setattr("quantplug.core.annotation.verify._of_same_reader", lambda point, spec: False)
    alone, behind = found(MIXED, "verified")
    assert "failed" not in {verdict.status for verdict in alone.values()}
    failed = {name: verdict.reason for name, verdict in behind.items() if verdict.status == "failed"}
    assert set(failed) == {"add aten.add.Tensor-behind-linear"}
    (reason,) = failed.values()
    assert "shares the quantization of another tensor in torch.uint8, but its producer is quantized to" in reason


def test_b26_numbers_that_a_row_takes_over_and_cannot_hold_fail_its_limits():
    centred = DTypeWithConstraints(torch.int8, zero_point_exact_match=0)
    moves = movement(("view",)).accepting(DTypeConfig("centred", input=centred, output=centred))
    symmetric = activation_spec(symmetric=True)
    rows = (known_range("sigmoid"), under(binary("add", ()), symmetric), moves)
    alone, behind = found(backend(*rows), "limits")
    assert "failed" not in {verdict.status for verdict in alone.values()}
    failed = {name: verdict.reason for name, verdict in behind.items() if verdict.status == "failed"}
    assert set(failed) == {"view aten.view.default-behind-sigmoid"}
    (reason,) = failed.values()
    assert "breaks zero_point_exact_match of backend 'npu': found -128, the limit is 0" in reason


def test_b26_rows_that_write_alike_take_turns_so_that_forms_stay_few():
    names = [f"own{number}" for number in range(6)]
    operators = ("add", "sub", "mul", "maximum", "minimum", "div.Tensor")
    rows = [replace(binary(o, ()), name=name) for o, name in zip(operators, names, strict=True)]
    made = backend(*rows, pooling("max_pool2d"))
    behind = [trial.form.name.split("-behind-")[1] for trial in trials(made) if "-behind-" in trial.form.name]
    assert len(behind) == 14  # seven rows, behind one that has its own range and one that shares
    assert set(behind) >= {"add", "sub", "mul", "maximum", "minimum", "max_pool2d"}


@pytest.mark.parametrize("row", [linear(()), binary("add", ()), pooling("max_pool2d")], ids=lambda row: row.name)
def test_b26_a_row_alone_is_tried_behind_itself(row):
    _, behind = found(backend(row), "verified")
    assert [verdict.status for verdict in behind.values()] == ["passed"]
