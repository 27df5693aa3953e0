"""What torch's inductor would compile wrongly, and does not: compiled programs compute what eager ones do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from x86_programs import alone, quantized

import quantplug
from quantplug.core.specs.levels import sqnr

from models import Function, Signal  # isort: skip

ROWS, IMAGES = (4, 16), (2, 3, 8, 8)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.gelu(m.linear(x)) + x,
        lambda m, x: F.relu(F.relu6(m.linear(x)) + x),
        lambda m, x: F.gelu(torch.tanh(m.linear(x))),
    ],
    ids=["sum", "sum and relu", "function"],
)
def test_a_linear_that_ends_in_a_function_is_not_fused_with_what_follows(function):
    x = torch.randn(ROWS)
    _, program = quantized(Function(function, linear=nn.Linear(16, 16)), x)
    assert sqnr(program.compile()(x), program(x)) > 100


@pytest.mark.few(1)
@pytest.mark.parametrize("after", [F.silu, F.hardswish, F.relu6])
def test_a_convolution_that_ends_in_a_function_is_not_fused_with_what_follows(after):
    x = torch.randn(IMAGES)
    _, program = quantized(Function(lambda m, x: after(F.relu(m.conv(x))), conv=nn.Conv2d(3, 8, 3)), x)
    assert sqnr(program.compile()(x), program(x)) > 100


@pytest.mark.few(1)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_range_of_run_time_has_zero_in_it(sign, symmetric):
    x = sign * (torch.rand(ROWS) + 1)
    config = quantplug.get_x86_quantization_config(is_dynamic=True, symmetric=symmetric)
    _, program = quantized(Function(lambda m, x: m.linear(x), linear=nn.Linear(16, 16)), x, config=config)
    compiled = program.compile()
    for given in (x, -x, torch.zeros_like(x), x - sign):
        torch.testing.assert_close(compiled(given), program(given), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_package_measures_ranges_without_python(symmetric, tmp_path):
    x = torch.randn(ROWS)
    config = quantplug.get_x86_quantization_config(is_dynamic=True, symmetric=symmetric)
    _, program = quantized(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4)), x, config=config)
    (found,) = alone(program.package(tmp_path / "model.pt2"), (x,))
    torch.testing.assert_close(found, program(x), rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: m.linear(F.max_pool2d(x, 2).flatten(1)), IMAGES),
        (lambda m, x: m.linear(F.max_pool2d(x.permute(0, 3, 1, 2), 2).flatten(1)), (2, 8, 8, 3)),
        (lambda m, x: m.conv(F.max_pool2d(x.roll(1, 1), 2).transpose(2, 3)), IMAGES),
        (lambda m, x: m.conv(F.max_pool2d(x, 2)), IMAGES[1:]),
    ],
    ids=["contiguous", "channels last", "moved", "one image"],
)
def test_a_max_pool_takes_images_in_any_memory(function, shape):
    x = torch.randn(shape)
    model = Function(function, linear=nn.Linear(48, 5), conv=nn.Conv2d(3, 4, 3))
    _, program = quantized(model, x)
    assert {op.placement for op in program.ops if "max_pool" in op.target} == {"int8"}
    assert sqnr(program.compile()(x), program(x)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_the_size_of_a_convolution_over_one_dimension_is_known(config):
    x = torch.randn(2, 4, 24)
    _, program = quantized(Signal(), x, config=config)
    assert sqnr(program.compile()(x), program(x)) > 100
