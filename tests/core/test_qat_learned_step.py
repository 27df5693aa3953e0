"""Learned step sizes: the paper's gradients, torch's numbers, and a better low-bit model at the end."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import fx, nn
from torchao.quantization.pt2e import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    disable_fake_quant,
    disable_observer,
    quantize_pt2e,
)
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers.learned_step import LearnedStepSizeFakeQuantize
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e

SCHEMES = {
    "per_tensor": torch.per_tensor_symmetric,
    "per_tensor_affine": torch.per_tensor_affine,
    "per_channel": torch.per_channel_symmetric,
    "per_channel_affine": torch.per_channel_affine,
}


def by_the_paper(x, scale, zero_point, least, greatest, factor):
    """The paper's appendix in plain operators: straight-through rounding, a scaled gradient for the step."""
    step = (scale - scale * factor).detach() + scale * factor
    bounded = torch.clamp(x / step, least - zero_point, greatest - zero_point)
    return ((bounded.round() - bounded).detach() + bounded) * step


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(SCHEMES)),
    st.sampled_from([(-8, 7), (-128, 127), (-1, 1), (0, 15), (-127, 127)]),
    st.integers(0, 2),
    st.floats(-1.5, 1.5),
    st.integers(0, 2**16),
)
def test_gradients_are_those_of_the_paper(scheme, bounds, axis, shift, seed):
    torch.manual_seed(seed)
    dtype = torch.uint8 if bounds[0] == 0 else torch.int8
    least, greatest = bounds
    fake_quantize = LearnedStepSizeFakeQuantize(dtype, least, greatest, SCHEMES[scheme], axis)
    x = torch.randn(3, 4, 5).add(shift).requires_grad_()
    fake_quantize(x)
    with torch.no_grad():
        fake_quantize.scale.mul_(0.7)
    weight = torch.randn(3, 4, 5)
    (fake_quantize(x) * weight).sum().backward()
    found: Any = x.grad
    x.grad = None

    shape = [1, 1, 1]
    if "channel" in scheme:
        shape[axis] = -1
    scale = fake_quantize.scale.detach().reshape(shape).requires_grad_()
    zero_point = fake_quantize.zero_point.reshape(shape)
    far = torch.maximum(greatest - zero_point, zero_point - least)
    factor = 1 / torch.sqrt(x.numel() / scale.numel() * far)
    (by_the_paper(x, scale, zero_point, least, greatest, factor) * weight).sum().backward()
    expected: Any = x.grad
    assert torch.equal(found != 0, expected != 0)
    assert torch.equal(found, weight * (found != 0)), "the gradient inside the range is not exactly 1"
    torch.testing.assert_close(fake_quantize.scale.grad, scale.grad.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_equals_quantize_and_dequantize(scheme):
    torch.manual_seed(0)
    fake_quantize, x = LearnedStepSizeFakeQuantize(torch.int8, -7, 7, SCHEMES[scheme], 1), torch.randn(6, 5, 4) + 0.5
    result = fake_quantize(x)
    scale, zero_point = fake_quantize.calculate_qparams()
    library = torch.ops.quantized_decomposed
    tail: tuple[Any, ...]
    if "channel" in scheme:
        tail = (scale, zero_point, 1, -7, 7, torch.int8)
        expected = library.dequantize_per_channel(library.quantize_per_channel(x, *tail), *tail)
    else:
        tail = (float(scale), int(zero_point), -7, 7, torch.int8)
        expected = library.dequantize_per_tensor(library.quantize_per_tensor(x, *tail), *tail)
    assert torch.equal(result, expected)


def test_first_batch_sets_the_step_of_the_paper():
    x = torch.randn(8, 16)
    fake_quantize = LearnedStepSizeFakeQuantize(torch.int8, -4, 3)
    fake_quantize(x)
    torch.testing.assert_close(fake_quantize.scale.data, 2 * x.abs().mean().reshape(1) / 4**0.5)
    before = fake_quantize.scale.clone()
    fake_quantize(10 * x)
    assert torch.equal(fake_quantize.scale, before)


def test_affine_zero_point_covers_unsigned_data():
    fake_quantize = LearnedStepSizeFakeQuantize(torch.int8, -128, 127, torch.per_tensor_affine)
    x = torch.rand(32, 8)
    fake_quantize(x)
    assert int(fake_quantize.zero_point) == -128
    assert (fake_quantize(torch.zeros(4)) == 0).all()


def test_batch_axis_does_not_count():
    gradients = []
    for batch in (1, 8):
        fake_quantize = LearnedStepSizeFakeQuantize(torch.int8, -8, 7, batch_axis=0)
        x = torch.linspace(-1, 1, 32).expand(batch, 32)
        fake_quantize(x).square().sum(1).mean().backward()
        gradients.append(fake_quantize.scale.grad)
    torch.testing.assert_close(*gradients)


def test_learning_finds_a_better_step():
    torch.manual_seed(0)
    x = torch.randn(4096)
    fake_quantize = LearnedStepSizeFakeQuantize(torch.int8, -2, 1)
    optimizer = torch.optim.SGD(fake_quantize.parameters(), lr=0.5)
    errors = []
    for _ in range(200):
        error = (fake_quantize(x) - x).square().mean()
        optimizer.zero_grad()
        (error * 64).backward()
        optimizer.step()
        errors.append(float(error.detach()))
    steps = torch.linspace(0.2, 2.5, 400)
    best = min(float((torch.fake_quantize_per_tensor_affine(x, float(s), 0, -2, 1) - x).square().mean()) for s in steps)
    assert errors[-1] < 1.03 * best
    assert errors[0] > errors[-1]


def test_state_is_saved_and_loaded():
    fake_quantize = LearnedStepSizeFakeQuantize(torch.int8, -7, 7, torch.per_channel_symmetric)
    x = torch.randn(6, 5)
    expected = fake_quantize(x)
    fresh = LearnedStepSizeFakeQuantize(torch.int8, -7, 7, torch.per_channel_symmetric)
    fresh.load_state_dict(fake_quantize.state_dict())
    assert fresh.has_data
    assert torch.equal(fresh(x), expected)
    assert torch.equal(copy.deepcopy(fresh)(x), expected)


def test_switches_of_a_fake_quantize():
    fake_quantize, x = LearnedStepSizeFakeQuantize(), torch.randn(5)
    fake_quantize.apply(disable_fake_quant)
    assert fake_quantize(x) is x
    assert fake_quantize.has_data
    waiting = LearnedStepSizeFakeQuantize().apply(disable_observer)
    with pytest.raises(CalibrationError, match="no data"):
        waiting(x)
    with pytest.raises(CalibrationError, match="no data"):
        waiting.calculate_qparams()


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": torch.float16},
        {"is_dynamic": True},
        {"qscheme": torch.per_channel_affine_float_qparams},
        {"quant_min": 0, "quant_max": 255},
        {"quant_min": 3, "quant_max": 7},
        {"quant_min": 0, "quant_max": 0},
    ],
)
def test_what_it_cannot_do_is_an_error(arguments):
    with pytest.raises(ConfigError, match=r"learned step size .*; (choose|change)"):
        LearnedStepSizeFakeQuantize(**arguments)


