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
