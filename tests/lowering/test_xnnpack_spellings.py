"""One convolution in the ways in which exports and decompositions spell it: each runs in integers."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.xnnpack import XNNPACKProgram

ATEN = torch.ops.aten
ONE, NONE = [1, 1], [0, 0]
SPELLINGS = {
    "convolution": lambda x, w, b: ATEN.convolution.default(x, w, b, ONE, NONE, ONE, False, NONE, 1),
    "transposed": lambda x, w, b: ATEN.convolution.default(x, w, b, [2, 2], NONE, ONE, True, NONE, 1),
    "padding in words, one number for both strides": lambda x, w, b: ATEN.conv2d.padding(x, w, b, [1], "same"),
}


class Plain(nn.Module):
    """A convolution from six channels to six, and relu6 in place."""

    def __init__(self, spelled):
        super().__init__()
        self.spelled = spelled
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6, 3, 3)), nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x):
        return ATEN.relu6_.default(self.spelled(x, self.weight, self.bias))


@pytest.mark.few(1)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_convolutions_in_every_spelling_run_in_integers(spelling):
    torch.manual_seed(0)
    x = torch.randn(1, 6, 8, 8)
    artefact = quantplug.quantize(Plain(SPELLINGS[spelling]).eval(), (x,), "xnnpack", [x], progress=False)
    assert [op.placement for op in artefact.program.ops] == ["int8", "int8"]
    assert sqnr(artefact(x), artefact.reference(x)) > 40


@pytest.mark.slow
def test_a_convolution_that_is_padded_unevenly_in_words_runs_in_integers():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(6, 6, (2, 3), padding="same"), nn.ReLU()).eval(), torch.randn(1, 6, 8, 8)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    assert {op.placement for op in artefact.program.ops} == {"int8"}
    assert isinstance(artefact.program, XNNPACKProgram)
    assert artefact.program.delegates == 1
    assert sqnr(artefact(x), artefact.reference(x)) > 40
