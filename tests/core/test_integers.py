"""The integer representation against exact arithmetic: fractions, and q/dq computed in float64."""

import io
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e import quantize_pt2e as peer
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.qdq.nodes import CHOOSE_OPS, DEQUANTIZE_OPS, QUANTIZE_OPS

ACT = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_affine)
# With zero points, so that every term of the product counts.
WEIGHT = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, 0)
SELECTIONS = ("max_pool", "cat", "permute", "slice")


class Everything(Quantizer):
    """Quantizes the inputs and outputs of every operator, weights along an axis; a bound belongs to what it bounds."""

    def __init__(self, axis: int = 0) -> None:
        fields = (torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_affine, axis)
        self.weight = QuantizationSpec(*fields)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if str(node.target).startswith("aten."):
                self._annotate(node)
        return model

    def _annotate(self, node: fx.Node) -> None:
        first, *rest = node.all_input_nodes[:2]
        inputs: dict[fx.Node, Any] = {first: ACT}
        inputs |= {n: self.weight if n.op == "get_attr" else ACT for n in rest}
        output: Any = ACT
        if any(name in str(node.target) for name in SELECTIONS):
            output = SharedQuantizationSpec((first, node))
            inputs |= dict.fromkeys(rest, output)
        if any("relu" in str(u.target) or "hardtanh" in str(u.target) for u in node.users):
            output = None
        if "relu" in str(node.target) or "hardtanh" in str(node.target):
            inputs = {} if first.op == "call_function" else inputs
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, output, _annotated=True)

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Exact(fx.Interpreter):
    """Runs a q/dq graph in float64, where each operator's error is far below a quantization step."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.double() if value.is_floating_point() else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None  # the guards of export, which refuse float64

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in QUANTIZE_OPS:
            value, scale, zero_point, low, high, dtype = args
            return torch.clamp(torch.round(value / scale) + zero_point, low, high).to(dtype)
        if target in DEQUANTIZE_OPS:
            value, scale, zero_point, *rest = args
            if len(rest) == 4:
                shape = [-1 if axis == rest[0] else 1 for axis in range(value.dim())]
                scale, zero_point = scale.view(shape), zero_point.view(shape)
            return (value.double() - zero_point) * scale
        return super().call_function(target, args, kwargs)


class Product(nn.Module):
    def __init__(self, layer: nn.Module, bound: Any = None) -> None:
        super().__init__()
        self.layer, self.bound = layer, bound

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if self.bound is None else self.bound(y)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def image(*channels: int) -> Tensor:
    return torch.randn(2, *channels)


PRODUCTS = {
    "linear": (lambda: Product(nn.Linear(40, 6)), (40,)),
    "linear without bias": (lambda: Product(nn.Linear(40, 6, bias=False)), (3, 40)),
    "linear relu": (lambda: Product(nn.Linear(40, 6), F.relu), (40,)),
    "conv1d": (lambda: Product(nn.Conv1d(4, 6, 3, stride=2)), (4, 9)),
    "conv2d padded": (lambda: Product(nn.Conv2d(4, 6, 3, padding=1)), (4, 7, 7)),
    "conv2d padded by name": (lambda: Product(nn.Conv2d(4, 6, 3, padding="same")), (4, 7, 7)),
    "conv2d grouped, dilated, relu6": (
        lambda: Product(nn.Conv2d(4, 6, 3, groups=2, dilation=2), nn.ReLU6(inplace=True)),
        (4, 8, 8),
    ),
    "conv2d hardtanh": (lambda: Product(nn.Conv2d(4, 6, 3), nn.Hardtanh(-0.3, 0.4)), (4, 8, 8)),
    "conv3d": (lambda: Product(nn.Conv3d(2, 3, 3, bias=False)), (2, 5, 5, 5)),
    "conv_transpose1d": (lambda: Product(nn.ConvTranspose1d(4, 6, 3, padding=1)), (4, 9)),
    "conv_transpose2d": (lambda: Product(nn.ConvTranspose2d(4, 6, 3, stride=2)), (4, 5, 5)),
}
OTHERS = {
    "add": (lambda x, y: x + y, 2),
    "add in place": (lambda x, y: (x * y).add_(y), 2),
    "sub of broadcast": (lambda x, y: torch.sub(x, y[:, :1], alpha=2), 2),
    "add relu": (lambda x, y: F.relu(x + y), 2),
    "add a number": (lambda x: x + 0.7, 1),
    "mul": (lambda x, y: x * y, 2),
    "matmul": (lambda x, y: x @ y.transpose(-1, -2), 2),
    "relu": (lambda x: F.relu(x), 1),
    "mean": (lambda x: x.mean((2, 3), keepdim=True), 1),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, padding=1), 1),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, padding=1), 1),
    "cat": (lambda x, y: torch.cat([x, y], 1), 2),
    "permute": (lambda x: x.permute(0, 2, 3, 1), 1),
}


def both(module: nn.Module, inputs: tuple[Tensor, ...], quantizer: Quantizer) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the q/dq graph and the integer representation of one prepared model."""
    prepared = prepare_pt2e(torch.export.export(module.eval(), inputs).module(), quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared), convert_pt2e(prepared, use_reference_representation=True)


def check_exact(module: nn.Module, inputs: tuple[Tensor, ...], quantizer: Quantizer) -> None:
    pairs, integers = both(module, inputs, quantizer)
    expected = Exact(pairs).run(*(value.double() for value in inputs))
    torch.testing.assert_close(integers(*inputs).double(), expected, rtol=1e-6, atol=1e-6)
    counts = Counter(node.target in DEQUANTIZE_OPS for node in integers.graph.nodes)
    assert counts[True] == 1, integers.graph  # the one behind the last quantize
    integers.graph.lint()


