"""Limits that a backend declares: checked when annotating, when sharing is known, and on calibrated numbers."""

import copy
import dataclasses
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function, exported
from torch import nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug import Backend, BackendQuantizer, calibrate, convert_pt2e, explain, get_quantizer, prepare_pt2e
from quantplug.annotators.activation import known_range
from quantplug.annotators.convolution import convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import config_for, int32_bias_spec
from quantplug.annotators.shape import movement
from quantplug.core.errors import AnnotationError, CalibrationError, ConfigError
from quantplug.core.graph.facts import is_observer
from quantplug.core.qdq.format import differences
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.core.specs.limits import Rescale
from quantplug.quantizers.framework.derived import derive

REFERENCE = "quantplug.lowering.reference:lower"
UINT8 = DTypeWithConstraints(
    torch.uint8, quant_min_lower_bound=0, quant_max_upper_bound=255, scale_min_lower_bound=2**-12
)
WEIGHT = DTypeWithConstraints(
    torch.int8, quant_min_lower_bound=-128, quant_max_upper_bound=127, scale_min_lower_bound=2**-12
)
INT8 = DTypeConfig("uint8_int8", input=UINT8, output=UINT8, weight=WEIGHT)


def toy(*rows, dtypes=(INT8,), **fields):
    return Backend("toy", rows or (linear(),), lowering=REFERENCE, dtypes=dtypes, **fields)


def quantizer_of(backend, config=None, *, strict=True):
    made = type("ToyQuantizer", (BackendQuantizer,), {"backend": backend})(strict=strict)
    return made if config is None else made.set_global(config)


def activation(low=0, high=255, eps=2**-12, dtype=torch.uint8, scheme=torch.per_tensor_affine, observer=MinMaxObserver):
    return QuantizationSpec(dtype, observer.with_args(eps=eps), low, high, scheme)


def config(act=None, weight=None, bias=None):
    act = act or activation()
    weight = weight or activation(-127, 127, dtype=torch.int8, scheme=torch.per_tensor_symmetric)
    return QuantizationConfig(act, act, weight, bias)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def convert(model, quantizer, *batches):
    prepared = prepare_pt2e(exported(model, batches[0]), quantizer)
    calibrate(prepared, list(batches), progress=False)
    return convert_pt2e(prepared)


X = torch.linspace(-2, 2, 24).reshape(4, 6)


def test_b06_ranges_inside_the_bounds_are_accepted():
    for low, high in ((0, 255), (0, 127), (10, 200)):
        model = exported(mlp(), X)
        quantizer_of(toy(), config(activation(low, high))).annotate(model)
        assert explain(model).quantized == 3
        assert {row.dtypes for row in explain(model).rows if row.quantized} == {"uint8_int8"}


