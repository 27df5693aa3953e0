"""Ratios of scales that XNNPACK's kernels do not take: the report says float before lowering, the program after it."""

import pytest
import torch
from models import Function
from torch import nn

import quantplug

PLUS_MINUS = torch.cat([torch.ones(1, 4, 8, 4), -torch.ones(1, 4, 8, 4)], 3) * torch.linspace(100, 200, 8).view(8, 1)


def placed(function, x, **modules):
    """Returns what the report and what the program say of each operator: whether it is an integer one, and why not."""
    model = Function(function, **modules).eval()
    artefact = quantplug.quantize(model, (x,), "xnnpack", [(x,)], progress=False)
    program = {op.node: (op.placement == "int8", op.reason) for op in artefact.program.ops}
    report = {row.node: (row.quantized, row.reason) for row in artefact.report.rows}
    return report, program


def layers(factor=1.0):
    torch.manual_seed(0)
    first, last = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1)
    with torch.no_grad():
        first.weight.mul_(factor)
        last.bias.fill_(1e-3)
    return {"first": first, "last": last}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "factor", "operator", "ratio"),
    [
        (lambda m, x: m.last(m.first(x).mean((2, 3), keepdim=True)), 1.0, "mean", r"\[0.00391, 128\)"),
        (lambda m, x: m.last(m.first(x) - (m.first(x) + 1e-4 * x)), 1.0, "sub", r"\[0.000977, 256\)"),
        (lambda m, x: m.last(torch.clamp(m.first(x), 0.0, 1.0)), 1e5, "conv2d", r"\[0, 256\)"),
    ],
)
def test_what_calibration_puts_beyond_a_kernels_ratios_is_float_in_report_and_program(
    function, factor, operator, ratio
):
    report, program = placed(function, PLUS_MINUS, **layers(factor))
    assert report[operator] == program[operator]
    is_integer, reason = report[operator]
    assert not is_integer
    assert ": the ratio " in reason
    assert reason.endswith(ratio.replace("\\", ""))
    assert {name for name, (integer, _) in report.items() if integer} == {
        name for name, (integer, _) in program.items() if integer
    }


@pytest.mark.slow
@pytest.mark.parametrize("layer", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("dim", [None, 0, 2])
def test_a_float_convolution_of_one_dimension_between_integers_runs_in_the_delegate(layer, dim):
    """ExecuTorch puts conversions around it, takes it for an integer one and refuses the program."""
    torch.manual_seed(0)
    middle = layer(6, 6, 3, stride=2, padding=1, groups=2)
    model = nn.Sequential(nn.Conv1d(4, 6, 3), middle, nn.Conv1d(6, 3, 1)).eval()
    quantizer = quantplug.get_quantizer("xnnpack").set_module_name("1", None)
    shapes = None if dim is None else ({dim: torch.export.Dim("size", min=2 if dim == 0 else 8, max=64)},)
    x = torch.randn(2, 4, 12)
    artefact = quantplug.quantize(model, (x,), quantizer, [x], dynamic_shapes=shapes, progress=False)
    larger = x if dim is None else torch.cat([x, x + 1], dim)
    for batch in (x, larger, x):
        torch.testing.assert_close(artefact(batch), artefact.reference(batch))
    placed = [op.placement for op in artefact.program.ops if "conv" in op.target]
    assert placed == ["int8", "float", "int8"]


@pytest.mark.slow
def test_a_convolution_of_one_dimension_beyond_its_ratio_is_float_with_that_reason():
    torch.manual_seed(0)
    first, last = nn.Conv1d(2, 3, 1, bias=False), nn.Conv1d(3, 3, 1)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1000.0, -1000.001]] * 3).reshape(3, 2, 1))
    x = torch.randn(2, 1, 12)
    report, program = placed(lambda m, x: m.last(m.first(torch.cat([x, x], 1))), x, first=first, last=last)
    assert report["conv1d"] == program["conv1d"]
    assert ": the ratio " in program["conv1d"][1]
    assert program["conv1d_1"] == (True, "")
