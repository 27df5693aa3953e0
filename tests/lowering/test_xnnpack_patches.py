"""Convolutions over patches of images run as linear layers and give the integers of the convolution."""

import pytest
import torch
from qdq_graphs import decibels
from torch import nn

import quantplug
from quantplug.lowering.xnnpack import lower
from quantplug.lowering.xnnpack.serializer.records import recorded_kernel_calls


def program_of(model, x, shapes=None):
    torch.manual_seed(0)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    quantplug.calibrate(prepared, [x])
    converted = quantplug.convert_pt2e(prepared)
    return lower(converted, (x,)), converted


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [4, (2, 6)])
def test_patches_of_colours_are_rows_of_a_linear_layer(kernel):
    batch = torch.export.Dim("batch", min=1, max=8)
    model = nn.Sequential(nn.Conv2d(3, 16, kernel, kernel), nn.Flatten(2))
    with recorded_kernel_calls() as calls:
        program, graph = program_of(model, torch.randn(2, 3, 24, 24), ({0: batch},))
    assert [op.placement for op in program.ops if "conv2d" in op.target] == ["int8"]
    assert {call.kind for call in calls if not (call.is_convert or call.is_movement)} == {"FullyConnected"}
    for size in (1, 5):
        fresh = torch.randn(size, 3, 24, 24)
        assert decibels(program(fresh), graph(fresh)) >= 60


OTHERS = {
    "many channels": (nn.Conv2d(16, 8, 4, 4), 16),
    "overlapping": (nn.Conv2d(3, 8, 4, 2), 3),
    "with a rest": (nn.Conv2d(3, 8, 5, 5), 3),
    "padded": (nn.Conv2d(3, 8, 4, 4, padding=2), 3),
    "with an activation": (nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU()), 3),
    "of one pixel": (nn.Conv2d(3, 8, 1), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name):
    model, channels = OTHERS[name]
    with recorded_kernel_calls() as calls:
        program_of(model, torch.randn(1, channels, 24, 24))
    assert {call.kind for call in calls if not (call.is_convert or call.is_movement)} == {"Conv2d"}
