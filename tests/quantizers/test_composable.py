"""Compositions: regions, precedence, conflicts, and what each quantizer gets to see."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from compositions import (
    BACKBONE,
    CORES,
    HEAD,
    KEY,
    WORDS,
    Images,
    Tagger,
    Toy,
    X,
    converted,
    mixed,
    overwrite,
    owners,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import exported
from torch import nn
from torchao.quantization.pt2e import FixedQParamsObserver
from torchao.quantization.pt2e.quantizer import ComposableQuantizer as TorchaoComposableQuantizer
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec

import quantplug
from quantplug import ComposableQuantizer, EmbeddingQuantizer, Region, explain, get_quantizer
from quantplug.core.annotation.plan import plan_of
from quantplug.core.errors import AnnotationError, ConfigError, PatternError
from quantplug.core.specs.decision import decision

# Precedence.


def test_declared_precedence_makes_the_order_of_adding_irrelevant():
    parts = [
        (lambda: get_quantizer("x86"), HEAD, 1),
        (lambda: Toy(overwrite(torch.ops.aten.linear.default, torch.ops.aten.relu.default)), None, 0),
        (lambda: get_quantizer("xnnpack"), Region(operator="conv2d"), 2),
        (lambda: get_quantizer("xnnpack"), Region(operator="max_pool2d"), 2),
    ]
    plans, notes = [], []
    for order in (parts, parts[::-1], parts[2:] + parts[:2]):
        quantizer = ComposableQuantizer()
        for make, region, precedence in order:
            quantizer.add(make(), region, precedence=precedence)
        model = quantizer.annotate(exported(Images().eval(), X))
        plans.append(plan_of(model))
        notes.append(explain(model).notes)
    assert all(plan == plans[0] for plan in plans)
    assert all(found == notes[0] for found in notes)
    found = {node.node.partition(":")[0]: node.decided.owner for node in plans[0].nodes}
    assert found["backbone.0"] == "xnnpack 1"
    assert found["backbone.3"] == "xnnpack 2"
    assert found["head.1"] == "x86"
    assert found["backbone.1"] == "Toy"


REGIONS = (
    None,
    HEAD,
    BACKBONE,
    Region(operator="linear"),
    Region(operator=("conv2d", "max_pool2d")),
    Region(module="*.1"),
    Region(filter=lambda node: "relu" in node.name or "conv" in node.name),
)
CHILDREN = (
    lambda: get_quantizer("x86"),
    lambda: get_quantizer("xnnpack"),
    lambda: get_quantizer("xnnpack").set_global("int8_dynamic"),
    lambda: get_quantizer("xnnpack").set_operator_type("linear", None),
    lambda: Toy(overwrite(torch.ops.aten.linear.default, torch.ops.aten.relu.default)),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComposableQuantizer quantizes none")  # as two that leave linears float, for linears
@settings(max_examples=20, deadline=None)
@given(
    members=st.lists(st.tuples(st.sampled_from(CHILDREN), st.sampled_from(REGIONS)), min_size=2, max_size=4),
    data=st.data(),
)
def test_any_composition_with_declared_precedence_is_the_same_in_any_order(members, data):
    parts = [(make, region, rank) for rank, (make, region) in enumerate(members)]
    found = []
    for order in (parts, data.draw(st.permutations(parts))):
        quantizer = ComposableQuantizer(strict=False)
        for make, region, rank in order:
            quantizer.add(make(), region, precedence=rank, name=f"member {rank}")
        prepared = quantplug.prepare_pt2e(exported(Images().eval(), X), quantizer)
        found.append((plan_of(prepared), explain(prepared).notes))
    assert found[0] == found[1]


def test_without_declared_precedence_the_first_wins():
    first = converted(Images().eval(), ComposableQuantizer([get_quantizer("x86"), get_quantizer("xnnpack")]), X)
    second = converted(Images().eval(), ComposableQuantizer([get_quantizer("xnnpack"), get_quantizer("x86")]), X)
    assert owners(first)["conv2d"] == "x86"
    assert owners(second)["conv2d"] == "xnnpack"


def test_what_one_leaves_float_is_open_to_the_next():
    only_linear = get_quantizer("xnnpack").set_operator_type("linear", "int8")
    reference = converted(Images().eval(), ComposableQuantizer([only_linear, get_quantizer("x86")]), X)
    found = owners(reference)
    assert found["linear"] == "xnnpack"
    assert found["conv2d"] == found["max_pool2d"] == "x86"


def test_equal_precedence_on_one_operator_is_an_error_that_names_both():
    quantizer = (
        ComposableQuantizer()
        .add(get_quantizer("x86"), HEAD, precedence=1)
        .add(get_quantizer("xnnpack"), Region(operator="linear"), precedence=1)
    )
    message = r"'x86' and 'xnnpack' .* both cover 'linear' \(aten.linear.default, module 'head.1'\) with precedence 1;"
    with pytest.raises(ConfigError, match=message):
        quantplug.prepare_pt2e(exported(Images().eval(), X), quantizer)


# Regions.


@pytest.mark.parametrize(
    ("region", "inside"),
    [
        (HEAD, {"flatten", "linear", "relu_1", "linear_1"}),
        (Region(module=("head.1", "backbone.0")), {"linear", "conv2d"}),
        (Region(module="*.1"), {"linear", "relu"}),
        (Region(module=nn.Linear), {"linear", "linear_1"}),
        (Region(operator="linear"), {"linear", "linear_1"}),
        (Region(operator=(nn.functional.relu, torch.ops.aten.max_pool2d)), {"relu", "relu_1", "max_pool2d"}),
        (Region(filter=lambda node: "_1" in node.name), {"conv2d_1", "relu_1", "linear_1"}),
        (Region(module="head", operator="linear", filter=lambda node: "_1" in node.name), {"linear_1"}),
    ],
)  # fmt: skip
def test_regions_by_module_operator_and_filter(region, inside):
    model = exported(Images().eval(), X)
    assert {n.name for n in region.nodes(model.graph) if n.op == "call_function"} == inside
    assert region.unmatched(model) == []


def test_a_region_without_conditions_is_the_whole_graph():
    model = exported(Images().eval(), X)
    assert Region().nodes(model.graph) == set(model.graph.nodes)
    assert Region().text == "the whole model"


def test_a_fused_piece_is_never_cut_by_a_border():
    region = Region(filter=lambda node: node.name != "relu")
    reference = converted(Images().eval(), ComposableQuantizer().add(get_quantizer("xnnpack"), region), X)
    report = explain(reference)
    assert not report.row("relu").quantized
    assert report.row("conv2d").how.endswith("-> int8")


def test_a_piece_across_the_border_goes_as_a_whole():
    def annotate(model):
        conv, relu = (next(n for n in model.graph.nodes if n.name == name) for name in ("conv2d", "relu"))
        spec = quantplug.get_symmetric_quantization_config().input_activation
        conv.meta[KEY] = QuantizationAnnotation({conv.args[0]: spec}, _annotated=True)
        relu.meta[KEY] = QuantizationAnnotation({}, spec, _annotated=True)

    quantizer = ComposableQuantizer().add(Toy(annotate), Region(operator="conv2d"))
    report = explain(quantizer.annotate(exported(Images().eval(), X)))
    assert report.quantized == 0
    assert "needs 'relu'" in report.row("conv2d").reason
    assert "outside of its region, operator type 'conv2d'" in report.row("conv2d").reason
    assert report.row("relu").reason == "no quantizer of the composition covers it"
    assert report.notes == ("Quantizer 'Toy' annotated nothing in operator type 'conv2d'.",)


def test_a_share_with_something_outside_of_the_region_is_dropped():
    def annotate(model):
        overwrite(torch.ops.aten.conv2d.default)(model)
        relu = next(n for n in model.graph.nodes if n.name == "relu")
        shared = SharedQuantizationSpec(relu.args[0])
        relu.meta[KEY] = QuantizationAnnotation({relu.args[0]: shared}, shared, _annotated=True)

    quantizer = ComposableQuantizer(strict=False).add(Toy(annotate), Region(operator="relu"))
    report = explain(converted(Images().eval(), quantizer, X))
    assert "needs 'conv2d'" in report.row("relu").reason


def test_a_float_operator_has_the_reason_of_everybody_who_could_have_taken_it():
    quantizer = ComposableQuantizer([get_quantizer("x86").set_operator_type("linear", "int8"), EmbeddingQuantizer()])
    reason = explain(converted(Tagger().eval(), quantizer, WORDS)).row("mean").reason
    assert reason.startswith("'x86': ")
    assert "; 'embedding': " in reason


def test_a_reason_names_the_quantizer_that_has_the_operator():
    quantizer = ComposableQuantizer().add(get_quantizer("x86"), precedence=1)
    model = quantizer.annotate(exported(Images().eval(), X))
    later = ComposableQuantizer([get_quantizer("xnnpack").set_global("int8_dynamic")])
    assert explain(later.annotate(model)).row("linear").owner == "x86"


# Conflicts.


def test_a_quantizer_that_annotates_what_another_has_loses_it_and_is_named():
    quantizer = ComposableQuantizer([get_quantizer("xnnpack"), Toy(overwrite(torch.ops.aten.linear.default))])
    reference = converted(Images().eval(), quantizer, X)
    assert owners(reference)["linear"] == "xnnpack"
    notes = explain(reference).notes
    expected = "Quantizer 'Toy' annotates 'linear' (aten.linear.default, module 'head.1') as well, which is already"
    assert any(note.startswith(expected) and "by 'xnnpack'" in note for note in notes)
    assert all(note in str(explain(reference)).replace("\n", " ") or len(note) > 150 for note in notes)


def _mutate(model):
    node = next(n for n in model.graph.nodes if n.name == "linear")
    if KEY in node.meta:
        node.meta[KEY].output_qspec = quantplug.get_symmetric_quantization_config().output_activation


def _clear(model):
    node = next(n for n in model.graph.nodes if n.name == "linear")
    if KEY in node.meta:
        node.meta[KEY].input_qspec_map.clear()


def _remove(model):
    next(n for n in model.graph.nodes if n.name == "linear").meta.pop(KEY, None)


@pytest.mark.parametrize("tamper", [_mutate, _clear, _remove])
def test_a_change_of_anothers_annotation_is_an_error_and_changes_nothing(tamper):
    only_linear = get_quantizer("xnnpack").set_operator_type("linear", "int8")
    model = exported(Images().eval(), X)
    before = {node: dict(node.meta) for node in model.graph.nodes}, dict(model.meta)
    node = r"'linear' \(aten.linear.default, module 'head.1'\)"
    message = f"Quantizer 'Toy' changed or removed the annotation of {node}, which 'xnnpack' made; "
    with pytest.raises(AnnotationError, match=message):
        ComposableQuantizer([only_linear, Toy(tamper)]).annotate(model)
    assert ({node: dict(node.meta) for node in model.graph.nodes}, dict(model.meta)) == before


@pytest.mark.parametrize("tamper", [_mutate, _clear, _remove])
def test_if_not_strict_the_change_is_dropped_and_noted(tamper):
    alone = converted_plan([get_quantizer("xnnpack")])
    with_toy = converted_plan([get_quantizer("xnnpack"), Toy(tamper)])
    assert with_toy.differences(alone) == []
    model = ComposableQuantizer([get_quantizer("xnnpack"), Toy(tamper)], strict=False).annotate(exported(Images(), X))
    assert any("changed or removed the annotation of 'linear'" in note for note in explain(model).notes)


def converted_plan(quantizers):
    return plan_of(ComposableQuantizer(quantizers, strict=False).annotate(exported(Images(), X)))


def test_observers_that_disagree_on_one_tensor_are_noted():
    config = quantplug.get_symmetric_quantization_config(True, observer="minmax")
    model = nn.Sequential()
    model.backbone, model.fc = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    quantizer = (
        ComposableQuantizer()
        .add(get_quantizer("xnnpack").set_global(config), BACKBONE, precedence=0, name="a")
        .add(get_quantizer("xnnpack"), Region(module="fc"), precedence=0, name="b")
    )
    (note,) = explain(converted(model.eval(), quantizer, x)).notes
    assert "asks for another observer" in note
    assert "linear" in note


# What torchao's composition leaves out: validate and callback of each quantizer.


@pytest.mark.parametrize("core", CORES)
def test_validate_and_callback_of_each_quantizer_see_its_own_annotations(core):
    seen = {}

    def validate(model):
        seen["validate"] = {n.name for n in model.graph.nodes if KEY in n.meta}

    def callback(model, observers):
        seen["callback"] = {point[1].name if isinstance(point, tuple) else point.name for point in observers}
        for point, observer in observers.items():
            if observer is not None:
                observers[point] = FixedQParamsObserver(0.5, 0, torch.int8, quant_min=-128, quant_max=127)

    toy = Toy(overwrite(torch.ops.aten.linear.default), validate, callback)
    quantizer = ComposableQuantizer().add(toy, HEAD, precedence=0).add(get_quantizer("xnnpack"), BACKBONE, precedence=0)
    reference = converted(Images().eval(), quantizer, X, core=CORES[core])
    assert seen == {"validate": {"linear", "linear_1"}, "callback": {"linear", "linear_1"}}
    scales = [n.args[1] for n in reference.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert 0.5 in scales
    assert len(set(scales)) > 1


def test_a_quantizer_that_refuses_the_graph_is_named():
    def validate(model):
        raise RuntimeError("no int8 here")

    quantizer = ComposableQuantizer([get_quantizer("xnnpack"), Toy(validate=validate)])
    with pytest.raises(AnnotationError, match=r"Quantizer 'Toy' refuses .*: RuntimeError: no int8 here"):
        quantplug.prepare_pt2e(exported(Images().eval(), X), quantizer)
    model = exported(Images().eval(), X)
    quantizer.annotate(model)
    annotated = {n.name for n in model.graph.nodes if KEY in n.meta}
    with pytest.raises(AnnotationError):
        quantizer.validate(model)
    assert {n.name for n in model.graph.nodes if KEY in n.meta} == annotated


def test_a_callback_that_gives_an_observer_to_anothers_point_is_an_error():
    def callback(model, observers):
        observers[next(n for n in model.graph.nodes if n.name == "conv2d")] = FixedQParamsObserver(0.5, 0, torch.int8)

    quantizer = (
        ComposableQuantizer()
        .add(Toy(overwrite(torch.ops.aten.linear.default), callback=callback), HEAD)
        .add(get_quantizer("xnnpack"), BACKBONE)
    )
    with pytest.raises(AnnotationError, match=r"'Toy' gives an observer to 'conv2d' .* which it did not annotate"):
        quantplug.prepare_pt2e(exported(Images().eval(), X), quantizer)


def test_transforms_of_every_quantizer_run():
    class Transforming(Toy):
        def transform_for_annotation(self, model):
            for node in [n for n in model.graph.nodes if n.target is torch.ops.aten.relu.default]:
                node.target = torch.ops.aten.relu6.default
            return model

    reference = converted(Images().eval(), ComposableQuantizer([get_quantizer("xnnpack"), Transforming()]), X)
    assert [r.operator for r in explain(reference).rows if r.operator.startswith("relu")] == ["relu6", "relu6"]


def test_each_region_folds_batch_norms_as_its_backend_does():
    class Unfolded(quantplug.XNNPACKQuantizer):
        backend = replace(quantplug.XNNPACKQuantizer.backend, name="unfolded", folds_batch_norm=False)

    for region, left in ((BACKBONE, 1), (HEAD, 0)):
        quantizer = ComposableQuantizer().add(Unfolded(), region, precedence=1).add(get_quantizer("x86"), precedence=0)
        reference = converted(Images(norm=True).eval(), quantizer, X)
        assert sum("batch_norm" in row.operator for row in explain(reference).rows) == left


# What is refused when it is declared or first used.


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ComposableQuantizer().add(quantplug.XNNPACKQuantizer), ConfigError, "found XNNPACKQuantizer"),
        (lambda: ComposableQuantizer(["xnnpack"]), ConfigError, "found str"),
        (lambda: ComposableQuantizer([mixed()]), ConfigError, "takes no other composition"),
        (lambda: ComposableQuantizer([TorchaoComposableQuantizer([])]), ConfigError, "takes no other composition"),
        (lambda: ComposableQuantizer().add(EmbeddingQuantizer(), "head"), ConfigError, r"Region\(module='head'\)"),  # type: ignore[arg-type]
        (lambda: mixed().add(EmbeddingQuantizer()), ConfigError, "of all of its quantizers or of none"),
        (lambda: Region(operator="linaer"), PatternError, "linaer"),
        (lambda: Region(module=3), ConfigError, "found 3"),  # type: ignore[arg-type]
        (lambda: Region(filter="head"), ConfigError, "found 'head'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_declarations_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_an_empty_composition_is_an_error():
    with pytest.raises(ConfigError, match="has no quantizers; add one"):
        quantplug.prepare_pt2e(exported(Images().eval(), X), ComposableQuantizer())


def test_quantizers_that_cannot_be_told_apart_are_an_error():
    def containing(name: str) -> Callable[[torch.fx.Node], bool]:
        return lambda node: name in node.name

    quantizer = ComposableQuantizer()
    for name in ("0", "1"):
        quantizer.add(get_quantizer("xnnpack"), Region(filter=containing(name)), precedence=0)
    with pytest.raises(ConfigError, match=r"called 'xnnpack' .* pass a name for each"):
        quantplug.prepare_pt2e(exported(Images().eval(), X), quantizer)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (Region(module="haed"), r"module name 'haed' matches nothing in the model \(the nearest names are \['head'"),
        (Region(operator="conv1d"), "operator type 'conv1d' matches nothing"),
        (Region(module="head", operator="conv2d"), "no operator of the model lies in module name 'head' and operator"),
    ],
)
def test_a_region_that_covers_nothing_is_an_error_or_a_note(region, message):
    def quantizer(strict):
        return ComposableQuantizer(strict=strict).add(get_quantizer("xnnpack")).add(get_quantizer("x86"), region)

    model = exported(Images().eval(), X)
    with pytest.raises(ConfigError, match=f"Quantizer 'x86': {message}"):
        quantizer(True).annotate(model)
    assert all(KEY not in node.meta for node in model.graph.nodes)
    notes = explain(quantizer(False).annotate(model)).notes
    assert notes[0].startswith("Quantizer 'x86': ")


def test_a_composition_can_be_used_again():
    quantizer = mixed()
    plans = [plan_of(quantplug.prepare_pt2e(exported(Images().eval(), X), quantizer)) for _ in range(2)]
    assert plans[0] == plans[1]
    assert all(decision(n) is None for n in exported(Images().eval(), X).graph.nodes)
