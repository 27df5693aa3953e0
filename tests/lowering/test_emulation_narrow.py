"""A processor that does not exist, with narrow accumulators: its kernels are loops over numbers, and the emulation
yields their very bits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from qdq_graphs import Net, Weight, fake, graph_of
from torch import Tensor

from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import Level
from quantplug.lowering.emulation import FixedPoint, KernelSet, Numerics, Row, emulate, rows

LIBRARY = torch.library.Library("fake_npu", "DEF")
LIBRARY.define(
    "convolve(Tensor x, Tensor w, Tensor bias, float[] ratios, int x_zero, int zero, int stride, int padding, "
    "int groups, str accumulator, bool saturate, int bits) -> Tensor"
)


def _added(total, product, accumulator: str, saturate: bool):
    """One multiply-accumulate of the processor: exact sum, then the register's limits."""
    if accumulator == "float16":
        with np.errstate(over="ignore"):
            found = np.float16(np.float32(total) + np.float32(product))
        return np.float16(np.clip(found, -65504, 65504)) if saturate else found
    limit = 2**15 if accumulator == "int16" else 2**31
    exact = int(total) + int(product)
    return max(-limit, min(limit - 1, exact)) if saturate else (exact + limit) % (2 * limit) - limit


def _rescaled(total, ratio: float, bits: int) -> int:
    """Requantization: one float32 product rounded to even, or (bits > 0) a fixed-point product rounded up."""
    if bits == 0:
        with np.errstate(over="ignore", invalid="ignore"):
            return int(np.clip(np.rint(np.float32(total) * np.float32(ratio)), -(2**31), 2**31 - 1))
    mantissa, exponent = np.frexp(np.float64(np.float32(ratio)))
    shift = bits - int(exponent)
    return (int(total) * round(float(mantissa) * 2**bits) + (1 << (shift - 1))) >> shift


def _convolve(x, w, bias, ratios, x_zero, zero, stride, padding, groups, accumulator, saturate, bits):
    image = np.pad(x.numpy().astype(int) - x_zero, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    weight = w.numpy().astype(int)
    batch, (outs, ins, high, wide) = len(image), weight.shape
    rows_, columns = ((image.shape[d] - k) // stride + 1 for d, k in ((2, high), (3, wide)))
    out = np.zeros((batch, outs, rows_, columns), dtype=np.int8)
    for n, o, r, c in np.ndindex(*out.shape):
        total = _added(0, int(bias[o]), accumulator, saturate)
        first = o // (outs // groups) * ins
        for i, kr, kc in np.ndindex(ins, high, wide):
            product = image[n, first + i, r * stride + kr, c * stride + kc] * weight[o, i, kr, kc]
            total = _added(total, product, accumulator, saturate)
        out[n, o, r, c] = max(-128, min(127, _rescaled(total, ratios[o], bits) + zero))
    return torch.from_numpy(out)


LIBRARY.impl("convolve", _convolve, "CPU")


def npu(accumulator: torch.dtype, saturate: bool, bits: int) -> KernelSet:
    """The processor as a backend declares it."""
    numerics = Numerics(accumulator, saturate, FixedPoint(bits)) if bits else Numerics(accumulator, saturate)
    return KernelSet(
        "fake_npu", (Row("convolution", rows.products(numerics, "conv2d")), Row("moves", rows.movements()))
    )


def run(x: Tensor, weight: Weight, bias: Tensor, options, accumulator, saturate, bits, entered, out):
    """Returns the output integers of the emulation and of the processor's kernel."""
    stride, padding, groups = options
    net = Net(
        lambda s, x: fake(F.conv2d(fake(x, entered), s.w(), s.b, stride, padding, 1, groups), out), w=weight, b=bias
    )
    graph = graph_of(net, x)
    emulated = emulate(graph, (x,), npu(accumulator, saturate, bits))
    assert emulated.levels == {"conv2d": Level.EXACT}
    integers = torch.ops.quantized_decomposed.quantize_per_tensor(x, *entered, -128, 127, torch.int8)
    unit = weight.scales * entered[0]
    quantized_bias = torch.ops.quantized_decomposed.quantize_per_channel(
        bias, unit, weight.zeros, 0, -(2**31), 2**31 - 1, torch.int32
    )
    ratios = (torch.tensor(entered[0]) * weight.scales / torch.tensor(out[0])).tolist()
    name = str(accumulator).removeprefix("torch.")
    kernel = torch.ops.fake_npu.convolve(
        integers,
        weight.integers,
        quantized_bias,
        ratios,
        entered[1],
        out[1],
        stride,
        padding,
        groups,
        name,
        saturate,
        bits,
    )
    found = emulated(x) / torch.tensor(out[0]) + out[1]
    return found.round().to(torch.int8), kernel


MODES = [
    (torch.int32, False, 0),
    (torch.int32, True, 31),
    (torch.int16, False, 0),
    (torch.int16, True, 0),
    (torch.int16, True, 15),
    (torch.float16, False, 0),
    (torch.float16, True, 0),
]


@pytest.mark.parametrize(("accumulator", "saturate", "bits"), MODES, ids=str)
def test_r09_r23_emulation_of_narrow_accumulators_has_no_mismatching_element(accumulator, saturate, bits):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 6, 5) * 3, Weight(6, 4, 3, 3), torch.randn(6)
    found, kernel = run(x, weight, bias, (1, 1, 1), accumulator, saturate, bits, (0.03, -3), (0.05, 4))
    assert torch.equal(found, kernel)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    options=st.sampled_from([(1, 0, 1), (2, 1, 1), (1, 1, 2), (1, 2, 4)]),
    entered=st.tuples(st.floats(0.001, 0.1), st.integers(-128, 127)),
    out=st.tuples(st.floats(0.001, 0.5), st.integers(-128, 127)),
    size=st.integers(3, 5),
    seed=st.integers(0, 1000),
)
def test_r23_emulation_equals_the_kernel_for_any_shape_scale_and_zero_point(mode, options, entered, out, size, seed):
    torch.manual_seed(seed)
    groups = options[2]
    x, weight, bias = torch.randn(1, 4, size, 4) * 2, Weight(4, 4 // groups, 3, 2), torch.randn(4)
    accumulator, saturate, bits = mode
    found, kernel = run(x, weight, bias, options, accumulator, saturate, bits, entered, out)
    assert torch.equal(found, kernel)


def test_r09_narrow_accumulators_make_a_difference():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 4, 6, 5) * 3, Weight(6, 4, 3, 3), torch.randn(6)
    results = [run(x, weight, bias, (1, 1, 1), *mode, (0.03, -3), (0.05, 4))[0] for mode in MODES]
    wide, fixed, wrapped, saturated, _, half, _ = results
    assert torch.equal(wide, fixed)
    assert not torch.equal(wide, wrapped)
    assert not torch.equal(wrapped, saturated)
    assert not torch.equal(wide, half)


