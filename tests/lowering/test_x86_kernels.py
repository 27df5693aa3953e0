"""Each kernel and rule of the x86 lowering against the q/dq graph, operator by operator.

Classes: "exact" (every integer equal), "one step" (fused kernels round once where the q/dq graph rounds a
float32 sum of another order).
"""

import pytest
import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators of quantized_decomposed)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.lowering.processor import highest_integer
from quantplug.lowering.x86 import X86Program, lower
from quantplug.lowering.x86.kernels import few_rows

QD = torch.ops.quantized_decomposed
TOP = highest_integer()


def integers(x, scale=0.05, zero_point=100 * TOP // 255, qmin=0, qmax=TOP, dtype=torch.uint8):
    return QD.quantize_per_tensor(x, scale, zero_point, qmin, qmax, dtype)


def rounded(x, scale=0.05, zero_point=100 * TOP // 255, qmin=0, qmax=TOP, dtype=torch.uint8):
    """Quantizes and dequantizes: what stands between two operators of a reference graph."""
    args = (scale, zero_point, qmin, qmax, dtype)
    return QD.dequantize_per_tensor(QD.quantize_per_tensor(x, *args), *args)


class Weight(nn.Module):
    """An int8 weight as a reference graph holds it: integers, scales and a dequantize node."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("values", torch.randint(-127, 128, shape, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(shape[0]) * 0.003 + 0.001)
        self.register_buffer("zeros", torch.zeros(shape[0], dtype=torch.int64))
        self.axis = 0

    def forward(self):
        return QD.dequantize_per_channel(self.values, self.scales, self.zeros, self.axis, -127, 127, torch.int8)


class Product(nn.Module):
    """A convolution or linear between quantized tensors, and a function between it and the quantization."""

    def __init__(self, product, weight, between=lambda y: y, bias=True, before=None, after=None):
        super().__init__()
        self.weight = Weight(*weight)
        self.bias = nn.Parameter(torch.randn(weight[0])) if bias else None
        self.product, self.between = product, between
        self.before, self.after = before or {}, after or {"scale": 0.04, "zero_point": 90}

    def forward(self, x):
        y = self.product(rounded(x, **self.before), self.weight(), self.bias)
        return rounded(self.between(y), **self.after)


def check(model, *inputs, step, kernels, share=0.002):
    """Lowers a reference graph and compares; returns the program.

    Args:
        step: size of one step of the output's quantization.
        kernels: how many oneDNN kernels the program must consist of.
        share: at most this part of the elements may be one step away.
    """
    graph = torch.export.export(model.eval(), inputs).module()
    program = lower(graph, inputs)
    found = [n for n in program.module.graph.nodes if str(n.target).startswith("onednn.")]
    assert len(found) == kernels, program.module.graph
    with torch.no_grad():
        difference = (graph(*inputs) - program(*inputs)).abs() / step
    assert difference.max() < 1.01
    assert (difference > 0.5).float().mean() <= share
    return program


IMAGE = (2, 16, 9, 9)


@pytest.mark.parametrize(
    ("product", "weight", "shape"),
    [
        (F.conv1d, (8, 16, 3), (2, 16, 20)),
        (F.conv2d, (8, 16, 3, 3), IMAGE),
        (F.conv3d, (8, 16, 3, 3, 3), (2, 16, 5, 5, 5)),
        (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), (8, 16, 3, 3), IMAGE),
        (lambda x, w, b: F.conv2d(x, w, b, dilation=2, padding=(2, 1)), (8, 16, 3, 3), IMAGE),
        (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (8, 16, 3, 3), IMAGE),
        (lambda x, w, b: F.conv2d(x, w, b, groups=16, padding=1), (16, 1, 3, 3), IMAGE),
        (lambda x, w, b: F.conv2d(x, w, b, groups=4), (8, 4, 3, 3), IMAGE),
        (F.linear, (8, 16), (3, 16)),
        (F.linear, (8, 16), (2, 3, 16)),
        (lambda x, w, b: torch.addmm(b, x, w.t()), (8, 16), (3, 16)),
        (lambda x, w, b: torch.mm(x, w.t()), (8, 16), (3, 16)),
    ],
)
def test_products_are_exact(product, weight, shape):
    torch.manual_seed(0)
    check(Product(product, weight), torch.randn(shape) * 3, step=0.04, kernels=1, share=0)


def test_a_product_needs_no_bias():
    torch.manual_seed(0)
    check(Product(F.conv2d, (8, 16, 3, 3), bias=False), torch.randn(IMAGE) * 3, step=0.04, kernels=1)


@pytest.mark.parametrize(
    "between",
    [
        F.relu,
        F.relu6,
        F.hardswish,
        F.silu,
        lambda y: y * torch.sigmoid(y),
        lambda y: y.clamp(-1, 2),
        lambda y: y.clamp(min=0.5),
    ],
)
def test_unary_functions_fuse_into_convolutions(between):
    torch.manual_seed(0)
    program = check(Product(F.conv2d, (8, 16, 3, 3), between), torch.randn(IMAGE) * 3, step=0.04, kernels=1)
    assert {operator.placement for operator in program.ops} == {"int8"}


@pytest.mark.parametrize(
    "between",
    [F.relu, F.relu6, F.hardswish, F.silu, F.gelu, torch.tanh, lambda y: F.gelu(y, approximate="tanh"), F.leaky_relu],
)
def test_unary_functions_fuse_into_linears(between):
    torch.manual_seed(0)
    program = check(Product(F.linear, (8, 16), between), torch.randn(5, 16) * 3, step=0.04, kernels=1)
    assert {operator.placement for operator in program.ops} == {"int8"}


def test_a_function_without_integer_kernel_stays_float_and_is_reported():
    torch.manual_seed(0)
    program = check(Product(F.linear, (8, 16), torch.erf), torch.randn(5, 16) * 3, step=0.04, kernels=1)
    (left,) = [operator for operator in program.ops if operator.placement != "int8"]
    assert left.target == "aten.erf.default"
    assert "no integer kernel for aten.erf.default" in left.reason


@pytest.mark.parametrize(
    "after", [{"zero_point": 60, "qmin": 0, "qmax": 127}, {"zero_point": 0, "qmin": 20, "qmax": 200}]
)
@pytest.mark.parametrize(
    ("between", "clamps"),
    [
        (lambda y: y, 0),
        (F.relu, 0),
        (lambda y: y.clamp(-1, 2), 0),
        (lambda y: y.clamp(min=90.0), 0),  # beyond the range of the integers
        (F.silu, 1),
    ],
)
def test_an_output_range_narrower_than_its_dtype_is_kept(between, clamps, after):
    torch.manual_seed(0)
    model = Product(F.conv2d, (8, 16, 3, 3), between, after={"scale": 0.04, **after})
    program = check(model, torch.randn(IMAGE) * 30, step=0.04, kernels=1)
    found = [n for n in program.portable.graph.nodes if n.target is torch.ops.aten.clamp.default]
    assert len(found) == clamps


def test_signed_activations_run_on_the_unsigned_kernels():
    torch.manual_seed(0)
    low = -(TOP + 1) // 2
    signed = {"scale": 0.05, "zero_point": -7, "qmin": low, "qmax": low + TOP, "dtype": torch.int8}
    model = Product(F.conv2d, (8, 16, 3, 3), F.relu, before=signed, after=signed)
    check(model, torch.randn(IMAGE) * 3, step=0.05, kernels=1)


class Residual(nn.Module):
    """Convolution plus shortcut, which others may read too."""

    def __init__(self, product, weight, activation, *, shortcut_read_later=False, shortcut_is_input=False):
        super().__init__()
        self.weight, self.bias = Weight(*weight), nn.Parameter(torch.randn(weight[0]))
        self.product, self.activation = product, activation
        self.read_later, self.is_input = shortcut_read_later, shortcut_is_input

    def forward(self, x, shortcut):
        shortcut = rounded(x if self.is_input else shortcut, 0.06, 120)
        source = shortcut if self.is_input else rounded(x)
        total = self.activation(self.product(source, self.weight(), self.bias) + shortcut)
        result = rounded(total, 0.07, 30)
        return result + shortcut.mean() if self.read_later else result


@pytest.mark.parametrize("activation", [F.relu, lambda y: y])
@pytest.mark.parametrize("read_later", [False, True])
@pytest.mark.parametrize("is_input", [False, True])
def test_residual_sums_are_added_by_the_kernel_and_spare_what_others_read(activation, read_later, is_input):
    torch.manual_seed(0)
    conv = lambda x, w, b: F.conv2d(x, w, b, padding=1)  # noqa: E731
    model = Residual(conv, (16, 16, 3, 3), activation, shortcut_read_later=read_later, shortcut_is_input=is_input)
    program = check(model, torch.randn(IMAGE) * 3, torch.randn(IMAGE) * 3, step=0.07, kernels=1)
    targets = [str(n.target) for n in program.module.graph.nodes]
    assert "onednn.qconv2d_pointwise.binary" in targets
    assert "aten.add.Tensor" not in targets[: targets.index("onednn.qconv2d_pointwise.binary")]


@pytest.mark.parametrize("activation", [F.relu, lambda y: y])
def test_residual_sums_are_added_by_linears(activation):
    torch.manual_seed(0)
    check(
        Residual(F.linear, (16, 16), activation), torch.randn(4, 16) * 3, torch.randn(4, 16) * 3, step=0.07, kernels=1
    )


class FloatResidual(nn.Module):
    """A transformer's residual: the shortcut and the sum stay float."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = Weight(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return rounded(F.layer_norm(x + F.linear(rounded(x), self.weight(), self.bias), (16,)), 0.02, 128)


@pytest.mark.parametrize("shape", [(4, 16), (2, 5, 16)])
def test_a_float_residual_is_added_by_the_linear(shape):
    torch.manual_seed(0)
    program = check(FloatResidual(), torch.randn(shape), step=0.02, kernels=1)
    assert "onednn.qlinear_pointwise.binary" in [str(n.target) for n in program.module.graph.nodes]


def test_a_broadcast_sum_is_not_fused():
    torch.manual_seed(0)
    model = Residual(F.linear, (16, 16), F.relu)
    program = check(model, torch.randn(4, 16), torch.randn(1, 16), step=0.07, kernels=1)
    assert "aten.add.Tensor" in [operator.target for operator in program.ops if operator.placement == "float"]


class Movement(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, Weight(16, 16, 1, 1)

    def forward(self, x):
        y = rounded(F.conv2d(rounded(x), self.weight()), 0.05, 100)
        return rounded(self.function(y), 0.05, 100)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.flatten(1),
        lambda y: y.reshape(2, 4, -1),
        lambda y: y.permute(0, 2, 3, 1),
        lambda y: y.transpose(1, 2).unsqueeze(0),
        lambda y: y[:, 3:7],
        lambda y: y[:, 2],
        lambda y: y[:, :, :1, :1].expand(2, 16, 5, 5),
        lambda y: y.repeat(1, 2, 1, 1),
        lambda y: torch.cat([y, y[:, :3]], 1),
        lambda y: torch.stack([y, y]),
        lambda y: F.pad(y, (1, 2, 0, 1)),
        lambda y: F.pixel_shuffle(y, 2),
        lambda y: F.max_pool2d(y, 3, 2, 1),
        lambda y: F.max_pool2d(y, 2),
        lambda y: F.max_pool2d(y, 3, 2, 1, ceil_mode=True),
        F.relu,
        lambda y: F.relu(y, inplace=True),
        lambda y: F.dropout(y, 0.5, training=False),
        lambda y: y.contiguous().view(2, -1),
    ],
)
def test_movement_pooling_and_relu_stay_on_integers_exactly(function):
    torch.manual_seed(1)  # with no tie in the convolution
    program = check(Movement(function), torch.randn(IMAGE) * 3, step=0.05, kernels=1, share=0)
    assert {operator.placement for operator in program.ops} == {"int8"}
    conversions = [n for n in program.module.graph.nodes if n.target is torch.ops.aten.to.dtype]
    assert len(conversions) == 2


def test_a_padding_value_off_the_grid_stays_float():
    torch.manual_seed(0)
    model = Movement(lambda y: F.pad(y, (1, 1), value=0.033))
    program = check(model, torch.randn(IMAGE), step=0.05, kernels=1)
    (left,) = [operator for operator in program.ops if operator.placement != "int8"]
    assert "padding value 0.033" in left.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.zeros.fill_(3), "zero point other than 0"),
        (lambda w: setattr(w, "axis", 1), "scales along axis 1"),
    ],
)
def test_weights_that_no_kernel_multiplies_stay_float_with_the_reason(change, reason):
    torch.manual_seed(0)
    model = Product(F.linear, (16, 16))
    change(model.weight)
    program = check(model, torch.randn(3, 16), step=0.04, kernels=0)
    (left,) = [operator for operator in program.ops if operator.target == "aten.linear.default"]
    assert left.placement == "float"
    assert reason in left.reason


