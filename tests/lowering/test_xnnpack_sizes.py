"""Open sizes in the runtime: the whole range that was exported, from call to call, or a sentence that says why not."""

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.lowering.xnnpack import legalize
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.xnnpack import XNNPACK

BATCH = torch.export.Dim("batch", min=1, max=64)


def quantized(model, x, shapes):
    return quantplug.quantize(model.eval(), (x,), "xnnpack", [x], dynamic_shapes=shapes, progress=False)


def require_agreement(artefact, *batches):
    for x in batches:
        assert decibels(artefact(x), artefact.reference(x)) >= 40


@pytest.mark.slow
def test_a_program_of_convolutions_takes_every_batch_that_was_exported():
    """Fake convolutions ask whether the batch is below 16."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    artefact = quantized(model, torch.randn(4, 3, 8, 8), ({0: BATCH},))
    require_agreement(artefact, *(torch.randn(size, 3, 8, 8) for size in (1, 15, 16, 64, 2)))


@pytest.mark.slow
def test_convolutions_outside_of_delegates_take_every_batch_that_was_exported():
    """Memory is planned last, by a pass that traces what no delegate took once more."""

    def forward(net, x):
        rows = F.max_pool2d(x, 3, 3, 1).reshape(x.shape[0], 2, 4)
        mixed = net.mix(net.padded(rows))
        image = torch.stack([mixed, mixed], -1)
        gate = net.out(F.relu(net.into(F.adaptive_avg_pool2d(image, 1))))
        return image * torch.sigmoid(gate), mixed, net.norm(rows)

    layers = {
        "norm": nn.BatchNorm1d(2),  # ExecuTorch refuses it here in a delegate, so that all float operators leave them
        "padded": nn.Conv1d(2, 4, 3, 3, 3, 2, padding_mode="reflect"),
        "mix": nn.Linear(2, 4),
        "into": nn.Conv2d(4, 2, 1),
        "out": nn.Conv2d(2, 4, 1),
    }
    artefact = quantized(Net(forward, **layers), torch.randn(3, 2, 6, 6), (({0: BATCH},),))
    for size in (1, 15, 16, 64, 2):
        x = torch.randn(size, 2, 6, 6)
        pairs = zip(artefact(x), artefact.reference(x), strict=True)
        assert min(decibels(found, expected) for found, expected in pairs) >= 40


@pytest.mark.slow
def test_more_than_was_exported_is_told_with_the_limit():
    """The runtime's own error advised to export with dynamic shapes, which is what was done."""
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), torch.randn(4, 6, 8)
    shapes = ({0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("length", max=20)},)
    program = quantplug.quantize(model, (x,), "xnnpack", [x], dynamic_shapes=shapes, progress=False)
    assert program(torch.randn(16, 20, 8)).shape == (16, 20, 4)
    for size, words in (((17, 6, 8), "Size 0 of .* is 17, .* at most 16"), ((4, 21, 8), "Size 1 of .* at most 20")):
        with pytest.raises(LoweringError, match=words):
            program(torch.randn(size))
    assert program(x).shape == (4, 6, 4)


@pytest.mark.slow
def test_integer_means_are_right_in_calls_that_grow():
    """XNNPACK's mean wrote its sums into memory of the smaller call before."""
    model = Net(lambda net, x: F.adaptive_avg_pool2d(F.relu(net.layer(x)), 1), layer=nn.Conv2d(3, 16, 3))
    for first in (4, 5):
        artefact = quantized(model, torch.randn(4, 3, 8, 8), (({0: BATCH},),))
        require_agreement(artefact, *(torch.randn(size, 3, 8, 8) for size in (first, 15, 60)))
    assert {op.placement for op in artefact.program.ops if "mean" in op.target} == {"float"}


