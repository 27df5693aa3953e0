"""Operators beyond the stock: products of activations, and operators of a library of one's own, end to end."""

from functools import partial

import pytest
import torch
from models import Function, exported
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec

from quantplug import (
    Backend,
    BackendQuantizer,
    calibrate,
    convert_pt2e,
    explain,
    get_quantizer,
    prepare_pt2e,
    quantize,
)
from quantplug.annotators.activation import own_range
from quantplug.annotators.matmul import matmul
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.errors import LoweringError
from quantplug.core.graph.editing import call
from quantplug.core.patterns.language import op, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.format import is_reference_quantized
from quantplug.core.qdq.qparams import dequantize, qparams
from quantplug.core.qdq.qparams import quantize as quantize_pattern
from quantplug.lowering.rules import lower_by_rules
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.xnnpack import XNNPACK

REFERENCE = "quantplug.lowering.reference:lower"
A, B = torch.randn(2, 3, 4, generator=torch.manual_seed(0)), torch.randn(2, 4, 5, generator=torch.manual_seed(1))


def quantizer_of(backend, *, strict=True):
    return type("CustomQuantizer", (BackendQuantizer,), {"backend": backend})(strict=strict)


def converted_of(backend, model, inputs):
    prepared = prepare_pt2e(exported(model, *inputs), quantizer_of(backend))
    calibrate(prepared, [inputs], progress=False)
    return convert_pt2e(prepared)


def is_op(node, name):
    return f".{name}." in str(node.target)


def find(model, name):
    return next(node for node in model.graph.nodes if is_op(node, name))


def saved_and_loaded(converted, inputs, path):
    torch.export.save(torch.export.export(converted, inputs), path)
    return torch.export.load(path).module()


def test_r25_a_quantized_bmm_is_added_to_a_derived_backend_and_the_base_is_untouched(tmp_path):
    before = [label for row in XNNPACK.annotators for label, _ in row.patterns]
    made = derive(XNNPACK, "with_bmm", add=(matmul("bmm", "matmul"),), lowering=REFERENCE)
    converted = converted_of(made, Function(lambda m, a, b: torch.bmm(a, b)), (A, B))
    bmm = find(converted, "bmm")
    assert [is_op(source, "dequantize_per_tensor") for source in bmm.args] == [True, True]
    assert [is_op(user, "quantize_per_tensor") for user in bmm.users] == [True]
    assert is_reference_quantized(converted)
    assert torch.equal(saved_and_loaded(converted, (A, B), tmp_path / "bmm.pt2")(A, B), converted(A, B))
    assert torch.allclose(converted(A, B), torch.bmm(A, B), atol=0.1)
    assert [label for row in XNNPACK.annotators for label, _ in row.patterns] == before
    product = exported(Function(lambda m, a, b: torch.bmm(a, b)), A, B)
    untouched = prepare_pt2e(product, quantizer_of(XNNPACK, strict=False))
    assert explain(untouched).row("bmm").reason.startswith("no rule ends in aten.bmm.default")


@pytest.mark.parametrize(
    ("activation", "function"),
    [("softmax", lambda x: torch.softmax(x, -1)), ("sigmoid", torch.sigmoid)],
)
def test_r27_an_activation_is_fused_onto_a_product(activation, function, tmp_path):
    backend = Backend(
        "fused",
        (matmul("bmm", activations=("softmax", "sigmoid")),),
        {"int8": get_symmetric_quantization_config},
        REFERENCE,
    )
    converted = converted_of(backend, Function(lambda m, a, b: function(torch.bmm(a, b))), (A, B))
    bmm = find(converted, "bmm")
    (fused,) = bmm.users
    assert is_op(fused, activation)
    (quantized,) = fused.users
    assert quantized.args[1:3] == (1 / 256, -128), "the range of the activation is known"
    assert {row.rule for row in explain(converted).rows} == {f"bmm_{activation}"}
    loaded = saved_and_loaded(converted, (A, B), tmp_path / "fused.pt2")
    assert torch.equal(loaded(A, B), converted(A, B))
    assert torch.allclose(converted(A, B), function(torch.bmm(A, B)), atol=0.05)


