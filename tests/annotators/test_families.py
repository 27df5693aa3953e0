"""Operator families: which observers they make, which qparams are shared, in every way a model can be written."""

import pytest
import torch
import torch.nn.functional as F
from models import Function, SampleModel, exported, node, observed, operators, reference
from torch import nn
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer, SharedQuantizationSpec

from quantplug import XNNPACKQuantizer, convert_pt2e, explain, get_quantizer, prepare_pt2e
from quantplug.annotators.convolution import convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.core.annotation.annotator import Choice
from quantplug.core.annotation.engine import annotate, annotate_with
from quantplug.core.observers import HistogramObserver
from quantplug.core.patterns.language import Match
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.xnnpack import XNNPACK

CONFIG = get_symmetric_quantization_config(True)
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
KEY = "quantization_annotation"
QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default


def xnnpack():
    return XNNPACKQuantizer().set_global(CONFIG)


def observers(prepared):
    """The observer instance at each call, in graph order."""
    return [
        getattr(prepared, n.target)
        for n in prepared.graph.nodes
        if n.op == "call_module" and "post_process" in str(n.target)
    ]


def observer_at(prepared, source, consumer):
    """The observer that a consumer reads a value through."""
    (call,) = (n for n in node(prepared, consumer).all_input_nodes if n.args and n.args[0].name == source)
    return prepared.get_submodule(str(call.target))


def pairs(converted):
    return [tuple(n.args[1:]) for n in converted.graph.nodes if n.target is QUANTIZE]


def test_q05_add_has_three_histogram_observers():
    prepared = observed(Function(lambda m, x, y: x + y), xnnpack(), X, Y)
    found = observers(prepared)
    assert len({id(o) for o in found}) == len(found) == 3
    assert all(isinstance(o, HistogramObserver) for o in found)
    converted = convert_pt2e(prepared)
    assert sorted(operators(converted)) == ["add", *["dequantize_per_tensor"] * 3, *["quantize_per_tensor"] * 3]
    assert len(set(pairs(converted))) == 3


def test_q07_both_inputs_of_add_can_share_scale_and_zero_point():
    shared = binary("add", shared_inputs=True)

    class Toy(Quantizer):
        def annotate(self, model):
            annotate(model, (shared,), lambda n: Choice(CONFIG, "all", 1), "toy")
            return model

        def validate(self, model):
            pass

    converted = reference(Function(lambda m, x, y: x + y), Toy(), X, 5 * Y)
    first, second, out = pairs(converted)
    assert first == second
    assert out != first
    # Independent specs give independent scales (E04).
    one, other, _ = pairs(reference(Function(lambda m, x, y: x + y), xnnpack(), X, 5 * Y))
    assert one != other


@pytest.mark.parametrize("name", ["max_pool2d", "cat"])
def test_q08_input_and_output_share_one_observer(name):
    def pool(m, x, y):
        return F.max_pool2d(torch.relu(m.c(x)), 2) + m.c(y)[:, :, ::2, ::2]

    def cat(m, x, y):
        return torch.cat([m.c(x), m.c(y)], 1)

    prepared = observed(
        Function({"max_pool2d": pool, "cat": cat}[name], c=nn.Conv2d(3, 3, 1)), xnnpack(), X, Y
    )  # fmt: skip
    calls = [n for n in prepared.graph.nodes if n.op == "call_module" and n.args and n.args[0].name == name]
    (output,) = calls
    for source in node(prepared, name).all_input_nodes:
        assert prepared.get_submodule(str(source.target)) is prepared.get_submodule(str(output.target))


