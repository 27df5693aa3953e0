"""The engine: what it writes, what it refuses and why, and that an error leaves the graph as it was."""

from dataclasses import replace

import pytest
import torch
from models import Function, ResNet18, exported, node, observed, operators, reference
from torch import nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    SharedQuantizationSpec,
)

from quantplug import (
    ComposableQuantizer,
    EmbeddingQuantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    explain,
    get_quantizer,
    prepare_pt2e,
)
from quantplug.annotators.convolution import convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.core.annotation.annotator import Annotator, Choice
from quantplug.core.annotation.engine import annotate, annotate_with
from quantplug.core.errors import AnnotationError, ConfigError, ModelError, PatternError
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.specs.decision import decision
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.core.specs.levels import sqnr

CONFIG = get_symmetric_quantization_config(True)
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
KEY = "quantization_annotation"


def conv_relu(m, x):
    return torch.relu(m.conv(x))


def fused():
    return exported(Function(conv_relu, conv=nn.Conv2d(3, 3, 1)), X)


def everything(config=CONFIG):
    return lambda n: Choice(config, "test", 1)


def written(model):
    return {n.name: sorted(n.meta) for n in model.graph.nodes}


def test_inputs_are_annotated_at_the_operator_and_the_output_at_the_last_node():
    model = fused()
    (found,) = annotate(model, (convolution(),), everything(), "toy")
    assert found.label == "conv_relu"
    first, second = node(model, "conv2d").meta[KEY], node(model, "relu").meta[KEY]
    assert list(first.input_qspec_map) == list(node(model, "conv2d").args[:2])
    assert first.output_qspec is None
    assert second.input_qspec_map == {}
    assert second.output_qspec is CONFIG.output_activation
    assert decision(node(model, "conv2d")).root == "relu"


def test_an_annotator_without_op_is_refused_when_it_is_declared():
    with pytest.raises(PatternError, match="Pattern 'relu' of annotator 'mine' binds no operator to 'op'"):
        Annotator("mine", (("relu", op("relu", self=value("x"))),), lambda match, config: {})


def test_decide_is_pure():
    model = fused()
    before = written(model)
    match = convolution().patterns[0][1].match(node(model, "relu"))
    assert isinstance(match, Match)
    decided = convolution()(match, CONFIG)
    assert {n.name for n in decided} == {"conv2d", "relu"}
    assert written(model) == before


@pytest.mark.parametrize("culprit", ["outside", "decide", "choose"])
def test_an_error_leaves_the_graph_as_it_was(culprit):
    def decide(match, config):
        if culprit == "outside":
            return {match["x"]: QuantizationAnnotation()}
        raise ZeroDivisionError

    def choose(n):
        if culprit == "choose" and n.name == "relu":
            raise ZeroDivisionError
        return Choice(CONFIG, "test", 1)

    failing = Annotator("mine", (("conv", op("conv2d", input=value("x"), name="op")),), decide)
    annotators = (convolution(activations=()),) if culprit == "choose" else (failing,)
    model = fused()
    before = written(model)
    with pytest.raises((AnnotationError, ZeroDivisionError)) as raised:
        annotate(model, annotators, choose, "toy")
    assert written(model) == before
    if culprit == "outside":
        assert "Rule 'conv' annotates 'inputs_0'" in str(raised.value)
        assert "not part of the piece" in str(raised.value)


def test_b19_differing_configs_inside_a_piece_name_both_and_annotate_no_half():
    int8, other = CONFIG, get_symmetric_quantization_config(False)
    model = fused()
    quantizer = XNNPACKQuantizer().set_operator_type("conv2d", int8).set_operator_type("relu", other)
    quantizer.annotate(model)
    # The pair is not fused: the convolution is annotated whole, and the relu stays in its scale.
    assert decision(node(model, "conv2d")).rule == "conv"
    assert node(model, "conv2d").meta[KEY].output_qspec is int8.output_activation
    assert decision(node(model, "relu")).rule == "relu"
    assert isinstance(node(model, "relu").meta[KEY].output_qspec, SharedQuantizationSpec)


def test_b19_the_diagnostic_names_both_scopes():
    model = fused()
    scopes = {
        "conv2d": Choice(CONFIG, "scope one", 5),
        "relu": Choice(get_symmetric_quantization_config(), "scope two", 5),
    }
    annotate(model, (convolution(),), lambda n: scopes.get(n.name, Choice()), "toy")
    told = decision(node(model, "relu"))
    assert told.nearest == "conv_relu"
    assert "'conv2d' (aten.conv2d.default" in told.reason
    assert "scope one" in told.reason
    assert "'relu' (aten.relu.default" in told.reason
    assert "scope two" in told.reason
    assert KEY not in node(model, "relu").meta