@pytest.mark.parametrize("name", PRODUCTS)
def test_r18_products_accumulate_integers_exactly(name: str) -> None:
    torch.manual_seed(0)
    make, shape = PRODUCTS[name]
    check_exact(make(), (torch.randn(8, *shape) + 0.3,), Everything(axis=1 if "transpose" in name else 0))


@pytest.mark.parametrize("name", OTHERS)
def test_r18_other_operators_compute_on_integers_exactly(name: str) -> None:
    torch.manual_seed(0)
    function, count = OTHERS[name]
    check_exact(Calls(function), tuple(torch.randn(4, 3, 6, 6) + 0.2 for _ in range(count)), Everything())


def test_r18_a_linear_layer_rounds_the_exact_fraction() -> None:
    """By hand: every output is the fraction (sum of products * scales + bias) / scale, rounded half to even."""
    torch.manual_seed(1)
    x, layer = torch.randn(40, 12), nn.Linear(12, 3)
    pairs, integers = both(nn.Sequential(layer), (x,), Everything())
    first, last = [n for n in pairs.graph.nodes if n.target in QUANTIZE_OPS]
    scale, zero_point, low, high = last.args[1:5]
    state = {key: value for key, value in pairs.state_dict().items() if "weight" in key}
    stored, scales, zero_points = (
        next(v for k, v in state.items() if k.endswith(end)) for end in ("quantized", "_scale", "_zero_point")
    )
    taken = first.target(x, *first.args[1:]).tolist()
    expected = []
    for row in taken:
        for channel in range(3):
            offset = int(zero_points[channel])
            total = sum((a - first.args[2]) * (int(w) - offset) for a, w in zip(row, stored[channel], strict=True))
            real = total * Fraction(first.args[1]) * Fraction(float(scales[channel]))
            real += Fraction(layer.bias[channel].item())
            expected.append(min(max(round(real / Fraction(scale)) + zero_point, low), high))
    found = torch.round(integers(x) / scale) + zero_point
    assert found.flatten().tolist() == expected


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(4, 5)
        self.deep, self.up = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2), nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.stem(x)), 2)
        y = self.up(F.hardtanh(self.deep(y), 0.0, 6.0) + y)
        return self.fc(F.adaptive_avg_pool2d(y * y, 1).flatten(1))


def xnnpack(**options: Any) -> Quantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**options))


@pytest.mark.few(1)
@pytest.mark.parametrize("per_channel", [False, True])
def test_r18_a_network_stays_on_integers_from_entry_to_exit(per_channel: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    pairs, integers = both(Network(), (x,), xnnpack(is_per_channel=per_channel))
    targets = Counter(n.target in QUANTIZE_OPS or n.target in DEQUANTIZE_OPS for n in integers.graph.nodes)
    assert targets[True] == 2
    step = max(n.args[1] for n in pairs.graph.nodes if n.target in QUANTIZE_OPS)
    difference = (integers(x) - pairs(x)).abs()
    assert difference.max() <= 1.01 * step
    assert (difference > 0).float().mean() < 0.03
    file = io.BytesIO()
    torch.export.save(torch.export.export(integers, (x,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), integers(x), rtol=0, atol=0)


def test_r18_dynamic_products_end_in_float() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 12)
    pairs, integers = both(nn.Sequential(nn.Linear(12, 5)), (x,), xnnpack(is_per_channel=True, is_dynamic=True))
    assert any(n.target in CHOOSE_OPS for n in integers.graph.nodes)
    assert not any(n.target in DEQUANTIZE_OPS for n in integers.graph.nodes)
    torch.testing.assert_close(integers(x), pairs(x))


def test_r18_operators_without_an_integer_rule_keep_their_pairs() -> None:
    x = torch.randn(4, 8)
    pairs, integers = both(Calls(torch.sigmoid), (x,), Everything())
    assert [n.target for n in integers.graph.nodes] == [n.target for n in pairs.graph.nodes]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.one(v), lambda v: self.two(v) + v, (x,))


@pytest.mark.slow
@torch.no_grad()
def test_r18_submodels_of_control_flow_are_rewritten_too() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6).abs()
    prepared = prepare_pt2e(torch.export.export(Branches().eval(), (x,)).module(), xnnpack())
    for sign in (1, -1):
        prepared(sign * x)
    pairs, integers = convert_pt2e(prepared), convert_pt2e(prepared, use_reference_representation=True)
    regions = [m for m in integers.children() if isinstance(m, fx.GraphModule)]
    assert any("int64" in str(n.args) for m in regions for n in m.graph.nodes)
    for sign in (1, -1):
        torch.testing.assert_close(integers(sign * x), pairs(sign * x))


@pytest.mark.slow  # torchao exports each of its patterns anew.
def test_r18_we_are_nearer_to_the_pairs_than_the_peer() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 20)
    errors = {}
    for name, prepare, convert in (
        ("ours", prepare_pt2e, convert_pt2e),
        ("peer", peer.prepare_pt2e, peer.convert_pt2e),
    ):
        module = torch.export.export(nn.Sequential(nn.Linear(20, 30)).eval(), (x,)).module()
        prepared = prepare(module, xnnpack())
        prepared(x)
        pairs = convert_pt2e(prepared)
        errors[name] = float((convert(prepared, use_reference_representation=True)(x) != pairs(x)).float().mean())
        torch.manual_seed(0)
        x = torch.randn(64, 20)
    assert errors["ours"] < 0.001 < 0.2 < errors["peer"]
