"""Random backends on random models: what is annotated keeps every constraint, what is not has a reason that is true.

The oracle below decides about each operator from the declaration alone, without patterns or engine.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import exported
from torch import nn

from quantplug import Backend, BackendQuantizer, explain, prepare_pt2e
from quantplug.annotators.activation import clamps, own_range
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.presets import config_for
from quantplug.core.annotation.verify import verify_annotations
from quantplug.core.graph.facts import compute_nodes
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints

FAMILIES = ("linear", "add", "mul", "gelu", "relu")
MAKERS = {
    "linear": lambda: linear(activations=()),
    "add": lambda: binary("add", activations=()),
    "mul": lambda: binary("mul", activations=()),
    "gelu": lambda: own_range("gelu"),
    "relu": lambda: clamps("relu"),
}


def at_most(width):
    def check(match, config):
        found = match["op"].meta["val"].shape[-1]
        return None if found <= width else f"{found} columns, the buffer holds {width}"

    return check


class Chain(nn.Module):
    """Operators one after the other; add and mul also read the model's input through a linear layer."""

    def __init__(self, steps, width):
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in steps)

    def forward(self, x):
        for step, layer in zip(self.steps, self.layers, strict=True):
            other = x
            if step == "linear":
                x = layer(x)
            elif step in ("add", "mul"):
                x = getattr(torch, step)(x, torch.tanh(other))
            else:
                x = getattr(torch.nn.functional, step)(x)
        return x


@st.composite
def backends(draw):
    rows = []
    limits = {}
    for family in draw(st.permutations(FAMILIES))[: draw(st.integers(1, 5))]:
        width = draw(st.sampled_from([4, 8]))
        dtype = draw(st.sampled_from([torch.int8, torch.uint8]))
        bound = DTypeWithConstraints(dtype, *draw(st.sampled_from([(None, None), (0, None), (None, 100)])))
        limits[family] = (width, bound)
        rows.append(MAKERS[family]().where(at_most(width)).accepting(DTypeConfig("it", bound, bound, torch.int8)))
    activations = draw(st.sampled_from([torch.int8, torch.uint8]))
    asked = DTypeConfig("asked", activations, activations, torch.int8)
    backend = Backend(
        "random", tuple(rows), {"it": lambda **_: config_for(asked)}, "quantplug.lowering.reference:lower"
    )
    return backend, limits, asked


def fits(bound, dtype):
    low, high = (-128, 127) if dtype is torch.int8 else (0, 255)
    least, greatest = bound.range
    return bound.dtype is dtype and low >= least and high <= greatest


def expected(node, limits, asked, quantized):
    """Returns None for an operator that has to be quantized, or words that the reason has to contain."""
    family = str(node.target).split(".")[1]
    if family not in limits:
        return f"no rule ends in {node.target}"
    width, bound = limits[family]
    if node.meta["val"].shape[-1] > width:
        return f"columns, the buffer holds {width}"
    # A clamp has no numbers of its own: those that it shares are checked once its producer is known.
    if family == "relu" and node.args[0].name not in quantized:
        return "which is float"
    return None if fits(bound, asked.input) else "the limit is"


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(backends(), st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=5), st.sampled_from([4, 8, 16]))
def test_every_annotation_keeps_every_constraint_and_every_reason_is_true(drawn, steps, width):
    backend, limits, asked = drawn
    model = exported(Chain(steps, width), torch.randn(2, width))
    quantizer = type("RandomQuantizer", (BackendQuantizer,), {"backend": backend})(strict=False)
    quantizer.annotate(model)
    verify_annotations(model)
    report = explain(model)
    quantized = {row.node for row in report.rows if row.quantized}
    for node in compute_nodes(model.graph):
        words, row = expected(node, limits, asked, quantized), report.row(node.name)
        assert row.quantized is (words is None), (row, words)
        if words is not None:
            assert words in row.reason
    for violation in report.violations:
        family = str(next(n for n in model.graph.nodes if n.name == violation.node).target).split(".")[1]
        assert not fits(limits[family][1], asked.input)
    prepared = prepare_pt2e(exported(Chain(steps, width), torch.randn(2, width)), quantizer)
    assert {row.node for row in explain(prepared).rows if row.quantized} == quantized
