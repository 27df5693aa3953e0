"""Convolutions with narrow weights beside float images: linear layers over patches, in the file that a user gets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quantplug
from quantplug.core.errors import ModelError
from quantplug.core.specs.levels import sqnr

CONFIGS = {"int8_weight_only": (100, 35), "float16": (50, 50)}


def quantized(model, x, config, **options):
    torch.manual_seed(0)
    return quantplug.quantize(model.eval(), (x,), "xnnpack", config=config, progress=False, **options)


def require_agreement(artefact, model, config, *batches):
    of_graph, of_float = CONFIGS[config]
    for x in batches:
        assert sqnr(artefact.reference(x), artefact(x)) > of_graph
        assert sqnr(model(x), artefact(x)) > of_float


class Net(nn.Module):
    """Strides, a shortcut of one tap, a depthwise layer and a transposed one beside those that have patches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1, bias=False))
        self.short, self.deep = nn.Conv2d(16, 64, 1, 2, bias=False), nn.Conv2d(64, 64, 3, 1, 1, groups=64)
        self.wide = nn.ConvTranspose2d(64, 4, 2, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.wide(torch.relu(self.deep(torch.relu(self.body(x) + self.short(x)))))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "most"), [("int8_weight_only", 0.32), ("float16", 0.55)])
def test_e13_e08_a_network_of_convolutions_has_a_small_file_and_one_delegate(config, most):
    model, x = Net().eval(), torch.randn(2, 3, 32, 32)
    artefact = quantized(model, x, config)
    require_agreement(artefact, model, config, x, torch.randn(2, 3, 32, 32))
    wide = [value for name, value in model.named_parameters() if name.startswith(("deep", "wide"))]
    parameters = sum(value.numel() for value in model.parameters()) - sum(value.numel() for value in wide)
    least = 1 if config == "int8_weight_only" else 2
    # What stays float is stored as it is; beside it each node of a program takes about a hundred bytes.
    fixed = 4 * sum(value.numel() for value in wide) + 30_000
    assert least * parameters < artefact.nbytes < most * 4 * parameters + fixed
    assert artefact.program.delegates == 1
    rows = {row.node: row for row in artefact.report.rows if row.operator.startswith("conv")}
    assert [row.quantized for row in rows.values()] == [True] * 4 + [False] * 2
    assert "which only linear layers read, and it has 64 groups" in next(
        row.reason for row in rows.values() if row.module_path == "deep"
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 9, 9)),
        (nn.Conv2d(8, 16, 3, stride=2, padding=1), (2, 8, 9, 9)),
        (nn.Conv2d(8, 16, 1, stride=2, bias=False), (2, 8, 8, 8)),
        (nn.Conv2d(8, 16, (3, 2), stride=(2, 1), dilation=(1, 2), padding="valid"), (1, 8, 10, 9)),
        (nn.Conv2d(8, 16, (4, 3), padding="same", dilation=2), (2, 8, 9, 9)),
        (nn.Conv2d(8, 16, 5, stride=3, dilation=2), (1, 8, 15, 11)),
        (nn.Conv2d(8, 16, 1), (8, 5, 5)),
        (nn.Conv1d(8, 16, 5, padding=2), (2, 8, 20)),
        (nn.Conv1d(8, 12, 3, stride=3), (2, 8, 20)),
        (nn.Conv2d(4, 8, 3, padding=1, padding_mode="replicate"), (2, 4, 6, 6)),
    ],
    ids=str,
)
def test_every_geometry_is_computed(layer, shape, config):
    x = torch.randn(shape)
    artefact = quantized(layer, x, config)
    assert all(row.quantized for row in artefact.report.rows if row.operator.startswith("conv"))
    require_agreement(artefact, layer, config, x, torch.randn(shape))


@pytest.mark.slow
@given(
    channels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    more=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    config=st.sampled_from(list(CONFIGS)),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_random_geometries_are_computed(channels, kernel, stride, dilation, padding, more, config):
    sizes = [d * (k - 1) + 1 + m for k, d, m in zip(kernel, dilation, more, strict=True)]
    torch.manual_seed(0)
    one, other = channels
    layer = nn.Conv2d(one, other, kernel, stride, padding, dilation).eval()
    x = torch.randn(2, channels[0], *sizes)
    artefact = quantized(layer, x, config)
    for batch in (x, torch.randn_like(x)):
        assert sqnr(artefact.reference(batch), artefact(batch)) > CONFIGS[config][0]


@pytest.mark.slow
def test_an_open_batch_has_patches_too():
    batch = torch.export.Dim("batch", min=1, max=32)
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(), torch.randn(4, 4, 12, 12)
    artefact = quantized(model, x, "int8_weight_only", dynamic_shapes=({0: batch},))
    require_agreement(artefact, model, "int8_weight_only", *(torch.randn(n, 4, 12, 12) for n in (1, 32, 5)))


@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 8, 8), "it has 2 groups"),
        (nn.Conv2d(3, 8, 7), (2, 3, 12, 12), "reads 49 numbers a channel, more than 25"),
        (nn.ConvTranspose2d(3, 8, 3), (2, 3, 8, 8), "the config quantizes weights only"),
    ],
)
def test_what_has_no_patches_stays_float_with_the_reason(layer, shape, reason):
    with pytest.raises(ModelError, match=reason):
        quantized(layer, torch.randn(shape), "int8_weight_only")


def test_open_images_stay_float_with_the_reason():
    size = torch.export.Dim("size", min=8, max=32)
    with pytest.raises(ModelError, match="the size of what it reads is open"):
        quantized(
            nn.Conv2d(3, 8, 3), torch.randn(2, 3, 12, 12), "int8_weight_only", dynamic_shapes=({2: size, 3: size},)
        )


class Bounded(nn.Module):
    def __init__(self, bound):
        super().__init__()
        self.conv, self.head, self.bound = nn.Conv2d(8, 8, 3, padding="same"), nn.Linear(12, 12), bound

    def forward(self, x):
        return self.head(self.bound(self.conv(x)))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["float16", "int8_dynamic"])
@pytest.mark.parametrize("bound", [lambda y: torch.clamp_min(y, 0.1), lambda y: y.clamp(min=0.1)], ids=["min", "clamp"])
def test_a_clamp_that_computes_in_float_behind_a_narrow_layer_stays_outside_where_the_delegate_fails(bound, config):
    torch.manual_seed(0)
    calls = [torch.randn(2, 8, 12, 12) for _ in range(2)]
    artefact = quantized(Bounded(bound).eval(), calls[0], config)
    for x in calls:
        assert sqnr(artefact.reference(x), artefact(x)) > 60