def test_padding_that_onednn_computes_wrongly_stays_float():
    torch.manual_seed(0)
    model = Product(
        lambda x, w, b: F.conv2d(x, w, b, padding=2), (8, 1, 2, 2), before={"scale": 0.05, "zero_point": 176}
    )
    program = check(model, torch.randn(3, 1, 7, 7) * 5, step=0.04, kernels=0)
    assert "wider than the kernel reaches" in next(o.reason for o in program.ops if o.placement == "float")


def test_a_transposed_convolution_stays_float_and_runs():
    torch.manual_seed(0)
    program = check(Product(F.conv_transpose2d, (16, 16, 3, 3)), torch.randn(IMAGE), step=0.04, kernels=0)
    assert any("conv_transpose2d" in operator.target and operator.placement == "float" for operator in program.ops)


class Dynamic(nn.Module):
    """A linear whose activation parameters are computed at run time."""

    def __init__(self, dtype, *, symmetric=False):
        super().__init__()
        self.weight, self.bias = Weight(8, 16), nn.Parameter(torch.randn(8))
        self.range = (0, TOP, dtype) if dtype == torch.uint8 else (-128, 127, dtype)
        self.choose = QD.choose_qparams_symmetric if symmetric else QD.choose_qparams

    def forward(self, x):
        scale, zero_point = self.choose(x, self.range[0], self.range[1], 1e-5, self.range[2])
        q = QD.quantize_per_tensor(x, scale, zero_point, *self.range)
        return F.linear(QD.dequantize_per_tensor(q, scale, zero_point, *self.range), self.weight(), self.bias)


