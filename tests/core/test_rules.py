"""Rules: what they return is spliced in, what they covered is carried out by what they inserted."""

import pytest
import torch
from torch import fx, nn

from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import call, constant, viewed
from quantplug.core.graph.meta import ORIGINS, REASON, origins
from quantplug.core.patterns.language import op, single_use, value
from quantplug.core.patterns.rules import Rule, apply

aten = torch.ops.aten
RELU_OF_SUM = op("relu", self=op("add.Tensor", self=value("a"), other=value("b"), name="add"), name="relu")


class Sum(nn.Module):
    """A sum, its relu, and what reads them."""

    def __init__(self, reads_sum=False):
        super().__init__()
        self.reads_sum = reads_sum

    def forward(self, a, b):
        total = a + b
        last = torch.relu(total)
        return (last.sin(), last.cos(), total) if self.reads_sum else (last.sin(), last.cos())


def graph_of(model):
    exported = torch.export.export(model.eval(), (torch.randn(2, 3), torch.randn(2, 3))).module()
    for node in exported.graph.nodes:
        if node.op == "call_function":
            ORIGINS.put(node, frozenset({node.name}))
    return exported.graph


def carried(graph):
    return {node.name: set(origins(node)) for node in graph.nodes if node.op == "call_function" and origins(node)}


def names(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function" and "assert" not in str(node.target)]


def test_the_returned_node_is_read_by_all_and_carries_out_what_is_gone():
    graph = graph_of(Sum())
    rule = Rule(RELU_OF_SUM, lambda m: call(m.root, aten.maximum.default, (m["a"], m["b"]), m.root))
    assert apply(graph, [rule]) == 1
    assert names(graph) == ["aten.maximum.default", "aten.sin.default", "aten.cos.default"]
    assert carried(graph) == {"maximum_default": {"add", "relu"}, "sin": {"sin"}, "cos": {"cos"}}


def test_all_that_a_rule_inserted_carries_out_the_piece_but_for_constants_and_what_is_made_of_them():
    def several(match):
        held = constant(match.root, "held", torch.ones(3))
        doubled = call(match.root, aten.mul.Tensor, (held, 2), held)
        kernel = call(match.root, aten.addcmul.default, (match["a"], match["b"], doubled), match.root)
        return viewed(match.root, aten.unsqueeze.default, viewed(match.root, aten.squeeze.dim, kernel, 0), 0)

    graph = graph_of(Sum())
    apply(graph, [Rule(RELU_OF_SUM, several)])
    made = {"addcmul_default", "squeeze_dim", "unsqueeze_default"}
    assert carried(graph) == {**{name: {"add", "relu"} for name in made}, "sin": {"sin"}, "cos": {"cos"}}


def test_an_operator_that_stands_there_again_carries_itself_out_and_nothing_else_does():
    def clamped_before(match):
        inner = call(match.root, aten.clamp.default, (match["add"], 0, 6), match.root)
        return call(match.root, aten.relu.default, (inner,), match.root)

    graph = graph_of(Sum())
    apply(graph, [Rule(RELU_OF_SUM, clamped_before)])
    assert carried(graph)["relu_default"] == {"relu"}
    assert "clamp_default" not in carried(graph)


def test_a_node_of_the_piece_that_others_read_stays_and_stays_itself():
    graph = graph_of(Sum(reads_sum=True))
    apply(graph, [Rule(RELU_OF_SUM, lambda m: call(m.root, aten.maximum.default, (m["a"], m["b"]), m.root))])
    assert carried(graph)["add"] == {"add"}
    assert carried(graph)["maximum_default"] == {"relu"}


def test_a_node_that_is_changed_in_place_and_returned_carries_out_what_followed_it():
    def fuse(match):
        match["add"].kwargs = {"alpha": 2}
        return match["add"]

    graph = graph_of(Sum())
    apply(graph, [Rule(op("relu", self=single_use(op("add.Tensor", name="add"))), fuse)])
    assert names(graph) == ["aten.add.Tensor", "aten.sin.default", "aten.cos.default"]
    assert carried(graph)["add"] == {"add", "relu"}


def test_a_root_that_is_changed_in_place_keeps_its_readers_and_its_name():
    def change(match):
        match.root.target = aten.sigmoid.default
        return match.root

    graph = graph_of(Sum())
    apply(graph, [Rule(op("relu"), change)])
    assert names(graph)[1] == "aten.sigmoid.default"
    assert carried(graph)["relu"] == {"relu"}


def test_what_a_rule_puts_behind_the_root_reads_it_and_others_read_that():
    graph = graph_of(Sum())
    apply(graph, [Rule(op("relu"), lambda m: call(m.root.next, aten.neg.default, (m.root,), m.root))])
    relu, negated = (next(node for node in graph.nodes if name in str(node.target)) for name in ("relu", "neg"))
    assert list(relu.users) == [negated]
    assert {str(user.target) for user in negated.users} == {"aten.sin.default", "aten.cos.default"}
    graph.lint()


def test_a_reason_changes_nothing_and_is_told():
    graph = graph_of(Sum())
    before = str(graph)
    assert apply(graph, [Rule(op("relu"), lambda match: "it is Tuesday")]) == 0
    assert str(graph) == before
    assert REASON.get(next(node for node in graph.nodes if "relu" in str(node.target))) == "it is Tuesday"


def elsewhere(match):
    return next(iter(fx.symbolic_trace(nn.ReLU()).graph.nodes))


def gone(match):
    node = call(match.root, aten.neg.default, (match.root,), match.root)
    match.root.graph.erase_node(node)
    return node


@pytest.mark.parametrize("rewrite", [lambda match: None, lambda match: 3, elsewhere, gone])
def test_a_rule_that_returns_no_node_of_the_graph_is_named(rewrite):
    with pytest.raises(
        LoweringError, match=r"The rule for relu at node 'relu' .* returned .*; return the node of this"
    ):
        apply(graph_of(Sum()), [Rule(op("relu"), rewrite)])


def test_a_rule_that_inserts_and_then_refuses_is_named():
    def undecided(match):
        call(match.root, aten.neg.default, (match.root,), match.root)
        return "it changed its mind"

    with pytest.raises(LoweringError, match=r"The rule for relu at node .* inserted nodes and then refused"):
        apply(graph_of(Sum()), [Rule(op("relu"), undecided)])