@pytest.mark.parametrize(
    ("asked", "limited", "words"),
    [
        (
            activation(0, 255),
            dataclasses.replace(UINT8, quant_max_upper_bound=127),
            r"The input of 'linear' \(module '0'\) breaks quant_max_upper_bound of backend 'toy': found 255, "
            r"the limit is 127; the nearest legal dtype config is 'narrow'",
        ),
        (
            activation(0, 200),
            dataclasses.replace(UINT8, quant_min_lower_bound=5),
            r"The input of 'linear' \(module '0'\) breaks quant_min_lower_bound .* found 0, the limit is 5",
        ),
        (
            activation(eps=1e-9),
            UINT8,
            r"The input of 'linear' \(module '0'\) breaks scale_min_lower_bound .* found an eps of 1e-09, "
            r"the limit is 0.000244141",
        ),
        (
            activation(dtype=torch.int8, low=-128, high=127),
            UINT8,
            r"The input of 'linear' \(module '0'\) breaks dtype .* found int8, the limit is uint8",
        ),
        (
            activation(),
            dataclasses.replace(UINT8, zero_point_exact_match=0),
            r"breaks zero_point_exact_match .* found an observed zero point, the limit is 0",
        ),
        (
            activation(),
            dataclasses.replace(UINT8, scale_exact_match=0.5),
            r"breaks scale_exact_match .* found an observed scale, the limit is 0.5",
        ),
        (
            activation(scheme=torch.per_tensor_symmetric),
            dataclasses.replace(UINT8, qschemes=(torch.per_tensor_affine,)),
            r"breaks qschemes .* found per_tensor_symmetric, the limit is per_tensor_affine",
        ),
    ],
)
def test_b06_b08_b24_a_config_outside_is_one_error_or_in_the_report(asked, limited, words):
    narrow = DTypeConfig("narrow", input=limited, output=limited, weight=WEIGHT)
    backend, model = toy(dtypes=(narrow,)), exported(mlp(), X)
    with pytest.raises(AnnotationError, match=words + r".* \(1 more like it\.\)"):
        quantizer_of(backend, config(asked)).annotate(model)
    assert not any("quantization_annotation" in node.meta for node in model.graph.nodes)

    prepared = prepare_pt2e(model, quantizer_of(backend, config(asked), strict=False))
    report = explain(prepared)
    assert report.quantized == 0
    assert len(report.violations) == 2
    assert not any(is_observer(module) for module in prepared.children())
    assert report.row("linear").reason.startswith("nearest rule 'linear_relu': The input of 'linear'")
    assert str(report.violations[0]) in report.text(width=1000)
    assert str(report.violations[0]).split("'")[0] in report.html()