@pytest.mark.slow
def test_a_mean_of_fixed_sizes_stays_integer():
    model = Net(lambda net, x: F.adaptive_avg_pool2d(F.relu(net.layer(x)), 1), layer=nn.Conv2d(3, 16, 3))
    artefact = quantized(model, torch.randn(4, 3, 8, 8), None)
    assert {op.placement for op in artefact.program.ops} == {"int8"}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_padded_convolutions_take_every_batch_that_was_exported(mode, config):
    """A circular pad took the example's batch for the only one, and the program said so at its first other call."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(4, 4, 3, padding=(1, 2), padding_mode=mode)).eval()
    x = torch.randn(3, 4, 8, 8)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], config, dynamic_shapes=({0: BATCH},), progress=False)
    require_agreement(artefact, *(torch.randn(size, 4, 8, 8) for size in (3, 1, 64, 2)))


@pytest.mark.slow
def test_a_program_for_less_than_was_exported_is_refused_when_it_is_lowered(monkeypatch):
    monkeypatch.setattr(legalize, "AT_LOWERING", ())
    plain = derive(XNNPACK, "plain", transforms=())
    quantizer = type("Plain", (BackendQuantizer,), {"backend": plain})()
    model, x = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular").eval(), torch.randn(3, 4, 8, 8)
    with pytest.raises(LoweringError, match=r"at most \[3, 4, 8, 8\], and it was exported with up to \[64, 4, 8, 8\]"):
        quantplug.quantize(model, (x,), quantizer, [x], dynamic_shapes=({0: BATCH},), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("slopes", [1, 6])
@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (2, 6, 3, 6), (2, 6, 3, 4, 6)])
@pytest.mark.parametrize("config", ["int8", "int4_dynamic"])
def test_slopes_of_any_rank_and_open_batch_lower(slopes, shape, config):
    """XNNPACK's prelu reads channels last, which ExecuTorch could not arrange for three dimensions."""
    model = nn.Sequential(nn.Linear(shape[-1], 6), nn.PReLU(slopes), nn.Linear(6, 8)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.linspace(-0.5, 0.9, slopes))
    x = torch.randn(shape)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], config, dynamic_shapes=({0: BATCH},), progress=False)
    require_agreement(artefact, *(torch.randn(size, *shape[1:]) for size in (shape[0], 1, 7)))


LENGTH = torch.export.Dim("length", min=2, max=40)
LONGER = ((2, 16, 6), (5, 16, 40), (1, 16, 2), (64, 16, 11))


class Speech(nn.Module):
    """Convolutions over time between linear layers, for any number of recordings of any length."""

    def __init__(self):
        super().__init__()
        self.into, self.over, self.out = nn.Linear(16, 16), nn.Conv1d(16, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.over(self.into(x.transpose(1, 2)).transpose(1, 2)).relu().transpose(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["xnnpack", "tensorrt"])
@pytest.mark.filterwarnings("ignore:The quantizer is for backend")
def test_a_convolution_over_time_takes_open_batches_and_lengths(quantizer):
    """ExecuTorch writes it as a conv2d between two reshapes, and its serializer fails on those of two open sizes."""
    x, shapes = torch.randn(2, 16, 6), ({0: BATCH, 2: LENGTH},)
    chosen = quantplug.get_quantizer(quantizer)
    artefact = quantplug.quantize(
        Speech().eval(), (x,), "xnnpack", [x], quantizer=chosen, dynamic_shapes=shapes, progress=False
    )
    require_agreement(artefact, *(torch.randn(size) for size in LONGER))
    placed = {op.node: op for op in artefact.program.ops}
    assert placed["conv1d"].placement == "portable"
    assert "2 of its sizes are open" in placed["conv1d"].reason
    assert placed["linear"].placement == "int8"


def test_the_report_says_which_convolution_has_too_many_open_sizes():
    exported = torch.export.export(Speech().eval(), (torch.randn(LONGER[0]),), dynamic_shapes=({0: BATCH, 2: LENGTH},))
    prepared = quantplug.prepare_pt2e(exported.module(), quantplug.get_quantizer("xnnpack"))
    (row,) = (row for row in quantplug.explain(prepared).rows if "conv" in row.operator)
    assert "2 of its sizes are open" in row.reason


@pytest.mark.slow
def test_a_dimension_behind_two_open_sizes():
    model = Net(lambda net, x: net.layer(x.transpose(1, 2)).unsqueeze(-1) + 1.0, layer=nn.Linear(16, 8))
    artefact = quantized(model, torch.randn(LONGER[0]), (({0: BATCH, 2: LENGTH},),))
    require_agreement(artefact, *(torch.randn(size) for size in LONGER))
