"""The pattern language: each construct alone, then properties over generated graphs."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function, MobileNet, exported
from torch import nn

import quantplug.core.pt2e.quantization  # noqa: F401 - registers the q/dq operators
from quantplug.core.errors import PatternError
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.patterns.language import (
    Match,
    Miss,
    anything,
    constant,
    each,
    either,
    item,
    literal,
    op,
    optional,
    single_use,
    value,
)

aten = torch.ops.aten


def graph_of(function, *inputs, strict=False, **parts):
    return exported(Function(function, **parts), *inputs, strict=strict).graph


def nodes_of(graph, name):
    return [n for n in graph.nodes if n.op == "call_function" and str(n.target).startswith(f"aten.{name}")]


def last(graph):
    return graph.output_node().args[0][0]


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CONV = nn.Conv2d(3, 4, 3)


def test_a_name_stands_for_functional_overloads_and_the_inplace_form():
    assert operator_overloads("relu") == {aten.relu.default, aten.relu_.default}
    found = operator_overloads("add")
    assert {aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor} <= found
    assert aten.add.out not in found
    assert operator_overloads("add.Tensor") == {aten.add.Tensor}
    assert operator_overloads(aten.add.Tensor) == {aten.add.Tensor}
    assert aten.add_.Tensor not in operator_overloads(aten.add)


def test_operands_are_named_as_in_the_schema_with_defaults_filled_in():
    graph = graph_of(lambda m, x: F.conv2d(x, m.w), X, w=nn.Parameter(torch.randn(4, 3, 1, 1)))
    found = op("conv2d", input=value("x"), weight=constant("w"), bias=None, groups=1, stride=[1, 1]).match(last(graph))
    assert isinstance(found, Match)
    assert found["x"].op == "placeholder"
    assert str(found["w"].target) == "function.w" or str(found["w"].target) == "w"
    miss = op("conv2d", groups=4).match(last(graph))
    assert not miss
    assert "operand 'groups'" in miss.reason
    assert "is 1, not 4" in miss.reason


def test_keyword_operands_are_found_by_name():
    graph = graph_of(lambda m, x: torch.add(x, x, alpha=2), X)
    assert op("add", alpha=2).match(last(graph))
    assert not op("add", alpha=1).match(last(graph))


def test_a_wrong_operand_name_fails_at_declaration_and_shows_the_schema():
    with pytest.raises(
        PatternError, match=r"Operator 'conv2d' has no operand \['x'\]; its schema offers .*Tensor input"
    ):
        op("conv2d", x=value())
    with pytest.raises(PatternError, match=r"no operator 'rellu'.*aten::relu"):
        op("rellu")
    with pytest.raises(PatternError, match="has no overload 'Tensr'"):
        op("add.Tensr")
    with pytest.raises(PatternError, match="names no operator"):
        op()


def test_overloads_without_a_named_operand_are_left_out():
    # relu's schema has no `other`; add.Scalar has; bitwise_and.Tensor and Scalar both have.
    assert op("clamp", min=literal(0)).targets >= {aten.clamp.default}
    assert aten.max.default not in op("max", other=value()).targets


def test_operators_of_other_libraries():
    assert op("quantized_decomposed::quantize_per_tensor", input=value()).targets


def test_capturing_one_name_twice_needs_the_same_node():
    square = op("mul", self=value("x"), other=value("x"))
    assert square.match(last(graph_of(lambda m, x: x * x, X)))
    miss = square.match(last(graph_of(lambda m, x, y: x * y, X, X.clone())))
    assert "'x' is already" in miss.reason


def test_optional_operand_binds_only_when_it_is_there():
    pattern = op("conv2d", input=value("x"), weight=constant("w"), bias=optional(constant("b")))
    with_bias = pattern.match(last(graph_of(lambda m, x: m.c(x), X, c=CONV)))
    without = pattern.match(last(graph_of(lambda m, x: m.c(x), X, c=nn.Conv2d(3, 4, 3, bias=False))))
    assert "b" in with_bias
    assert "b" not in without
    assert without.get("b") is None
    with pytest.raises(KeyError):
        without["b"]


def test_alternatives_are_tried_in_order():
    pattern = op("add", self=either(op("relu", self=value(), name="left"), value("any")))
    taken = pattern.match(last(graph_of(lambda m, x: torch.relu(x) + x, X)))
    assert "left" in taken
    assert "any" not in taken
    assert "any" in pattern.match(last(graph_of(lambda m, x: torch.tanh(x) + x, X)))


def test_an_alternative_that_fails_later_is_taken_back():
    # The first alternative fits the operand alone, but not together with the second operand.
    pattern = op("add", self=either(value("a"), op("relu", self=value("a"))), other=value("a"))
    found = pattern.match(last(graph_of(lambda m, x: torch.relu(x) + x, X)))
    assert isinstance(found, Match)
    assert len(found.nodes) == 2


@pytest.mark.parametrize("swapped", [False, True])
def test_commutative_operands(swapped):
    pattern = op("add", self=op("relu", self=value()), other=value("rest"), commutative=("self", "other"))
    graph = graph_of(lambda m, x, y: (y + torch.relu(x)) if swapped else (torch.relu(x) + y), X, X.clone())
    assert pattern.match(last(graph))["rest"].op == "placeholder"


def test_commutative_needs_operand_names_of_the_schema():
    with pytest.raises(PatternError, match="no operand"):
        op("add", commutative=("self", "second"))


def test_single_use_counts_users_and_names_them():
    pattern = op("relu", self=single_use(op("conv2d", name="conv")))
    assert pattern.match(last(graph_of(lambda m, x: torch.relu(m.c(x)), X, c=CONV)))

    def twice(m, x):
        y = m.c(x)
        return torch.relu(y), y

    miss = pattern.match(last(graph_of(twice, X, c=CONV)))
    assert "2 nodes use ('relu', 'output')" in miss.reason


def test_each_matches_every_element_of_a_list_and_binds_the_list():
    graph = graph_of(lambda m, x, y: torch.cat([torch.relu(x), torch.relu(y), y]), X, X.clone())
    found = op("cat", tensors=each(value(), "xs")).match(last(graph))
    assert [n.name for n in found["xs"]] == [n.name for n in last(graph).args[0]]
    miss = op("cat", tensors=each(op("relu"))).match(last(graph))
    assert "operand 'tensors'" in miss.reason
    assert "[2]" in miss.reason


def test_item_matches_one_result_of_an_operator_that_yields_several():
    graph = graph_of(lambda m, x: torch.max(x, 1)[0], X)
    pattern = item(op("max", name="op"), 0)
    assert pattern.targets == {operator.getitem}
    found = pattern.match(last(graph))
    assert found["op"].target is aten.max.dim
    assert not item(op("max"), 1).match(last(graph))


def test_literals_compare_by_value_and_lists_as_tuples():
    graph = graph_of(lambda m, x: F.max_pool2d(x, 2), X)
    assert op("max_pool2d", kernel_size=[2, 2]).match(last(graph))
    assert op("max_pool2d", kernel_size=literal((3, 3), (2, 2), name="k")).match(last(graph))["k"] == [2, 2]
    assert "not [3, 3]" in op("max_pool2d", kernel_size=[3, 3]).match(last(graph)).reason.replace("(3, 3)", "[3, 3]")


def test_a_literal_never_equals_a_node():
    graph = graph_of(lambda m, x: x + x, X)
    assert not op("add", other=1).match(last(graph))
    assert op("add", other=anything("o")).match(last(graph))


def test_conditions_give_their_reason():
    graph = graph_of(lambda m, x: torch.relu(m.c(x)), X, c=CONV)
    odd = value("x", lambda node: None if node.op != "placeholder" else "inputs are not allowed")
    assert op("conv2d", input=odd).match(nodes_of(graph, "conv2d")[0]).reason == "inputs are not allowed"
    whole = op("relu", self=op("conv2d", name="conv")).where(lambda m: f"{m['conv'].name} is refused")
    assert whole.match(last(graph)).reason == "conv2d is refused"
    assert op("relu").where(lambda m: None, lambda m: None).match(last(graph))


def test_a_miss_keeps_the_predicate_that_came_furthest():
    graph = graph_of(lambda m, x: torch.relu(m.c(x)), X, c=CONV)
    pattern = either(op("relu", self=op("linear")), op("relu", self=op("conv2d", bias=None)))
    miss = pattern.match(last(graph))
    assert isinstance(miss, Miss)
    assert miss.matched == 2
    assert "operand 'bias'" in miss.reason


def test_patterns_are_values_and_matching_changes_nothing():
    one = op("relu", self=value("x"), name="r")
    assert one == op("relu", self=value("x"), name="r") or hash(one) == hash(one)
    with pytest.raises(AttributeError):
        one.name = "other"  # type: ignore[misc]
    graph = graph_of(lambda m, x: torch.relu(x), X)
    before = str(graph)
    one.match(last(graph))
    assert str(graph) == before


# What the patterns of a vendor look like: fused, optional, alternative.
VENDOR = (
    ("conv_act", op(
        "relu", "relu6", "hardtanh",
        self=single_use(op("conv2d", input=value("x"), weight=constant("w"), bias=optional(constant("b")), name="c")),
        name="act",
    )),
    ("add", op("add", self=value("a"), other=value("b"), alpha=1)),
    ("linear", op("linear", input=value("x"), weight=constant("w"))),
)  # fmt: skip


def found_in(graph):
    return [(label, n.name) for n in graph.nodes if n.op == "call_function" for label, p in VENDOR if p.match(n)]


@pytest.mark.slow
def test_strict_and_nonstrict_exports_match_alike():
    model, x = MobileNet().eval(), torch.randn(1, 3, 32, 32)
    default, strict = (found_in(exported(model, x, strict=s).graph) for s in (False, True))
    assert [label for label, _ in default] == [label for label, _ in strict]
    assert [label for label, _ in default].count("add") == 2
    assert [label for label, _ in default].count("linear") == 1


def test_decompositions_keep_what_they_do_not_rewrite():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    decomposed = torch.export.export(model.eval(), (X,)).run_decompositions().module().graph
    conv = either(op("conv2d", weight=constant("w")), op("convolution", weight=constant("w"), transposed=False))
    pattern = op("relu", self=single_use(conv))
    for graph in (exported(model, X).graph, decomposed):
        assert sum(bool(pattern.match(n)) for n in nodes_of(graph, "relu")) == 2


UNARY = (torch.relu, torch.tanh, torch.sigmoid)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12))
def test_matching_agrees_with_a_literal_definition_on_generated_graphs(recipe):
    """relu(single_use(a + b)) in either form, against a search written out by hand."""

    def build(m, x, y):
        made = [x, y]
        for kind, i, j in recipe:
            one, other = made[i % len(made)], made[j % len(made)]
            made.append(one + other if kind > 2 else UNARY[kind](one))
        return made[-1]

    graph = graph_of(build, torch.randn(2), torch.randn(2))
    pattern = op("relu", self=single_use(op("add", self=value("a"), other=value("b"), name="sum")), name="r")
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0]
        expected = node.target is aten.relu.default and source.target is aten.add.Tensor and len(source.users) == 1
        found = pattern.match(node)
        assert bool(found) == expected
        if expected:
            assert (found["r"], found["sum"], found["a"], found["b"]) == (node, source, *source.args)
            assert found.nodes == (node, source)
        else:
            assert found.reason


@settings(max_examples=25, deadline=None)
@given(depth=st.integers(1, 6), break_at=st.integers(0, 6), name=st.sampled_from(["relu", "tanh", "sigmoid"]))
def test_a_chain_matches_as_far_as_it_goes(depth, break_at, name):
    """A pattern of `depth` links over a chain with another link somewhere: the miss counts what held."""

    def chain(m, x):
        for position in range(8):
            x = torch.exp(x) if position == 7 - break_at else getattr(torch, name)(x)
        return x

    pattern = value("x")
    for _ in range(depth):
        pattern = op(name, self=pattern)
    found = pattern.match(last(graph_of(chain, torch.randn(2))))
    if depth <= break_at:
        assert len(found.nodes) == depth
    else:
        assert not found
        assert max(found.matched, 0) == break_at