def test_equal_configs_are_one_config_whoever_made_them():
    def made():
        spec = QuantizationSpec(
            torch.int8, MinMaxObserver.with_args(eps=2**-12), -128, 127, torch.per_tensor_affine
        )  # fmt: skip
        weight = QuantizationSpec(torch.int8, MinMaxObserver.with_args(), -127, 127, torch.per_tensor_symmetric)
        return QuantizationConfig(spec, spec, weight, None)

    assert made() != made()  # torchao compares the constructors by identity
    model = fused()
    XNNPACKQuantizer().set_operator_type("conv2d", made()).set_operator_type("relu", made()).annotate(model)
    assert decision(node(model, "relu")).rule == "conv_relu"


def test_none_inside_a_piece_keeps_the_rest():
    model = fused()
    XNNPACKQuantizer().set_global("int8").set_operator_type("relu", None).annotate(model)
    assert decision(node(model, "conv2d")).rule == "conv"
    assert "float by operator type 'relu'" in explain(model).row("relu").reason


def test_what_another_quantizer_annotated_is_left_alone():
    model = fused()
    theirs = QuantizationAnnotation(_annotated=True)
    node(model, "conv2d").meta[KEY] = theirs
    XNNPACKQuantizer().set_global("int8").annotate(model)
    assert node(model, "conv2d").meta[KEY] is theirs
    assert KEY not in node(model, "relu").meta
    assert decision(node(model, "relu")).nearest == "conv_relu"
    assert "already annotated by another quantizer" in decision(node(model, "relu")).reason


def test_a_second_quantizer_of_ours_takes_only_what_the_first_left():
    model = exported(
        Function(lambda m, x: m.fc(torch.flatten(m.conv(x), 1)), conv=nn.Conv2d(3, 3, 1), fc=nn.Linear(192, 4)), X
    )
    XNNPACKQuantizer().set_operator_type("conv2d", "int8").annotate(model)
    conv = node(model, "conv2d").meta[KEY]
    get_quantizer("x86").set_operator_type("linear", "int8").annotate(model)
    assert node(model, "conv2d").meta[KEY] is conv
    assert decision(node(model, "conv2d")).owner == "xnnpack"
    assert decision(node(model, "linear")).owner == "x86"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_types_stay_float_with_the_reason(dtype):
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()).to(dtype), X.to(dtype)
    with pytest.raises(ModelError, match=rf"computes in {dtype}: call model.float\(\)"):
        reference(model, get_quantizer("xnnpack"), x)
    with pytest.warns(UserWarning, match=r"call model.float\(\)"):
        converted = reference(model, get_quantizer("xnnpack", strict=False), x)
    assert "quantize_per_tensor" not in operators(converted)
    assert f"is {dtype}, not torch.float32" in explain(converted).row("conv2d").reason
    assert torch.equal(converted(x), model(x))


def test_integer_arithmetic_stays_integer():
    model = Function(lambda m, i: m.table(i + i), table=nn.Embedding(10, 4))
    quantizer = ComposableQuantizer([EmbeddingQuantizer(), get_quantizer("xnnpack")])
    converted = reference(model, quantizer, torch.tensor([1, 2]))
    report = explain(converted)
    assert "is torch.int64, not torch.float32" in report.row("add").reason
    assert report.row("embedding").quantized
    assert sqnr(converted(torch.tensor([1, 2])), model(torch.tensor([1, 2]))) > 35


def test_a_tensor_added_to_itself_has_one_input_observer():
    prepared = observed(Function(lambda m, x: x + x), get_quantizer("xnnpack"), X)
    assert operators(convert_pt2e(prepared)).count("add") == 1
    assert len([n for n in prepared.graph.nodes if n.op == "call_module" and "activation" in str(n.target)]) == 2


def test_a_module_used_twice_is_quantized_twice():
    conv = nn.Conv2d(3, 3, 1)
    model = Function(lambda m, x: torch.relu(m.conv(torch.relu(m.conv(x)))), conv=conv)
    report = explain(reference(model, get_quantizer("xnnpack"), X))
    assert [r.rule for r in report.rows] == ["conv_relu"] * 4
    assert {r.module_path for r in report.rows if r.operator == "conv2d"} == {"conv"}


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_resnets_reused_inplace_relu_and_inplace_add(backend, strict):
    model = exported(ResNet18(4, 4), torch.randn(1, 3, 32, 32), strict=strict)
    prepared = prepare_pt2e(model, get_quantizer(backend))
    rules = [row.rule for row in explain(prepared).rows]
    assert rules.count("conv_relu") == 18
    assert "" not in rules
    if backend == "xnnpack":  # x86 may take a convolution and the addition after it as one piece
        assert rules.count("add_relu") == 16
        assert rules.count("conv") == 11