class WeightQuantizer(Quantizer):
    """Quantizes the weights of linear layers; optionally their inputs too."""

    def __init__(self, weight: QuantizationSpec, activation: QuantizationSpec | None = None):
        self.weight, self.activation = weight, activation

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                specs = {node.args[0]: self.activation, node.args[1]: self.weight}
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(specs, _annotated=True)
        return model

    def validate(self, model):
        pass


def learned(least, greatest, scheme=torch.per_channel_symmetric, **options):
    constructor = LearnedStepSizeFakeQuantize.with_args(**options) if options else LearnedStepSizeFakeQuantize
    return QuantizationSpec(torch.int8, constructor, least, greatest, scheme, 0)


def exported(module: nn.Module, x: torch.Tensor, training: bool) -> fx.GraphModule:
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(copy.deepcopy(module).train(training), (x,), dynamic_shapes=({0: batch},)).module()


@pytest.mark.parametrize("peer", [False, True], ids=["ours", "torchao"])
def test_learned_steps_are_what_is_converted(peer):
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)
    quantizer = WeightQuantizer(learned(-7, 7), learned(-128, 127, torch.per_tensor_affine, batch_axis=0))
    prepare, convert = (
        (quantize_pt2e.prepare_qat_pt2e, quantize_pt2e.convert_pt2e) if peer else (prepare_qat_pt2e, convert_pt2e)
    )
    prepared = prepare(exported(module, x, True), quantizer)
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.01)
    prepared(x)
    steps = {name: p.detach().clone() for name, p in prepared.named_parameters() if "scale" in name}
    assert len(steps) == 4
    for _ in range(5):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(prepared.get_parameter(name), step) for name, step in steps.items())
    expected = prepared(x)
    torch.testing.assert_close(convert(prepared)(x), expected, rtol=0, atol=1e-6)


# E19: a low-bit task. 2-bit weights (-2..1 would waste a level on a symmetric weight: -1..1).


def digits():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


def fit(model, images, labels, epochs, rate):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(200):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model


def min_max(least, greatest):
    constructor = FakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0)
    return QuantizationSpec(torch.int8, constructor, least, greatest, torch.per_channel_symmetric, 0)


ACTIVATION = QuantizationSpec(
    torch.int8, FakeQuantize.with_args(observer=MovingAverageMinMaxObserver), -128, 127, torch.per_tensor_affine
)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_e19_qat_loses_less_than_ptq_at_two_bits(seed):
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    module = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    fit(module, images, labels, 15, 2e-2)

    @torch.no_grad()
    def loss(model):
        return float(F.cross_entropy(model(test_images), test_labels))

    results = {"float": loss(module.eval())}
    ptq = prepare_pt2e(exported(module, test_images, False), WeightQuantizer(min_max(-1, 1), ACTIVATION))
    ptq(images)
    results["ptq"] = loss(convert_pt2e(ptq))
    for name, weight in (("qat", min_max(-1, 1)), ("lsq", learned(-1, 1))):
        torch.manual_seed(seed)
        prepared = prepare_qat_pt2e(exported(module, images, True), WeightQuantizer(weight, ACTIVATION))
        fit(prepared, images, labels, 6, 5e-3)
        results[name] = loss(convert_pt2e(prepared.eval()))
    print({name: round(value, 3) for name, value in results.items()})
    assert results["qat"] < 0.9 * results["ptq"]
    assert results["lsq"] < 0.7 * results["ptq"]
