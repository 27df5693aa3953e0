"""Products by a parameter, however a model writes them, are linear layers: on each target, in each kind of config."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantplug
from quantplug.core.graph.facts import operator_name
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.rewrites.products import products_are_linear
from quantplug.quantizers.framework.registry import get_quantizer

Written = Callable[[Tensor, Tensor, Tensor], Tensor]
# Each is given rows, a square matrix and a bias, and yields rows.
WRITTEN: dict[str, Written] = {
    "falcon": lambda x, w, b: x @ w.T + b,
    "bias first": lambda x, w, b: b + torch.matmul(x, w.permute(1, 0)),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "mm": lambda x, w, b: torch.mm(x, w.mT).add_(b),
    "swapped": lambda x, w, b: x @ w.swapaxes(0, -1) + b,
    "turned twice": lambda x, w, b: x @ w.T.contiguous().transpose(0, 1).detach().clone() + b,
    "as it lies": lambda x, w, b: x @ w + b,
    "conv1d of gpt-2": lambda x, w, b: torch.addmm(b, x, w),
}
CONFIGS = [
    *(("x86", config) for config in ("int8", "int8_dynamic", "int4_weight_only")),
    *(("xnnpack", config) for config in ("int8", "int8_dynamic", "8da4w")),
]


class Net(nn.Module):
    """Two layers of each way to write them, so that none stands at an end, where backends spare some."""

    def __init__(self, ways: list[Written], width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = ways * 2
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in self.ways)
        self.biases = nn.ParameterList(torch.randn(width) for _ in self.ways)

    def forward(self, x: Tensor) -> Tensor:
        for way, weight, bias in zip(self.ways, self.weights, self.biases, strict=True):
            x = way(x, weight, bias).relu()
        return x


@pytest.mark.parametrize(
    ("backend", "config"),
    [pytest.param(*case, marks=[] if case[0] == "x86" else pytest.mark.slow) for case in CONFIGS],
)
def test_products_by_parameters_have_kernels(backend, config):
    model = Net(list(WRITTEN.values())).eval()
    data = [(torch.randn(5, 64),) for _ in range(3)]
    artefact = quantplug.quantize(model, data[0], backend, data, config, progress=False)
    layers = [op for op in artefact.program.ops if any(name in op.target for name in ("linear", "mm", "add."))]
    assert [(op.target, op.placement) for op in layers] == [("aten.linear.default", "int8")] * len(model.ways)
    x = torch.randn(5, 64)
    assert sqnr(artefact(x), artefact.reference(x)) > 40
    assert sqnr(artefact(x), model(x)) > (12 if "4" in config else 25)


@pytest.mark.parametrize("backend", ["x86", "xnnpack", "onnxruntime", "openvino", "tensorrt", "arm", "cortex_m"])
def test_every_backend_takes_them(backend):
    model = Net([WRITTEN["falcon"]]).eval()
    graph = torch.export.export(model, (torch.randn(2, 64),)).module()
    prepared = quantplug.prepare_pt2e(graph, get_quantizer(backend))
    rows = [row for row in quantplug.explain(prepared).rows if row.operator.startswith(("linear", "matmul", "add"))]
    assert [(row.operator, row.quantized) for row in rows] == [("linear", True)] * 2


def test_a_parameter_that_two_products_share_stays_one():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) @ self.table.weight.T

    model = Tied().eval()
    graph = torch.export.export(model, (torch.tensor([[1, 2]]),)).module()
    get_quantizer("x86").transform_for_annotation(graph)
    assert [name for name, _ in graph.named_parameters()] == ["table.weight"]


def test_what_is_no_layer_stays():
    """A scaled sum, a matrix that is computed, and a row that is no bias."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.c = (nn.Parameter(torch.randn(size)) for size in ((8, 8), (8,), (3, 8)))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.addmm(self.b, x, self.w.T, alpha=2), x @ (self.w * x.sum()).T, torch.addmm(self.c, x, self.w)

    model, x = Other().eval(), torch.randn(3, 8)
    graph = torch.export.export(model, (x,)).module()
    get_quantizer("x86").transform_for_annotation(graph)
    assert not [node for node in graph.graph.nodes if "linear" in str(node.target)]
    torch.testing.assert_close(graph(x), model(x))


class Standardized(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1, as BiT's."""

    def forward(self, x: Tensor) -> Tensor:
        flat = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True, eps=1e-6)
        return F.conv2d(x, flat.reshape_as(self.weight), self.bias, padding=1)


