"""Two specs that meet on one tensor, or in one group: each keeps its numbers, or a sentence says that it cannot.

The backends are written as an author would write them: a row of the stock families under specs of its own.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e import FakeQuantize, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)

import quantplug
from quantplug.annotators.activation import own_range
from quantplug.annotators.convolution import convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import activation_spec, get_symmetric_quantization_config
from quantplug.annotators.shape import concatenation
from quantplug.core.errors import AnnotationError
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS, QUANTIZE_OPS, is_weight
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

UINT8 = activation_spec(torch.uint8, 0, 255)


class PowerOfTwo(MinMaxObserver):
    """For kernels that scale by a shift."""

    def calculate_qparams(self):
        scale, zero_point = super().calculate_qparams()
        return 2.0 ** torch.ceil(torch.log2(scale)), zero_point


SHIFTED = QuantizationSpec(torch.int8, PowerOfTwo, -128, 127, torch.per_tensor_affine)


def under(row, spec):
    """A row whose kernel takes and gives activations of a spec of its own."""
    return replace(
        row, decide=lambda match, c: row.decide(match, replace(c, input_activation=spec, output_activation=spec))
    )


def quantizer(*rows):
    backend = Backend(
        "npu", rows, {"int8": get_symmetric_quantization_config}, lowering="quantplug.lowering.reference:lower"
    )
    return type("NPUQuantizer", (BackendQuantizer,), {"backend": backend})()


def quantized(model, x, *rows):
    batches = [x, 2 * x.flip(0)]
    return quantplug.quantize(model.eval(), (x,), quantizer(*rows), batches, progress=False)


def read(model, name):
    """What an operator of a q/dq graph reads: (scale, zero point, quant_min, quant_max, dtype) of each activation."""
    node = next(n for n in model.graph.nodes if n.name == name)
    return [n.args[1:6] for n in node.all_input_nodes if n.target in DEQUANTIZE_OPS and not is_weight(n)]


def written(model, name):
    node = next(n for n in model.graph.nodes if n.name == name)
    (quantize,) = [n for n in node.users if n.target in QUANTIZE_OPS]
    return quantize.args[1:6]


def is_power_of_two(scale):
    return float(torch.log2(torch.tensor(scale))).is_integer()


def decibels(artefact, model, x):
    expected, found = model(x), artefact(x)
    return float(20 * torch.log10(expected.norm() / (expected - found).norm()))


class TwoBranches(nn.Module):
    def __init__(self, join=torch.add):
        super().__init__()
        self.a, self.b, self.c, self.join = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), join

    def forward(self, x):
        return self.c(self.join(self.a(x), self.b(x)))


def concatenated(a, b):
    return torch.cat([a, b], 0)


@pytest.mark.parametrize(
    ("row", "name", "join"),
    [(binary("add", (), shared_inputs=True), "add", torch.add), (concatenation("cat"), "cat", concatenated)],
)
def test_q06_int8_layers_before_a_uint8_operator_of_shared_inputs_are_requantized(row, name, join):
    torch.manual_seed(0)
    model, x = TwoBranches(join), torch.randn(16, 8)
    artefact = quantized(model, x, linear(), under(row, UINT8))
    assert artefact.report.quantized == 4
    one, other = read(artefact.reference, name)
    assert one == other
    assert one[2:] == (0, 255, torch.uint8)
    assert written(artefact.reference, name)[4] is torch.uint8
    assert {written(artefact.reference, layer)[4] for layer in ("linear", "linear_1")} == {torch.int8}
    assert min(decibels(artefact, model, data) for data in (x, -x)) > 25


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(F.max_pool2d(self.conv(x), 2))


@pytest.mark.parametrize("strict", [False, True])
def test_q06_a_pooling_of_powers_of_two_behind_a_convolution_keeps_its_scale(strict):
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(4, 3, 9, 9)
    prepared = prepare_pt2e(
        torch.export.export(model, (x,), strict=strict).module(),
        quantizer(convolution((2,)), under(pooling("max_pool2d"), SHIFTED)).set_global("int8"),
    )
    prepared(x)
    prepared(2 * x)
    converted = convert_pt2e(prepared)
    assert not is_power_of_two(written(converted, "conv2d")[0])
    assert is_power_of_two(read(converted, "max_pool2d")[0][0])
    assert written(converted, "max_pool2d") == read(converted, "max_pool2d")[0]
    assert not is_power_of_two(read(converted, "conv2d_1")[0][0])
    assert (converted(x) - model(x)).norm() < 0.1 * model(x).norm()


OTHERS = {
    "range": activation_spec(torch.int8, -64, 63),
    "scheme": activation_spec(symmetric=True),
    "smallest scale": activation_spec(eps=0.125),
    "scheme given to the observer": QuantizationSpec(
        torch.int8, MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric, quant_min=-127, quant_max=127)
    ),
    "fixed": FixedQParamsQuantizationSpec(torch.int8, 0.0625, 3, -128, 127, torch.per_tensor_affine),
    "power of two": SHIFTED,
    "dtype": UINT8,
}


def own_numbers(spec, given):
    scale, zero_point, low, high, dtype = given
    held = {
        "range": (low, high) == (-64, 63),
        "scheme": zero_point == 0,
        "smallest scale": scale >= 0.125,
        "scheme given to the observer": zero_point == 0 and low == -127,
        "fixed": (scale, zero_point) == (0.0625, 3),
        "power of two": is_power_of_two(scale),
        "dtype": dtype is torch.uint8,
    }
    return held[spec]


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", OTHERS)
def test_q06_whatever_two_specs_differ_in_each_has_numbers_of_its_own_in_either_order(spec):
    torch.manual_seed(0)
    model, x = TwoBranches(), torch.rand(16, 8) + 0.5
    behind = quantized(model, x, linear(), under(binary("add", ()), OTHERS[spec])).reference
    for given in (*read(behind, "add"), written(behind, "add")):
        assert own_numbers(spec, given)
    assert not any(own_numbers(spec, written(behind, name)) for name in ("linear", "linear_1"))
    before = quantized(model, x, under(linear(), OTHERS[spec]), binary("add", ())).reference
    assert all(own_numbers(spec, written(before, name)) for name in ("linear", "linear_1"))
    # Fixed numbers are taken over by who asks for no others.
    followers = (*read(before, "add"), *read(behind, "linear_2"))
    assert [own_numbers(spec, given) for given in followers] == [spec == "fixed"] * 3


def test_q06_a_scale_derived_from_the_producers_is_put_on_the_edge():
    def rounded_up(observers):
        scale, _ = observers[0].calculate_qparams()
        return 2.0 ** torch.ceil(torch.log2(scale)), torch.zeros(1, dtype=torch.int32)

    def decide(match, config):
        source, node = match["x"], match["op"]
        spec = DerivedQuantizationSpec([source], rounded_up, torch.int8, -128, 127, torch.per_tensor_symmetric)
        return {node: QuantizationAnnotation({source: spec}, SharedQuantizationSpec((source, node)))}

    torch.manual_seed(0)
    row = replace(pooling("max_pool2d", follows=("x",)), decide=decide)
    found = quantized(Pooled(), torch.randn(4, 3, 9, 9), convolution((2,)), row).reference
    (given,) = read(found, "max_pool2d")
    assert written(found, "conv2d")[0] < given[0] < 2 * written(found, "conv2d")[0]
    assert is_power_of_two(given[0])
    assert written(found, "max_pool2d") == given


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(torch.sigmoid(x))


@pytest.mark.parametrize("spec", ["scheme", "power of two", "smallest scale"])
def test_q06_a_fixed_scale_is_not_taken_over_where_a_spec_asks_for_other_numbers(spec):
    torch.manual_seed(0)
    fixed = under(own_range("sigmoid"), FixedQParamsQuantizationSpec(torch.int8, 3 / 256, -128, -128, 127))
    artefact = quantized(Gated(), torch.randn(16, 8), fixed, under(linear(), OTHERS[spec]))
    assert written(artefact.reference, "sigmoid")[:2] == (3 / 256, -128)
    (given,) = read(artefact.reference, "linear")
    assert own_numbers(spec, given)
    taking = quantized(Gated(), torch.randn(16, 8), fixed, linear()).reference
    assert read(taking, "linear")[0][:2] == (3 / 256, -128)


def joining(second):
    """A sum whose second operand has a spec of its own making."""

    def decide(match, config):
        a, b, node = match["a"], match["b"], match["op"]
        spec = config.input_activation
        return {node: QuantizationAnnotation({a: spec, b: second(a, node)}, spec)}

    return replace(binary("add", ()), decide=decide)


def test_q06_to_share_with_another_layers_output_of_another_dtype_leaves_the_operator_float_with_the_reason():
    row = under(joining(lambda a, node: SharedQuantizationSpec(a)), UINT8)
    rows = (replace(under(linear(), UINT8), name="wide").where(named("a")), linear(), row)
    artefact = quantized(TwoBranches(), torch.randn(16, 8), *rows)
    report = artefact.report.row("add")
    assert not report.quantized
    assert (
        report.reason
        == "nearest rule 'add': operand 'linear_1' would share numbers in torch.uint8, and is quantized to torch.int8"
    )


def named(module):
    def check(match, config):
        path = [path for path, _ in match["op"].meta["nn_module_stack"].values()]
        return None if path[-1].endswith(module) else "another layer"

    return check


def test_q06_numbers_that_two_tensors_cannot_share_are_one_sentence():
    spec = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_symmetric, 1)
    sentence = "has a scale for each of 8 channels along axis 1, and has 1 there; give it a spec of its own"

    class Broad(nn.Module):
        def forward(self, x):
            return torch.relu(x) + torch.tanh(x[:, :1])

    def decide(match, config):
        a, b, node = match["a"], match["b"], match["op"]
        return {node: QuantizationAnnotation({a: spec, b: SharedQuantizationSpec((a, node))})}

    exported = torch.export.export(Broad(), (torch.randn(4, 8),)).module()
    before = str(exported.graph)
    with pytest.raises(AnnotationError, match=r"The input 'tanh' of 'add'.* shares its quantization with the .*'relu'"):
        prepare_pt2e(exported, quantizer(replace(binary("add", ()), decide=decide)).set_global("int8"))
    with pytest.raises(AnnotationError, match=sentence):
        prepare_pt2e(exported, quantizer(replace(binary("add", ()), decide=decide)).set_global("int8"))
    assert str(exported.graph) == before


def test_q06_observers_that_find_a_range_otherwise_share_and_are_reported():
    other = activation_spec(observer="minmax")
    artefact = quantized(TwoBranches(), torch.randn(16, 8), linear(), under(binary("add", ()), other))
    assert read(artefact.reference, "add") == [written(artefact.reference, n) for n in ("linear", "linear_1")]
    assert "asks for another observer" in str(artefact.report)


def test_q06_in_training_a_rule_for_scales_stands_for_itself():
    fake = FakeQuantize.with_args(observer=PowerOfTwo)
    spec = QuantizationSpec(torch.int8, fake, -128, 127, torch.per_tensor_affine)
    x = torch.randn(16, 8)
    rows = quantizer(linear(), under(binary("add", ()), spec))
    exported = torch.export.export(TwoBranches(), (x,)).module()
    trained = quantplug.prepare_qat_pt2e(exported, rows.set_global(get_symmetric_quantization_config(is_qat=True)))
    trained(x)
    converted = convert_pt2e(trained)
    assert all(is_power_of_two(given[0]) for given in (*read(converted, "add"), written(converted, "add")))
    assert not is_power_of_two(written(converted, "linear")[0])
