"""Sums, activations and poolings with one fault each, which the plainest form of a row does not show."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.conformance import judge, trials
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


def written(numbers, scale, zero_point):
    return (torch.round(numbers / scale) + zero_point).clamp(-128, 127).to(torch.int8)


def of_first(numbers, fault):
    """Lets every sample from the third on have the numbers of the first."""
    return torch.cat([numbers[:2], numbers[:1].expand_as(numbers[2:])]) if fault == "third sample" else numbers


@torch.library.custom_op("faulty_cpu::add", mutates_args=())
def add(a: Tensor, b: Tensor, scales: list[float], zeros: list[int], relu: bool, fault: str) -> Tensor:
    one, other = ((x.double() - zero) * scale for x, zero, scale in zip((a, b), zeros[:2], scales[:2], strict=True))
    if fault == "broadcast" and one.shape != other.shape:
        one, other = torch.broadcast_tensors(one, other)
        other = other.flatten()[0]
    sums = one + other
    sums = of_first(sums, fault)
    return written(sums.clamp(min=0) if relu and fault != "activation" else sums, scales[2], zeros[2])


@add.register_fake
def _(a, b, scales, zeros, relu, fault):
    return a.new_empty(torch.broadcast_shapes(a.shape, b.shape))


@torch.library.custom_op("faulty_cpu::linear", mutates_args=())
def product(
    x: Tensor, w: Tensor, b: Tensor, s: Tensor, scale: float, zeros: list[int], relu: bool, fault: str
) -> Tensor:
    sums = of_first((x.double() - zeros[0]) @ w.double().t() * s + b, fault)
    return written(sums.clamp(min=0) if relu and fault != "activation" else sums, scale, zeros[1])


@product.register_fake
def _(x, w, b, s, scale, zeros, relu, fault):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("faulty_cpu::pool", mutates_args=())
def pool(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool, fault: str
) -> Tensor:
    numbers = x.double()
    right = F.max_pool2d(numbers, kernel, stride, padding, dilation, ceil)
    if fault == "padding":
        height, width = padding
        padded = F.pad(numbers, (width, width, height, height))
        return F.max_pool2d(padded, kernel, stride, 0, dilation, ceil)[..., : right.shape[-2], : right.shape[-1]].to(
            x.dtype
        )
    if fault == "dilation":
        right = F.max_pool2d(numbers, kernel, stride, padding, 1, ceil)[..., : right.shape[-2], : right.shape[-1]]
    if fault == "ceil_mode":
        down = F.max_pool2d(numbers, kernel, stride, padding, dilation)
        right = F.pad(down, (0, right.shape[-1] - down.shape[-1], 0, right.shape[-2] - down.shape[-2]), value=-128)
    return right.to(x.dtype)


@pool.register_fake
def _(x, kernel, stride, padding, dilation, ceil, fault):
    return F.max_pool2d(x.float(), kernel, stride, padding, dilation, ceil).to(x.dtype)


def to_add(match, fault):
    params = [qparams(match[name]) for name in ("da", "db")] + [qparams(match.root)]
    numbers = [found.scale for found in params], [found.zero_point for found in params]
    return torch.ops.faulty_cpu.add.default, (match["a"], match["b"], *numbers, "act" in match, fault)


def to_linear(match, fault):
    weight, into, out = integer_weight(match["w"]), qparams(match["dx"]), qparams(match.root)
    bias = constant_value(match["b"]).detach() if "b" in match else torch.zeros_like(weight.scales)
    held = (weight.values, bias, weight.scales * into.scale)
    made = [constant(match.root, name, found) for name, found in zip(("w", "b", "s"), held, strict=True)]
    zeros = [into.zero_point, out.zero_point]
    return torch.ops.faulty_cpu.linear.default, (match["x"], *made, out.scale, zeros, "act" in match, fault)


def to_pool(match, fault):
    given = operands(match["op"])
    kernel = list(given["kernel_size"])
    window = (kernel, list(given["stride"]) or kernel, list(given["padding"]), list(given["dilation"]))
    return torch.ops.faulty_cpu.pool.default, (match["x"], *window, given["ceil_mode"], fault)


def carried_out(match, to, fault):
    target, args = to(match, fault)
    return call(match.root, target, args, match["op"], torch.int8)


def integers(name):
    return dequantize(input=value(name), name=f"d{name}", where=(lambda match: is_static(match[f"d{name}"]),))


def whole(match, config):
    name = str(match["op"].target)
    return (
        None if name in ("aten.linear.default", "aten.add.Tensor", "aten.max_pool2d.default") else "no whole operator"
    )


def backend(fault="", sums_row=None):
    sums = op("add.Tensor", self=integers("a"), other=integers("b"), alpha=1, name="op")
    layer = op("linear", input=integers("x"), weight=value("w"), bias=optional(value("b")), name="op")
    kernels = (
        (op("relu", self=sums, name="act"), to_add),
        (sums, to_add),
        (op("relu", self=layer, name="act"), to_linear),
        (layer, to_linear),
        (op("max_pool2d", self=integers("x"), name="op"), to_pool),
    )
    rules = tuple(Rule(quantize(input=pattern), partial(carried_out, to=to, fault=fault)) for pattern, to in kernels)
    rows = (sums_row or binary("add"), linear(("relu",)), pooling("max_pool2d"))
    lower = partial(lower_by_rules, rules=rules, library="faulty_cpu")
    return Backend("faulty", tuple(r.where(whole).within(Level.ONE_STEP) for r in rows), dtypes=(INT8,), lowering=lower)


FAULTS = {
    "broadcast": ("add", "add_relu"),
    "activation": ("add_relu", "linear_relu"),
    "third sample": ("add", "add_relu", "linear_relu"),
    "padding": ("max_pool2d",),
    "dilation": ("max_pool2d",),
    "ceil_mode": ("max_pool2d",),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("fault", "label"), [(fault, label) for fault, labels in FAULTS.items() for label in labels])
def test_b26_a_fault_that_plain_forms_do_not_show_fails_the_level(fault, label):
    found = [judge(trial, "level") for trial in trials(backend(fault), label)]
    assert any(verdict.status == "passed" for verdict in found)
    reasons = [verdict.reason for verdict in found if verdict.status == "failed"]
    assert reasons
    assert all(reason.startswith("the program against the q/dq graph, on the calibration data") for reason in reasons)


@pytest.mark.few(1)
@pytest.mark.parametrize("before", [(), ("relu6",), ("relu6", "hardswish")])
def test_a_fault_from_the_third_sample_on_shows_in_whichever_size_a_rule_is_tried(before):
    found = trials(backend("third sample", binary("add", (*before, "relu"))))
    asked = [trial for trial in found if trial.claim.label in ("add", "add_relu")]
    assert {trial.claim.label for trial in asked if judge(trial, "level").status == "failed"} == {"add", "add_relu"}


@pytest.mark.few(2)
@pytest.mark.parametrize("label", ["add", "add_relu", "linear_relu", "max_pool2d"])
def test_b26_honest_operators_pass(label):
    found = [judge(trial, check) for trial in trials(backend(), label) for check in ("lowered", "delegated", "level")]
    assert [verdict.reason for verdict in found if verdict.status == "failed"] == []
    assert any(verdict.status == "passed" for verdict in found)