@pytest.mark.parametrize("model", [Dynamic(torch.uint8), Dynamic(torch.int8), Dynamic(torch.int8, symmetric=True)])
def test_dynamic_linears_choose_their_parameters_at_run_time(model):
    torch.manual_seed(0)
    runs = TOP == 255 or model.range[2] == torch.uint8  # int8 and weights of 8 bits overflow without VNNI
    program = check(model, torch.randn(5, 16), step=1e-4, kernels=1 if runs else 0)
    assert runs or any("weight_bits=7" in operator.reason for operator in program.ops)
    large = torch.randn(5, 16) * 100
    torch.testing.assert_close(program(large), model(large), rtol=1e-4, atol=1e-2)


class DynamicResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Dynamic(torch.uint8), Dynamic(torch.uint8)

    def forward(self, x):
        return F.relu(self.one(x)) + F.relu(self.two(x) + x[..., :8] * 2)


@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 16)])
def test_dynamic_linears_fuse_what_follows(shape):
    torch.manual_seed(0)
    program = check(DynamicResidual(), torch.randn(shape), step=1e-4, kernels=2)
    floats = [o.target for o in program.ops if o.placement == "float"]
    assert floats.count("aten.relu.default") == 0


class FloatShortcut(nn.Module):
    """A convolution's float shortcut, which is read again after the sum."""

    def __init__(self):
        super().__init__()
        self.weight = Weight(16, 16, 1, 1)

    def forward(self, x):
        shortcut = x * 2
        return F.relu(F.conv2d(rounded(x), self.weight()) + shortcut) - shortcut


