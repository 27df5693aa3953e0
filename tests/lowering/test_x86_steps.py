"""x86's steps: what each says of the graph holds, and the graph computes the same numbers from step to step."""

import dataclasses
from typing import Any

import pytest
import torch
import xnnpack_models
from torch import nn
from torch.utils import _pytree as pytree

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.starting import starting
from quantplug.lowering.steps import run
from quantplug.lowering.x86.steps import Told, steps


class Small(nn.Module):
    """What the steps are about: both products, a residual sum, clamps, moves, poolings, a row of one dimension."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding="same"), nn.BatchNorm2d(16), nn.ReLU6(), nn.MaxPool2d(2))
        self.block = nn.Conv2d(16, 16, 3, padding=1)
        self.row = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(16, 16), nn.Hardswish(), nn.Linear(16, 16))

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.block(x))
        x = self.row(torch.cat((x, x), 2).flatten(2)).mean(2)
        return self.head(x)


def small() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    return Small().eval(), [(torch.randn(2, 3, 16, 16),) for _ in range(2)]


def listed(name):
    model, sample = xnnpack_models.make(name, 64, seed=0)
    return model, [sample(seed) for seed in range(2)]


def converted(model, batches, config="int8", decomposed=False):
    quantizer = quantplug.get_quantizer("x86").set_global(config)
    exported = torch.export.export(model, batches[0])
    exported = exported.run_decompositions() if decomposed else exported
    prepared = quantplug.prepare_pt2e(exported.module(), quantizer)
    for batch in batches:
        prepared(*batch)
    return quantplug.convert_pt2e(prepared)


@torch.no_grad()
def first(model, batch):
    return pytree.tree_leaves(model(*batch))[0]


def computes(expected, batch, least):
    """The condition that a graph module gives these numbers, up to roundings of integers."""

    def differs(module):
        running = starting(module)
        running.graph.lint()
        running.recompile()
        agreement = float(sqnr(first(running, batch), expected))
        return None if agreement > least else f"it gives other numbers, at {agreement:.1f} dB"

    return differs


def checked(model, batches, config="int8", decomposed=False, least=35, **options):
    graph = converted(model, batches, config, decomposed)
    same = computes(first(graph, batches[1]), batches[1], least)
    found = [dataclasses.replace(step, leaves=(*step.leaves, same)) for step in steps(batches[1], Told(), **options)]
    run(found, starting(graph), checked=True)


@pytest.mark.parametrize("config", ["int8", "int8_dynamic", "int8_weight_only"])
def test_what_every_step_says_holds(config):
    checked(*small(), config=config)


@pytest.mark.slow
def test_what_every_step_says_holds_of_a_decomposed_graph():
    checked(*small(), decomposed=True)


def test_what_every_step_says_holds_where_products_compute_in_half():
    checked(*small(), config="int8_weight_only", float_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "name",
    [
        "LSTM",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "googlenet", "vit", "bert", "swin_t")
        ),
    ],
)
def test_what_every_step_says_holds_of_models_of_the_tables(name):
    # Of random weights, which a processor's roundings in float change more: 34.4 dB on one with AVX512.
    model, batches = listed(name)
    checked(model, batches, least=30 if name == "swin_t" else 35)


def broken(step, change):
    """Returns a step that does something more to its graph."""

    def run_and_break(module):
        step.change(module)
        change(module)

    return dataclasses.replace(step, change=run_and_break)


def forget_values(module):
    for node in module.graph.nodes:
        node.meta.pop("val", None)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("clean", forget_values, r"Step 'clean' did not leave what it says: .* has no value\."),
        ("attention", forget_values, r"Step 'move integers' needs what does not hold before it: .* has no value\."),
    ],
)
def test_a_faulty_step_is_named(name, change, sentence):
    graph, batches = converted(*small()), small()[1]
    planted = [broken(step, change) if step.name == name else step for step in steps(batches[0], Told())]
    with pytest.raises(LoweringError, match=sentence):
        run(planted, starting(graph), checked=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("spell plainly", r"aten\.convolution.* is not spelled plainly"),
        ("move integers", "moves what it could move in integers"),
        ("kernels", "conv2d.* has no kernel, and nothing says why"),
        ("fuse", "quantizes what its kernel could yield in integers"),
    ],
)
def test_a_step_that_does_nothing_is_named(name, sentence):
    graph, batches = converted(*small(), decomposed=True), small()[1]
    idle = {step.name: dataclasses.replace(step, change=lambda module: None) for step in steps(batches[0], Told())}
    planted = [idle[name] if step.name == name else step for step in steps(batches[0], Told())]
    with pytest.raises(LoweringError, match=f"Step '{name}' did not leave what it says: .*{sentence}"):
        run(planted, starting(graph), checked=True)
