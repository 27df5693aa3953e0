"""Whole models in the runtime: sizes of files, dynamic sequences, encoders in every mode."""

import copy

import pytest
import torch
from models import ResNet18
from qdq_graphs import decibels
from torch import nn

import quantplug
from quantplug.lowering.xnnpack import XNNPACKProgram

LENGTH = torch.export.Dim("length", min=2, max=32)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, activation="gelu", batch_first=True).eval()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_a_dynamic_sequence_runs_at_every_length(config):
    model, x = encoder(), torch.randn(1, 8, 32)
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: LENGTH},)).module()
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    quantplug.calibrate(prepared, [x, torch.randn(1, 13, 32)])
    converted = quantplug.convert_pt2e(prepared)
    program = quantizer.backend.lower(converted, (x,))
    linears = [op.placement for op in program.ops if "linear" in op.target]
    assert set(linears) == {"int8"}
    assert not any("refuse" in (op.reason or "") for op in program.ops)  # the first program runs and agrees
    for length in (2, 5, 17, 32):
        fresh = torch.randn(1, length, 32)
        assert decibels(program(fresh), converted(fresh)) >= (40 if config == "int8" else 30)


@pytest.mark.slow
def test_resnet18_is_a_quarter_of_its_float_file():
    torch.manual_seed(0)
    model, x = ResNet18().eval(), torch.randn(1, 3, 64, 64)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    stored = sum(p.numel() * 4 for p in model.state_dict().values())
    assert artefact.nbytes <= 0.27 * stored
    assert isinstance(artefact.program, XNNPACKProgram)
    assert (artefact.program.counts.f32, artefact.program.delegates) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int4_dynamic", "int4_dynamic_groups"])
def test_four_bit_linear_layers_of_an_mlp_are_a_sixth_of_their_float_file(config):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).eval(), torch.randn(2, 1024)
    artefact = quantplug.quantize(model, (x,), "xnnpack", config=config, progress=False)
    assert artefact.nbytes <= 0.16 * sum(p.numel() * 4 for p in model.parameters())


class Branches(nn.Module):
    """A model whose branches hold layers, one of them below another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(t: torch.Tensor) -> torch.Tensor:
            return torch.cond(t[0, 0] > 0, lambda u: self.b(u).relu(), lambda u: u * 2.0, (t,))

        return self.c(torch.cond(x.sum() > 0, self.a, inner, (x,)))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_layers_in_branches_run_on_integer_kernels(config):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 8) for _ in range(8)]
    calibration = None if config == "int8_dynamic" else inputs
    artefact = quantplug.quantize(Branches().eval(), (inputs[0],), "xnnpack", calibration, config, progress=False)
    linears = [op.placement for op in artefact.program.ops if "linear" in op.target]
    assert linears == ["int8"] * 3
    for x in inputs:
        assert decibels(artefact(x), artefact.reference(x)) >= 35


class Scopes(nn.Module):
    """A model of which one layer is in a scope without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.a(x).relu()
        with torch.autocast("cpu", enabled=False):
            y = y * 2.0
        return self.b(y.mean((-2, -1)))


@pytest.mark.slow
def test_layers_in_scopes_run_on_integer_kernels():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 3, 8, 8) for _ in range(8)]
    artefact = quantplug.quantize(Scopes().eval(), (inputs[0],), "xnnpack", inputs, progress=False)
    assert isinstance(artefact.program, XNNPACKProgram)
    assert (artefact.program.counts.f32, artefact.program.counts.portable) == (0, 0)
    for x in inputs:
        assert decibels(artefact(x), artefact.reference(x)) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "int8_per_tensor"])
def test_transposed_convolutions_with_groups_run(config):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 8, 8, 8) for _ in range(4)]
    layers = nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    model = nn.Sequential(*layers).eval()
    artefact = quantplug.quantize(model, (inputs[0],), "xnnpack", inputs, config, progress=False)
    placed = {op.target.split(".")[1]: op.placement for op in artefact.program.ops}
    assert placed["conv_transpose2d"] == ("float" if config == "int8" else "int8")
    assert placed["conv2d"] == "int8"
    assert decibels(artefact(inputs[1]), artefact.reference(inputs[1])) >= 40


def test_a_channels_last_model_runs():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 3)
    model = nn.Sequential(*layers).eval()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(1, 3, 16, 16).to(memory_format=torch.channels_last)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    assert isinstance(artefact.program, XNNPACKProgram)
    assert (artefact.program.counts.f32, artefact.program.counts.portable) == (0, 0)
    assert decibels(artefact(x), artefact.reference(x)) >= 40


class Remembers(nn.Module):
    """A counter and a cache that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.full((1,), 3.0))
        self.register_buffer("last", torch.ones(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = self.layer(x) + 0.1 * self.calls + 0.5 * self.last
        self.last.copy_(y)
        return y


@pytest.mark.slow
def test_a_program_begins_with_the_state_of_its_model_and_keeps_it_between_calls():
    torch.manual_seed(0)
    model, inputs = Remembers().eval(), [torch.randn(1, 4) for _ in range(6)]
    fresh = copy.deepcopy(model)
    artefact = quantplug.quantize(model, (inputs[0],), "xnnpack", inputs, progress=False)
    with torch.no_grad():
        expected = [fresh(x) for x in inputs]
    for _ in range(2):
        found = [artefact(x) for x in inputs]
        assert decibels(torch.cat(found), torch.cat(expected)) > 30
        artefact.program.restart()
    assert model.calls == 3
