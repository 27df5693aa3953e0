"""Tables of embeddings in groups of integers on XNNPACK: what the file stores, and what its kernels look up."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.xnnpack import XNNPACKProgram


class Words(nn.Module):
    """Words, positions, a layer, and a head that may be the table."""

    def __init__(self, width, tied):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(500, width), nn.Embedding(8, width)
        self.head = nn.Linear(width, 500, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words):
        return self.head(self.table(words) + self.places(torch.arange(words.shape[1])))


def words():
    return torch.randint(0, 500, (2, 8))


def in_groups(config, size):
    backend = quantplug.get_quantizer("xnnpack").backend
    everywhere = backend.config("int4_dynamic_groups", group_size=size)
    chosen = quantplug.get_quantizer("xnnpack").set_global(everywhere)
    return chosen.set_operator_type("embedding", backend.config(config, group_size=size))


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("config", "size", "share"), [("int4_groups", 32, 0.2), ("int8_groups", 128, 0.25)])
def test_tables_are_stored_in_groups(config, size, share, tied, tmp_path):
    model, example = Words(256, tied).eval(), words()
    artefact = quantplug.quantize(model, (example,), in_groups(config, size), progress=False)
    for given in (example, words(), example):
        # The head's kernel rounds the scales of its groups to bfloat16; the table alone is exact, see below.
        assert sqnr(artefact(given), artefact.reference(given)) > 40
        assert sqnr(artefact.reference(given), model(given)) > 15
    # The program is held against a graph with the scales that its file has.
    assert isinstance(artefact.program, XNNPACKProgram)
    assert artefact.program.sqnr > 90
    assert artefact.report.row("embedding").quantized
    table = next(op for op in artefact.program.ops if op.node == "embedding")
    assert (table.placement, table.reason) == ("portable", "")
    assert "portable kernel that reads the integers" in table.how
    assert artefact.report.row("embedding_1").reason.endswith(
        "the same at each call, and rounding them would save nothing"
    )
    artefact.save(tmp_path / "words.pte")
    # Both integers of a tied table are stored, the head's own order beside that of rows.
    numbers = 2 * model.table.weight.numel()
    held = (tmp_path / "words.pte").stat().st_size - 4 * model.places.weight.numel() - 20_000
    assert held < share * 4 * numbers


@pytest.mark.few(1)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("config", "low", "high"), [("int4_groups", -8, 7), ("int8_groups", -127, 127)])
def test_a_table_alone_is_what_its_integers_say(config, low, high, groups):
    """Steps of each group of 64 in rows of one or three, found here, half a step from the weights at most."""
    torch.manual_seed(0)
    model, example = nn.Embedding(40, 64 * groups).eval(), torch.tensor([[0, 39, 7], [7, 1, 2]])
    chosen = quantplug.get_quantizer("xnnpack").backend.config(config, group_size=64)
    artefact = quantplug.quantize(model, (example,), "xnnpack", config=chosen, progress=False)
    for given in (example, example.flip(0), example):
        found = artefact(given)
        assert torch.equal(found, artefact.reference(given))
        weights = model(given).detach().unflatten(-1, (groups, 64))
        largest = model.weight.detach().unflatten(-1, (groups, 64)).abs().amax(-1, keepdim=True)[given]
        step = largest / ((high - low) / 2)
        counts = found.unflatten(-1, (groups, 64)) / step
        assert torch.allclose(counts, counts.round(), atol=1e-4)
        assert low <= counts.round().min()
        assert counts.round().max() <= high
        assert ((found.unflatten(-1, (groups, 64)) - weights).abs() <= 0.5001 * step).all()


def test_rows_that_are_no_groups_stay_float_with_the_reason():
    model = nn.Embedding(40, 48).eval()
    exported = torch.export.export(model, (words(),)).module()
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int4_groups")
    with pytest.warns(UserWarning, match="quantizes none"):
        report = quantplug.explain(quantplug.prepare_pt2e(exported, quantizer))
    assert report.row("embedding").reason.endswith("its rows of 48 numbers are no multiple of the group of 32")
    exported = torch.export.export(model, (words(),)).module()
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int4_dynamic_groups")
    with pytest.warns(UserWarning, match="quantizes none"):
        report = quantplug.explain(quantplug.prepare_pt2e(exported, quantizer))
    assert "give embedding the config 'int4_groups' or 'int8_groups'" in report.row("embedding").reason