def test_a_float_shortcut_that_is_read_again_is_not_overwritten():
    torch.manual_seed(0)
    program = check(FloatShortcut(), torch.randn(IMAGE), step=1e-4, kernels=1)
    x = torch.randn(IMAGE)
    assert torch.equal(program(x), program(x))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 20),
    filters=st.integers(1, 20),
    size=st.integers(3, 12),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    zero_point=st.integers(0, TOP),
    out_zero_point=st.integers(0, TOP),
    relu=st.booleans(),
)
def test_convolutions_of_any_geometry_stay_within_a_step(
    batch, channels, filters, size, kernel, stride, padding, zero_point, out_zero_point, relu
):
    torch.manual_seed(0)
    model = Product(
        lambda x, w, b: F.conv2d(x, w, b, stride=stride, padding=min(padding, kernel - 1)),
        (filters, channels, kernel, kernel),
        F.relu if relu else lambda y: y,
        before={"scale": 0.05, "zero_point": zero_point},
        after={"scale": 0.04, "zero_point": out_zero_point},
    )
    check(model, torch.randn(batch, channels, size, size) * 5, step=0.04, kernels=1, share=0.01)


@pytest.mark.parametrize(("rows", "is_streamed"), [((1,), True), ((2, 8), True), ((17,), False)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("between", [lambda y: y, F.relu, lambda y: y.clamp(-1, 2), F.gelu, F.silu, torch.tanh])
def test_a_large_weight_of_few_rows_is_read_by_the_kernel_that_reads_it_faster(
    rows, is_streamed, bias, between, monkeypatch
):
    monkeypatch.setattr(few_rows, "most_rows", lambda: 16)
    torch.manual_seed(0)
    model = Product(F.linear, (64, 64), between, bias=bias, after={"scale": 0.4, "zero_point": 40})
    x, kernels = torch.randn(*rows, 64) * 3, 0 if is_streamed else 1
    program = check(model, x, step=0.4, kernels=kernels, share=0.02)
    found = [str(n.target) for n in program.module.graph.nodes if "linear_with_input_q_dq" in str(n.target)]
    assert len(found) == 1 - kernels
    assert {operator.placement for operator in program.ops} == {"int8"}


def test_programs_with_streamed_weights_are_saved_as_they_were_before_packing(monkeypatch, tmp_path):
    monkeypatch.setattr(few_rows, "most_rows", lambda: 16)
    monkeypatch.setattr(few_rows, "LEAST_ELEMENTS", 2**12)
    torch.manual_seed(0)
    x = torch.randn(2, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    program = quantplug.quantize(model, (x,), "x86", [x], progress=False, autotune=True).program
    assert {operator.placement for operator in program.ops} == {"int8"}
    engine = torch.backends.quantized.engine
    loaded = X86Program.load(program.save(tmp_path / "model.pt2"))
    assert torch.backends.quantized.engine == engine
    assert torch.equal(loaded(x), program(x))
    monkeypatch.setattr(few_rows, "most_rows", lambda: 0)
    elsewhere = X86Program.load(tmp_path / "model.pt2")
    assert [str(n.target) for n in elsewhere.module.graph.nodes].count("onednn.qlinear_pointwise.default") == 2
    torch.testing.assert_close(elsewhere(x), program(x), rtol=0, atol=1e-4)
