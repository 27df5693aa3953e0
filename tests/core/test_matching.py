"""Finding patterns in a graph: largest first, each node once, a reason for everything else, linear work."""

import pytest
import torch
from models import exported
from torch import nn

from quantplug.core.errors import PatternError
from quantplug.core.graph.facts import compute_nodes
from quantplug.core.patterns.language import Pattern, constant, op, optional, single_use, value
from quantplug.core.patterns.matching import PatternIndex

CONV = op("conv2d", input=value("x"), weight=constant("w"), bias=optional(constant("b")), name="op")
CONV_RELU = op("relu", self=single_use(CONV))
ADD = op("add", self=value("a"), other=value("b"), name="op")
ADD_RELU = op("relu", self=single_use(ADD))
DECLARED = (("b", "conv", CONV), ("b", "conv_relu", CONV_RELU), ("b", "add", ADD), ("b", "add_relu", ADD_RELU))


class Chain(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(blocks))

    def forward(self, x):
        for conv in self.convs:
            x = torch.relu(x + torch.relu(conv(x)))
        return x


def chain(blocks):
    return exported(Chain(blocks), torch.randn(1, 2, 4, 4)).graph


def find(graph, declared=DECLARED, accept=lambda found: None):
    return PatternIndex(declared).find(graph, accept)


def test_the_largest_piece_wins_whatever_the_order_of_declaration():
    for declared in (DECLARED, DECLARED[::-1]):
        findings = find(chain(2), declared)
        assert [f.label for f in findings.found] == ["conv_relu", "add_relu"] * 2
        assert findings.misses == {}


def test_the_first_declared_wins_between_pieces_of_one_size():
    again = (("first", "one", CONV), ("second", "two", CONV))
    assert [(f.owner, f.label) for f in find(chain(1), again).found] == [("first", "one")]
    assert [(f.owner, f.label) for f in find(chain(1), again[::-1]).found] == [("second", "two")]


def test_no_node_is_part_of_two_pieces():
    graph = chain(4)
    nodes = [n for f in find(graph).found for n in f.match.nodes]
    assert len(nodes) == len(set(nodes)) == 16
    assert set(nodes) == set(compute_nodes(graph))


def test_overlapping_pieces_of_one_size_leave_a_reason():
    # Two relus of one add: either could be fused with it, neither is its single user.
    twice = op("relu", self=ADD)

    class TwoReaders(nn.Module):
        def forward(self, x, y):
            s = x + y
            return torch.relu(s), torch.relu(s)

    graph = exported(TwoReaders(), torch.randn(2), torch.randn(2)).graph
    findings = find(graph, (("b", "fused", twice),))
    assert len(findings.found) == 1
    (missed,) = findings.misses.values()
    assert (missed.label, missed.matched) == ("fused", 2)
    assert "is already part of 'fused'" in missed.reason


def test_a_refused_match_leaves_its_nodes_to_smaller_ones_and_keeps_the_reason():
    findings = find(chain(1), accept=lambda f: "no fusing" if len(f.match.nodes) > 1 else None)
    assert [f.label for f in findings.found] == ["conv", "add"]
    assert {m.label for m in findings.misses.values()} == {"conv_relu", "add_relu"}
    assert {m.reason for m in findings.misses.values()} == {"no fusing"}


def test_every_refused_node_of_a_piece_hears_the_reason():
    findings = find(chain(1), (("b", "conv_relu", CONV_RELU),), lambda f: "no kernel")
    reasons = {n.name: (m.label, m.reason) for n, m in findings.misses.items()}
    assert reasons["conv2d"] == ("conv_relu", "no kernel")
    assert reasons["relu"] == ("conv_relu", "no kernel")


def test_every_other_node_has_its_nearest_miss():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x):
            y = self.conv(x)
            return torch.relu(y) + y.tanh() * 2 + 1

    findings = find(exported(Mixed(), torch.randn(1, 2, 4, 4)).graph, DECLARED[1:])
    misses = {n.name: m for n, m in findings.misses.items()}
    assert misses["relu"].label == "conv_relu"
    assert "2 nodes use" in misses["relu"].reason
    assert misses["conv2d"].reason == "aten.conv2d.default is quantized only as part of conv_relu"
    assert misses["tanh"].reason == "no rule ends in aten.tanh.default"
    assert "is 1, not a tensor" in misses["add_1"].reason


def test_a_pattern_without_root_operator_is_refused():
    with pytest.raises(PatternError, match=r"Pattern 'any' .* ends in no operator"):
        PatternIndex([("b", "any", value("x"))])
    assert len(find(chain(1), (("b", "conv", single_use(CONV)),)).found) == 1


def test_work_is_linear_in_the_graph(monkeypatch):
    """Counts comparisons of patterns with nodes, not seconds."""
    calls = 0
    original = Pattern.match

    def counted(self, node):
        nonlocal calls
        calls += 1
        return original(self, node)

    monkeypatch.setattr(Pattern, "match", counted)
    counts = []
    for blocks in (10, 20, 40):
        calls = 0
        assert len(find(chain(blocks)).found) == 2 * blocks
        counts.append(calls)
    assert counts[1] == 2 * counts[0]
    assert counts[2] == 4 * counts[0]
    # One conv, one add and two relus that can end two patterns each.
    assert counts[0] == 10 * (1 + 1 + 2 * 2)
