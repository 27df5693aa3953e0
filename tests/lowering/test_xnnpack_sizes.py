"""Open sizes in the runtime: the whole range that was exported, from call to call, or a sentence that says why not."""

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError

BATCH = torch.export.Dim("batch", min=1, max=64)


def quantized(model, x, shapes):
    return quantplug.quantize(model.eval(), (x,), "xnnpack", [x], dynamic_shapes=shapes, progress=False)


def require_agreement(artefact, *batches):
    for x in batches:
        assert decibels(artefact(x), artefact.reference(x)) >= 40


def test_a_program_of_convolutions_takes_every_batch_that_was_exported():
    """Fake convolutions ask whether the batch is below 16."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    artefact = quantized(model, torch.randn(4, 3, 8, 8), ({0: BATCH},))
    require_agreement(artefact, *(torch.randn(size, 3, 8, 8) for size in (1, 15, 16, 64, 2)))


def test_integer_means_are_right_in_calls_that_grow():
    """XNNPACK's mean wrote its sums into memory of the smaller call before."""
    model = Net(lambda net, x: F.adaptive_avg_pool2d(F.relu(net.layer(x)), 1), layer=nn.Conv2d(3, 16, 3))
    for first in (4, 5):
        artefact = quantized(model, torch.randn(4, 3, 8, 8), (({0: BATCH},),))
        require_agreement(artefact, *(torch.randn(size, 3, 8, 8) for size in (first, 15, 60)))
    assert {op.placement for op in artefact.program.ops if "mean" in op.target} == {"float"}


def test_a_mean_of_fixed_sizes_stays_integer():
    model = Net(lambda net, x: F.adaptive_avg_pool2d(F.relu(net.layer(x)), 1), layer=nn.Conv2d(3, 16, 3))
    artefact = quantized(model, torch.randn(4, 3, 8, 8), None)
    assert {op.placement for op in artefact.program.ops} == {"int8"}


@pytest.mark.parametrize("shapes", [(({0: BATCH}, {0: BATCH}),), {"xs": ({0: BATCH}, {0: BATCH})}])
def test_inputs_of_any_number_have_open_sizes(shapes):
    def both(net, *xs):
        return net.layer(xs[0]) + net.layer(xs[1]).relu()

    class Variadic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, *xs):
            return both(self, *xs)

    inputs = (torch.randn(4, 8), torch.randn(4, 8))
    artefact = quantplug.quantize(Variadic().eval(), inputs, "xnnpack", [inputs], dynamic_shapes=shapes, progress=False)
    for size in (1, 33, 64):
        given = torch.randn(size, 8), torch.randn(size, 8)
        assert decibels(artefact(*given), artefact.reference(*given)) >= 40


@pytest.mark.parametrize("size", [torch.export.Dim("rows"), torch.export.Dim.AUTO])
def test_sizes_without_a_limit_are_refused(size):
    model, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(4, 8)
    with pytest.raises(LoweringError, match=r"Size 0 of input 0 \('input_?1?'\) is open without an upper limit"):
        quantized(model, x, ({0: size},))
