"""Kernels with one fault each: the kit finds it, whatever example of the row its author gives.

The honest kernel is a convolution of integers in whole numbers, scaled and rounded once, as an author would write it.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantplug.annotators.convolution import convolution
from quantplug.annotators.linear import linear
from quantplug.conformance import CHECKS, judge, trials, verdicts
from quantplug.core.graph.editing import call, constant
from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.patterns.language import op, optional, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import dequantize, integer_weight, is_static, qparams, quantize
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.core.specs.levels import Level
from quantplug.lowering.rules import lower_by_rules
from quantplug.quantizers.framework.backend import Backend

INT8 = DTypeConfig("int8", input=torch.int8, output=torch.int8, weight=torch.int8)
SEEN: dict[Any, Any] = {}


@torch.library.custom_op("faulty_npu::product", mutates_args=())
def product(
    x: Tensor, weight: Tensor, bias: Tensor, ratio: Tensor, zeros: list[int], form: list[int], fault: str
) -> Tensor:
    into, out = zeros
    if fault == "input zero point":
        into = 0
    if fault == "output zero point":
        out = 0
    if fault == "scales of channels":
        ratio = ratio[:1].expand_as(ratio)
    numbers = x.double() if fault == "padding" else x.double() - into
    if form:
        sums = convolved(numbers, weight.double(), form, fault)
        sums = sums - into * weight.double().sum((1, 2, 3)).view(-1, 1, 1) if fault == "padding" else sums
        ratio, bias = ratio.view(-1, 1, 1), bias.view(-1, 1, 1)
    else:
        sums = numbers @ weight.double().t()
    if fault == "bias":
        bias = torch.zeros_like(bias)
    steps = torch.round(sums * ratio + bias) + out
    if fault == "first call":
        steps = SEEN.setdefault((tuple(x.shape), zeros[0], zeros[1], float(ratio.sum())), steps)
    if fault == "saturation":
        return ((steps + 128) % 256 - 128).to(torch.int8)
    low, high = (-64, 63) if fault == "half of the range" else (-128, 127)
    return steps.clamp(low, high).to(torch.int8)


def convolved(numbers, weight, form, fault):
    stride, padding, dilation, groups = window_of(form)
    if fault == "order of dimensions":
        stride, padding, dilation = stride[::-1], padding[::-1], dilation[::-1]
    if fault == "first dimension":
        stride, padding, dilation = stride[:1] * 2, padding[:1] * 2, dilation[:1] * 2
    if fault == "groups" and groups > 1:
        # Every group reads the channels of the first.
        numbers = numbers[:, : weight.shape[1]].repeat(1, groups, 1, 1)
    if fault == "depthwise only" and 1 < groups < numbers.shape[1]:
        numbers = numbers[:, : weight.shape[1]].repeat(1, groups, 1, 1)
    if fault == "dilation" and max(dilation) > 1:
        shape = F.conv2d(numbers, weight, None, stride, padding, dilation, groups).shape
        return F.interpolate(F.conv2d(numbers, weight, None, stride, padding, 1, groups), shape[2:])
    return F.conv2d(numbers, weight, None, stride, padding, dilation, groups)


@product.register_fake
def _(x, weight, bias, ratio, zeros, form, fault):
    if not form:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    stride, padding, dilation, _ = window_of(form)
    each = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = [(n + 2 * pad - spread * (taps - 1) - 1) // step + 1 for n, taps, step, pad, spread in each]
    return x.new_empty((x.shape[0], weight.shape[0], *sizes))


def window_of(form):
    return form[:2], form[2:4], form[4:6], form[6]


def to_product(match, fault):
    weight, into, out = integer_weight(match["w"]), qparams(match["into"]), qparams(match.root)
    bias = constant_value(match["b"]) if "b" in match else torch.zeros_like(weight.scales)
    numbers = (weight.values, bias.detach() / out.scale, weight.scales * into.scale / out.scale)
    held = [constant(match.root, name, v) for name, v in zip(("weight", "bias", "ratio"), numbers, strict=True)]
    form = []
    if "conv" in str(match["op"].target):
        given = operands(match["op"])
        each = (given[name] for name in ("stride", "padding", "dilation"))
        form = [*(n for sizes in each for n in (list(sizes) * 2)[:2]), given["groups"]]
    zeros = [into.zero_point, out.zero_point]
    args = (match["x"], *held, zeros, form, fault)
    return call(match.root, torch.ops.faulty_npu.product.default, args, match["op"], torch.int8)


INTO = dequantize(input=value("x"), name="into", where=(lambda match: is_static(match["into"]),))


def backend(fault="", level=Level.ONE_STEP, **shown):
    rules = tuple(
        Rule(quantize(input=op(name, input=INTO, weight=value("w"), bias=optional(value("b")), name="op")), to)
        for name in ("conv2d.default", "linear")
        for to in [partial(to_product, fault=fault)]
    )
    made = (convolution((2,), ()), linear(()))
    rows = tuple(row.within(level).shown_by(*shown.get(row.name, ())).where(not_decomposed) for row in made)
    lower = partial(lower_by_rules, rules=rules, library="faulty_npu")
    return Backend("faulty", rows, dtypes=(INT8,), lowering=lower)


def not_decomposed(match, config):
    whole = ("aten.conv2d.default", "aten.linear.default")
    return None if str(match["op"].target) in whole else "the rules are about whole operators"


def one_convolution():
    """What an author shows who thinks of images about zero, with weights of one size."""
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3), (torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8),)


def one_layer():
    torch.manual_seed(0)
    return nn.Linear(8, 4), (torch.linspace(-1, 1, 64).view(8, 8),)


SHOWN = {"conv": (one_convolution,), "linear": (one_layer,)}
FAULTS = (
    "input zero point",
    "output zero point",
    "scales of channels",
    "padding",
    "bias",
    "first call",
    "saturation",
    "half of the range",
    "groups",
    "depthwise only",
    "dilation",
    "order of dimensions",
    "first dimension",
)


TOLD = {
    "first call": "other data of its range",
    "saturation": "(the calibration data|inputs beyond the calibrated range)",
}


def failures(made, check):
    """Yields what fails a check in forms of the convolution, without what it does not need."""
    tried = (judge(trial, check) for trial in trials(made, "conv"))
    return (verdict.reason for verdict in tried if verdict.status == "failed")


@pytest.mark.parametrize(
    ("level", "shown"),
    [(Level.APPROXIMATE, SHOWN), pytest.param(Level.ONE_STEP, {}, marks=pytest.mark.slow)],
    ids=["shown", "generated"],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_r08_b26_a_kernel_with_one_fault_fails_the_level(fault, level, shown):
    SEEN.clear()
    told = f"the program against the q/dq graph, on {TOLD.get(fault, 'the calibration data')}"
    assert any(re.match(told, reason) for reason in failures(backend(fault, level, **shown), "level"))


@pytest.mark.slow
@pytest.mark.parametrize("shown", [{}, SHOWN], ids=["generated", "shown"])
def test_r08_b26_the_honest_kernel_passes(shown):
    found = [(check, verdict) for _, check, verdict in verdicts(backend(**shown))]
    assert [verdict.reason for _, verdict in found if verdict.status == "failed"] == []
    assert {check for check, verdict in found if verdict.status == "passed"} == set(CHECKS) - {"emulated", "rescaled"}


def test_b26_what_an_author_shows_comes_beside_the_forms_that_the_kit_makes():
    names = {trial.form.name for trial in trials(backend(**SHOWN), "conv")}
    assert {"one_convolution", "one_convolution-positive"} < names
    assert names - {"one_convolution", "one_convolution-positive"} == {
        trial.form.name for trial in trials(backend(), "conv")
    }
