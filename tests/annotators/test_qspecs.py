"""Specs and presets: what a spec says is what the q/dq graph carries."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function, node, operators, reference
from torch import nn
from torchao.quantization.pt2e import (
    DerivedObserverOrFakeQuantize,
    FakeQuantizeBase,
    FusedMovingAvgObsFakeQuantize,
    MinMaxObserver,
    ObserverBase,
)
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

import quantplug
from quantplug import XNNPACKQuantizer, convert_pt2e, get_symmetric_quantization_config, prepare_qat_pt2e
from quantplug.annotators.activation import known_range
from quantplug.annotators.linear import linear as rows_of_linear
from quantplug.annotators.presets import activation_spec, int32_bias_spec, weight_spec
from quantplug.annotators.qspecs import fixed_qspec, on_axis
from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.x86_config import get_x86_quantization_config
from quantplug.quantizers.xnnpack import XNNPACK

QDQ = torch.ops.quantized_decomposed
LINEAR_INPUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def linear(bias=True):
    return Function(lambda m, x: m.fc(x), fc=nn.Linear(4, 3, bias))


def calls(model, target):
    return [n for n in model.graph.nodes if n.target is target]


# Rows that ask nothing of the dtypes, as a backend with every kernel has them.
ANY = Backend("any", (rows_of_linear(),), configs=XNNPACK.configs, lowering="quantplug.lowering.reference:lower")


class AnyQuantizer(BackendQuantizer):
    backend = ANY


RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(RANGES)),
    narrow=st.integers(0, 120),
    symmetric=st.booleans(),
    per_channel=st.booleans(),
    observer=st.sampled_from(["histogram", "minmax", "moving_average"]),
)
def test_q03_what_a_spec_says_is_what_the_graph_carries(dtype, narrow, symmetric, per_channel, observer):
    low, high = RANGES[dtype][0] + narrow * (dtype != torch.uint8), RANGES[dtype][1] - narrow
    spec = activation_spec(dtype, low, high, symmetric=symmetric, observer=observer)
    weight = weight_spec(-127 + narrow // 2, 127 - narrow // 2, per_channel=per_channel)
    config = QuantizationConfig(spec, spec, weight, None)
    converted = reference(linear(), AnyQuantizer().set_global(config), LINEAR_INPUT)
    pairs = calls(converted, QDQ.quantize_per_tensor.default)
    assert len(pairs) == 2
    for quantize in pairs:
        scale, zero_point, *limits, found = quantize.args[1:]
        assert (found, tuple(limits)) == (dtype, (low, high))
        assert scale >= 2**-12
        assert low <= zero_point <= high
        if symmetric:
            # Zero stands in the middle; an unsigned range has two middles.
            assert zero_point in ((low + high) // 2, (low + high + 1) // 2)
    name = "dequantize_per_channel" if per_channel else "dequantize_per_tensor"
    (stored,) = (n for n in calls(converted, getattr(QDQ, name).default) if n.args[0].op == "get_attr")
    integers = getattr(converted, stored.args[0].target)
    assert integers.dtype == torch.int8
    assert integers.abs().max() <= 127 - narrow // 2
    assert converted(LINEAR_INPUT).isfinite().all()


def test_q14_the_four_accessors_have_torchaos_names_and_pass_none_through():
    config = get_symmetric_quantization_config(True, int32_bias=True)
    assert quantplug.get_input_act_qspec(config) is config.input_activation
    assert quantplug.get_output_act_qspec(config) is config.output_activation
    assert quantplug.get_weight_qspec(config) is config.weight
    assert quantplug.get_bias_qspec(config) is config.bias
    empty = QuantizationConfig(None, None, None, None)
    for accessor in (
        quantplug.get_input_act_qspec,
        quantplug.get_output_act_qspec,
        quantplug.get_weight_qspec,
        quantplug.get_bias_qspec,
    ):
        assert accessor(None) is None
        assert accessor(empty) is None


def test_q14_specs_that_no_kernel_runs_are_refused():
    wrong = QuantizationSpec(
        torch.int8, MinMaxObserver.with_args(), -128, 127, torch.per_channel_affine, ch_axis=0
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"input activation spec has qscheme torch.per_channel_affine"):
        quantplug.get_input_act_qspec(QuantizationConfig(wrong, None, None, None))
    with pytest.raises(ConfigError, match="output activation spec"):
        quantplug.get_output_act_qspec(QuantizationConfig(None, wrong, None, None))
    with pytest.raises(ConfigError, match=r"weight spec has qscheme torch.per_channel_affine"):
        quantplug.get_weight_qspec(QuantizationConfig(None, None, wrong, None))
    with pytest.raises(ConfigError, match=r"bias spec has dtype torch.int8"):
        quantplug.get_bias_qspec(QuantizationConfig(None, None, None, wrong))


def test_equal_arguments_give_the_same_config():
    assert get_symmetric_quantization_config(True) is get_symmetric_quantization_config(True)
    assert get_symmetric_quantization_config(True) == get_symmetric_quantization_config(True)
    assert get_x86_quantization_config(reduce_range=True).input_activation.quant_max == 127


@pytest.mark.parametrize("made", [get_symmetric_quantization_config, get_x86_quantization_config])
def test_options_that_exclude_each_other(made):
    with pytest.raises(ConfigError, match="dynamic or weight-only, found both"):
        made(is_dynamic=True, is_weight_only=True)
    with pytest.raises(ConfigError, match="no observer 'histgram'; choose one of"):
        made(observer="histgram")
    with pytest.raises(ConfigError, match="no mode 'fast'"):
        activation_spec(mode="fast")
    with pytest.raises(ConfigError, match="int32_bias=True needs static activations"):
        get_symmetric_quantization_config(is_dynamic=True, int32_bias=True)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.int8, (1 / 256, -128)), (torch.uint8, (1 / 256, 0)), (torch.int16, (1 / 65536, -32768))],
)
def test_q11_sigmoid_spreads_zero_to_one_over_the_integers(dtype, expected):
    spec = fixed_qspec(activation_spec(dtype, *RANGES[dtype]), 0.0, 1.0)
    assert (spec.scale, spec.zero_point) == expected
    assert fixed_qspec(None, 0.0, 1.0) is None


@pytest.mark.parametrize(
    ("function", "scale", "zero_point"), [(torch.sigmoid, 1 / 256, -128), (torch.tanh, 1 / 128, 0)]
)
def test_q11_fixed_qparams_are_constants_that_calibration_cannot_move(function, scale, zero_point):
    model = Function(lambda m, x: function(x))
    fixing = derive(XNNPACK, "fixing", add=(known_range(function.__name__),))
    quantizer = type("Fixing", (BackendQuantizer,), {"backend": fixing})
    found = []
    for factor in (0.01, 1.0, 100.0):
        converted = reference(model, quantizer().set_global("int8"), factor * LINEAR_INPUT)
        first, last = calls(converted, QDQ.quantize_per_tensor.default)
        assert last.args[1:3] == (scale, zero_point)
        found.append(first.args[1])
    # The input keeps the range of the data: it is not clipped to the range of the output.
    assert found[2] > 50 * found[1] > 2500 * found[0] * 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize(("function", "least"), [(torch.sigmoid, 40), (torch.tanh, 30)])
def test_q11_small_numbers_keep_their_precision_on_xnnpack(function, least):
    """The range of -1..1 for the tanh of numbers about 0.03 left 14 dB."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 4)
    model = Function(lambda m, x: m.second(function(0.03 * m.first(x))), first=first, second=second)
    x = torch.randn(32, 16)
    artefact = quantplug.quantize(model.eval(), (x,), "xnnpack", [x], progress=False)
    assert sqnr(artefact(x), model(x)) > least
    assert sqnr(artefact(x), artefact.reference(x)) > 40
    assert artefact.report.row(function.__name__).quantized


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("layer", ["linear", "conv", "conv_transpose"])
def test_q12_the_bias_scale_is_the_product_of_input_and_weight_scale(per_channel, layer):
    part: Any
    part, x = {
        "linear": (nn.Linear(4, 3), LINEAR_INPUT),
        "conv": (nn.Conv2d(3, 5, 3), torch.randn(1, 3, 6, 6)),
        "conv_transpose": (nn.ConvTranspose2d(3, 5, 3), torch.randn(1, 3, 6, 6)),
    }[layer]
    model = Function(lambda m, x: m.part(x), part=part)
    config = get_symmetric_quantization_config(per_channel, int32_bias=True)
    converted = reference(model, XNNPACKQuantizer().set_global(config), x)
    (op,) = (n for n in converted.graph.nodes if n.name.startswith(("linear", "conv")) and n.op == "call_function")
    source, weight, bias = op.args[:3]
    scale = source.args[1] * scale_of(converted, weight)
    assert torch.allclose(scale_of(converted, bias), scale, rtol=1e-6)
    stored = getattr(converted, bias.args[0].target)
    assert stored.dtype == torch.int32
    assert torch.allclose(stored * scale, part.bias, atol=float(scale.max()) / 2 + 1e-9)


