"""Rows that nobody reads are not computed: the numbers stay, the operators before the slice become smaller."""

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import decibels
from torch import nn

import quantplug
from quantplug.lowering.xnnpack.rewrites import rewrite_for_xnnpack

TOKENS = 6


class Tokens(nn.Module):
    """A transformer block of which a function reads some tokens."""

    def __init__(self, read, *, batch_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.read = read
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, activation="gelu", batch_first=batch_first, norm_first=True
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.read(self.norm(self.layer(x)))


class Branches(nn.Module):
    """Layers of which a part of the result is read."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 24)

    def forward(self, x):
        return self.function(self, x)


def rewritten(model, x):
    exported = torch.export.export(model.eval(), (x,)).module()
    expected = exported(x)
    graph = rewrite_for_xnnpack(exported)
    torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-5)
    return graph.graph


def shapes(graph, kind):
    return [tuple(n.meta["val"].shape) for n in graph.nodes if str(n.target).startswith(f"aten.{kind}.")]


READS = {
    "the first token": lambda y: y[:, 0],
    "the last token": lambda y: y[:, -1],
    "a third of the tokens": lambda y: y[:, 2:4],
}


@pytest.mark.parametrize("name", READS)
def test_a_block_of_which_few_tokens_are_read_computes_these(name):
    graph = rewritten(Tokens(READS[name]), torch.randn(2, TOKENS, 16))
    rows = 2 if "third" in name else 1
    qkv, *others = shapes(graph, "linear")
    assert TOKENS in qkv, "keys and values of all tokens are read"
    assert len(others) == 3
    assert all(TOKENS not in shape for shape in others)
    assert all(shape[-2:] == (rows, TOKENS) for shape in shapes(graph, "softmax"))


def test_tokens_before_the_batch():
    graph = rewritten(Tokens(lambda y: y[0], batch_first=False), torch.randn(TOKENS, 2, 16))
    assert [shape[0] for shape in shapes(graph, "linear")] == [TOKENS, 2, 1, 1]


# What keeps every row: half of it and more is read, or two parts, or it is read in another way too.
WHOLE = {
    "most tokens": lambda s, x: s.one(x)[:, 1:],
    "two parts": lambda s, x: s.one(x)[:, :1] + s.one(x)[:, 1:2] * (y := s.two(x))[:, :1, :16] + y[:, 1:2, :16],
    "features": lambda s, x: s.two(x)[..., :8],
    "the sum too": lambda s, x: (y := s.one(x))[:, 0] + y.sum(1),
    "within the normalized": lambda s, x: F.layer_norm(x, (TOKENS, 16))[:, 0],
    "a step": lambda s, x: s.one(x)[:, ::3],
    "no costly operator": lambda s, x: F.relu(x * 2)[:, 0],
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_read_whole_is_computed_whole(name):
    x = torch.randn(2, TOKENS, 16)
    if name != "two parts":
        kinds = ("linear", "layer_norm", "relu")
        graph = rewritten(Branches(WHOLE[name]), x)
        assert all(shape[1] == TOKENS for kind in kinds for shape in shapes(graph, kind))
        return
    graph = rewritten(Branches(WHOLE[name]), x)
    assert [shape[1] for shape in shapes(graph, "linear")].count(TOKENS) == 1, "only the layer that both parts share"


PARTS = {
    "a product of rows": lambda s, x: (s.one(x) @ s.one(x).transpose(1, 2))[:, 0],
    "a product of columns": lambda s, x: (s.one(x) @ s.one(x).transpose(1, 2))[:, :, 0],
    "a turned view": lambda s, x: s.two(x).reshape(2, TOKENS, 4, 6).permute(0, 2, 1, 3)[:, :, 0],
    "a broadcast sum": lambda s, x: (s.one(x) + x[:, :1])[:, 3],
    "merged rows": lambda s, x: s.one(x).reshape(2 * TOKENS, 16)[:TOKENS],
    "some of a piece": lambda s, x: torch.cat([x * 2, s.one(x)], 1)[:, TOKENS + 1 : TOKENS + 3],
    "one operand twice": lambda s, x: ((y := s.one(x)) * y)[:, 0],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_many_operators(name):
    graph = rewritten(Branches(PARTS[name]), torch.randn(2, TOKENS, 16))
    assert any(shape[:-1] != (2, TOKENS) for shape in shapes(graph, "linear"))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrence_of_which_one_step_is_read_joins_no_steps(kind):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(16, 8, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0][:, -1]

    torch.manual_seed(0)
    graph = rewritten(Last(), torch.randn(1, TOKENS, 16))
    assert not shapes(graph, "cat")
    assert not shapes(graph, "transpose")


def test_a_whole_piece_of_a_concatenation_is_the_piece():
    read = Branches(lambda s, x: torch.cat([x * 2, s.one(x), x], 1)[:, TOKENS : 2 * TOKENS])
    graph = rewritten(read, torch.randn(2, TOKENS, 16))
    assert not shapes(graph, "cat")
    assert not shapes(graph, "slice")


@pytest.mark.slow
def test_the_program_of_a_classifier_on_one_token():
    x = torch.randn(1, TOKENS, 16)
    artefact = quantplug.quantize(Tokens(lambda y: y[:, 0]).eval(), (x,), "xnnpack", [x], progress=False)
    fresh = torch.randn(1, TOKENS, 16)
    assert decibels(artefact.program(fresh), artefact.reference(fresh)) >= 40


@pytest.mark.slow
def test_a_dynamic_batch_stays_dynamic():
    model, x = Tokens(lambda y: y[:, 0]).eval(), torch.randn(2, TOKENS, 16)
    batch = torch.export.Dim("batch", min=1, max=8)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module())
    assert shapes(graph.graph, "linear")[-1][1] == 1
    for rows in (1, 5):
        fresh = torch.randn(rows, TOKENS, 16)
        torch.testing.assert_close(graph(fresh), model(fresh), rtol=1e-4, atol=1e-5)
