"""Boundaries: both sides, elements, and what the change of numbers costs."""

from dataclasses import replace

import pytest
import torch
from compositions import WORDS, Images, Tagger, X, converted, mixed
from torch import nn
from torchao.quantization.pt2e import quantize_pt2e as torchao

import quantplug
from quantplug import ComposableQuantizer, EmbeddingQuantizer, Region, explain, get_quantizer
from quantplug.core.report.boundaries import measure_boundaries


def test_boundaries_name_both_sides_elements_and_error():
    reference = converted(Images().eval(), mixed(), X)
    found = {boundary.kind: boundary for boundary in explain(reference).boundaries}
    assert set(found) == {"quantize", "shared", "requantize"}
    shared, requantize = found["shared"], found["requantize"]
    assert (shared.source, shared.readers, shared.elements, shared.error) == ("xnnpack", ("x86",), 144, 0)
    assert requantize.elements == 144
    assert requantize.before.startswith("int8")
    assert requantize.after.startswith("uint8")
    assert "requantize" in str(explain(reference))


def test_the_error_of_a_requantization_bounds_what_is_measured():
    config = quantplug.get_symmetric_quantization_config(True, observer="minmax")
    quantizer = (
        ComposableQuantizer()
        .add(get_quantizer("xnnpack").set_global(config), Region(module="0"), precedence=0)
        .add(get_quantizer("x86"), Region(module="1"), precedence=0)
    )
    x = torch.randn(64, 8)
    reference = converted(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), quantizer, x)
    (boundary,) = [b for b in explain(reference).boundaries if b.kind == "requantize"]
    assert (boundary.source, boundary.readers) == ("xnnpack", ("x86",))
    node = next(n for n in reference.graph.nodes if n.name == boundary.node)
    first, second = node.args[0].args[1:3], node.args[1:3]
    values = (torch.arange(-128, 128) - first[1]) * first[0]
    rounded = torch.fake_quantize_per_tensor_affine(values, second[0], second[1], 0, 255)
    inside = (values / second[0] + second[1]).round().clamp(0, 255) == (values / second[0] + second[1]).round()
    assert boundary.error == pytest.approx(float((rounded - values)[inside].abs().max()), rel=1e-3)
    assert boundary.clipped == pytest.approx(float((~inside).float().mean()))
    assert 0 < boundary.error <= second[0] / 2 * 1.001
    measured = measure_boundaries(reference, (x,))[boundary.node]
    assert 30 < measured < 80


def test_a_float_result_that_another_quantizes_is_a_boundary():
    reference = converted(Tagger().eval(), ComposableQuantizer([EmbeddingQuantizer(), get_quantizer("xnnpack")]), WORDS)
    crossing = explain(reference).boundaries[0]
    assert (crossing.kind, crossing.source, crossing.readers) == ("quantize", "embedding", ("xnnpack",))
    assert crossing.elements == 20 * 16


def test_equal_qparams_in_other_words_cost_no_pair():
    config = quantplug.get_symmetric_quantization_config(True)
    activation = replace(config.input_activation, quant_min=None, quant_max=None)
    reworded = replace(config, input_activation=activation, output_activation=activation)
    x = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()

    def quantizer():
        return (
            ComposableQuantizer()
            .add(get_quantizer("xnnpack").set_global(config), Region(module="0"), precedence=0, name="a")
            .add(get_quantizer("xnnpack").set_global(reworded), Region(module="1"), precedence=0, name="b")
        )

    ours, theirs = (converted(model, quantizer(), x, core=core) for core in (quantplug, torchao))
    kinds = [[b.kind for b in explain(found).boundaries if b.source == "a"] for found in (ours, theirs)]
    assert kinds == [["shared"], ["requantize"]]
    assert torch.equal(ours(x), theirs(x))