def scale_of(model, dequantize):
    scale = dequantize.args[1]
    if isinstance(scale, torch.fx.Node):
        scale = getattr(model, str(scale.target))
    return torch.as_tensor(scale).reshape(-1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_q12_the_order_of_the_map_does_not_matter(order):
    class Shuffled(XNNPACKQuantizer):
        def annotate(self, model):
            super().annotate(model)
            annotation = node(model, "linear").meta["quantization_annotation"]
            items = list(annotation.input_qspec_map.items())
            annotation.input_qspec_map = dict(items[i] for i in order)
            return model

    config = get_symmetric_quantization_config(True, int32_bias=True)
    torch.manual_seed(1)
    model = linear()
    expected = reference(model, XNNPACKQuantizer().set_global(config), LINEAR_INPUT)(LINEAR_INPUT)
    found = reference(model, Shuffled().set_global(config), LINEAR_INPUT)(LINEAR_INPUT)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", ["dynamic", "weight_only"])
def test_q12_a_bias_without_input_scale_is_an_error(wrong):
    config = QuantizationConfig(activation_spec(mode=wrong), None, weight_spec(), int32_bias_spec())
    with pytest.raises(ConfigError, match=r"asks for an int32 bias.*leave the bias float"):
        reference(linear(), XNNPACKQuantizer().set_global(config), LINEAR_INPUT)


def test_q16_one_declaration_gives_observers_or_fake_quantizes():
    model = torch.export.export(linear(), (LINEAR_INPUT,)).module()
    for is_qat, prepare, kind in (
        (False, quantplug.prepare_pt2e, ObserverBase),
        (True, prepare_qat_pt2e, FakeQuantizeBase),
    ):
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True, is_qat=is_qat))
        prepared = prepare(model, quantizer)
        found = [m for name, m in prepared.named_children() if name.startswith("activation_post_process")]
        assert len(found) == 3
        assert all(isinstance(m, kind) for m in found)
        prepared(LINEAR_INPUT)
        assert operators(convert_pt2e(prepared)).count("quantize_per_tensor") == 2


