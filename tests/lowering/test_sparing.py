"""Lowering with few copies: what is shared, what is computed by rows, and what waits, gives what it gave before."""

import copy

import pytest
import torch
from torch import fx, nn

from quantplug.core.graph.lazy import compiled_when_run
from quantplug.core.qdq.by_rows import computed_by_rows, has_rows_apart
from quantplug.lowering import agreement
from quantplug.lowering.agreement import Sparing
from quantplug.lowering.xnnpack.edge import constants_shared

AFFINE, DECOMPOSED = torch.ops.torchao, torch.ops.quantized_decomposed


class Counting(nn.Module):
    """A layer with a buffer that it writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) + self.calls


def test_copies_of_a_program_share_constants_but_for_what_it_writes():
    program = torch.export.export(Counting().eval(), (torch.randn(2, 8),))
    for _ in range(2):
        with constants_shared(program):
            twin = copy.deepcopy(program)
        held, own = twin.state_dict, program.state_dict
        assert held["layer.weight"].data_ptr() == own["layer.weight"].data_ptr()
        assert held["calls"].data_ptr() != own["calls"].data_ptr()
    apart = copy.deepcopy(program).state_dict
    assert apart["layer.weight"].data_ptr() != own["layer.weight"].data_ptr()


def of_groups(rows, columns):
    graph = fx.Graph()
    weight, scale, x = graph.get_attr("weight"), graph.get_attr("scale"), graph.placeholder("x")
    whole = graph.call_function(AFFINE.dequantize_affine.default, (weight, [1, 32], scale, None, torch.int8, -8, 7))
    graph.output(graph.call_function(torch.ops.aten.linear.default, (x, whole)))
    root = nn.Module()
    root.register_buffer("weight", torch.randint(-8, 8, (rows, columns), dtype=torch.int8))
    root.register_buffer("scale", torch.rand(rows, columns // 32) + 0.1)
    return fx.GraphModule(root, graph), whole


def test_weights_are_dequantized_by_rows_bit_by_bit():
    module, whole = of_groups(3001, 128)
    held = {node: getattr(module, node.target) for node in module.graph.find_nodes(op="get_attr")}
    expected = AFFINE.dequantize_affine(module.weight, [1, 32], module.scale, None, torch.int8, -8, 7)
    assert has_rows_apart(whole)
    for _ in range(2):
        assert torch.equal(computed_by_rows(whole, held.__getitem__), expected)


@pytest.mark.parametrize("large", [2**24, 2**18])
def test_a_graph_runs_the_same_with_few_floats(monkeypatch, large):
    monkeypatch.setattr(agreement, "_LARGE", large)
    module, _ = of_groups(3001, 128)
    x = torch.randn(4, 128)
    for _ in range(2):
        torch.testing.assert_close(Sparing(module).run(x), module(x))


def test_rows_of_a_table_are_those_of_the_whole_table():
    pytest.importorskip("executorch.exir.passes.quant_fusion_pass")
    graph = fx.Graph()
    table, scales, ids = graph.get_attr("table"), graph.get_attr("scales"), graph.placeholder("ids")
    graph.output(graph.call_function(DECOMPOSED.embedding_byte.default, (table, scales, None, -128, 127, ids)))
    root = nn.Module()
    root.register_buffer("table", torch.randint(-128, 128, (50, 8), dtype=torch.int8))
    root.register_buffer("scales", torch.rand(50))
    module, wanted = fx.GraphModule(root, graph), torch.tensor([[3, 49, 0], [3, 3, 7]])
    assert torch.equal(Sparing(module).run(wanted), module(wanted))


def test_graphs_wait_with_their_code_until_they_are_run():
    with compiled_when_run():
        layer = nn.Linear(4, 2)
        module = fx.symbolic_trace(nn.Sequential(layer, nn.ReLU()))
        for _ in range(2):
            module.recompile()
            assert not module.code
        x = torch.randn(3, 4)
        assert torch.equal(module(x), layer(x).relu())
        assert "forward" in module.code
    assert "forward" in fx.symbolic_trace(nn.Linear(4, 2)).code
