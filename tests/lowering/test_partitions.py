"""Delegates of XNNPACK do not depend on each other both ways."""

import networkx
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from quantplug.lowering.xnnpack.partition import in_stages

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