@pytest.mark.parametrize("accumulator", [torch.int16, torch.float16])
def test_r09_linears_and_lines_add_up_in_the_order_of_the_weight(accumulator):
    """A linear is a convolution of one pixel, a 1-D convolution one of height 1."""
    torch.manual_seed(0)
    kernels = KernelSet(
        "npu", (Row("products", rows.products(Numerics(accumulator, True), "conv1d", "conv2d", "linear")),)
    )
    x, w, b = torch.randn(5, 24) * 3, Weight(6, 24), torch.randn(6)
    pixel, line = Weight(6, 24, 1, 1), Weight(6, 8, 1, 3)
    pixel.integers.copy_(w.integers.reshape(6, 24, 1, 1))
    line.integers.copy_(torch.randint(-127, 128, line.integers.shape))
    linear = graph_of(Net(lambda s, x: fake(F.linear(fake(x), s.w(), s.b), (0.05, 4)), w=w, b=b), x)
    pixel.scales.copy_(w.scales)
    image = x.reshape(5, 24, 1, 1)
    conv = graph_of(Net(lambda s, x: fake(F.conv2d(fake(x), s.w(), s.b), (0.05, 4)), w=pixel, b=b), image)
    assert torch.equal(emulate(linear, (x,), kernels)(x), emulate(conv, (image,), kernels)(image).reshape(5, 6))
    one = Weight(6, 8, 3)
    one.integers.copy_(line.integers[:, :, 0])
    one.scales.copy_(line.scales)
    flat, high = torch.randn(2, 8, 9) * 3, None
    high = flat.unsqueeze(2)
    first = graph_of(Net(lambda s, x: fake(F.conv1d(fake(x), s.w(), s.b, 2, 1), (0.05, 4)), w=one, b=b), flat)
    second = graph_of(
        Net(lambda s, x: fake(F.conv2d(fake(x), s.w(), s.b, (1, 2), (0, 1)), (0.05, 4)), w=line, b=b), high
    )
    found, expected = emulate(first, (flat,), kernels)(flat), emulate(second, (high,), kernels)(high)
    assert torch.equal(found, expected.squeeze(2))


def test_r09_what_has_no_order_of_additions_stays_float_and_says_why():
    weight, x = Weight(4, 6, 3, 3, axis=1), torch.randn(1, 4, 5, 5)
    kernels = KernelSet("npu", (Row("t", rows.products(Numerics(torch.int16, True), "conv_transpose2d.input")),))
    net = Net(lambda s, x: fake(F.conv_transpose2d(fake(x), s.w(), s.b, 2), (0.05, 4)), w=weight, b=torch.randn(6))
    (operator,) = emulate(graph_of(net, x), (x,), kernels).ops
    assert operator.placement == "float"
    assert "over one or two dimensions" in operator.reason


def test_numerics_are_checked_when_declared():
    with pytest.raises(ConfigError, match=r"torch\.int8 is not emulated; choose one of"):
        Numerics(torch.int8)
    with pytest.raises(ConfigError, match="1 to 31 bits, found 40"):
        FixedPoint(40)