class Parts(nn.Module):
    """Layers over parts of one weight, as attention to something else has them, and a bias of several."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.biases = nn.Parameter(torch.randn(48, 16)), nn.ParameterList(torch.randn(24) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        first, others = self.weight.split([16, 32])
        return F.linear(F.linear(x, first).relu(), others, torch.cat([*self.biases])[16:])


COMPUTED: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "standardized": (nn.Sequential(Standardized(8, 8, 3), nn.ReLU(), Standardized(8, 8, 3)), (2, 8, 6, 6), 2),
    "normalized": (
        nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1), dim=2) for _ in range(2))),
        (2, 8, 6, 6),
        2,
    ),
    "parts": (Parts(), (5, 16), 2),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [pytest.param(n, b, marks=[] if b == "x86" else pytest.mark.slow) for n in COMPUTED for b in ("x86", "xnnpack")],
)
def test_weights_that_are_computed_from_parameters_have_kernels(name, backend):
    model, shape, count = COMPUTED[name]
    data = [(torch.randn(shape),) for _ in range(3)]
    artefact = quantplug.quantize(model.eval(), data[0], backend, data, "int8", progress=False)
    layers = [op.placement for op in artefact.program.ops if "linear" in op.target or "conv" in op.target]
    assert layers == ["int8"] * count
    assert sqnr(artefact(*data[1]), artefact.reference(*data[1])) > 40
    assert sqnr(artefact(*data[1]), model(*data[1])) > 25


def test_weights_that_are_to_be_trained_stay_computed():
    _, shape, _ = COMPUTED["parts"]
    model = nn.Sequential(Parts(), nn.Linear(32, 4, bias=False), nn.Linear(4, 4, bias=False))
    graph = torch.export.export(model.eval(), (torch.randn(shape),)).module()
    prepared = quantplug.prepare_qat_pt2e(graph, get_quantizer("x86"))
    trained = {name for name, _ in prepared.named_parameters()}
    assert trained == {name for name, _ in model.named_parameters()}


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["8da4w", "int8"])
@pytest.mark.parametrize(("bias", "is_flat"), [(False, False), (True, False), (True, True)])
def test_parts_of_a_layer_over_an_open_size_are_layers_in_one_delegate(config, bias, is_flat):
    """Queries, keys, values, gates of GPT-2 and Phi-3: XNNPACK's delegates slice no open sizes."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.last = nn.Linear(64, 96, bias=bias), nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.view(-1, 64) if is_flat else x
            query, key, value = self.fused(rows).view(1, -1, 96).split([32, 32, 32], -1)
            return self.last(torch.cat([query * key.sigmoid() + value, value[..., 32:]], -1))

    torch.manual_seed(0)
    model, length = Fused().eval(), torch.export.Dim("length", max=16)
    data = [(torch.randn(1, 6, 64),) for _ in range(3)]
    shapes = {"x": {1: length}}
    artefact = quantplug.quantize(model, data[0], "xnnpack", data, config, dynamic_shapes=shapes, progress=False)
    counts = artefact.program.counts  # type: ignore[attr-defined]
    assert (counts.delegates, counts.portable) == (1, 0)
    assert [op.placement for op in artefact.program.ops if "linear" in op.target] == ["int8"] * 4
    for x in (data[1][0], torch.randn(1, 3, 64)):
        assert sqnr(artefact(x), artefact.reference(x)) > 30
        assert sqnr(artefact(x), model(x)) > (12 if "4" in config else 25)


IN_FRONT = {
    "a matrix": (lambda w, x: torch.mm(w, x), (6, 16)),
    "tokens": (lambda w, x: w @ x, (2, 6, 16)),
    "a turned parameter": (lambda w, x: w.T @ x, (2, 6, 16)),
    "images": (lambda w, x: torch.matmul(w, x), (2, 3, 6, 16)),
}


class InFront(nn.Module):
    """A layer, a parameter times what it yields, and another layer."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first, self.last = function, nn.Linear(16, 16), nn.Linear(16, 16)
        self.mixing = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.mixing, self.first(x).relu()).relu()).relu()


@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("name", IN_FRONT)
def test_a_parameter_in_front_of_a_product_is_a_layer(name, config, backend):
    function, size = IN_FRONT[name]
    model, data = InFront(function).eval(), [(torch.randn(*size),) for _ in range(3)]
    artefact = quantplug.quantize(model, data[0], backend, data, config, progress=False)
    layers = [op for op in artefact.program.ops if any(name in op.target for name in ("linear", "mm", "matmul"))]
    assert [(op.target, op.placement) for op in layers] == [("aten.linear.default", "int8")] * 3
    for [x] in (*data, data[0]):
        assert sqnr(artefact(x), artefact.reference(x)) > 40
        assert sqnr(artefact(x), model(x)) > 25


@pytest.mark.parametrize("name", IN_FRONT)
def test_a_parameter_in_front_computes_the_same(name):
    function, size = IN_FRONT[name]
    model, x = InFront(function).eval(), torch.randn(*size)
    graph = products_are_linear(torch.export.export(model, (x,)).module())
    assert sum(operator_name(node) == "aten::linear" for node in graph.graph.nodes) == 3
    torch.testing.assert_close(graph(x), model(x))


def test_products_of_two_constants_or_with_a_vector_stay():
    weight, vector = torch.randn(6, 6), torch.randn(6)

    class Others(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ (weight @ vector) + (weight @ x[0]).sum()

    x = torch.randn(4, 6)
    graph = products_are_linear(torch.export.export(Others().eval(), (x,)).module())
    torch.testing.assert_close(graph(x), Others()(x))
