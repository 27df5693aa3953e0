"""Single numbers picked from rows of tensors with open sizes are exact products inside of XNNPACK's delegates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quantplug
from quantplug.core.graph.facts import operator_name
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.rewrites.parts import parts_of_open_rows_are_products

WIDTH = 12
LENGTH = {"x": {1: torch.export.Dim("length", min=2, max=16)}}


class Picking(nn.Module):
    """A function of rows of open length."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.sin())


PICKED = {
    "halves turned": lambda x: torch.cat((-x[..., 6:], x[..., :6]), -1),
    "neighbours turned": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "each twice": lambda x: x.repeat_interleave(2, -1),
    "a part turned": lambda x: torch.cat((-x[..., 4:8], x[..., :4], x[..., 8:]), -1),
    "one of pairs": lambda x: x.reshape(*x.shape[:-1], 6, 2).select(-1, 1),
    "of three": lambda x: x.reshape(*x.shape[:-1], 2, 3, 2)[..., 1, :],
    "a part of a part": lambda x: x[..., 2:][..., :-3][..., ::2],
    "last": lambda x: x[..., -1],
    "narrow": lambda x: x.narrow(-1, 3, 4),
}


def exported(function, length=5):
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
    return torch.export.export(Picking(function).eval(), (x,), dynamic_shapes=LENGTH).module()


@pytest.mark.parametrize("name", PICKED)
def test_what_is_picked_is_the_same_to_the_bit(name):
    graph = parts_of_open_rows_are_products(exported(PICKED[name]))
    names = {operator_name(node) for node in graph.graph.nodes}
    assert "aten::linear" in names
    assert names.isdisjoint({"aten::slice", "aten::select", "aten::cat", "aten::stack", "aten::repeat_interleave"})
    for length in (2, 9, 16):
        x = torch.randn(2, length, WIDTH)
        assert torch.equal(graph(x), PICKED[name](x.sin()))


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(-14, 14),
    end=st.one_of(st.none(), st.integers(-14, 14)),
    step=st.integers(1, 4),
    is_joined=st.booleans(),
)
def test_any_slice_is_the_same_to_the_bit(start, end, step, is_joined):
    def function(x):
        part = x[..., start:end:step]
        return torch.cat((-part, x, part), -1) if is_joined else part

    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(parts_of_open_rows_are_products(exported(function))(x), function(x.sin()))


LEFT = {
    "samples": lambda x: x[1:],
    "twice": lambda x: torch.cat((x, x), -1),
    "neighbours together": lambda x: torch.cat((x[..., 4:], -x[..., 1:10]), -1),
    "of two tensors": lambda x: torch.cat((x.sin()[..., :3], x.cos()[..., :3]), -1).sin(),
    "a mask": lambda x: x.masked_fill(x > 0, -torch.inf)[..., 1:],
    "large": lambda x: x.repeat(1, 1, 40)[..., 1:],
}


@pytest.mark.parametrize("name", LEFT)
def test_other_parts_compute_the_same(name):
    graph = parts_of_open_rows_are_products(exported(LEFT[name]))
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(graph(x), LEFT[name](x.sin()))
    names = [operator_name(node) for node in graph.graph.nodes]
    assert ("aten::linear" in names) == (name == "of two tensors")


class Turned(nn.Module):
    """Linear layers around what is picked."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first = function, nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(function(torch.zeros(1, 1, WIDTH)).reshape(-1).shape[0], 8)

    def forward(self, x):
        return self.last(self.function(self.first(x)).flatten(2))


def places(artefact):
    """Returns how many delegates there are, and how many operators outside of them."""
    return artefact.program.counts.delegates, artefact.program.counts.portable


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("name", ["halves turned", "neighbours turned", "of three", "each twice", "one of pairs"])
def test_a_file_of_open_length_is_one_delegate(name, config):
    model = Turned(PICKED[name]).eval()
    batches = [(torch.randn(2, length, WIDTH),) for length in (5, 9, 3)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, config, dynamic_shapes=LENGTH, progress=False)
    assert places(artefact) == (1, 0)
    for [x] in (*batches, batches[0]):
        assert sqnr(artefact(x), artefact.reference(x)) > 35
        assert sqnr(artefact(x), model(x)) > 20
