"""Layers in scopes (`no_grad`, autocast that is off, one inside the other) run on integer kernels like any other."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr


class Scoped(nn.Module):
    """Four layers: plain, without gradients, with autocast off, and in both scopes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.layers[0](x))
        with torch.no_grad():
            x = torch.relu(self.layers[1](x))
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.layers[2](x))
            with torch.no_grad():
                x = self.layers[3](x)
        return x


def batches():
    generator = torch.Generator().manual_seed(1)
    # Of few rows OpenVINO makes float products where it has one thread.
    return [torch.randn(16, 16, generator=generator) * (1 + i) for i in range(3)]


def lowered(backend, strict, config=None):
    model, inputs = Scoped().eval(), batches()
    program = torch.export.export(model, (inputs[0],), strict=strict)
    return model, quantplug.quantize(program, (inputs[0],), backend, inputs, config, progress=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
def test_layers_in_scopes_run_on_integers_and_the_report_calls_their_weights_static(backend, strict):
    model, artefact = lowered(backend, strict)
    linears = [op for op in artefact.program.ops if "linear" in op.target]
    assert len(linears) == 4
    assert [op for op in linears if op.placement != "int8"] == []
    rows = [row for row in artefact.report.rows if row.operator == "linear"]
    assert [row.quantized for row in rows] == [True] * 4
    assert not any("dynamic" in row.how for row in rows)
    for x in batches()[:2]:
        found = artefact(x)
        assert sqnr(found, artefact.reference(x)) > 35
        assert sqnr(found, model(x)) > 25


@pytest.mark.few(1)
@pytest.mark.parametrize("kernels", ["xnnpack", "x86"])
def test_emulation_takes_layers_in_scopes(kernels):
    _, artefact = lowered(kernels, strict=False)
    emulated = quantplug.get_quantizer(kernels).backend.emulate(artefact.reference, (batches()[0],))
    assert [op.placement for op in emulated.ops if "linear" in op.target] == ["int8"] * 4
    for x in batches()[:2]:
        assert sqnr(emulated(x), artefact(x)) > 60


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = torch.relu(self.first(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(x)
        return x.float()


def quantized_half(backend):
    model, inputs = Half().eval(), batches()
    program = torch.export.export(model, (inputs[0],))
    return model, inputs, quantplug.quantize(program, (inputs[0],), backend, inputs, progress=False)


def test_autocast_that_is_on_computes_what_the_model_does_on_x86():
    model, inputs, artefact = quantized_half("x86")
    for x in inputs[:2]:
        assert sqnr(artefact(x), model(x)) > 25


@pytest.mark.parametrize("backend", ["xnnpack", "openvino"])
def test_autocast_that_is_on_is_refused_in_a_sentence(backend):
    with pytest.raises(quantplug.QuantplugError, match="autocast") as error:
        quantized_half(backend)
    assert "\n" not in str(error.value)
