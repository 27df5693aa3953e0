"""GELU written out by its formula becomes the operator that has a kernel, on both targets; what is near it does not."""

import math

import pytest
import torch
from extras import transformers_module
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.rewrites.gelu import written_gelu_is_one
from quantplug.lowering.xnnpack import XNNPACKProgram

ROOT = math.sqrt(2.0 / math.pi)
WRITTEN = {
    "as GPT-2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "as GPT-NeoX": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "cube of products": lambda x: (torch.tanh((x + x * x * x * 0.044715) * ROOT) + 1) * (x / 2),
    "as BERT": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "distribution": lambda x: x * ((1 + torch.erf(x / math.sqrt(2))) / 2),
    "methods": lambda x: x.mul(math.sqrt(0.5)).erf().add(1.0).div(2.0).mul(x),
}
OTHERS = {
    "other root": lambda x: 0.5 * x * (1.0 + torch.tanh(0.9 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "without the half": lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "minus": lambda x: 0.5 * x * (1.0 - torch.erf(x / math.sqrt(2.0))),
    "of a third": lambda x: 0.5 * x.flip(-1) * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "of each channel": lambda x: torch.linspace(0.4, 0.6, 16) * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "of a sum": lambda x: 0.5 * (x + 1) * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "of one row": lambda x: 0.5 * x * (1.0 + torch.erf(x[:1] / math.sqrt(2.0))),
}


class Between(nn.Module):
    """A function between two layers, behind a sum: what it is of is a sum too."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(16, 16), nn.Linear(16, 8), function

    def forward(self, x):
        return self.second(self.function(self.first(x) + x))


def operators(graph):
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_formula_is_the_operator(name, is_dynamic):
    model, x = Between(WRITTEN[name]).eval(), torch.randn(4, 16) * 3
    shapes = ({0: torch.export.Dim("batch", min=2, max=9)},) if is_dynamic else None
    graph = written_gelu_is_one(torch.export.export(model, (x,), dynamic_shapes=shapes).module())
    aten = torch.ops.aten
    assert operators(graph) & {aten.gelu.default, aten.erf.default, aten.tanh.default} == {aten.gelu.default}
    assert not operators(graph) & {aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.div.Tensor}
    assert torch.allclose(graph(x), model(x), atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_near_the_formula_stays(name):
    model, x = Between(OTHERS[name]).eval(), torch.randn(4, 16)
    graph = torch.export.export(model, (x,)).module()
    before = operators(graph)
    assert operators(written_gelu_is_one(graph)) == before
    assert torch.equal(graph(x), model(x))


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
@pytest.mark.parametrize("name", ["as GPT-2", "as BERT"])
def test_a_file_has_the_kernel_of_the_written_formula(name, backend):
    model = Between(WRITTEN[name]).eval()
    batches = [torch.randn(4, 16) * 2 for _ in range(4)]
    artefact = quantplug.quantize(model, (batches[0],), backend=backend, calibration=batches, progress=False)
    for x in batches[1:]:
        with torch.no_grad():
            assert sqnr(artefact(x), model(x)) > 28
    [function] = [row for row in artefact.program.ops if "gelu" in row.target]
    assert not {"erf", "pow", "tanh"} & {row.target.split(".")[1] for row in artefact.program.ops}
    if isinstance(artefact.program, XNNPACKProgram):
        assert function.placement == "int8"
        counts = artefact.program.counts
        assert (counts.delegates, counts.portable, counts.f32) == (1, 0, 0)


@pytest.mark.parametrize("kind", ["NewGELUActivation", "FastGELUActivation", "GELUActivation"])
def test_the_classes_of_transformers(kind):
    function = getattr(transformers_module("transformers.activations"), kind)(
        *[True] if kind == "GELUActivation" else []
    )
    graph = torch.export.export(Between(function).eval(), (torch.randn(2, 16),)).module()
    assert torch.ops.aten.gelu.default in operators(written_gelu_is_one(graph))