def test_a_change_in_place_under_another_name_keeps_its_effect():
    def through_view(m, x):
        h = m.conv(x)
        h.view(-1).relu_()
        return m.conv(h)

    model = Function(through_view, conv=nn.Conv2d(3, 3, 1))
    converted = reference(model, get_quantizer("xnnpack", strict=False), X)
    assert sqnr(converted(X), model(X)) > 30
    assert "in place, which is read afterwards" in explain(converted).row("conv2d").reason


def test_data_movement_follows_quantized_producers_only():
    def moves(m, x):
        early = x.permute(0, 1, 3, 2).reshape(1, 3, 64)
        return torch.flatten(m.conv(x), 1), early

    model = Function(moves, conv=nn.Conv2d(3, 3, 1))
    report = explain(prepare_pt2e(exported(model, X), get_quantizer("xnnpack")))
    assert report.row("flatten").quantized
    assert "operand 'x' comes from 'inputs_0'" in report.row("permute").reason
    assert "which is float" in report.row("reshape").reason


def test_a_consumer_inherits_fixed_qparams():
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    model = Function(lambda m, x: torch.sigmoid(m.one(x)) * torch.sigmoid(m.two(x)), **layers)
    x = torch.randn(2, 4)
    prepared = prepare_pt2e(exported(model, x), get_quantizer("xnnpack"))
    inputs = node(prepared, "mul").meta[KEY].input_qspec_map
    assert all(isinstance(spec, SharedQuantizationSpec) for spec in inputs.values())
    with torch.no_grad():
        prepared(x)
    converted = convert_pt2e(prepared)
    # One pair for x, one after each linear and sigmoid, one after the product: none twice.
    assert operators(converted).count("quantize_per_tensor") == 6
    assert sqnr(converted(x), model(x)) > 25


def test_fixed_qparams_do_not_reach_dynamic_consumers():
    model = Function(lambda m, x: m.fc(torch.sigmoid(x)), fc=nn.Linear(4, 4))
    quantizer = XNNPACKQuantizer().set_global("int8").set_operator_type("linear", "int8_dynamic")
    converted = reference(model, quantizer, torch.randn(2, 4))
    assert any("choose_qparams" in name for name in operators(converted))


def test_after_decompositions_nothing_is_lost():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)).eval()
    decomposed = torch.export.export(model, (X,)).run_decompositions().module()
    prepared = prepare_pt2e(decomposed, get_quantizer("xnnpack"))
    with torch.no_grad():
        prepared(X)
    converted = convert_pt2e(prepared)
    report = explain(converted)
    assert report.quantized == len(report.rows)
    assert "max_pool2d" in {row.rule for row in report.rows}
    assert len(report.boundaries) == 2
    plain = reference(model, get_quantizer("xnnpack"), X)
    assert torch.allclose(converted(X), plain(X), atol=1e-6)


def test_constraints_are_reasons():
    refuse = binary("add").where(lambda match, config: f"no kernel for {match['op'].name}")
    model = exported(Function(lambda m, x, y: x + y), X, X.clone())
    annotate(model, (refuse,), everything(), "toy")
    assert decision(node(model, "add")).reason == "no kernel for add"


def test_a_rule_is_asked_once_about_a_match_even_if_dtypes_are_chosen_by_its_specs():
    asked = []
    row = linear().accepting(DTypeConfig("int8", input=torch.int8, output=torch.int8, weight=torch.int8))

    def decide(match, config):
        asked.append(match.root.name)
        return row.decide(match, config)

    model = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),)).module()
    annotate_with(model, [replace(row, decide=decide)], get_symmetric_quantization_config())
    assert asked == ["linear", "linear_1"]


def test_an_annotator_that_is_given_a_graph_says_what_annotates_one():
    model = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),)).module()
    with pytest.raises(ConfigError, match=r"found GraphModule; annotate a graph with `quantplug.plugin.annotate_with"):
        linear()(model, get_symmetric_quantization_config())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="annotate_with takes an exported graph module, found Linear"):
        annotate_with(nn.Linear(4, 4), [linear()], get_symmetric_quantization_config())  # type: ignore[arg-type]