def test_q16_one_spec_in_both_modes():
    """The very same spec, of plain observers, also trains: prepare_qat makes fake quantizes of it."""
    spec = activation_spec(observer="minmax")
    config = QuantizationConfig(spec, spec, weight_spec(), None)
    model = torch.export.export(linear(), (LINEAR_INPUT,)).module()
    outputs = []
    for prepare, kind in ((quantplug.prepare_pt2e, ObserverBase), (prepare_qat_pt2e, FakeQuantizeBase)):
        prepared = prepare(model, XNNPACKQuantizer().set_global(config))
        found = [m for name, m in prepared.named_children() if name.startswith("activation_post_process")]
        assert len(found) == 3
        assert all(isinstance(m, kind) for m in found)
        assert torch.equal(prepared(LINEAR_INPUT), model(LINEAR_INPUT)) is (kind is ObserverBase)
        outputs.append(convert_pt2e(prepared)(LINEAR_INPUT))
    # The range of the result is seen before its rounding there, and behind rounded weights here: a step at most.
    assert sqnr(outputs[1], outputs[0]) > 35


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_q16_a_spec_ends_on_integer_kernels_in_both_modes(backend):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(6, 16)
    batches = (x, x.flip(0) * 0.8)  # a moving average takes little notice of a second batch
    exported = torch.export.export(model, (batches[0],)).module()
    config = quantplug.get_quantizer(backend).backend.config("int8")
    for prepare, kind in ((quantplug.prepare_pt2e, ObserverBase), (prepare_qat_pt2e, FakeQuantizeBase)):
        quantizer = quantplug.get_quantizer(backend).set_global(config)
        prepared = prepare(exported, quantizer)
        seen = [m for name, m in prepared.named_children() if name.startswith("activation_post_process")]
        assert all(isinstance(m, kind) for m in seen if not isinstance(m, DerivedObserverOrFakeQuantize))
        for x in batches:
            prepared(x)
        converted = convert_pt2e(prepared)
        program = quantizer.backend.lower(converted, (batches[0],))
        assert {each.placement for each in program.ops} == {"int8"}
        for x in batches:
            assert sqnr(program(x), converted(x)) > 40
            assert 25 < sqnr(program(x), model(x)) < 80


def test_presets_make_torchaos_fake_quantizes_for_training():
    qat = get_symmetric_quantization_config(True, is_qat=True).input_activation.observer_or_fake_quant_ctr()
    assert isinstance(qat, FusedMovingAvgObsFakeQuantize)


def test_per_channel_axis_moves_with_the_operator():
    assert on_axis(weight_spec(), 1).ch_axis == 1
    assert on_axis(weight_spec(), 0) is weight_spec()
    assert on_axis(weight_spec(per_channel=False), 1).ch_axis == 0
    assert on_axis(None, 1) is None
