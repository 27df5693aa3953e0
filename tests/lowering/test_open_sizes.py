"""Tensors with open sizes inside of XNNPACK's delegates: parts, repetitions and scores, in files that run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quantplug
from quantplug.core.graph.facts import operator_name
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.rewrites.folding import constant_expressions_are_folded
from quantplug.lowering.rewrites.movement import index_is_slices, repeats_are_joined, strided_slice_is_view

WIDTH, HEADS = 24, 4
BATCH, LENGTH = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=3, max=32)
OPEN = {"batch": {0: BATCH}, "length": {1: LENGTH}, "both": {0: BATCH, 1: LENGTH}}
SIZES = [(2, 6), (3, 9), (1, 4), (2, 6)]


class Around(nn.Module):
    """Linear layers around a function of rows."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first = function, nn.Linear(16, WIDTH)
        self.last = nn.Linear(function(torch.zeros(1, 3, WIDTH)).shape[-1], 8)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def rows_of(kind, width=16):
    """Returns batches whose open sizes differ, the first one twice."""
    generator = torch.Generator().manual_seed(1)
    fixed = SIZES[0]
    sizes = [(n if kind != "length" else fixed[0], t if kind != "batch" else fixed[1]) for n, t in SIZES]
    return [torch.randn(*size, width, generator=generator) for size in sizes]


def places(artefact):
    """Returns how many delegates there are, and how many operators outside of them."""
    return artefact.program.counts.delegates, artefact.program.counts.portable


def joined_third(x):
    return x.unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()[1]


MOVED = {
    "halves turned": lambda x: torch.cat((-x[..., 12:], x[..., :12]), -1),
    "neighbours turned": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "one of three layers in one": joined_third,
    "three parts": lambda x: x.chunk(3, -1)[0] * x.chunk(3, -1)[1].tanh() + x.chunk(3, -1)[2],
    "every third": lambda x: x[..., 2::3],
    "each twice": lambda x: x.repeat_interleave(2, -1),
    "three times": lambda x: x.repeat(1, 1, 3),
    "beside itself": lambda x: torch.cat((x, x), -1),
    "of a list": lambda x: x[..., [5, 6, 7, 1, 2, 20]],
    "rolled": lambda x: x.roll(5, -1),
    "the first row": lambda x: x[:, 0],
    "the first rows": lambda x: x[:, :2],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("kind", ["batch", "length"])
@pytest.mark.parametrize("name", MOVED)
def test_what_only_moves_numbers_stays_in_one_delegate(name, kind, config):
    model, batches = Around(MOVED[name]).eval(), [(x,) for x in rows_of(kind)]
    artefact = quantplug.quantize(
        model, batches[0], "xnnpack", batches, config, dynamic_shapes=(OPEN[kind],), progress=False
    )
    assert places(artefact) == (1, 0)
    for [x] in batches:
        assert sqnr(artefact(x), artefact.reference(x)) > 60
        assert sqnr(artefact(x), model(x)) > 20


class Attention(nn.Module):
    """Layers with attention of heads, which share keys where there are fewer of these."""

    def __init__(self, layers=2, keys=HEADS, turns=False):
        super().__init__()
        torch.manual_seed(0)
        width, part = 32, 32 // HEADS
        self.part, self.keys, self.turns = part, keys, turns
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "asking": nn.Linear(width, width),
                    "asked": nn.Linear(width, keys * part),
                    "told": nn.Linear(width, keys * part),
                    "out": nn.Linear(width, width),
                    "norm": nn.LayerNorm(width),
                    "gate": nn.Linear(width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x, mask=None):
        for layer in self.layers:
            queries, keys, values = (
                layer[name](x).view(*x.shape[:2], -1, self.part).transpose(1, 2) for name in ("asking", "asked", "told")
            )
            if self.turns:
                queries = torch.cat((-queries[..., 4:], queries[..., :4]), -1) * 0.5 + queries
            found = nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=self.keys != HEADS
            )
            x = layer["norm"](x + layer["out"](found.transpose(1, 2).reshape(*x.shape[:2], -1)))
            x = x + nn.functional.gelu(layer["gate"](x))
        return x


def masked(kind, heads):
    """Returns batches with masks of [batch, heads, length, length], one row of which sees nothing."""
    generator, batches = torch.Generator().manual_seed(2), []
    for x in rows_of(kind, 32):
        mask = torch.rand(x.shape[0], heads, x.shape[1], x.shape[1], generator=generator) > 0.4
        mask[..., 0] = True
        mask[0, 0, 1] = False
        batches.append((x, mask))
    return batches


