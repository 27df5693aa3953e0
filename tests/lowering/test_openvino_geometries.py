"""Layers, averages, clamps, maxima and norms of any geometry on OpenVINO against their graphs."""

import random

import pytest
import torch
from test_x86_geometries import KINDS, ONE_COLUMN, geometry
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError, ModelError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.openvino import OpenVINOProgram

pytest.importorskip("openvino")


def quantized(model, *calls, **options):
    return quantplug.quantize(model.eval(), calls[:1], "openvino", list(calls), progress=False, **options)


def require_agreement(artefact, program, calls):
    for x in calls:
        wanted, found = artefact.reference(x), program(x)
        assert wanted.shape == found.shape
        assert (wanted - found).norm() <= 10 ** (-55 / 20) * wanted.norm()  # of a result that is zero too


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_COLUMN)
def test_a_result_of_one_column_is_computed_rightly_in_integers(name, tmp_path):
    model, shape = ONE_COLUMN[name]
    calls = [torch.randn(*shape) for _ in range(2)]
    artefact = quantized(nn.Sequential(model, nn.ReLU()), *calls)
    assert artefact.program.ops[0].placement == "int8"
    require_agreement(artefact, OpenVINOProgram.load(artefact.save(tmp_path / "program.zip")), calls)


@pytest.mark.slow
def test_open_sizes_that_may_be_one_column_wide():
    """torch leaves a result of one column open where the module has no convolution that it traced otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, (3, 4), stride=(1, 4), groups=4), nn.ReLU())
    sizes = ({2: torch.export.Dim("height", min=4, max=64), 3: torch.export.Dim("width", min=8, max=64)},)
    calls = [torch.randn(1, 4, 16, width) for width in (16, 8, 21)]
    artefact = quantized(model, *calls, dynamic_shapes=sizes)
    require_agreement(artefact, artefact.program, calls)


AVERAGES = {
    "a line": (nn.Conv1d(4, 4, 1), nn.AvgPool1d(3, 2, 1, ceil_mode=True), (2, 4, 8)),
    "an image": (nn.Conv2d(4, 4, 1), nn.AvgPool2d((5, 3), (2, 2), 1, ceil_mode=True), (2, 4, 12, 9)),
    "a window that would begin in the padding": (
        *(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2, 3, 1, ceil_mode=True)),
        (2, 4, 10, 10),
    ),
    "a volume": (nn.Conv3d(4, 4, 1), nn.AvgPool3d(3, 2, 1, ceil_mode=True), (1, 4, 8, 6, 7)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_that_count_padding_and_round_sizes_up(name):
    torch.manual_seed(0)
    layer, pool, shape = AVERAGES[name]
    calls = [torch.randn(*shape) + 3 for _ in range(2)]
    artefact = quantized(nn.Sequential(layer, pool), *calls)
    require_agreement(artefact, artefact.program, calls)


class Then(nn.Module):
    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer(x))


def biased(layer, number):
    nn.init.constant_(layer.bias, number)
    return layer


LAYERS = {
    "without a bias": lambda: nn.Conv1d(4, 8, 3, bias=False),
    "of biases 0": lambda: biased(nn.Conv1d(4, 8, 3), 0.0),
    "of biases 0.3": lambda: biased(nn.Conv1d(4, 8, 3), 0.3),
}
READERS = {
    "maxima": lambda y: y.amax(-1),
    "sums": lambda y: y.sum(-1),
    "maxima over samples": lambda y: y.amax(0),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_scales_of_channels_stay_with_their_channels(layer, read):
    torch.manual_seed(0)
    calls = [torch.randn(3, 4, 13) for _ in range(2)]
    artefact = quantized(Then(LAYERS[layer](), READERS[read]), *calls)
    assert artefact.program.ops[0].placement == "int8"
    require_agreement(artefact, artefact.program, calls)


CLAMPS = {
    "clamp": lambda y: y.clamp(-0.2, 0.3),
    "relu6": nn.functional.relu6,
    "hardtanh": nn.functional.hardtanh,
    "one bound": lambda y: y.clamp(max=0.3),
    "rows": lambda y: y.flatten(1).clamp(-0.2, 0.3).reshape(y.shape),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_clamps_of_integers_that_others_read_round_their_bounds(clamp):
    torch.manual_seed(0)
    calls = [torch.randn(2, 4, 9, 11) for _ in range(2)]
    artefact = quantized(Then(nn.Conv2d(4, 8, 3), lambda y: CLAMPS[clamp](y) + 2 * y), *calls)
    require_agreement(artefact, artefact.program, calls)


MAXIMA = {
    "a maximum": lambda x: x.amax(1),
    "a minimum": lambda x: x.amin(1),
    "with indices": lambda x: x.max(1).values,
    "a pooling": lambda x: nn.functional.adaptive_max_pool1d(x.mT, 1).squeeze(-1),
    "functions of it": lambda x: torch.tanh(2.5 * x.amax(1)),
    "a sum with others": lambda x: x.amax(1) + torch.arange(8.0),
    "a gate": lambda x: torch.sigmoid(x.amax(1)) * x.amax(1),
    "all of it": lambda x: x[:, 0] + x.max(),
}


@pytest.mark.slow
@pytest.mark.parametrize("read", MAXIMA)
def test_maxima_of_floats_are_quantized_as_they_are(read):
    torch.manual_seed(0)
    calls = [torch.randn(3, 10, 8) for _ in range(3)]
    artefact = quantized(nn.Sequential(Then(nn.Identity(), MAXIMA[read]), nn.Linear(8, 8)), *calls)
    require_agreement(artefact, artefact.program, calls)


class Shared(nn.Module):
    """Small integers that a norm and a layer read."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv1d(9, 8, 1, 3), nn.Linear(2, 2), norm

    def forward(self, x):
        x = self.first(x).relu()
        return self.norm(x), self.second(x)