def test_b07_scales_of_tiny_tensors_keep_the_bound():
    converted = convert(mlp(), quantizer_of(toy(), "uint8_int8"), X * 1e-9)
    scales = [n.args[1] for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert len(scales) >= 4
    assert all(scale >= 2**-12 for scale in scales)


class NoEps(MinMaxObserver):
    """An observer that takes an eps and does not keep it."""

    def calculate_qparams(self):
        scale, zero_point = super().calculate_qparams()
        return scale * 1e-6, zero_point


def test_b07_b08_a_calibrated_scale_below_the_bound_is_an_error_or_in_the_report():
    broken = config(activation(observer=NoEps))
    words = (
        r"The input of 'linear' \(module '0'\) breaks scale_min_lower_bound of backend 'toy': found .*e-0\d, the limit"
    )
    with pytest.raises(CalibrationError, match=words):
        convert(mlp(), quantizer_of(toy(), broken), X)
    converted = convert(mlp(), quantizer_of(toy(), broken, strict=False), X)
    assert {violation.port for violation in explain(converted).violations} == {"input", "output"}


def test_b08_an_upper_bound_on_scales_holds_after_calibration():
    bound = dataclasses.replace(UINT8, scale_max_upper_bound=0.1)
    backend = toy(dtypes=(DTypeConfig("int8", bound, bound, WEIGHT),))
    convert(mlp(), quantizer_of(backend), X)
    with pytest.raises(CalibrationError, match=r"input of 'linear' .* breaks scale_max_upper_bound .* limit is 0\.1"):
        convert(mlp(), quantizer_of(backend), X * 100)


def sigmoid_backend(scale, zero_point=0):
    exact = DTypeWithConstraints(torch.uint8, scale_exact_match=scale, zero_point_exact_match=zero_point)
    row = known_range("sigmoid").accepting(DTypeConfig("fixed", UINT8, exact))
    return Backend("toy", (row,), {"int8": partial(config, activation())}, REFERENCE)


def test_b08_exact_matches_hold_for_fixed_qparams():
    model = Function(lambda m, x: torch.sigmoid(x))
    converted = convert(model, quantizer_of(sigmoid_backend(1 / 256)), X)
    assert explain(converted).quantized == 1
    for backend, words in (
        (
            sigmoid_backend(1 / 128),
            r"output of 'sigmoid' breaks scale_exact_match .* found 0.00390625, the limit is 0.0078",
        ),
        (sigmoid_backend(1 / 256, 3), r"output of 'sigmoid' breaks zero_point_exact_match .* found 0, the limit is 3"),
    ):
        with pytest.raises(AnnotationError, match=words):
            quantizer_of(backend).annotate(exported(model, X))


def test_b09_one_object_gives_the_four_specs():
    dtypes = DTypeConfig("int8", input=UINT8, output=torch.int8, weight=torch.int8, bias=torch.int32)
    made = config_for(dtypes, observer="minmax")
    assert (made.input_activation.dtype, made.input_activation.quant_max) == (torch.uint8, 255)
    assert (made.output_activation.dtype, made.output_activation.quant_min) == (torch.int8, -128)
    assert (made.weight.dtype, made.weight.quant_min, made.weight.quant_max) == (torch.int8, -127, 127)
    assert made.bias.dtype == torch.int32
    dynamic = config_for(DTypeConfig("dynamic", input=torch.int8, weight=torch.int8, is_dynamic=True))
    assert dynamic.input_activation.is_dynamic
    assert dynamic.output_activation is None
    weight_only = config_for(DTypeConfig("weights", weight=torch.int8))
    assert weight_only.input_activation is None
    training = config_for(dtypes, is_qat=True)
    assert "FakeQuantize" in str(training.input_activation.observer_or_fake_quant_ctr)
    assert training.is_qat


@pytest.mark.slow
def test_b04_every_config_that_dtypes_give_is_accepted_by_them_and_reaches_the_q_nodes():
    for dtype in (torch.int8, torch.uint8, torch.int16):
        dtypes = DTypeConfig("it", input=dtype, output=dtype, weight=torch.int8)
        converted = convert(mlp(), quantizer_of(toy(dtypes=(dtypes,))), X)
        found = [n.args[-1] for n in converted.graph.nodes if "quantize_per_tensor.default" in str(n.target)]
        assert set(found) == {dtype}


def test_b14_the_first_satisfiable_dtype_config_wins_and_the_report_says_why():
    seven_bits = dataclasses.replace(UINT8, quant_max_upper_bound=127)
    narrow = DTypeConfig("narrow", seven_bits, seven_bits, WEIGHT)
    even = dataclasses.replace(UINT8, qschemes=(torch.per_tensor_symmetric,))
    symmetric = DTypeConfig("symmetric", even, even, WEIGHT)
    model = exported(mlp(), X)
    quantizer_of(toy(dtypes=(narrow, symmetric, INT8)), config()).annotate(model)
    row = explain(model).row("linear")
    assert row.dtypes == "uint8_int8"
    assert row.passed_over == (
        "'narrow': input quant_max_upper_bound is 127, found 255; "
        "'symmetric': input qschemes is per_tensor_symmetric, found per_tensor_affine"
    )
    assert row.passed_over in explain(model).text(width=1000)
    quantizer_of(toy(dtypes=(narrow, INT8)), config(activation(0, 127))).annotate(again := exported(mlp(), X))
    assert explain(again).row("linear").dtypes == "narrow"


def test_b18_r10_a_narrower_range_with_an_eps_is_carried_to_the_q_nodes():
    converted = convert(mlp(), quantizer_of(toy(), config(activation(0, 127, eps=2**-12))), X)
    ranges = {n.args[3:5] for n in converted.graph.nodes if "quantize_per_tensor.default" in str(n.target)}
    assert (0, 127) in ranges
    assert ranges <= {(0, 127), (-127, 127)}
    reduced = get_quantizer("x86").backend.config(reduce_range=True)
    assert (reduced.input_activation.quant_min, reduced.input_activation.quant_max) == (0, 127)


def test_a_mode_without_a_kernel_is_a_reason_and_no_error():
    dynamic = DTypeConfig("dynamic", input=UINT8, weight=WEIGHT, is_dynamic=True)
    backend = toy(linear(), binary("add").accepting(INT8), dtypes=(INT8, dynamic))
    model = exported(Function(lambda m, x: m.fc(x) + 1.5 * x, fc=nn.Linear(6, 6)), X)
    quantizer_of(backend, "dynamic").annotate(model)
    assert explain(model).row("linear").dtypes == "dynamic"
    only_static = toy(linear().accepting(INT8), dtypes=(INT8, dynamic))
    model = exported(mlp(), X)
    quantizer_of(only_static, "dynamic").annotate(model)
    assert "it has no dynamic kernel, only 'uint8_int8'" in explain(model).row("linear").reason


def test_a_shared_scale_has_to_fit_every_member_of_its_group():
    """The pooling kernel takes scales up to 1/200 only; the sigmoid before it fixes 1/256, the tanh 1/128."""
    pool = DTypeWithConstraints(torch.uint8, scale_max_upper_bound=1 / 200)
    rows = (
        known_range("sigmoid"),
        known_range("tanh"),
        movement(("view",)).accepting(DTypeConfig("small", pool, pool)),
    )
    backend = Backend("toy", rows, {"int8": config}, REFERENCE)
    fits = exported(Function(lambda m, x: torch.sigmoid(x).view(6, 4)), X)
    quantizer_of(backend).annotate(fits)
    assert explain(fits).quantized == 2
    breaks = exported(Function(lambda m, x: torch.tanh(x).view(6, 4)), X)
    words = r"The input of 'view' breaks scale_max_upper_bound .* found 0\.0078125, the limit is 0\.005; it shares"
    with pytest.raises(AnnotationError, match=words):
        quantizer_of(backend).annotate(breaks)
    quantizer_of(backend, strict=False).annotate(breaks)
    assert explain(breaks).quantized == 1
    assert "it shares its numbers" in explain(breaks).row("view").reason


def test_a_fixed_scale_is_not_inherited_by_an_edge_that_does_not_take_it():
    coarse = DTypeWithConstraints(torch.uint8, scale_min_lower_bound=1 / 100)
    row = linear().accepting(DTypeConfig("coarse", coarse, coarse, torch.int8))
    backend = Backend("toy", (known_range("sigmoid"), row), {"int8": partial(config, activation(eps=0.01))}, REFERENCE)
    converted = convert(Function(lambda m, x: m.fc(torch.sigmoid(x)), fc=nn.Linear(6, 2)), quantizer_of(backend), X)
    linear_node = next(n for n in converted.graph.nodes if "linear" in str(n.target))
    assert linear_node.args[0].args[1] >= 0.00999


def test_the_ratio_of_scales_is_held_against_what_the_kernel_can_express():
    backend = toy(linear().rescaling(2**-4, 2**4))
    weights = nn.Linear(6, 5, bias=False)
    with torch.no_grad():
        weights.weight.fill_(1.0).add_(torch.linspace(0, 1e-3, 30).reshape(5, 6))
    convert(weights, quantizer_of(toy()), X)
    words = (
        r"The output of 'linear' breaks the ratio of scales \(product / output\) .* limit is 0.0625 to 16; calibrate"
    )
    with pytest.raises(CalibrationError, match=words):
        convert(weights, quantizer_of(backend), X)
    each = toy(binary("add").rescaling(0.25, 2.0, "each"))
    convert(Function(lambda m, x: x + x.relu()), quantizer_of(each), X)
    with pytest.raises(CalibrationError, match=r"output of 'add' breaks the ratio of scales \(each / output\)"):
        convert(Function(lambda m, x: x + x.relu() * 100), quantizer_of(each), X)


def test_ratios_that_a_lowering_computes_in_float_are_float_in_the_report_and_change_no_number():
    model = Function(lambda m, x: torch.relu(m.fc(x)), fc=nn.Linear(6, 5))
    plain = convert(model, quantizer_of(toy(linear(("relu",)))), X)
    held = convert(model, quantizer_of(toy(linear(("relu",)).rescaling(2**4, 2**8, or_float=True))), X)
    assert differences(held, plain) == []
    for name in ("linear", "relu"):
        row = explain(held).row(name)
        assert not row.quantized
        assert re.fullmatch(
            r"nearest rule 'linear_relu': the ratio .* of its scales is outside of the kernel's \[16, 256\)", row.reason
        )
    wide = convert(model, quantizer_of(toy(linear(("relu",)).rescaling(2**-16, 2**8, or_float=True))), X)
    assert explain(wide).quantized == explain(plain).quantized == 2


def test_the_ratio_of_a_product_with_itself_counts_both_operands():
    backend = toy(binary("mul").rescaling(1e-3, 2**-5))
    convert(Function(lambda m, x: x * x), quantizer_of(backend), X * 0.1)
    with pytest.raises(CalibrationError, match=r"ratio of scales \(product / output\)"):
        convert(Function(lambda m, x: x * x), quantizer_of(toy(binary("mul").rescaling(2**-5, 2**8))), X * 0.1)


def test_an_integer_bias_that_was_cut_is_an_error():
    model = nn.Linear(6, 5)
    with torch.no_grad():
        model.bias[1] = 1e6
    bias32 = toy(dtypes=(dataclasses.replace(INT8, bias=torch.int32),))
    words = r"The bias of 'linear' breaks the int32 range of backend 'toy': found 1 values beyond it"
    with pytest.raises(CalibrationError, match=words):
        convert(model, quantizer_of(bias32, config(bias=int32_bias_spec())), X * 1e-3)
    with pytest.raises(AnnotationError, match=r"bias of 'linear' breaks dtype .* found int32, the limit is float"):
        quantizer_of(toy(), config(bias=int32_bias_spec())).annotate(exported(model, X))


@pytest.mark.slow
def test_limits_hold_inside_of_control_flow():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: self.fc(y), lambda y: self.fc(y) + 1, (x,))

    bound = dataclasses.replace(UINT8, scale_max_upper_bound=0.1)
    backend = toy(dtypes=(DTypeConfig("int8", bound, bound, WEIGHT),))
    with torch.no_grad():
        convert(Branches().eval(), quantizer_of(backend), X + 1, X - 1)
        with pytest.raises(CalibrationError, match="breaks scale_max_upper_bound"):
            convert(Branches().eval(), quantizer_of(backend), (X + 1) * 100, (X - 1) * 100)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DTypeWithConstraints("int8"), r"has dtype 'int8'; give a torch\.dtype"),  # type: ignore[arg-type]
        (lambda: DTypeWithConstraints(torch.int8, quant_max_upper_bound=255), r"255, outside of torch\.int8"),
        (lambda: DTypeWithConstraints(torch.int8, 5, 3), r"quant_min_lower_bound is 5, above quant_max_upper_bound"),
        (lambda: DTypeWithConstraints(torch.int8, scale_min_lower_bound=-1.0), "scales are positive"),
        (lambda: DTypeConfig("d", torch.int8, torch.int8, torch.int8, is_dynamic=True), "is dynamic, which quantizes"),
        (lambda: DTypeConfig("d", torch.int8, bias=torch.int8), r"has bias torch\.int8; choose torch\.int32"),
        (lambda: Rescale(2.0, 1.0), "from a positive ratio to a greater one"),
        (lambda: linear().rescaling(1.0, 2.0, "sum"), "of 'sum'"),
        (lambda: dataclasses.replace(linear(), output="somewhere"), "has output 'somewhere'; choose one of"),
        (lambda: Backend("", (linear(),), {}, REFERENCE), "has the name ''"),
        (lambda: Backend("toy", linear(), {}, REFERENCE), "are a Annotator; give a tuple"),  # type: ignore[arg-type]
        (lambda: Backend("toy", ("linear",), {}, REFERENCE), "hold 'linear', which is no Annotator"),  # type: ignore[arg-type]
        (lambda: toy(dtypes=(INT8, INT8)), "declares the dtype config 'uint8_int8' twice"),
        (
            lambda: Backend("toy", (linear(),), {"int8": config()}, REFERENCE),
            "Config 'int8' of backend 'toy' is a Quant",
        ),
        (lambda: Backend("toy", (linear(),), {"int8": config}), "has the lowering ''; give a function or its name"),
        (lambda: Backend("toy", (linear(),), {"int8": config}, "lower"), "has the lowering 'lower'"),
        (lambda: toy(transforms=("fold",)), "hold 'fold'; each is a function of a graph module"),
    ],
)
def test_r01_mistakes_in_a_declaration_are_errors_when_it_is_made(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_r28_a_backend_derives_from_another_which_stays_as_it_is():
    base = toy(linear(), binary("add"), pooling("max_pool2d"))
    made = derive(base, "more", add=(known_range("sigmoid"),), remove=("max_pool2d", "linear_relu"), summary="more")
    labels = {label for row in made.annotators for label, _ in row.patterns}
    assert {"sigmoid", "linear", "linear_clamp", "add"} <= labels
    assert not {"max_pool2d", "linear_relu"} & labels
    assert (made.name, made.summary, made.annotators[0].name) == ("more", "more", "sigmoid")
    assert (base.name, [row.name for row in base.annotators]) == ("toy", ["linear", "add", "max_pool2d"])
    assert "linear_relu" in {label for label, _ in base.annotators[0].patterns}
    assert copy.deepcopy(made) is made
    with pytest.raises(ConfigError, match=r"Backend 'toy' has no rule 'relu7' to remove; it has \["):
        derive(base, "x", remove=("relu7",))
    with pytest.raises(ConfigError, match=r"Backend 'x' cannot be derived from 'toy'.*lowring"):
        derive(base, "x", lowring=REFERENCE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.name = "other"
    with pytest.raises(TypeError, match="does not support item assignment"):
        base.configs["int4"] = config


def test_a_sum_of_its_own_in_a_derived_backend_wins_over_the_base():
    seven_bits = dataclasses.replace(UINT8, quant_max_upper_bound=127)
    narrow = DTypeConfig("narrow", seven_bits, seven_bits, WEIGHT)
    made = derive(toy(), "narrow", add=(linear().accepting(narrow),))
    model = exported(mlp(), X)
    quantizer_of(made, config(activation(0, 127))).annotate(model)
    assert explain(model).row("linear").dtypes == "narrow"


bounds = st.one_of(st.none(), st.integers(0, 255))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(low=bounds, high=bounds, smallest=st.sampled_from([None, 2**-16, 2**-12, 2**-8]), spec=st.data())
def test_q03_what_is_annotated_satisfies_every_bound_and_what_is_not_has_a_true_reason(low, high, smallest, spec):
    if low is not None and high is not None and low > high:
        low, high = high, low
    bound = DTypeWithConstraints(torch.uint8, low, high, smallest)
    least = spec.draw(st.integers(0, 254))
    asked = activation(least, spec.draw(st.integers(least + 1, 255)), spec.draw(st.sampled_from([2**-14, 2**-10])))
    backend = toy(convolution(), linear(), dtypes=(DTypeConfig("it", bound, bound, torch.int8),))
    model = exported(mlp(), X)
    quantizer_of(backend, config(asked), strict=False).annotate(model)
    legal = (
        (low is None or asked.quant_min >= low)
        and (high is None or asked.quant_max <= high)
        and (smallest is None or asked.observer_or_fake_quant_ctr.p.keywords["eps"] >= smallest)
    )
    assert explain(model).quantized == (3 if legal else 0)
    assert bool(explain(model).violations) is not legal
