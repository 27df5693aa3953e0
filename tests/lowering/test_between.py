"""Graphs that return what layers yield, and how long kernels take."""

import pytest
import torch
from planted_faults import clean, net
from torch import nn

import quantplug
from quantplug.lowering.between import LayersAlone, cut_apart, roundings_of, with_values
from quantplug.lowering.timing import Taken, timed, total


@pytest.mark.parametrize("family", ["residual", "transformer"])
def test_values_come_behind_the_models_own_outputs_and_are_those_of_an_interpreter(family):
    _, converted = clean(family, "x86")
    x = net(family)[1]
    inside = with_values(converted)
    with torch.no_grad():
        own, *values = inside.model(x)
        assert torch.equal(own, converted(x))
        run = torch.fx.Interpreter(converted, garbage_collect_values=False)
        run.run(x)
    nodes = {node.name: node for node in converted.graph.nodes}
    assert len(values) == len(inside.layers) > 5
    for layer, value in zip(inside.layers, values, strict=True):
        found = nodes[layer]
        while not torch.equal(run.env[found], value) or found.op == "placeholder":
            found = next(user for user in found.users if user.op == "call_function")


def test_layers_that_are_cut_apart_read_what_they_are_given_and_nothing_else():
    _, converted = clean("mlp", "x86")
    apart = cut_apart(converted)
    assert apart.layers == ("linear", "linear_1", "linear_2", "linear_3")
    assert apart.values == ("input_1", "relu", "relu_1", "relu_2")
    given = [torch.randn(32, size) for size in (16, 32, 32, 32)]
    with torch.no_grad():
        before = apart.model(*given)
        given[1] = given[1] + 1
        after = apart.model(*given)
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, False, True, True]
    alone = cut_apart(converted, "linear_2")
    assert alone.values == ("relu_1",)
    with torch.no_grad():
        assert torch.equal(alone.model(given[2])[0], after[2])
    rounding = roundings_of(converted, "linear_2")
    assert [node.op for node in rounding.model.graph.nodes].count("call_function") == 2


def test_what_is_cut_apart_is_a_graph_of_its_own():
    _, converted = clean("mlp", "x86")
    before = str(converted.graph)
    cut_apart(converted)
    with_values(converted)
    assert str(converted.graph) == before


def test_kernels_are_timed_by_the_operators_that_they_carry_out():
    _, converted = clean("residual", "x86")
    x = net("residual")[1]
    program = quantplug.get_quantizer("x86").backend.lower(converted, (x,))
    wanted = program(x).clone()
    times = program.kernel_times(x)
    assert torch.equal(program(x), wanted)
    assert all(0 < time.taken.low <= time.taken.middle <= time.taken.high for time in times)
    integers = {op.node for op in program.ops if op.placement == "int8"}
    assert integers <= set().union(*(time.operators for time in times))
    (first,) = (time for time in times if "conv2d" in time.operators)
    assert first.operators == {"conv2d", "relu"}
    assert first.kernel == "onednn.qconv_pointwise.default"


def test_a_layer_alone_takes_the_longer_the_larger_it_is():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1024)).eval()
    x = torch.randn(64, 64)
    artefact = quantplug.quantize(model, (x,), "x86", [x], progress=False)
    run = torch.fx.Interpreter(artefact.reference, garbage_collect_values=False)
    run.run(x)
    values = {node.name: value for node, value in run.env.items()}
    alone = LayersAlone(artefact.reference, values, quantplug.get_quantizer("x86").backend.lower)
    small, large = alone.taken("linear"), alone.taken("linear_2")
    assert large.middle > small.middle
    assert all(taken.low <= taken.middle <= taken.high for taken in (small, large))


def test_times_are_quartiles_and_add_up():
    taken = timed(lambda: sum(range(1000)))
    assert 0 < taken.low <= taken.middle <= taken.high
    assert total([Taken(1, 2, 3), Taken(10, 20, 30)]) == Taken(11, 22, 33)
