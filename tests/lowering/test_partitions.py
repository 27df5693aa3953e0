"""Delegates of XNNPACK do not depend on each other both ways, and what stands between portable operators makes none."""

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Function
from torch import fx

import quantplug
from quantplug.lowering.xnnpack.partition import in_stages, without_mere_copies

NODES = 14


@st.composite
def graphs(draw):
    """A graph whose nodes read earlier ones, and groups of neighbours in it that do not form a cycle."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(NODES):
        read = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
        nodes.append(graph.call_function(max, tuple(read)))
    graph.output(nodes[-1])
    chosen = draw(st.lists(st.sampled_from(nodes[1:]), unique=True))
    return graph, [[node] for node in chosen]


def quotient(graph, parts):
    unit = {node: index for index, part in enumerate(parts) for node in part}
    edges = {(unit.get(n, n), unit.get(m, m)) for m in graph.nodes for n in m.all_input_nodes}
    return networkx.DiGraph([edge for edge in edges if edge[0] != edge[1]])


@given(graphs())
def test_stages_hold_every_group_once_and_no_cycle(drawn):
    graph, groups = drawn
    stages = in_stages(graph, groups)
    assert sorted(node.name for stage in stages for node in stage) == sorted(node.name for [node] in groups)
    assert networkx.is_directed_acyclic_graph(quotient(graph, stages))
    chain = [node for node in graph.nodes if node.op == "call_function"]
    if len(groups) == len(chain):
        assert len(stages) == 1, "nothing outside is in between"


@pytest.mark.parametrize(("is_read_early", "stages"), [(False, 1), (True, 2)])
def test_what_nobody_waits_for_runs_in_the_last_delegate(is_read_early, stages):
    """A layer in front of masked attention needs no delegate of its own before the mask is there."""
    graph, aten = fx.Graph(), torch.ops.aten
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    layer = graph.call_function(aten.neg.default, (x,))
    outside = graph.call_function(aten.where.self, (mask, layer if is_read_early else x, x))
    masked = graph.call_function(aten.add.Tensor, (layer, outside))
    graph.output(masked)
    assert len(in_stages(graph, [[layer], [masked]])) == stages


def test_copies_that_only_pass_through_stay_outside():
    """XLNet's tokens, copied for a layer and for the sum behind it: no delegate of it was written at all."""
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.call_function(aten.round.default, (graph.placeholder("x"),))
    copy = graph.call_function(aten.clone.default, (x,))
    again = graph.call_function(aten.clone.default, (copy,))
    inside = graph.call_function(aten.mul.Tensor, (again, copy))
    own = graph.call_function(aten.clone.default, (inside,))
    graph.output((graph.call_function(aten.sin.default, (copy,)), again, own))
    assert without_mere_copies([inside, again, copy, own]) == [inside, own]
    graph.erase_node(graph.output_node())
    graph.output((inside, own))
    graph.eliminate_dead_code()
    assert without_mere_copies([inside, again, copy, own]) == [copy, again, inside, own]


def in_float(function, x, **options):
    """Returns the program of a float graph."""
    graph = torch.export.export(Function(function).eval(), (x,)).module()
    return quantplug.get_quantizer("xnnpack").backend.lower(graph, (x,), **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(("rows", "delegates"), [(8, 2), (8192, 3)])
def test_few_numbers_between_portable_operators_make_no_delegate(rows, delegates):
    """Scales of rows: largest numbers and roundings are portable, and so are a few products between them."""

    def function(_, x):
        largest = x.abs().amax(-1, keepdim=True)
        return (x * (largest * 0.5 + largest).reciprocal()).round().sin()

    x = torch.randn(rows, 64)
    program = in_float(function, x)
    assert torch.allclose(program(x), function(None, x), atol=1e-6)
    assert program.counts.delegates == delegates


def test_a_cast_of_integers_is_a_conversion_in_the_delegate():
    x = torch.randint(-128, 128, (4, 8), dtype=torch.int8)
    program = in_float(lambda _, x: (x.to(torch.float32) * torch.ones(8)).sin(), x)
    assert torch.allclose(program(x), x.to(torch.float32).sin(), atol=1e-6)
    assert (program.counts.converts, program.counts.portable) == (1, 0)
    cast = next(op for op in program.ops if op.target == "aten.to.dtype")
    assert (cast.placement, cast.reason) == ("float", "it makes floats of integers")
    kept = in_float(lambda _, x: x.to(torch.float32).sin(), x, accepts=lambda node: node.name != "to")
    assert kept.counts.converts == 0
    assert next(op.placement for op in kept.ops if op.target == "aten.to.dtype") == "portable"