NORMS = {
    "layer": nn.LayerNorm(2),
    "layer, transposed": lambda x: nn.functional.layer_norm(x.mT, (8,)),
    "group": nn.GroupNorm(2, 8),
    "instance": nn.functional.instance_norm,
}


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_integers_that_others_read_add_epsilon_to_the_variance_of_the_numbers(norm):
    torch.manual_seed(0)
    calls = [torch.randn(3, 9, 4) * 0.1 for _ in range(2)]
    artefact = quantized(Shared(NORMS[norm]), *calls)
    for x in calls:
        for wanted, found in zip(artefact.reference(x), artefact(x), strict=True):
            assert sqnr(found, wanted) > 60


@pytest.mark.slow
def test_averages_of_integers_count_zeros_as_padding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.AvgPool2d(3, 2, 1), nn.Conv2d(8, 4, 1))
    calls = [torch.randn(2, 4, 9, 11) + 1 for _ in range(2)]
    artefact = quantized(model, *calls)
    require_agreement(artefact, artefact.program, calls)


def test_averages_of_open_sizes_that_round_up_are_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True))
    sizes = ({2: 2 * torch.export.Dim("half", min=2, max=32)},)
    with pytest.raises(LoweringError, match=r"^OpenVINO computes 'avg_pool2d' .* wrongly, .* rounds open sizes up"):
        quantized(model, torch.randn(1, 4, 16, 16), dynamic_shapes=sizes)


@pytest.mark.slow
def test_a_program_that_does_not_compute_what_its_graph_does_is_refused():
    """OpenVINO takes the stride of a padded kernel of one pixel away, and writes more pixels than there are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1, stride=3, padding=1), nn.Sigmoid())
    with pytest.raises(LoweringError, match=r"^Output 0 of the program "):
        quantized(model, torch.randn(1, 4, 1))


@pytest.mark.slow
def test_every_geometry_is_right_or_refused():
    r, tried = random.Random(5), 0
    torch.manual_seed(5)
    while tried < 40:
        size, weight, given = geometry(r)
        model = nn.Sequential(KINDS[len(weight) - 3](size[1], weight[0], weight[2:], *given), nn.ReLU())
        calls = [torch.randn(*size) for _ in range(2)]
        try:
            artefact = quantized(model, *calls)
        except (LoweringError, ModelError):
            continue
        tried += 1
        require_agreement(artefact, artefact.program, calls)