def test_q08_average_pooling_shares_where_the_kernel_does_not_rescale():
    model = Function(lambda m, x: F.avg_pool2d(m.c(x), 2), c=nn.Conv2d(3, 3, 1))
    prepared = observed(model, get_quantizer("tensorrt"), X)
    (call,) = (n for n in prepared.graph.nodes if n.op == "call_module" and n.args and n.args[0].name == "avg_pool2d")
    (source,) = node(prepared, "avg_pool2d").all_input_nodes
    assert prepared.get_submodule(str(source.target)) is prepared.get_submodule(str(call.target))
    # Kernels that rescale keep a tighter range of their own for the output.
    x86 = observed(
        Function(lambda m, x: m.d(F.avg_pool2d(m.c(x), 2)), c=nn.Conv2d(3, 3, 1), d=nn.Conv2d(3, 3, 1)),
        get_quantizer("x86"),
        X,
    )
    calls = {n.args[0].name: getattr(x86, n.target) for n in x86.graph.nodes if n.op == "call_module" and n.args}
    assert calls["avg_pool2d"] is not calls["conv2d"]


def test_q09_sharing_is_transitive():
    def model(m, x):
        return torch.cat([m.one(x), m.two(x)], 1)

    prepared = observed(Function(model, one=nn.Conv2d(3, 2, 1), two=nn.Conv2d(3, 4, 1)), xnnpack(), X)
    calls = {
        n.args[0].name: getattr(prepared, n.target) for n in prepared.graph.nodes if n.op == "call_module" and n.args
    }
    assert calls["conv2d"] is calls["conv2d_1"] is calls["cat"]
    converted = convert_pt2e(prepared)
    assert len(set(pairs(converted))) == 2  # the input's, and one for both convolutions and cat


@pytest.mark.parametrize("form", ["edge", "node"])
@pytest.mark.parametrize("implicit", [False, True])
def test_q10_shared_specs_by_edge_and_by_node_and_the_implicit_flag(form, implicit):
    class Toy(Quantizer):
        def annotate(self, model):
            conv, other, add = (node(model, name) for name in ("conv2d", "conv2d_1", "add"))
            for n in (conv, other):
                n.meta[KEY] = QuantizationAnnotation(output_qspec=CONFIG.output_activation, _annotated=True)
            place = (conv, add) if form == "edge" else conv
            specs = {conv: CONFIG.input_activation, other: SharedQuantizationSpec(place)}
            add.meta[KEY] = QuantizationAnnotation(
                input_qspec_map=specs,
                output_qspec=SharedQuantizationSpec(place),
                allow_implicit_sharing=implicit,
                _annotated=True,
            )
            return model

        def validate(self, model):
            pass

    model = Function(lambda m, x: m.one(x) + m.two(x), one=nn.Conv2d(3, 3, 1), two=nn.Conv2d(3, 3, 1))
    prepared = observed(model, Toy(), X)
    read = [prepared.get_submodule(str(n.target)) for n in node(prepared, "add").all_input_nodes]
    (out,) = (prepared.get_submodule(str(n.target)) for n in node(prepared, "add").users)
    assert read[1] is out
    if implicit or form == "node":
        # With implicit sharing the edge (conv, add) takes over the observer of conv's output.
        assert (read[0] is out) == (implicit or form == "edge")
    theirs = torchao_prepare(exported(model, X), Toy())
    theirs_read = [theirs.get_submodule(str(n.target)) for n in node(theirs, "add").all_input_nodes]
    (theirs_out,) = (theirs.get_submodule(str(n.target)) for n in node(theirs, "add").users)
    assert [o is out for o in read] == [o is theirs_out for o in theirs_read]