def run(model, batches, shapes, config):
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, config, dynamic_shapes=shapes, progress=False)
    for batch in batches:
        assert sqnr(artefact(*batch), artefact.reference(*batch)) > 50
        assert sqnr(artefact(*batch), model(*batch)) > 20
    return artefact


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("keys", [HEADS, 2, 1])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_scores_of_open_length_with_any_mask_stay_in_one_delegate(heads, keys, config):
    shapes = ({1: LENGTH}, {2: LENGTH, 3: LENGTH})
    artefact = run(Attention(keys=keys).eval(), masked("length", heads), shapes, config)
    assert places(artefact) == (1, 4)  # what the mask becomes, once for both layers


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("turns", [False, True])
def test_an_encoder_of_open_batch_and_length_has_two_delegates_a_layer(turns, config):
    """XNNPACK's views infer one open size, and heads are told apart by views; slices instead of these take longer."""
    batches = [(x,) for x in rows_of("both", 32)]
    artefact = run(Attention(turns=turns).eval(), batches, (OPEN["both"],), config)
    assert places(artefact) == (5, 0)


@pytest.mark.few(1)
def test_an_encoder_of_open_batch_and_length_with_a_mask_has_two_delegates_a_layer():
    shapes = (OPEN["both"], {0: BATCH, 2: LENGTH, 3: LENGTH})
    artefact = run(Attention().eval(), masked("both", 1), shapes, "int8_dynamic")
    assert places(artefact) == (5, 4)


def exported(function, *sizes, shapes):
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(0))
    return torch.export.export(Applied(function).eval(), (x,), dynamic_shapes=(shapes,)).module()


class Applied(nn.Module):
    """A function of a tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-WIDTH, WIDTH - 1), min_size=1, max_size=10))
def test_any_list_of_places_is_the_same_to_the_bit(places):
    graph = exported(lambda x: x[..., places], 2, 5, WIDTH, shapes=OPEN["length"])
    graph = index_is_slices(constant_expressions_are_folded(graph))
    names = {operator_name(node) for node in graph.graph.nodes}
    assert "aten::index" not in names
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(graph(x), x[..., places])


@settings(max_examples=30, deadline=None)
@given(
    start=st.integers(-WIDTH, WIDTH),
    end=st.one_of(st.none(), st.integers(-WIDTH, WIDTH)),
    step=st.integers(1, 5),
    times=st.integers(1, 4),
)
def test_any_slice_and_repetition_is_the_same_to_the_bit(start, end, step, times):
    def function(x):
        part = x[..., start:end:step]
        return torch.cat((part.repeat_interleave(times, -1), part.repeat(1, 1, times)), -1)

    graph = strided_slice_is_view(repeats_are_joined(exported(function, 2, 5, WIDTH, shapes=None)))
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(graph(x), function(x))


LEFT = {
    "an index along the open size": lambda x: x[:, [0, 2]],
    "far apart": lambda x: x[..., ::2][..., [*range(11, -1, -1)]].flip(0),
    "a matrix of indices": lambda x: x[..., torch.tensor([[0, 1], [3, 2]])],
    "turned around": lambda x: x.flip(1),
    "repeated by an open size": lambda x: x[:1].repeat(x.shape[1], 1, 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_moves_compute_the_same(name):
    graph = exported(LEFT[name], 2, 5, WIDTH, shapes=OPEN["length"])
    for rewrite in (index_is_slices, repeats_are_joined, strided_slice_is_view):
        graph = rewrite(graph)
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(graph(x), LEFT[name](x))


class BesideConvolution(nn.Module):
    """A product of activations beside a layer that the runtime refuses, so that floats leave the delegates."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.ConvTranspose1d(5, 10, 4, 1, 1, 0, groups=5), nn.BatchNorm1d(10)

    def forward(self, x):
        y = nn.functional.hardtanh(self.norm(self.up(x)))
        return x @ x.transpose(-1, -2), y + y


def test_a_product_has_a_kernel_where_other_floats_leave_the_delegates():
    model, batches = BesideConvolution().eval(), [(torch.randn(3, 5, 6) * scale,) for scale in (0.1, 0.2)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, progress=False)
    for batch in (*batches, batches[0]):
        for found, wanted in zip(artefact(*batch), model(*batch), strict=True):
            assert sqnr(found, wanted) > 25
