"""Legalization for XNNPACK step by step: what each leaves holds, and the graph computes the same after each."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import xnnpack_models
from qdq_graphs import FULL, A, B, Net, Weight, decibels, fake, graph_of
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.starting import starting
from quantplug.lowering.steps import run
from quantplug.lowering.xnnpack.legalize import Legalized, steps
from quantplug.lowering.xnnpack.run_time import as_kernels_choose


class Mobile(nn.Module):
    """The pieces of mobile networks, and a pooling behind branches that are joined."""

    def __init__(self):
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 7, padding="same", groups=8)
        self.gate, self.head = nn.Conv2d(8, 8, 1), nn.Linear(16, 4)

    def forward(self, x):
        x = F.hardswish(self.stem(x))
        y = F.relu6(self.deep(x)) * F.hardsigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.head(torch.cat([x + y, F.max_pool2d(y, 3, 1, 1)], 1).mean((2, 3)) / 2).softmax(-1)


class Attentive(nn.Module):
    """Attention over tokens of patches."""

    def __init__(self):
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, 16, 4, 4), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        return self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1)


def converted(model, x, config=None):
    exported = torch.export.export(model.eval(), (x,)).module()
    quantizer = quantplug.get_quantizer("xnnpack")
    prepared = quantplug.prepare_pt2e(exported, quantizer if config is None else quantizer.set_global(config))
    prepared(x)
    return quantplug.convert_pt2e(prepared)


def take_steps(graph, inputs, changed=lambda step: step, least=40):
    """Legalizes a graph; after each step asks what it leaves, and whether the graph computes what it did."""
    working = starting(graph)
    as_kernels_choose(working)
    expected = pytree.tree_leaves(working(*inputs))
    for step in map(changed, steps(Legalized())):
        run([step], working, checked=True)
        working.graph.lint()
        working.recompile()
        for found, wanted in zip(pytree.tree_leaves(working(*inputs)), expected, strict=True):
            assert decibels(found, wanted) > least, step.name


@pytest.mark.parametrize("model", [Mobile, Attentive])
def test_every_step_leaves_what_it_says_and_the_same_numbers(model):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    take_steps(converted(model(), x), (x,))


@pytest.mark.slow
@pytest.mark.parametrize("name", xnnpack_models.TABLE)
def test_every_step_leaves_what_it_says_on_the_models_of_the_table(name):
    model, sample = xnnpack_models.make(name, 64, seed=0)
    inputs = sample(0)
    exported = torch.export.export(model.eval(), inputs).module()
    config = "int8_dynamic" if name == "bert_dynamic" else "int8"
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack").set_global(config))
    prepared(*inputs)
    # In float64 the graph of swin_t keeps no more than 30 decibels of itself: norms that round otherwise go so far.
    take_steps(quantplug.convert_pt2e(prepared), inputs, least=28 if name == "swin_t" else 40)


def everything(s, x):
    """One construct for each step whose condition is asked below."""
    x = fake(x, (0.03, 125), 0, 255, torch.uint8)
    y = fake(F.relu(F.linear(x, s.w(), torch.ops.quantized_decomposed.dequantize_per_tensor(s.b, 0.01, 0, *FULL))), B)
    y, z = fake(y * 2.0, A, -127, 127), fake(F.linear(y, s.w()), B)
    return fake(torch.cat([y, z], -1), B), y.softmax(-1), F.linear(y, s.v())


FAULTS = {
    "contiguous constants": "is no contiguous constant",
    "signed integers": "writes torch.uint8",
    "one dequantize for each integer reader": "is read by",
    "constant biases in float": "has a bias in integers",
    "narrow ranges as clamps": "has fewer integers than int8",
    "numbers as constants": "has a number beside integers",
    "concatenations in one scale": "joins integers of several scales",
    "products without integer kernel": "yields floats",
    "constants of its own for each product": "read '",
}


@pytest.fixture(scope="module")
def graph_of_everything():
    torch.manual_seed(0)
    weight, turned = Weight(16, 16), Weight(16, 16)
    turned.integers = turned.integers.t().contiguous().t()
    net = Net(everything, w=weight, v=turned, b=torch.arange(-8, 8, dtype=torch.int8))
    x = torch.randn(2, 16)
    return graph_of(net, x), x


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_that_does_nothing_is_caught(graph_of_everything, name):
    graph, x = graph_of_everything
    with pytest.raises(LoweringError, match=f"Step '{name}' did not leave what it says: .*{FAULTS[name]}"):
        take_steps(graph, (x,), lambda step: replace(step, change=lambda working: None) if step.name == name else step)


def test_a_step_that_changes_the_numbers_is_caught(graph_of_everything):
    graph, x = graph_of_everything

    def wrong(working):
        for node in working.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.replace_all_uses_with(node.args[0])

    with pytest.raises(AssertionError, match="slopes spelled out"):
        take_steps(graph, (x,), lambda s: replace(s, change=wrong) if s.name == "slopes spelled out" else s)
