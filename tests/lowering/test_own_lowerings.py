"""Lowerings of an author's own behind rows that exist: on integer kernels, in files, called twice."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.runtime import Runtime
from torch import nn

import quantplug
from quantplug.annotators.matmul import matmul
from quantplug.core.graph.editing import call, constant
from quantplug.core.patterns.language import op, optional, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import dequantize, integer_weight, is_static, qparams
from quantplug.core.specs.levels import sqnr
from quantplug.lowering import xnnpack
from quantplug.lowering.program import Program
from quantplug.lowering.rules import lower_by_rules
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.xnnpack import XNNPACK

aten = torch.ops.aten
INTO = dequantize(input=value("x"), name="into", where=(lambda match: is_static(match["into"]),))


def to_int_mm(match):
    """A linear on `aten._int_mm`: int8 by int8, added up in int32, and scaled once."""
    node, into, weight = match.root, qparams(match["into"]), integer_weight(match["w"])
    if isinstance(weight, str):
        return weight
    held = {
        "weight": weight.values.t().contiguous(),
        "shift": into.zero_point * weight.values.int().sum(1),
        "scale": into.scale * weight.scales,
    }
    w, shift, scale = (constant(node, name, number) for name, number in held.items())
    sums = call(node, aten._int_mm.default, (match["x"], w), node, torch.int32)
    result = call(node, aten.mul.Tensor, (call(node, aten.sub.Tensor, (sums, shift), node, torch.int32), scale), node)
    return call(node, aten.add.Tensor, (result, match["b"]), node) if "b" in match else result


RULES = (Rule(op("linear", input=INTO, weight=value("w"), bias=optional(value("b")), name="op"), to_int_mm),)
STOCK = {
    "derived": lambda lowering: derive(XNNPACK, "mine", lowering=lowering),
    "of its rows": lambda lowering: Backend(
        "mine", XNNPACK.annotators, {"int8": XNNPACK.configs["int8"]}, lowering, XNNPACK.transforms
    ),
}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48, bias=False), nn.Sigmoid()).eval()


def quantized(backend):
    quantizer = type("Mine", (BackendQuantizer,), {"backend": backend})()
    model, data = layers(), [torch.randn(16, 32) for _ in range(3)]
    return model, quantplug.quantize(model, (data[0],), quantizer, data, progress=False)


@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_r22_r24_rules_alone_bring_stock_rows_to_a_kernel_of_integers(stock, tmp_path):
    model, artefact = quantized(stock(partial(lower_by_rules, rules=RULES)))
    loaded = torch.export.load(artefact.save(tmp_path / "mine.pt2")).module()
    kernels = [node for node in loaded.graph.nodes if node.target is aten._int_mm.default]
    assert [node.args[0].meta["val"].dtype for node in kernels] == [torch.int8, torch.int8]
    assert {each.placement for each in artefact.program.ops if each.target == "aten.linear.default"} == {"int8"}
    for _ in range(2):
        x = torch.randn(16, 32)
        assert sqnr(loaded(x), artefact.reference(x)) > 60
        assert sqnr(artefact(x), model(x)) > 25


class Shipped(Program):
    """What a product might make of a `.pte`: the file with a card beside it."""

    def __init__(self, inner):
        self.inner, self.ops = inner, inner.ops

    def __call__(self, *inputs, **keywords):
        return self.inner(*inputs, **keywords)

    def save(self, path):
        card = "\n".join(f"{each.node} {each.placement}" for each in self.ops)
        Path(path).with_suffix(".txt").write_text(card)
        return self.inner.save(path)

    @property
    def nbytes(self):
        return self.inner.nbytes


@pytest.mark.slow
def test_r22_r24_a_function_of_ones_own_lowers_stock_rows_to_a_file_that_the_runtime_runs(tmp_path):
    def ship(converted, example_inputs, **options):
        return Shipped(xnnpack.lower(converted, example_inputs, **options))

    model, artefact = quantized(STOCK["of its rows"](ship))
    path = artefact.program.save(tmp_path / "mine.pte")
    assert path.with_suffix(".txt").read_text().splitlines()[0] == "linear int8"
    program = Runtime.get().load_program(path.read_bytes())
    method = program.load_method("forward")
    for _ in range(2):
        x = torch.randn(16, 32)
        assert sqnr(method.execute([x])[0], artefact.reference(x)) > 40
        assert sqnr(artefact(x), model(x)) > 25


def to_integer_product(match):
    """A product of int8 tensors added up in int32, scaled once and straight into the activation behind it."""
    root, sides = match.root, (("a", "into a"), ("b", "into b"))
    entered = [qparams(match[into]) for _, into in sides]
    whole = [
        call(root, torch.ops.prims.convert_element_type.default, (match[side], torch.int32), match[side], torch.int32)
        for side, _ in sides
    ]
    centred = [
        call(root, aten.sub.Tensor, (node, given.zero_point), node, torch.int32)
        for node, given in zip(whole, entered, strict=True)
    ]
    sums = call(root, aten.bmm.default, tuple(centred), match["op"], torch.int32)
    scaled = call(root, aten.mul.Tensor, (sums, entered[0].scale * entered[1].scale), match["op"])
    return call(root, root.target, (scaled, *root.args[1:]), root)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_r27_an_activation_fused_onto_a_product_runs_behind_its_integers_in_a_file(activation, tmp_path):
    def function(a, b):
        return torch.bmm(a, b).softmax(-1) if activation == "softmax" else torch.bmm(a, b).sigmoid()

    class Of(nn.Module):
        def forward(self, a, b):
            return function(a, b)

    sides: dict[str, Any] = {
        side: dequantize(
            input=value(name), name=f"into {name}", where=(lambda match, into=f"into {name}": is_static(match[into]),)
        )
        for side, name in (("self", "a"), ("mat2", "b"))
    }
    rule = Rule(op(activation, self=op("bmm", name="op", **sides), name="act"), to_integer_product)
    backend = Backend(
        "mine",
        (matmul("bmm", activations=("softmax", "sigmoid")),),
        {"int8": XNNPACK.configs["int8"]},
        partial(lower_by_rules, rules=(rule,)),
    )
    torch.manual_seed(0)
    calls = [(torch.randn(3, 4, 16), torch.randn(3, 16, 8)) for _ in range(2)]
    quantizer = type("Mine", (BackendQuantizer,), {"backend": backend})()
    artefact = quantplug.quantize(Of(), calls[0], quantizer, calls, progress=False)
    assert {row.rule for row in artefact.report.rows} == {f"bmm_{activation}"}
    (placed,) = (each.placement for each in artefact.program.ops if activation in each.target)
    assert placed == "float", "whatever the rule puts before it, the activation is computed in float"
    loaded = torch.export.load(artefact.save(tmp_path / "mine.pt2")).module()
    (product,) = loaded.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert product.meta["val"].dtype == torch.int32
    for call_of in calls:
        assert sqnr(loaded(*call_of), artefact.reference(*call_of)) > 40
        assert sqnr(loaded(*call_of), function(*call_of)) > 25
