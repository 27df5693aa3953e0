"""Open sizes on x86: sizes that are equal in the example stay as open as they were exported."""

import pytest
import torch
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.lowering.x86.running.program import X86Program

BATCH, STEPS = (torch.export.Dim(name, min=2, max=16) for name in ("batch", "steps"))


def positions():
    """Adds a table of (steps, channels) to tensors of (batch, steps, channels)."""
    net = Net(lambda net, x, table: net.after(torch.relu(net.fc(x) + table)), fc=nn.Linear(8, 8), after=nn.Linear(8, 8))
    inputs = torch.randn(4, 4, 8), torch.randn(4, 8)
    return net, inputs, ({0: BATCH, 1: STEPS}, {0: STEPS}), (torch.randn(3, 5, 8), torch.randn(5, 8))


def images():
    """Adds a buffer that is written, whose size is that of the batch; interpolates behind it."""

    def forward(net, x):
        net.fc.seen.add_(1)
        y = net.conv(x)
        y = nn.functional.interpolate(y, scale_factor=2, mode="bilinear").mean((2, 3))
        return net.fc(y) + net.fc.seen

    fc = nn.Linear(4, 4)
    fc.register_buffer("seen", torch.zeros(4))
    net = Net(forward, conv=nn.Conv2d(4, 4, 3, padding=1), fc=fc)
    return net, (torch.randn(4, 4, 4, 4),), ({0: BATCH},), (torch.randn(16, 4, 4, 4),)


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [positions, images])
@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_are_equal_in_the_example_stay_open(made, strict, tmp_path):
    """Comparing shapes closed them: other sizes were refused, and the program could not be saved."""
    torch.manual_seed(0)
    net, inputs, shapes, others = made()
    exported = torch.export.export(net.eval(), inputs, dynamic_shapes=(shapes,), strict=strict)
    artefact = quantplug.quantize(exported, None, "x86", [inputs, inputs], progress=False)
    assert isinstance(artefact.program, X86Program)
    ranges = artefact.program.exported().range_constraints.values()
    assert {(bound.lower, bound.upper) for bound in ranges} == {(2, 16)}
    loaded = X86Program.load(artefact.save(tmp_path / "model.pt2"))
    for given in (inputs, others):
        expected = artefact.reference(*given).detach()
        assert decibels(artefact(*given), expected) >= 50
        assert decibels(loaded(*given), expected) >= 50
