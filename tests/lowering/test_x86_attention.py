"""What attention reads: masks that mask nothing go, and what is the same at every call is computed once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import lower

aten = torch.ops.aten
BATCH = torch.export.Dim("batch", min=2, max=16)


class Encoder(nn.Module):
    """One attention block whose mask is computed from the number of positions."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(2, (4, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mask = self.seen(torch.arange(x.shape[1])).expand(x.shape[0], 1, x.shape[1], x.shape[1])
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def lowered(model, x, *, opened):
    shapes = ({0: BATCH},) if opened else None
    torch.manual_seed(0)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
    with torch.no_grad():
        prepared(x)
    graph = quantplug.convert_pt2e(prepared)
    return graph, lower(graph, (x,), dynamic_shapes=shapes)


def calls(program, *targets):
    return [node for node in program.portable.graph.nodes if node.target in targets]


@torch.no_grad()
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("seen", "is_masked"),
    [
        (lambda at: (at >= 0)[None, None, :, None], False),
        (lambda at: (at >= 1)[None, None, :, None], True),
        (lambda at: (at[None] <= at[:, None])[None, None], True),
    ],
)
def test_a_mask_that_masks_nothing_is_not_read(seen, is_masked, opened):
    x = torch.randn(2, 6, 32)
    graph, program = lowered(Encoder(seen), x, opened=opened)
    (attention,) = calls(program, aten.scaled_dot_product_attention.default)
    assert len(attention.all_input_nodes) == (4 if is_masked else 3)
    assert not calls(program, aten.arange.default, aten.ge.Scalar, aten.le.Tensor), "they are the same at every call"
    computed = {operator.target: operator for operator in program.ops if "computed once" in operator.how}
    assert "aten.arange.default" in computed
    assert {operator.placement for operator in computed.values()} == {"float"}
    found, expected = program(x), graph(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert sqnr(expected.nan_to_num(), found.nan_to_num()) > 40
    if opened:
        assert sqnr(graph(more := torch.randn(5, 6, 32)).nan_to_num(), program(more).nan_to_num()) > 30


class Grouped(nn.Module):
    """Eight heads of queries that read two heads of keys and values."""

    def __init__(self, mask, spelled):
        super().__init__()
        self.mask, self.spelled = mask, spelled
        self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.key, self.value = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x):
        heads = (
            self.query(x).unflatten(2, (8, 4)),
            self.key(x).unflatten(2, (2, 4)),
            self.value(x).unflatten(2, (2, 4)),
        )
        q, k, v = (part.transpose(1, 2) for part in heads)
        k, v = self.spelled(k), self.spelled(v)
        mask = self.mask(torch.arange(x.shape[1]), x)
        causal = {} if mask is not True else {"is_causal": True}
        gqa = k.shape[1] != 8
        found = F.scaled_dot_product_attention(q, k, v, None if mask is True else mask, enable_gqa=gqa, **causal)
        return self.out(found.transpose(1, 2).flatten(2))


def repeated(x):
    return x[:, :, None].expand(x.shape[0], 2, 4, x.shape[2], 4).reshape(x.shape[0], 8, x.shape[2], 4)


SPELLINGS = {"expand": repeated, "interleave": lambda x: x.repeat_interleave(4, 1), "asked": lambda x: x}
MASKS = {
    "none": lambda at, x: None,
    "matrix": lambda at, x: at[None] <= at[:, None],
    "floats": lambda at, x: torch.zeros(at.shape[0], at.shape[0]).masked_fill(at[None] > at[:, None], -1e4)[None, None],
    "samples": lambda at, x: (at[None] <= at[:, None])[None, None] & (x[:, :, 0] < 2)[:, None, None],
    "keys": lambda at, x: (x[:, :, 0] < 1)[:, None, None],
    "heads": lambda at, x: (at[None] - at[:, None])[None] * torch.arange(8)[:, None, None] * -0.1,
}


@torch.no_grad()
@pytest.mark.few(6)
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_keys_that_heads_share_are_not_copied_for_each_of_them(mask, spelled, opened):
    x = torch.randn(2, 6, 32)
    graph, program = lowered(Grouped(mask, spelled), x, opened=opened)
    (attention,) = calls(program, aten.scaled_dot_product_attention.default)
    assert [part.meta["val"].shape[1] for part in attention.args[:3]] == [2, 2, 2]
    assert not calls(program, aten.repeat_interleave.self_int)
    for given in (x, torch.randn(2, 6, 32), *([torch.randn(5, 6, 32)] if opened else [])):
        assert sqnr(graph(given), program(given)) > 35


@torch.no_grad()
@pytest.mark.parametrize(
    "mask",
    [lambda at, x: True, lambda at, x: torch.arange(8)[:, None, None] * (at * -0.1)],
    ids=["causal", "of heads alone"],
)
def test_masks_that_rows_of_a_head_cannot_share_keep_the_heads_apart(mask):
    x = torch.randn(2, 6, 32)
    graph, program = lowered(Grouped(mask, repeated), x, opened=False)
    assert sqnr(graph(x), program(x)) > 35
