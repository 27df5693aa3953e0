"""Operators that move numbers, compute nothing or clamp, between layers of integers: what is said of each, it does."""

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import decibels
from torch import nn

import quantplug
from quantplug.core.graph.operators import KEEPERS

ATEN = torch.ops.aten
# what is done to images (2, 4, 8, 8), by the operator that the table names
PIECES = {
    "view.default": lambda t: t.view(2, 4, 16, 4),
    "reshape": lambda t: t.reshape(2, 4, 16, 4),
    "_unsafe_view": lambda t: ATEN._unsafe_view(t, [2, 4, 16, 4]),
    "flatten": lambda t: t.flatten(2).reshape(2, 4, 16, 4),
    "unflatten": lambda t: t.reshape(2, 4, 64).unflatten(2, (16, 4)),
    "squeeze": lambda t: t.reshape(2, 4, 8, 1, 8).squeeze(3),
    "unsqueeze": lambda t: t.unsqueeze(2).reshape(2, 4, 16, 4),
    "contiguous": lambda t: t.transpose(2, 3).contiguous(),
    "clone": lambda t: t.clone(),
    "permute": lambda t: t.permute(0, 1, 3, 2),
    "transpose": lambda t: t.transpose(2, 3),
    "t": lambda t: t.reshape(16, 32).t().reshape(2, 4, 8, 8),
    "mT": lambda t: t.mT,
    "numpy_T": lambda t: t.reshape(16, 32).T.reshape(2, 4, 8, 8),
    "movedim": lambda t: t.movedim((2, 3), (3, 2)),
    "moveaxis": lambda t: t.moveaxis(2, 3),
    "swapaxes": lambda t: t.swapaxes(2, 3),
    "swapdims": lambda t: t.swapdims(2, 3),
    "slice.Tensor": lambda t: t[:, :, 2:6],
    "select": lambda t: t.reshape(2, 4, 2, 8, 4)[:, :, 1],
    "narrow": lambda t: t.narrow(2, 1, 5),
    "flip": lambda t: t.flip(2),
    "roll": lambda t: t.roll(2, 3),
    "pixel_shuffle": lambda t: F.pixel_shuffle(t, 2).expand(-1, 4, -1, -1),
    "pixel_unshuffle": lambda t: F.pixel_unshuffle(t, 2)[:, 3:7],
    "channel_shuffle": lambda t: F.channel_shuffle(t, 2),
    "expand": lambda t: t[:, :, :1].expand(2, 4, 8, 8),
    "repeat": lambda t: t.repeat(1, 1, 2, 1),
    "repeat_interleave.self_int": lambda t: t.repeat_interleave(2, 2),
    "dropout": lambda t: F.dropout(t, 0.5, False),
    "feature_dropout": lambda t: F.dropout2d(t, 0.5, False),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.5, False),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.5, False),
    "alias": lambda t: ATEN.alias(t),
    "detach": lambda t: t.detach(),
    "lift_fresh_copy": lambda t: ATEN.lift_fresh_copy(t),
    "constant_pad_nd": lambda t: ATEN.constant_pad_nd(t, [1, 1]),
    "pad": lambda t: F.pad(t, (1, 1)),
    "cat": lambda t: torch.cat([t, t[:, :, :3]], 2),
    "stack": lambda t: torch.stack([t, t], 2).flatten(2, 3),
    "max_pool2d": lambda t: F.max_pool2d(t, 2),
    "relu": lambda t: F.relu(t.mT),
    "relu6": lambda t: F.relu6(t.mT),
    "hardtanh": lambda t: F.hardtanh(t.mT, -0.5, 0.7),
    "clamp": lambda t: t.mT.clamp(-0.5, 0.7),
    "clamp_min": lambda t: t.clamp_min(-0.3),
    "clamp_max": lambda t: t.clamp_max(0.4),
}
# Without a kernel of integers there.
FLOATS = {
    "x86": set(),
    "xnnpack": {"expand", "stack"},
}


class Around(nn.Module):
    """Every piece between two layers of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleDict({name.replace(".", "_"): nn.Conv2d(3, 4, 3, padding=1) for name in PIECES})
        self.last = nn.ModuleDict({name.replace(".", "_"): nn.Conv2d(4, 2, 1) for name in PIECES})

    def forward(self, x):
        ends = ((name.replace(".", "_"), piece) for name, piece in PIECES.items())
        return [self.last[name](piece(self.first[name](x))) for name, piece in ends]


@pytest.fixture(scope="module", params=["x86", pytest.param("xnnpack", marks=pytest.mark.slow)])
def artefact(request):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    return quantplug.quantize(Around().eval(), (x,), request.param, [x, torch.randn(2, 3, 8, 8)], progress=False)


def test_the_pieces_are_those_of_the_table():
    assert {*PIECES, "max_pool1d", "max_pool3d"} == {*KEEPERS}


def test_an_operator_runs_where_explain_says(artefact):
    placed = {found.node: found.placement for found in artefact.program.ops}
    said = {row.node: row.quantized for row in artefact.report.rows if row.node in placed}
    assert said == {node: placed[node] == "int8" for node in said}
    names = {name.partition(".")[0] for name in FLOATS[artefact.backend]}
    floats = [found.target for found in artefact.program.ops if found.placement != "int8"]
    assert {target.split(".")[1] for target in floats} <= names | {"flatten"}, floats
    assert names <= {target.split(".")[1] for target in floats}


def test_it_computes_what_its_graph_does_at_every_call(artefact):
    for seed in (1, 2):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        found = artefact(x)
        again = artefact(x)
        for name, one, other, expected in zip(PIECES, found, again, artefact.reference(x), strict=True):
            assert torch.equal(one, other), name
            assert decibels(one, expected) > 35, name


def test_what_runs_on_integers_does_so_in_the_emulation(artefact):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    emulated = quantplug.emulate(artefact.reference, (x,), artefact.backend)
    placed = {found.node for found in artefact.program.ops if found.placement == "int8"}
    assert placed <= {found.node for found in emulated.ops if found.placement == "int8"}
