"""Depthwise convolutions with kernels larger than XNNPACK's own are sums of parts, and agree with the q/dq graph."""

from typing import Any

import pytest
import torch
from qdq_graphs import decibels
from torch import nn

import quantplug
from quantplug.lowering.xnnpack import lower

LARGE: dict[str, Any] = {
    "7 x 7": ((7, 7), {"padding": 3}),
    "7 x 7 without padding": ((7, 7), {"bias": False}),
    "strided and dilated": ((5, 7), {"padding": (2, 4), "stride": (2, 1), "dilation": (1, 2)}),
    "one row of many": ((1, 31), {"padding": (0, 15)}),
    "one column of many": ((31, 1), {"padding": (15, 0)}),
}


def program_of(model, config="int8", size=36):
    x = torch.randn(2, 8, size, size)
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    prepared = quantplug.prepare_pt2e(torch.export.export(model.eval(), (x,)).module(), quantizer)
    quantplug.calibrate(prepared, [x])
    converted = quantplug.convert_pt2e(prepared)
    program, fresh = lower(converted, (x,)), torch.randn(2, 8, size, size)
    assert decibels(program(fresh), converted(fresh)) >= 40
    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_large_kernel_runs_as_float_parts_and_says_why(name):
    torch.manual_seed(0)
    kernel, options = LARGE[name]
    layer = nn.Conv2d(8, 8, kernel, groups=8, **options)
    program = program_of(nn.Sequential(nn.Conv2d(8, 8, 1), layer, nn.ReLU(), nn.Conv2d(8, 8, 1)))
    [large] = [op for op in program.ops if "25 taps" in op.reason and "relu" not in op.target]
    assert large.target == "aten.conv2d.default"
    assert (program.counts.delegates, program.counts.portable) == (1, 0)


@pytest.mark.slow
def test_a_large_kernel_of_a_graph_that_quantizes_at_run_time():
    torch.manual_seed(0)
    program = program_of(nn.Sequential(nn.Conv2d(8, 8, 7, groups=8), nn.Conv2d(8, 8, 1)), "int8_dynamic")
    assert any("25 taps" in op.reason for op in program.ops)


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 5, groups=8), nn.Conv2d(8, 8, 7), nn.Conv2d(8, 8, 7, groups=2)])
def test_what_has_a_kernel_stays_one_integer_convolution(layer):
    program = program_of(layer, size=12)
    assert (program.counts.int8, program.counts.f32) == (1, 0)
