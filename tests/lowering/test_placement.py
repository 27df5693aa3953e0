"""Where operators ran: an operator is int8 because a kernel of it was recorded."""

import pytest
import torch
from qdq_graphs import Net, TensorWeight, fake, graph_of
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.graph.editing import call, constant
from quantplug.core.patterns.language import op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import dequantize, quantize
from quantplug.lowering.placement import place, record
from quantplug.lowering.xnnpack import lower

aten = torch.ops.aten


class Between(nn.Module):
    """Operators that compute nothing, between float layers and between integer ones."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.LayerNorm(8), nn.LayerNorm(8), nn.Dropout()
        self.three, self.four = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.drop(self.two(self.drop(self.one(x)).detach()))
        return self.four(self.drop(torch.relu(self.three(x))))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
def test_what_computes_nothing_runs_on_no_integer_kernel(backend):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    program = quantplug.quantize(Between().eval(), (x,), backend, [(x,)], progress=False).program
    placed = {found.node: found for found in program.ops}
    integer = {name for name, found in placed.items() if found.placement == "int8"}
    assert {"linear", "linear_1"} <= integer <= {"linear", "relu", "dropout_2", "linear_1"}
    assert all(placed[name].reason for name in placed.keys() - integer)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_integers_pass_by_what_computes_nothing(backend):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    artefact = quantplug.quantize(Between().eval(), (x,), backend, [(x,)], progress=False)
    row = next(row for row in artefact.report.rows if row.node == "dropout_2")
    placed = next(found for found in artefact.program.ops if found.node == "dropout_2")
    assert row.quantized == (placed.placement == "int8")


@pytest.mark.slow
def test_an_activation_runs_where_a_kernel_was_written_with_its_bounds(monkeypatch):
    """Behind it the integers end at zero, so that no number tells whether it was dropped."""
    from executorch.backends.xnnpack._passes.fuse_activation_pass import FuseActivationPass

    x = torch.randn(2, 8)
    net = Net(lambda s, x: fake(F.relu(F.linear(fake(x), s.w())), (0.02, -128)), w=TensorWeight(4, 8))
    graph = graph_of(net, x)
    assert [found.placement for found in lower(graph, (x,)).ops] == ["int8", "int8"]
    monkeypatch.setattr(FuseActivationPass, "get_fused_activation", lambda node: None)
    linear, relu = lower(graph, (x,)).ops
    assert linear.placement == "int8"
    assert (relu.placement, relu.reason) == ("float", "no kernel was written that clamps to its bounds")


class Forked(nn.Module):
    """A layer whose integers two others read, one of them padded unevenly."""

    def __init__(self):
        super().__init__()
        self.stem, self.even = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.uneven = nn.Conv2d(4, 4, (2, 3), padding="same")

    def forward(self, x):
        x = self.stem(x)
        return self.even(x), self.uneven(x)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_a_float_layer_is_float_although_its_padding_is_moved_in_integers(backend):
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 6)
    quantizer = quantplug.get_quantizer(backend).set_global("int8").set_module_name("uneven", None)
    program = quantplug.quantize(Forked().eval(), (x,), quantizer, [x], progress=False).program
    placed = {found.module_path: found for found in program.ops if "conv2d" in found.target}
    integer = {path: found.placement == "int8" for path, found in placed.items()}
    assert integer == {"stem": True, "even": True, "uneven": False}
    assert placed["uneven"].reason


class Cancelling(nn.Module):
    """Large numbers that cancel, so that the output's steps are much finer than those of the products."""

    def __init__(self):
        super().__init__()
        self.sum = nn.Linear(8, 4)
        nn.init.constant_(self.sum.weight, 1.0)
        nn.init.zeros_(self.sum.bias)

    def forward(self, x):
        return self.sum(torch.cat([x, -x], -1))


@pytest.mark.slow
def test_where_the_scales_of_a_linear_are_too_far_apart_the_program_says_float():
    calls = [(torch.randn(16, 4, generator=torch.manual_seed(seed)) * 1e5,) for seed in range(2)]
    artefact = quantplug.quantize(Cancelling().eval(), calls[0], "xnnpack", calls, progress=False)
    placed = next(found for found in artefact.program.ops if "linear" in found.target)
    assert placed.placement == "float"
    assert "ratio" in placed.reason


def placed_by(rewrite):
    """Where hardswish between quantize and dequantize runs after a rule for it."""

    class Piece(nn.Module):
        def forward(self, x):
            q = torch.ops.quantized_decomposed
            x = q.dequantize_per_tensor(
                q.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8), 0.1, 3, -128, 127, torch.int8
            )
            return q.quantize_per_tensor(torch.nn.functional.hardswish(x), 0.1, 3, -128, 127, torch.int8)

    graph = torch.export.export(Piece(), (torch.randn(4),)).module().graph
    recorded = record(graph)
    pattern = quantize(input=op("hardswish", self=dequantize(input=value("integers"), name="into"), name="op"))
    apply(graph, [Rule(pattern, rewrite)])
    (found,) = place(recorded, graph)
    return found


def kernel_and_view(match):
    kernel = call(match.root, aten.bitwise_xor.Scalar, (match["integers"], 1), match.root, torch.int8)
    return call(match.root, aten.clamp.default, (kernel, 0, 6), match.root, torch.int8)


def kernel_to_float_and_back(match):
    kernel = call(match.root, aten.sum.dim_IntList, (match["integers"], [0], True), match["op"], torch.int32)
    scaled = call(match.root, aten.mul.Tensor, (kernel, 0.5), match["op"])
    return call(match.root, match.root.target, (scaled, *match.root.args[1:]), match.root)


def float_arithmetic(match):
    gate = call(match.root, aten.hardsigmoid.default, (match["into"],), match["op"])
    product = call(match.root, aten.mul.Tensor, (match["into"], gate), match["op"])
    return call(match.root, match.root.target, (product, *match.root.args[1:]), match.root)


def float_arithmetic_with_integer_constants(match):
    held = constant(match.root, "held", torch.ones(4, dtype=torch.int8))
    real = call(match.root, aten.to.dtype, (held, torch.float32), match["op"])
    product = call(match.root, aten.mul.Tensor, (match["into"], real), match["op"])
    return call(match.root, match.root.target, (product, *match.root.args[1:]), match.root)


def the_same_again(match):
    widened = call(match.root, aten.to.dtype, (match["integers"], torch.float32), match["op"])
    again = call(match.root, aten.hardswish.default, (widened,), match["op"])
    return call(match.root, match.root.target, (again, *match.root.args[1:]), match.root)


@pytest.mark.parametrize("rewrite", [kernel_and_view, kernel_to_float_and_back])
def test_what_a_rule_brings_to_a_kernel_is_int8_wherever_the_kernel_stands(rewrite):
    assert placed_by(rewrite).placement == "int8"


@pytest.mark.parametrize("rewrite", [float_arithmetic, float_arithmetic_with_integer_constants, the_same_again])
def test_what_a_rule_computes_in_float_is_float_whatever_stands_beside_it(rewrite):
    found = placed_by(rewrite)
    assert found.placement == "float"
    assert "no integer kernel for aten" in found.reason


def test_what_a_rule_refuses_is_float_with_its_reason():
    assert placed_by(lambda match: "never").placement == "float"
