"""Weights of four bits in groups on x86: what a file holds, and what the kernel computes."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from x86_programs import quantized

import quantplug
from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program

FULL = "int4_weight_only"


def explained(exported, backend, config):
    return quantplug.explain(quantplug.prepare_pt2e(exported, quantplug.get_quantizer(backend).set_global(config)))


class Block(nn.Module):
    """A gated block behind a norm, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(256)
        self.gate, self.up = nn.Linear(256, 512, bias=False), nn.Linear(256, 512)
        self.down = nn.Linear(512, 256, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize(("rows", "size"), [((1,), 32), ((2, 7), 64), ((40,), 128), ((3,), 256)])
def test_b26_e08_a_saved_file_holds_four_bits_and_computes_what_its_graph_does(tmp_path, rows, size):
    model, calls = Block().eval(), [torch.randn(*rows, 256) for _ in range(2)]
    config = quantplug.get_quantizer("x86").backend.config(FULL, group_size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        artefact = quantplug.quantize(model, (calls[0],), "x86", config=config, progress=False)
    path = artefact.save(tmp_path / "block.pt2")
    loaded, plain = X86Program.load(path), torch.export.load(path).module()
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert path.stat().st_size < weights / 2 + weights / size * 2 + 90_000  # the graph, and floats
    for x in calls:
        expected = artefact.reference(x)
        assert sqnr(artefact(x), expected) > 45
        assert torch.equal(loaded(x), artefact(x))
        assert torch.equal(plain(x), artefact(x))
        assert 15 < sqnr(expected, model(x)) < 45
    kernels = [each for each in artefact.program.ops if each.target.startswith("aten.linear")]
    assert [each.placement for each in kernels] == ["int8"] * 3
    assert "int8 of 4 bits per group" in str(artefact.report)


@pytest.mark.slow
def test_open_sizes_and_compiled_programs_have_the_kernel_too():
    batch = torch.export.Dim("batch", min=2, max=64)
    x = torch.randn(4, 256)
    artefact = quantplug.quantize(
        Block().eval(), (x,), "x86", config=FULL, dynamic_shapes={"x": {0: batch}}, progress=False
    )
    for rows in (2, 33):
        x = torch.randn(rows, 256)
        assert sqnr(artefact(x), artefact.reference(x)) > 45
    assert isinstance(artefact.program, X86Program)
    targets = {str(node.target) for node in artefact.program.module.graph.nodes}
    assert "aten._weight_int4pack_mm_for_cpu.default" in targets
    assert not {"aten.stack.default", "aten._convert_weight_to_int4pack_for_cpu.default"} & targets
    assert sqnr(artefact.program.compile()(x), artefact(x)) > 60


@pytest.mark.slow
@pytest.mark.parametrize("opened", [{1: "length"}, {0: "batch", 1: "length"}], ids=["length", "both"])
def test_sequences_of_open_sizes_have_the_kernel(opened, tmp_path):
    """A language model's: the kernel takes a matrix, whose rows go back to where they were."""
    shapes = {axis: torch.export.Dim(name, min=2, max=64) for axis, name in opened.items()}
    x = torch.randn(3, 5, 256)
    model = Block().eval()
    artefact = quantplug.quantize(model, (x,), "x86", config=FULL, dynamic_shapes={"x": shapes}, progress=False)
    assert isinstance(artefact.program, X86Program)
    loaded = X86Program.load(artefact.save(tmp_path / "model.pt2"))
    for length in (2, 5, 33):
        x = torch.randn(7 if 0 in opened else 3, length, 256)
        for run in (artefact, loaded):
            assert sqnr(run(x), artefact.reference(x)) > 45
    x = torch.randn(3, 5, 256)
    assert sqnr(artefact.program.compile()(x), artefact(x)) > 60
    assert str(artefact.report).count("int8 of 4 bits per group") >= 1


@pytest.mark.parametrize(
    ("layer", "wide", "reason"),
    [
        (nn.Linear(64, 40), 64, "its 40 output channels are no multiple of 16"),
        (nn.Linear(48, 32), 48, "its 48 input channels are no multiple of the group of 32"),
        (nn.Conv1d(1, 4, 3), 64, "the config has a scale for every 32 input channels"),
    ],
)
def test_what_the_kernel_does_not_read_stays_float_with_the_reason(layer, wide, reason):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = nn.Linear(64, wide), layer

        def forward(self, x):
            return self.other(self.first(x).reshape(x.shape[0], *[1] * (layer.weight.dim() - 2), -1))

    net: Any = Net().eval()
    x = torch.randn(3, 64)
    size = 16 if wide % 32 else 32
    net.first = nn.Linear(64, wide) if size == 32 else nn.Sequential(nn.Linear(64, 64), nn.Linear(64, wide))
    artefact = quantplug.quantize(net, (x,), "x86", config=FULL, progress=False)
    row = next(row for row in artefact.report.rows if row.module_path == "other")
    assert not row.quantized
    assert reason in row.reason
    assert sqnr(artefact(x), artefact.reference(x)) > 45


def test_what_says_nothing_of_groups_is_an_error():
    backend = quantplug.get_quantizer("x86").backend
    with pytest.raises(ConfigError, match="'weight_observer' says nothing of weights in groups"):
        backend.config(FULL, weight_observer="mse")
    with pytest.raises(ConfigError, match="'weight_qmin' says nothing of weights in groups"):
        quantplug.get_quantizer("xnnpack").backend.config("int4_dynamic_groups", weight_qmin=-7)
    with pytest.raises(ConfigError, match="or take config 'int4_weight_only'"):
        backend.config("int8", weight_bits=4)


def test_groups_of_another_size_than_the_kernel_reads_stay_float():
    config = quantplug.get_quantizer("x86").backend.config(FULL, group_size=96)
    exported = torch.export.export(nn.Linear(192, 64), (torch.randn(2, 192),)).module()
    with pytest.warns(UserWarning, match="the kernel takes groups of 32, 64, 128, 256 input channels, not of 96"):
        report = explained(exported, "x86", config)
    assert not report.rows[0].quantized


def test_four_bits_of_one_scale_a_channel_are_told_on_x86():
    config = quantplug.get_quantizer("xnnpack").backend.config("int4_weight_only")
    with pytest.warns(UserWarning, match="Backend 'x86' stores weights in 8 bits"):
        quantized(Block(), torch.randn(3, 256), config=config)