def test_a_product_with_itself_is_quantized_once():
    backend = Backend("square", (matmul("matmul"),), {"int8": get_symmetric_quantization_config}, REFERENCE)
    converted = converted_of(backend, Function(lambda m, a: a @ a), (torch.randn(3, 3),))
    first, second = find(converted, "matmul").args
    assert first is second


# A library of one's own: `shrink` has no decomposition and no quantized reference anywhere.


@torch.library.custom_op("quantplug_test::shrink", mutates_args=())
def shrink(x: Tensor, strength: float) -> Tensor:
    return x - strength * torch.tanh(x)


@shrink.register_fake
def _(x: Tensor, strength: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("quantplug_test::shrink_int8", mutates_args=())
def shrink_int8(x: Tensor, strength: float, in_scale: float, in_zero: int, out_scale: float, out_zero: int) -> Tensor:
    """The kernel: a table of 256 entries, as accelerators do it."""
    real = (torch.arange(-128, 128) - in_zero) * in_scale
    table = torch.clamp(torch.round((real - strength * torch.tanh(real)) / out_scale) + out_zero, -128, 127)
    return table.to(torch.int8)[x.long() + 128]


@shrink_int8.register_fake
def _(x: Tensor, strength: float, in_scale: float, in_zero: int, out_scale: float, out_zero: int) -> Tensor:
    return torch.empty_like(x)


def shrink_rule():
    pattern = quantize_pattern(
        input=op("quantplug_test::shrink", x=dequantize(input=value("x"), name="into"), name="op")
    )

    def rewrite(match):
        entered, leaves = qparams(match["into"]), qparams(match.root)
        args = (match["x"], match["op"].args[1], entered.scale, entered.zero_point, leaves.scale, leaves.zero_point)
        return call(match.root, torch.ops.quantplug_test.shrink_int8.default, args, match["op"], torch.int8)

    return Rule(pattern, rewrite)


def shrink_annotator():
    """The operand has the name that the operator's own schema gives it."""
    own = own_range("relu")
    return Annotator("shrink", (("shrink", op("quantplug_test::shrink", x=value("x"), name="op")),), own.decide)


SHRINK = Backend(
    "shrinker",
    (shrink_annotator(),),
    {"int8": get_symmetric_quantization_config},
    partial(lower_by_rules, rules=(shrink_rule(),), library="quantplug_test"),
)


def test_r26_r19_r20_a_library_operator_is_annotated_lowered_and_survives_a_round_trip(tmp_path):
    x = torch.linspace(-3, 3, 60).reshape(4, 15)
    model = Function(lambda m, x: torch.ops.quantplug_test.shrink(x, 0.5))
    artefact = quantize(model, (x,), quantizer_of(SHRINK), [x])
    assert [(o.target, o.placement) for o in artefact.program.ops] == [("quantplug_test.shrink.default", "int8")]
    reference = converted_of(SHRINK, model, (x,))
    assert torch.equal(artefact(x), reference(x)), "the kernel yields what the q/dq graph says"
    assert torch.allclose(artefact(x), model(x), atol=0.05)
    loaded = torch.export.load(artefact.save(tmp_path / "shrink.pt2")).module()
    assert torch.equal(loaded(x), artefact(x))
    assert any(is_op(node, "shrink_int8") for node in loaded.graph.nodes)
    assert torch.equal(saved_and_loaded(reference, (x,), tmp_path / "reference.pt2")(x), reference(x))


def relu_backend(rewrite):
    """relu between integers of one scale: its own annotator in a few lines, its lowering a rule."""

    def decide(match, config):
        shared = SharedQuantizationSpec((match["x"], match["op"]))
        return {match["op"]: QuantizationAnnotation({match["x"]: config.input_activation}, shared)}

    pattern = quantize_pattern(input=op("relu", self=dequantize(input=value("x"), name="into"), name="op"))
    rows = (Annotator("relu", (("relu", op("relu", self=value("x"), name="op")),), decide, output="shared"),)
    lowering = partial(lower_by_rules, rules=(Rule(pattern, rewrite),))
    return Backend("clamper", rows, {"int8": get_symmetric_quantization_config}, lowering)


def integer_clamp(match):
    zero_point = qparams(match["into"]).zero_point
    return call(match.root, torch.ops.aten.clamp.default, (match["x"], zero_point, None), match["op"], torch.int8)


def test_r21_r06_relu_becomes_an_integer_clamp_at_the_zero_point():
    x = torch.linspace(-1, 3, 40).reshape(2, 20)
    model, backend = Function(lambda m, x: torch.relu(x)), relu_backend(integer_clamp)
    converted = converted_of(backend, model, (x,))
    program = backend.lower(converted, (x,))
    assert torch.equal(program(x), converted(x))
    assert [o.placement for o in program.ops] == ["int8"]
    targets = [str(node.target) for node in program._exported.graph.nodes if node.op == "call_function"]
    assert [t.split(".")[1] for t in targets] == ["quantize_per_tensor", "clamp", "dequantize_per_tensor"]
    clamp = next(n for n in program._exported.graph.nodes if is_op(n, "clamp"))
    zero_point = next(n for n in program._exported.graph.nodes if is_op(n, "quantize_per_tensor")).args[2]
    assert clamp.args[1] == zero_point
    program._exported.graph.lint()
    assert any(is_op(node, "relu") for node in converted.graph.nodes), "the q/dq graph is the caller's"


def test_a_rule_that_breaks_the_graph_is_one_error():
    def wrong(match):
        return call(match.root, torch.ops.aten.mm.default, (match["x"], match["x"]), match["op"])

    x = torch.randn(2, 20)
    backend = relu_backend(wrong)
    converted = converted_of(backend, Function(lambda m, x: torch.relu(x)), (x,))
    with pytest.raises(LoweringError, match=r"The graph that the rules left does not run .*; mend the rule"):
        backend.lower(converted, (x,))


def test_r24_a_lowering_is_fx_rules_or_any_function():
    """Fully custom: a function of the q/dq graph that returns a Program of its own making."""
    seen = []

    def custom(converted, example_inputs, **options):
        seen.append(options)
        return lower_by_rules(converted, example_inputs, rules=())

    backend = Backend("custom", (own_range("relu"),), {"int8": get_symmetric_quantization_config}, custom)
    x = torch.randn(2, 4)
    program = backend.lower(converted_of(backend, nn.ReLU(), (x,)), (x,), speed="high")
    assert seen == [{"speed": "high"}]
    assert [(o.placement, o.reason) for o in program.ops] == [
        ("float", "no integer kernel for aten.relu.default in this place")
    ]


@pytest.mark.parametrize(
    ("backend", "product", "reason"),
    [
        ("xnnpack", torch.bmm, "multiplies two activations in float only"),
        ("xnnpack", torch.matmul, "multiplies two activations in float only"),
        ("x86", torch.bmm, "no oneDNN operator for two int8 activations"),
        ("x86", torch.matmul, "no oneDNN operator for two int8 activations"),
        ("x86", F.scaled_dot_product_attention, "no oneDNN operator for two int8 activations"),
        ("openvino", torch.bmm, "add=INTEGER_PRODUCTS"),
        ("openvino", F.scaled_dot_product_attention, "add=INTEGER_PRODUCTS"),
    ],
)
def test_r25_a_backend_without_products_of_activations_says_why(backend, product, reason):
    inputs = [torch.randn(2, 4, 4) for _ in range(product.__name__.count("scaled") + 2)]
    model = Function(lambda m, *x: product(m.linear(x[0]), *x[1:]), linear=nn.Linear(4, 4))
    prepared = prepare_pt2e(exported(model, *inputs), get_quantizer(backend))
    row = explain(prepared).row(product.__name__)
    assert not row.quantized
    assert row.reason.startswith("no rule ends in aten.")
    assert reason in row.reason
