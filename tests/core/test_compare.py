"""Comparing a quantized graph with its float original, per output and per layer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Function, MyModel, exported, reference, settled
from torch import nn

from quantplug import get_quantizer
from quantplug.core.report.compare import compare_layers, node_values
from quantplug.core.specs.levels import sqnr

X = torch.randn(1, 3, 10, 10, generator=torch.Generator().manual_seed(0))


@given(st.floats(-60, 60), st.integers(0, 100))
def test_sqnr_is_the_ratio_of_energies_in_decibels(decibels, seed):
    signal = torch.randn(200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
    noise *= signal.norm() / noise.norm() * 10 ** (-decibels / 20)
    assert sqnr(signal + noise, signal) == pytest.approx(decibels, abs=1e-6)


def test_sqnr_at_its_ends():
    x = torch.randn(5)
    assert sqnr(x, x) == math.inf
    assert sqnr(x, torch.zeros(5)) == -math.inf
    assert sqnr(torch.zeros(5), x) == pytest.approx(0)
    assert sqnr(nn.Parameter(x), x + 1) == sqnr(x, x + 1)


def test_layers_of_a_quantized_graph_beside_the_float_ones():
    model = settled(MyModel(use_bn=True), torch.randn(4, 3, 10, 10))
    original = exported(model, X)
    compared = compare_layers(original, reference(model, get_quantizer("xnnpack"), X), (X,))
    # The inside of the fused piece is left out: the batch norm is folded into the convolution.
    assert list(compared) == ["linear", "relu", "sigmoid"]
    for name, (value, found) in compared.items():
        assert value.shape == found.shape
        assert 25 < sqnr(found, value) < 90, name
    assert torch.equal(compared["sigmoid"][0], model(X))


def test_values_are_kept_before_an_inplace_operator_changes_them():
    model = exported(Function(lambda m, x: m.conv(x).relu_(), conv=nn.Conv2d(3, 3, 1)), X)
    values = node_values(model, (X,), {"conv2d", "relu_", "no_such_node"})
    assert values.keys() == {"conv2d", "relu_"}
    assert values["conv2d"].min() < 0 <= values["relu_"].min()