FORMS = {
    "relu": (F.relu, nn.ReLU(), lambda t: t.relu_()),
    "sigmoid": (torch.sigmoid, nn.Sigmoid(), lambda t: t.sigmoid()),
    "relu6": (F.relu6, nn.ReLU6(), lambda t: F.relu6(t, inplace=True)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_e01_e05_r07_functional_module_and_inplace_forms_are_one(name, strict):
    functional, module, method = FORMS[name]
    forms = (lambda m, x: functional(m.c(x)), lambda m, x: m.act(m.c(x)), lambda m, x: method(m.c(x)))
    conv = nn.Conv2d(3, 3, 1)
    outputs = []
    for form in forms:
        converted = reference(Function(form, c=conv, act=module), xnnpack(), X, strict=strict)
        outputs.append(converted(X))
        # nn.ReLU6 is exported as hardtanh(0, 6), F.relu6 as relu6: both are one piece with the convolution.
        rules = {r.rule.replace("hardtanh", "relu6") for r in explain(converted).rows}
        assert rules == ({"conv", "sigmoid"} if name == "sigmoid" else {f"conv_{name}"})
        assert operators(converted).count("quantize_per_tensor") == (3 if name == "sigmoid" else 2)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_e01_linear_and_add_in_every_form():
    fc = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    forms = (
        lambda m, x: m.fc(x) + m.fc(x),
        lambda m, x: torch.add(F.linear(x, m.fc.weight, m.fc.bias), m.fc(x)),
        lambda m, x: m.fc(x).add_(m.fc(x)),
    )
    outputs = [reference(Function(form, fc=fc), xnnpack(), x)(x) for form in forms]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_e04_addition_and_concatenation_through_modules_of_functions():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.functions = torch.ao.nn.quantized.FloatFunctional()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = self.functions.add(self.conv(x), x)
            return self.functions.cat([y, x], 1)

    report = explain(reference(Block(), xnnpack(), X))
    assert [row.rule for row in report.rows if row.operator.startswith(("add", "cat"))] == ["add", "cat"]


def test_e06_flatten_stays_in_the_integer_domain():
    model, x = SampleModel(), torch.randn(4, 3, 32, 32)
    converted = reference(model, xnnpack(), x)
    flatten = node(converted, "flatten")
    (source,), (user,) = flatten.all_input_nodes, flatten.users
    assert "dequantize" in str(source.target)
    assert user.target is QUANTIZE
    # The same qparams on both sides: the move is one of integers.
    assert tuple(source.args[1:]) == tuple(user.args[1:])


class Styled(Quantizer):
    """Linear layers found in one of three styles, decided by our annotator."""

    def __init__(self, style):
        super().__init__()
        self.style = style

    def annotate(self, model):
        rule = linear(activations=())
        if self.style == "matcher":
            annotate_with(model, [rule], CONFIG)
        elif self.style == "node walk":
            for n in model.graph.nodes:
                for _, pattern in rule.patterns:
                    match = pattern.match(n)
                    if isinstance(match, Match):
                        for found, annotation in rule(match, CONFIG).items():
                            annotation._annotated = True
                            found.meta[KEY] = annotation
        else:
            partitions = get_source_partitions(model.graph, [nn.Linear]).get(nn.Linear, [])
            members = {n for partition in partitions for n in partition.nodes}
            annotate_with(model, [rule], CONFIG, lambda n: n in members)
        return model

    def validate(self, model):
        pass


@pytest.mark.parametrize("prepare", [prepare_pt2e, torchao_prepare], ids=["ours", "torchao"])
def test_q06_three_styles_of_finding_patterns_give_one_result(prepare):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    outputs = []
    for style in ("matcher", "node walk", "source partitions"):
        prepared = prepare(exported(model, x, strict=True), Styled(style))
        assert sum(n.op == "call_module" and "post" in str(n.target) for n in prepared.graph.nodes) == 6
        prepared(x)
        outputs.append(convert_pt2e(prepared)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert sqnr(outputs[0], model(x)) > 30


@pytest.mark.slow
@pytest.mark.parametrize("style", ["matcher", "node walk", "source partitions"])
def test_q06_layers_found_in_any_style_run_on_integer_kernels(style):
    torch.manual_seed(0)
    model, calls = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(2, 6, 16)
    prepared = prepare_pt2e(exported(model, calls[0], strict=True), Styled(style))
    for x in calls:
        prepared(x)
    converted = convert_pt2e(prepared)
    program = XNNPACK.lower(converted, (calls[0],))
    assert [each.placement for each in program.ops if "linear" in each.target] == ["int8", "int8"]
    for x in calls:
        assert sqnr(program(x), converted(x)) > 40
        assert 25 < sqnr(program(x), model(x)) < 80


def test_an_annotator_alone_annotates_what_a_filter_allows():
    model = exported(
        Function(lambda m, x: m.two(torch.relu(m.one(x))), one=nn.Conv2d(3, 3, 1), two=nn.Conv2d(3, 3, 1)), X
    )  # fmt: skip
    pieces = annotate_with(model, [convolution()], CONFIG, lambda n: n.name in ("conv2d", "relu"))
    assert [[n.name for n in piece] for piece in pieces] == [["relu", "conv2d"]]
    assert KEY not in node(model, "conv2d_1").meta
    assert annotate_with(model, [convolution()], CONFIG) != []


MOVES = {
    "view": lambda t: t.view(1, -1),
    "reshape": lambda t: t.reshape(3, -1),
    "permute": lambda t: t.permute(0, 2, 3, 1),
    "transpose": lambda t: t.transpose(1, 2),
    "squeeze": lambda t: t.squeeze(0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "slice": lambda t: t[:, :2],
    "select": lambda t: t[:, 1],
    "expand": lambda t: t.expand(2, 3, 8, 8),
    "flatten": lambda t: t.flatten(1),
    "repeat": lambda t: t.repeat(1, 2, 1, 1),
    "contiguous": lambda t: t.transpose(2, 3).contiguous(),
}


REPEATING = ("expand",)


@pytest.mark.parametrize("name", REPEATING)
def test_xnnpack_has_no_kernel_that_repeats_elements(name):
    model = Function(lambda m, x: torch.cat([MOVES[name](m.c(x))] * 2), c=nn.Conv2d(3, 3, 1))
    assert not explain(reference(model, get_quantizer("xnnpack"), X)).row(name).quantized


@pytest.mark.parametrize(
    ("name", "backend"), [*((n, "x86") for n in MOVES), *((n, "xnnpack") for n in MOVES if n not in REPEATING)]
)
def test_data_movement_keeps_scale_and_value(name, backend):
    model = Function(lambda m, x: torch.relu(torch.cat([MOVES[name](m.c(x))] * 2)), c=nn.Conv2d(3, 3, 1))
    converted = reference(model, get_quantizer(backend), X)
    report = explain(converted)
    assert report.quantized == len(report.rows), report
    assert len(set(pairs(converted))) == 2
    assert sqnr(converted(X), model(X)) > 30


@pytest.mark.parametrize(
    ("part", "x"),
    [
        (nn.Conv1d(3, 4, 3), torch.randn(2, 3, 9)),
        (nn.Conv2d(4, 4, 3, groups=4), torch.randn(2, 4, 9, 9)),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2, bias=False), torch.randn(2, 3, 9, 9)),
        (nn.ConvTranspose2d(3, 4, 3), torch.randn(2, 3, 5, 5)),
        (nn.Linear(5, 4, bias=False), torch.randn(2, 5)),
        (nn.Linear(5, 4), torch.randn(2, 3, 5)),
    ],
    ids=["conv1d", "depthwise", "strided", "transposed", "linear_no_bias", "linear_3d"],
)
def test_weighted_operators_keep_their_accuracy(part, x):
    converted = reference(nn.Sequential(part, nn.ReLU()), xnnpack(), x)
    report = explain(converted)
    assert report.quantized == len(report.rows)
    assert sqnr(converted(x), nn.Sequential(part, nn.ReLU())(x)) > 30
    dequantize = next(n for n in converted.graph.nodes if "dequantize_per_channel" in str(n.target))
    assert dequantize.args[3] == int(isinstance(part, nn.ConvTranspose2d))
