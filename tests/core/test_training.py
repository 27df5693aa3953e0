"""One declaration for calibration and training: what prepare_qat makes of specs that hold plain observers."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer as ExecutorchQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    get_symmetric_quantization_config as executorch_config,
)
from sklearn.datasets import load_digits
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import (
    FakeQuantize,
    FakeQuantizeBase,
    HistogramObserver,
    MinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

import quantplug
from quantplug import Region, derive, explain, get_quantizer, union
from quantplug.core.errors import AnnotationError, CalibrationError
from quantplug.core.observers import OBSERVERS, observer
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.x86 import X86
from quantplug.quantizers.xnnpack import XNNPACK

IMAGES = (8, 3, 8, 8)


class Residual(nn.Module):
    """Convolutions with batch norms, with and without bias, a sum and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.two, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.one(x)))
        y = torch.relu(self.norm2(self.two(y)) + y)
        return self.head(y.mean((2, 3)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


def exported(module: nn.Module, *inputs: Tensor, training: bool = True, strict: bool = False) -> fx.GraphModule:
    return torch.export.export(copy.deepcopy(module).train(training), inputs, strict=strict).module()


def quantizer_of(backend: quantplug.Backend) -> Quantizer:
    return type("Own", (quantplug.BackendQuantizer,), {"backend": backend})()


def composed() -> Quantizer:
    both = quantplug.ComposableQuantizer().add(get_quantizer("x86"), Region(module="head"))
    return both.add(get_quantizer("xnnpack"))


BUILT_IN: dict[str, Callable[[], Quantizer]] = {
    "xnnpack": lambda: get_quantizer("xnnpack"),
    "xnnpack int8": lambda: get_quantizer("xnnpack").set_global("int8"),
    "xnnpack per tensor": lambda: get_quantizer("xnnpack").set_global("int8_per_tensor"),
    "xnnpack dynamic": lambda: get_quantizer("xnnpack").set_global("int8_dynamic"),
    "x86": lambda: get_quantizer("x86"),
    "openvino": lambda: get_quantizer("openvino"),
    "cortex_m": lambda: get_quantizer("cortex_m"),
    "tensorrt": lambda: get_quantizer("tensorrt"),
    "derived": lambda: quantizer_of(derive(XNNPACK, "mine")),
    "union": lambda: quantizer_of(union("both", XNNPACK, X86)),
    "composed": composed,
}


def train(prepared: fx.GraphModule, x: Tensor, steps: int = 20) -> list[float]:
    torch.manual_seed(1)
    target, losses = torch.randn(len(x), 4), []
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(prepared(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def observers(prepared: fx.GraphModule) -> list[nn.Module]:
    return [module for name, module in prepared.named_children() if "activation_post_process" in name]


def rules(converted: fx.GraphModule) -> list[str]:
    return sorted(row.rule.replace("_bn", "") for row in explain(converted).rows if row.rule)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BUILT_IN)
def test_e18_one_quantizer_object_trains_and_calibrates(name: str) -> None:
    x, quantizer, module = torch.randn(IMAGES), BUILT_IN[name](), model()
    prepared = prepare_qat_pt2e(exported(module, x), quantizer)
    assert observers(prepared)
    floats = copy.deepcopy(module).train()(x)
    trained = prepared(x)
    assert 15 < float(sqnr(trained, floats)) < 80, "a model that is quantized in training is not the float one"
    before = {key: value.detach().clone() for key, value in prepared.named_parameters()}
    losses = train(prepared, x)
    assert losses[-1] < 0.95 * losses[0]
    assert not any(torch.equal(value, before[key]) for key, value in prepared.named_parameters())
    prepared.eval().apply(disable_observer)
    converted = convert_pt2e(prepared)
    calibrated = prepare_pt2e(exported(module, x, training=False), quantizer)
    assert all(isinstance(m, ObserverBase) and not isinstance(m, FakeQuantizeBase) for m in observers(calibrated))
    calibrated(x)
    assert rules(converted) == rules(convert_pt2e(calibrated)), "training quantizes other operators than calibration"
    for other in (x, torch.randn(IMAGES)):
        assert float(sqnr(converted(other), prepared(other))) > 35


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def by_hand(x: Tensor, module: Perceptron, activation: tuple[int, int], weight: tuple[int, int]) -> Tensor:
    """What a first step of training is: torch's fake quantization of inputs, weights and results by their ranges."""

    def of_tensor(value: Tensor) -> Tensor:
        low, high = float(value.detach().amin().clamp(max=0)), float(value.detach().amax().clamp(min=0))
        scale = torch.tensor((high - low) / (activation[1] - activation[0]))
        zero = torch.round(activation[0] - low / scale).int()
        return torch.fake_quantize_per_tensor_affine(value, scale, zero, *activation)

    def of_rows(value: Tensor) -> Tensor:
        scale = value.detach().abs().amax(1) / ((weight[1] - weight[0]) / 2)
        return torch.fake_quantize_per_channel_affine(value, scale, torch.zeros(len(scale)).int(), 0, *weight)

    hidden = of_tensor(torch.relu(F.linear(of_tensor(x), of_rows(module.one.weight), module.one.bias)))
    return F.linear(hidden, of_rows(module.two.weight), module.two.bias)


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("backend", "config", "ranges"),
    [
        ("x86", quantplug.get_x86_quantization_config(weight_bits=8), ((0, 255), (-128, 127))),
        ("x86", quantplug.get_x86_quantization_config(weight_bits=7), ((0, 255), (-64, 64))),
        ("xnnpack", quantplug.get_symmetric_quantization_config(True), ((-128, 127), (-127, 127))),
        (
            "xnnpack",
            quantplug.get_symmetric_quantization_config(True, weight_qmin=-7, weight_qmax=7, observer="percentile"),
            ((-128, 127), (-7, 7)),
        ),
    ],
)
def test_q16_a_step_of_training_is_torchs_fake_quantization_with_straight_through_gradients(
    backend: str, config, ranges, strict: bool
) -> None:
    torch.manual_seed(0)
    x, module = torch.randn(16, 6) + 0.3, Perceptron()
    prepared = prepare_qat_pt2e(exported(module, x, strict=strict), get_quantizer(backend).set_global(config))
    if backend == "xnnpack":  # its kernels write integers; what the model returns is compared before that
        prepared.get_submodule(str(next(iter(prepared.graph.find_nodes(op="output"))).args[0][0].target)).apply(
            disable_fake_quant
        )
    found, expected = prepared(x), by_hand(x, module, *ranges)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, module(x), rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(prepared.get_parameter(name).grad, value.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
@pytest.mark.parametrize("strict", [False, True])
def test_e18_what_was_trained_is_what_the_saved_program_computes(backend: str, strict: bool, tmp_path) -> None:
    x, quantizer = torch.randn(IMAGES), get_quantizer(backend)
    prepared = prepare_qat_pt2e(exported(model(), x, strict=strict), quantizer)
    train(prepared, x)
    prepared.eval().apply(disable_observer)
    converted = convert_pt2e(prepared)
    assert "batch_norm" not in str(converted.graph)
    quantizer.backend.lower(converted, (x,)).save(tmp_path / f"trained.{'pte' if backend == 'xnnpack' else 'pt2'}")
    program = load(backend, next(tmp_path.iterdir()))
    for other in (x, torch.randn(IMAGES), 2 * torch.randn(IMAGES)):
        (found,) = program(other)
        assert float(sqnr(found, prepared(other).detach())) > 38


def load(backend: str, path) -> Callable[..., list[Tensor]]:
    if backend == "xnnpack":
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(path.read_bytes())  # it has to outlive its method
        return lambda x: [value.clone() for value in program.load_method("forward").execute([x])]
    module = torch.export.load(path).module()
    return lambda x: [module(x).detach()]


def test_ranges_are_learnt_and_weights_ranges_are_those_of_the_moment() -> None:
    x = torch.randn(IMAGES)
    prepared = prepare_qat_pt2e(exported(model(), x), get_quantizer("xnnpack"))
    prepared(x)
    entry = prepared.activation_post_process_x
    first = entry.calculate_qparams()[0].clone()
    for _ in range(5):
        prepared(10 * x)
    grown = entry.calculate_qparams()[0]
    assert 1.2 * first < grown < 2 * first, "no moving average of what is trained on"
    with torch.no_grad():
        prepared.get_parameter("head.weight").mul_(0.1)
    prepared(x)
    weight = prepared.get_parameter("head.weight").detach()
    scale, _ = prepared.activation_post_process_head_weight.calculate_qparams()
    torch.testing.assert_close(scale, weight.abs().amax(1).clamp(min=127 * 2**-12) / 127)


def test_switches_of_torchao_work() -> None:
    x, module = torch.randn(IMAGES), model()
    prepared = prepare_qat_pt2e(exported(module, x), get_quantizer("xnnpack"))
    train(prepared, x, 3)
    prepared.eval().apply(disable_observer)
    ranges = [m.scale.clone() for m in observers(prepared) if isinstance(m, FakeQuantize)]
    quantized = prepared(5 * x)
    assert all(torch.equal(m.scale, s) for m, s in zip(observers_of(prepared), ranges, strict=True))
    prepared.apply(disable_fake_quant)
    floats = prepared(5 * x)
    assert not torch.equal(floats, quantized)
    module.load_state_dict({k: v for k, v in prepared.state_dict().items() if "post_process" not in k}, strict=False)
    torch.testing.assert_close(floats, module.eval()(5 * x), rtol=1e-4, atol=1e-5)
    prepared.apply(enable_fake_quant)
    assert torch.equal(prepared(5 * x), quantized)
    prepared.apply(enable_observer)
    prepared(50 * x)
    assert any(not torch.equal(m.scale, s) for m, s in zip(observers_of(prepared), ranges, strict=True))
    dropped = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    switched = prepare_qat_pt2e(exported(dropped, torch.randn(4, 6)), get_quantizer("x86"))
    row = torch.randn(4, 6)
    assert not torch.equal(switched(row), switched(row))
    switched.apply(disable_observer)
    assert torch.equal(switched.eval()(row), switched(row))
    assert not torch.equal(switched.train()(row), switched(row))


def observers_of(prepared: fx.GraphModule) -> list[FakeQuantize]:
    return [module for module in observers(prepared) if isinstance(module, FakeQuantize)]


def test_copies_and_checkpoints_go_on_where_training_stopped() -> None:
    x = torch.randn(IMAGES)
    prepared = prepare_qat_pt2e(exported(model(), x), get_quantizer("xnnpack"))
    train(prepared, x, 4)
    duplicate, file = copy.deepcopy(prepared), io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    fresh = prepare_qat_pt2e(exported(model(), x), get_quantizer("xnnpack"))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    expected = train(prepared, 2 * x, 4)
    assert train(duplicate, 2 * x, 4) == expected
    assert train(fresh, 2 * x, 4) == expected
    results = [convert_pt2e(m.eval())(x) for m in (prepared, duplicate, fresh)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_e10_a_model_that_was_never_trained_cannot_be_converted(backend: str) -> None:
    prepared = prepare_qat_pt2e(exported(model(), torch.randn(IMAGES)), get_quantizer(backend))
    with pytest.raises(CalibrationError, match="observers have seen no data: 'activation_post_process"):
        convert_pt2e(prepared)


# Every kind of spec.


class WithoutScale(ObserverBase):
    """Sees tensors and gives no scale."""

    def __init__(self, dtype: torch.dtype, **options: object) -> None:
        super().__init__(dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> None:
        raise NotImplementedError


class OneSpec(Quantizer):
    """Quantizes the input or the weight of a linear layer with one spec."""

    def __init__(self, spec: QuantizationSpec, operand: int):
        super().__init__()
        self.spec, self.operand = spec, operand

    def annotate(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            found = QuantizationAnnotation({node.args[self.operand]: self.spec}, _annotated=True)
            node.meta[Q_ANNOTATION_KEY] = found
        return graph_module

    def validate(self, graph_module: fx.GraphModule) -> None:
        pass


TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)
INTEGERS = [(torch.int8, -128, 127), (torch.int8, -8, 7), (torch.uint8, 0, 255), (torch.int16, -32768, 32767)]
OWN = [(observer(name, bool(axis)), axis, name) for name in OBSERVERS for axis in (0, 1)]
THEIRS = [
    (MinMaxObserver, 0, "torchao minmax"),
    (HistogramObserver, 0, "torchao histogram"),
    (PerChannelMinMaxObserver, 1, "torchao channels"),
    (observer("minmax", power_of_two=True), 0, "powers of two"),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("constructor", "operand", "name"), [*OWN, *THEIRS], ids=lambda value: str(value)[-12:])
def test_q16_every_observer_of_integers_trains(constructor, operand: int, name: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(6, 4), torch.randn(32, 6) + 0.3
    for scheme in CHANNEL if operand else TENSOR:
        for dtype, low, high in INTEGERS:
            spec = QuantizationSpec(dtype, constructor, low, high, scheme, 0 if operand else None)
            prepared = prepare_qat_pt2e(exported(module, x), OneSpec(spec, operand))
            (fake,) = observers(prepared)
            seen = x if operand == 0 else prepared.get_parameter("weight")
            prepared(x).sum().backward()
            assert prepared.get_parameter("weight").grad.abs().sum() > 0
            scale, zero_point = fake.calculate_qparams()
            axis = (0,) if operand else ()
            quantized = rounded(seen.detach(), scale, zero_point, low, high, bool(axis))
            torch.testing.assert_close(fake.apply(disable_observer)(seen), quantized, rtol=1e-5, atol=1e-6)
            assert float(sqnr(quantized, seen.detach())) > (12 if high == 7 else 35)
            if "two" in name:
                assert torch.equal(scale.log2(), scale.log2().round())
            converted = convert_pt2e(prepared.eval())
            torch.testing.assert_close(converted(x), prepared(x), rtol=1e-5, atol=1e-5)


def rounded(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, by_row: bool) -> Tensor:
    shape = (-1, 1) if by_row else (1,)
    scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (torch.clamp(torch.round(x * (1 / scale)) + zero, low, high) - zero) * scale


def test_q16_fixed_and_dynamic_specs_train() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(6, 4, bias=False), torch.rand(32, 6)
    fixed = FixedQParamsQuantizationSpec(torch.uint8, 1 / 16, 0, 0, 255, torch.per_tensor_affine)
    prepared = prepare_qat_pt2e(exported(module, x), OneSpec(fixed, 0))
    expected = F.linear(torch.round(x * 16) / 16, *prepared.parameters())
    torch.testing.assert_close(prepared(x), expected)
    for constructor in (PlaceholderObserver.with_args(eps=2**-12), observer("minmax")):
        dynamic = QuantizationSpec(torch.int8, constructor, -128, 127, torch.per_tensor_affine, is_dynamic=True)
        prepared = prepare_qat_pt2e(exported(module, x), OneSpec(dynamic, 0))
        for size in (1, 100, 0.01):
            found, floats = prepared(size * x), F.linear(size * x, *prepared.parameters())
            assert 30 < float(sqnr(found, floats)) < 80, "the range is not that of each batch"
        converted = convert_pt2e(prepared.eval())
        # A value between two integers may go to either: the operator that finds the range divides in another order.
        assert all(float(sqnr(converted(size * x), prepared(size * x))) > 45 for size in (1, 100, 0.01))


@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
@pytest.mark.parametrize("config", ["int8_dynamic", "float16"])
def test_q16_what_needs_no_range_trains_as_it_is_converted(backend: str, config: str) -> None:
    """Frozen observers had frozen the ranges of run time, and float16 trained as float without a word."""
    if backend == "openvino" and config == "int8_dynamic":
        pytest.skip("OpenVINO has no such config")
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), torch.randn(16, 6)
    prepared = prepare_qat_pt2e(exported(module, x), get_quantizer(backend).set_global(config))
    assert 30 < float(sqnr(prepared(x), module(x))) < 90, "a model that is quantized in training is not the float one"
    losses = train(prepared, x)
    assert losses[-1] < losses[0]
    prepared.eval().apply(disable_observer)
    converted = convert_pt2e(prepared)
    for size in (1, 100, 0.01):
        assert float(sqnr(converted(size * x), prepared(size * x))) > 100
    prepared.apply(disable_fake_quant)
    assert float(sqnr(converted(x), prepared(x))) < 90


def test_embedding_tables_with_float_zero_points_train() -> None:
    table = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 2))
    x = torch.randint(0, 20, (3, 5))
    prepared = prepare_qat_pt2e(exported(table, x), quantplug.EmbeddingQuantizer())
    (fake,) = observers(prepared)
    assert isinstance(fake, FakeQuantizeBase)
    found = prepared(x)
    assert not torch.equal(found, table(x))
    found.sum().backward()
    assert prepared.get_parameter("0.weight").grad.abs().sum() > 0
    torch.testing.assert_close(convert_pt2e(prepared.eval())(x), prepared(x), rtol=1e-4, atol=1e-5)


def test_derived_biases_and_shared_scales_train() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.conv(x))
            return torch.cat([F.max_pool2d(y, 2), F.max_pool2d(y, 2)]).flatten(1)

    x = torch.randn(2, 3, 8, 8)
    prepared = prepare_qat_pt2e(exported(Shared(), x), get_quantizer("xnnpack"))
    assert len([m for m in observers(prepared) if isinstance(m, FakeQuantizeBase)]) == 3
    prepared(x).square().mean().backward()
    assert all(p.grad is not None for p in prepared.parameters())
    converted = convert_pt2e(prepared.eval())
    assert any(b.dtype == torch.int32 for b in converted.buffers())
    assert float(sqnr(converted(x), prepared(x))) > 40


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (QuantizationSpec(torch.int8, WithoutScale, -128, 127, torch.per_tensor_affine), "WithoutScale"),
        (QuantizationSpec(torch.float8_e4m3fn, MinMaxObserver, qscheme=torch.per_tensor_symmetric), "float8_e4m3fn"),
        (QuantizationSpec(torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine), "only where.*dynamic"),
    ],
)
def test_what_cannot_be_trained_is_an_error_that_names_spec_and_place(spec: QuantizationSpec, said: str) -> None:
    module, x = exported(nn.Sequential(nn.Linear(6, 4)), torch.randn(2, 6)), torch.randn(2, 6)
    before = module.code
    with pytest.raises(
        AnnotationError, match=rf"'linear'.*module '0'.*cannot be trained with QuantizationSpec.*{said}"
    ):
        prepare_qat_pt2e(module, OneSpec(spec, 0))
    assert module.code == before
    assert torch.isfinite(module(x)).all()


