"""Products that two at a time overflow 16 bits without VNNI: told of configs, held on numbers, tried by the kit."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import quantplug
from quantplug.annotators.linear import linear
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.conformance import verdicts
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.graph.meta import LIMITS
from quantplug.core.specs.limits import ONEDNN_PAIRS, Pairs
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.x86 import X86, get_x86_quantization_config

MODES = {
    "static": get_x86_quantization_config,
    "dynamic": lambda **o: get_x86_quantization_config(is_dynamic=True, **o),
}


@pytest.fixture(params=[True, False], ids=["saturates", "VNNI"])
def saturates(request, monkeypatch):
    for place in ("quantplug.lowering.processor", "quantplug.lowering.x86.kernels.few_rows"):
        monkeypatch.setattr(f"{place}.kernels_saturate", lambda: request.param)
    return request.param


def stages(config):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(8, 16)
    quantizer = quantplug.get_quantizer("x86").set_global(config)
    prepared = quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    told = quantplug.explain(prepared)
    prepared(x)
    converted = quantplug.convert_pt2e(prepared)
    return told, converted, quantizer.backend.lower(converted, (x,)), x


@pytest.mark.parametrize("mode", MODES)
def test_a_config_of_full_range_is_told_before_calibration_and_held_on_the_numbers(mode, saturates):
    told, converted, program, x = stages(MODES[mode](weight_bits=8))
    words = (
        r"The weight of 'linear' \(module '0'\) breaks the sum of two products of backend 'x86': found up to 65280, "
        r"the limit is 32767; this processor has no VNNI, .*; quantize with weight_bits=7\."
    )
    assert [bool(re.fullmatch(words, str(broken))) for broken in told.violations[:1]] == [True] * saturates
    assert len(told.violations) == 2 * saturates
    rows = quantplug.explain(converted).rows
    assert [row.quantized for row in rows] == [not saturates] * 3
    assert [row.reason for row in rows] == [op.reason for op in program.ops]
    assert {op.placement for op in program.ops} == {"float" if saturates else "int8"}
    assert all("the limit is 32767, here they come up to" in row.reason for row in rows) == saturates
    error, signal = program(x) - converted(x), converted(x)
    assert float(signal.norm() / error.norm().clamp_min(1e-20)) > 100


@pytest.mark.parametrize("options", [{"weight_bits": 7}, {"weight_bits": 8, "reduce_range": True}])
def test_seven_bits_of_either_fit(options, monkeypatch):
    monkeypatch.setattr("quantplug.lowering.processor.kernels_saturate", lambda: True)
    told, converted, program, _ = stages(get_x86_quantization_config(**options))
    assert told.violations == ()
    assert quantplug.explain(converted).quantized == 3
    assert {op.placement for op in program.ops} == {"int8"}


def test_the_weights_of_another_backends_config_are_told_too(monkeypatch):
    monkeypatch.setattr("quantplug.lowering.processor.kernels_saturate", lambda: True)
    told, converted, *_ = stages(get_symmetric_quantization_config())
    assert [broken.value for broken in told.violations] == ["up to 64770"] * 2
    assert quantplug.explain(converted).quantized == 0


def test_a_plan_carries_the_limit():
    model, x = nn.Sequential(nn.Linear(16, 4)).eval(), torch.randn(8, 16)
    quantizer = quantplug.get_quantizer("x86")
    plan = plan_of(quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer))
    replayed = quantplug.prepare_pt2e(
        torch.export.export(model, (x,)).module(), Plan.from_json(plan.json()).quantizer()
    )
    (limits,) = filter(None, map(LIMITS.get, replayed.graph.nodes))
    assert limits.pairs == ONEDNN_PAIRS


@pytest.mark.slow
def test_the_conformance_kit_tries_the_limit():
    limit = Pairs(2**15 - 1, "this device adds two products in 16 bits", "quantize with weight_bits=7")
    configs = {"int8": lambda **o: get_x86_quantization_config(weight_bits=8, **o)}
    row = linear(()).adding_pairs(limit).writing_float()
    wide = derive(replace(X86, annotators=(row,), configs=configs), "wide")
    found = {check: verdict.reason for _, check, verdict in verdicts(wide) if verdict.status == "failed"}
    assert set(found) == {"limits"}
    assert "breaks the sum of two products of backend 'wide': found up to 65280, the limit is 32767" in found["limits"]
    narrow = replace(wide, configs={"int8": lambda **o: get_x86_quantization_config(weight_bits=7, **o)})
    assert not [verdict for _, _, verdict in verdicts(narrow) if verdict.status == "failed"]
