"""Where operators ran: an operator is int8 because a kernel of it was recorded."""

import pytest
import torch
from torch import nn

import quantplug


class Between(nn.Module):
    """Operators that compute nothing, between float layers and between integer ones."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.LayerNorm(8), nn.LayerNorm(8), nn.Dropout()
        self.three, self.four = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.drop(self.two(self.drop(self.one(x)).detach()))
        return self.four(self.drop(torch.relu(self.three(x))))


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
def test_what_computes_nothing_runs_on_no_integer_kernel(backend):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    program = quantplug.quantize(Between().eval(), (x,), backend, [(x,)], progress=False).program
    placed = {found.node: found for found in program.ops}
    integer = {name for name, found in placed.items() if found.placement == "int8"}
    assert {"linear", "linear_1"} <= integer <= {"linear", "relu", "dropout_2", "linear_1"}
    assert all(placed[name].reason for name in placed.keys() - integer)


@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_integers_pass_by_what_computes_nothing(backend):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    artefact = quantplug.quantize(Between().eval(), (x,), backend, [(x,)], progress=False)
    row = next(row for row in artefact.report.rows if row.node == "dropout_2")
    placed = next(found for found in artefact.program.ops if found.node == "dropout_2")
    assert row.quantized == (placed.placement == "int8")