@pytest.mark.slow
def test_a_foreign_quantizer_without_fake_quantizes_trains() -> None:
    x = torch.randn(4, 6)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    quantizer = ExecutorchQuantizer().set_global(executorch_config(is_per_channel=True))
    prepared = prepare_qat_pt2e(exported(module, x), quantizer)
    assert not torch.equal(prepared(x), module(x))
    losses = train(prepared, x)
    assert losses[-1] < losses[0]
    prepared.eval().apply(disable_observer)
    assert float(sqnr(convert_pt2e(prepared)(x), prepared(x))) > 40


# E19: digits at low bits, from the presets of a backend.


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_e19_training_with_a_config_of_observers_loses_less_than_calibration(seed: int) -> None:
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    (images, rest), (labels, targets) = ((t[order[:1200]], t[order[1200:]]) for t in (images, labels))
    module = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    fit(module, images, labels, 15, 2e-2)
    chosen = quantplug.get_symmetric_quantization_config(True, weight_qmin=-1, weight_qmax=1)
    quantizer = get_quantizer("xnnpack").set_global(chosen)
    loss = {}
    batch = torch.export.Dim("batch", min=2)

    def opened(training: bool) -> fx.GraphModule:
        found = copy.deepcopy(module).train(training)
        return torch.export.export(found, (images,), dynamic_shapes=({0: batch},)).module()

    calibrated = prepare_pt2e(opened(False), quantizer)
    calibrated(images)
    loss["calibrated"] = float(F.cross_entropy(convert_pt2e(calibrated)(rest), targets))
    prepared = prepare_qat_pt2e(opened(True), quantizer)
    fit(prepared, images, labels, 6, 5e-3)
    loss["trained"] = float(F.cross_entropy(convert_pt2e(prepared.eval())(rest), targets))
    assert loss["trained"] < 0.9 * loss["calibrated"], loss


def fit(module: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(200):
            optimizer.zero_grad()
            F.cross_entropy(module(images[rows]), labels[rows]).backward()
            optimizer.step()
