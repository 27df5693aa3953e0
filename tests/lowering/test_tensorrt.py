"""What TensorRT reads: explicit quantization rule by rule, the q/dq graph's numbers, refusals, an engine."""

import copy
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.errors import ArtefactError, ConfigError, LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.tensorrt import TENSORRT

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx_graphs  # noqa: E402
import onnx_ir  # noqa: E402
from models import Function, MobileNet, ResNet18  # noqa: E402
from onnx_graphs import BATCH, Counter, written  # noqa: E402
from qdq_graphs import Net, TensorWeight, Weight, dynamic, fake, graph_of  # noqa: E402

from quantplug.lowering.onnx.explicit import RULES, objections  # noqa: E402
from quantplug.lowering.onnx.export import number_of  # noqa: E402
from quantplug.lowering.onnx.tensorrt import TensorRTProgram, lower  # noqa: E402

PRODUCTS = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1}  # the axis of output channels in the weight of each
ZERO = (0.03, 0)


class Residual(nn.Module):
    """A residual block, pooling of both kinds, a clamp and a head; yields a dictionary."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.down, self.head = nn.Conv2d(16, 16, 1, bias=False), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.one(x))
        x = F.max_pool2d(F.relu(x + self.two(x)), 2)
        x = F.avg_pool2d(F.hardtanh(self.down(x)), 2)
        return {"logits": self.head(x.mean((2, 3)))}


class Attention(nn.Module):
    """A block of a transformer, of masked attention by hand."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.norm, self.after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Detector(nn.Module):
    """Features of two sizes joined, and boxes and scores of each, as detectors have them."""

    def __init__(self):
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.neck = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 16, 3, padding=1)
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        fine = F.relu(self.stem(x))
        coarse = F.silu(self.deep(fine))
        joined = F.relu(self.neck(torch.cat([fine, F.relu(self.up(coarse))], 1)))
        return self.boxes(joined).flatten(2), self.scores(joined).flatten(2).sigmoid()


quantized = partial(onnx_graphs.quantized, backend="tensorrt")


def require_same(program, reference, *inputs, decibels=80.0):
    """Both agree in each of their outputs, in two calls."""
    for _ in range(2):
        with torch.no_grad():
            found, wanted = program(*inputs), reference(*inputs)
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(found), leaves(wanted), strict=True):
            assert sqnr(one, other) > decibels


def require_rules(graph, half=False):
    """What NVIDIA's guide asks of a file whose products are all int8, read from the file itself."""
    held = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    kinds = {each.name: each.data_type for each in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if "quantizelinear" in node.op_type.lower():
            scale, zero = (held[name] for name in node.input[1:3])
            assert scale.dtype == (np.float16 if half else np.float32)
            assert (scale > 0).all()
            assert (zero.dtype, zero.any()) == (np.int8, False)
            assert zero.size == scale.size
        if node.op_type == "QuantizeLinear":
            assert held[node.input[1]].ndim == 0
            assert {reader.op_type for reader in readers[node.output[0]]} == {"DequantizeLinear"}
            made = makers.get(node.input[0])
            assert made is None or made.op_type != "DequantizeLinear"
        if node.op_type in PRODUCTS:
            sources = [makers[name] for name in node.input[:2]]
            assert [source.op_type for source in sources] == ["DequantizeLinear"] * 2
            if sources[1].input[0] in held:
                weight, scales = held[sources[1].input[0]], held[sources[1].input[1]]
                (axis,) = (each.i for each in sources[1].attribute if each.name == "axis")
                assert weight.dtype == np.int8
                assert axis == PRODUCTS[node.op_type]
                assert len(scales) == weight.shape[axis]
            for bias in node.input[2:]:
                assert kinds[bias] == (onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT)
        if node.op_type in ("Relu", "Clip"):
            assert makers[node.input[0]].op_type in (*PRODUCTS, "Add")
    return [node.op_type for node in graph.node]


@pytest.fixture(scope="module")
def residual():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 16, 16),)
    reference = quantized(Residual(), inputs, dynamic_shapes=BATCH)
    return reference, TENSORRT.lower(reference, inputs)


def test_a_residual_net_keeps_every_rule_for_any_batch(residual, tmp_path):
    reference, program = residual
    assert isinstance(program, TensorRTProgram)
    assert {operator.placement for operator in program.ops} == {"int8"}
    kinds = require_rules(written(program, tmp_path))
    assert [kinds.count(kind) for kind in ("Conv", "MatMul", "Add", "Relu", "Clip", "MaxPool")] == [3, 1, 2, 2, 1, 1]
    for size in (1, 2, 5):
        require_same(program, reference, torch.randn(size, 3, 16, 16))
    with pytest.raises(LoweringError, match=r"Input 0 of the program is .* found torch.float32"):
        program(torch.randn(2, 3, 17, 16))


def test_an_average_over_a_map_of_open_size_keeps_it_open():
    torch.manual_seed(0)
    sizes = {0: torch.export.Dim("n", min=1, max=8), 2: torch.export.Dim("h", min=8), 3: torch.export.Dim("w", min=8)}
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    inputs = (torch.randn(2, 3, 16, 16),)
    artefact = quantplug.quantize(model.eval(), inputs, "tensorrt", [inputs], dynamic_shapes=(sizes,), progress=False)
    for shape in ((2, 3, 16, 16), (3, 3, 20, 24)):
        require_same(artefact, artefact.reference, torch.randn(*shape))


def test_a_saved_program_loads_and_is_a_plain_model_of_onnx(residual, tmp_path):
    _, program = residual
    x = torch.randn(3, 3, 16, 16)
    path = program.save(tmp_path / "model.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    loaded = TensorRTProgram.load(path)
    assert torch.equal(loaded(x)["logits"], program(x)["logits"])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (found,) = plain.run(None, {plain.get_inputs()[0].name: x.numpy()})
    assert sqnr(torch.from_numpy(found), program(x)["logits"]) > 80
    for attempt in (copy.copy, copy.deepcopy):
        with pytest.raises(ArtefactError, match="save"):
            attempt(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "count", "half"),
    [
        (lambda: ResNet18(8, 10), {"Conv": 20}, False),
        (MobileNet, {"Conv": 13}, False),
        (MobileNet, {"Conv": 13}, True),
        (Detector, {"Conv": 5, "ConvTranspose": 1}, False),
        (Detector, {"Conv": 5, "ConvTranspose": 1}, True),
    ],
    ids=["resnet18", "mobilenet", "mobilenet16", "detector", "detector16"],
)
def test_whole_nets_keep_every_rule(model, count, half, tmp_path):
    torch.manual_seed(0)
    net, inputs = model().eval(), (torch.randn(2, 3, 32, 32),)
    reference = quantized(net, inputs)
    program: Any = TENSORRT.lower(reference, inputs, float_dtype=torch.float16 if half else torch.float32)
    kinds = require_rules(written(program, tmp_path), half)
    assert {kind: kinds.count(kind) for kind in count} == count
    require_same(program, reference, *inputs, decibels=25 if half else 80)
    told = {row.node: row.reason for row in quantplug.explain(reference).rows if not row.quantized}
    assert told == {op.node: op.reason for op in program.ops if op.placement == "float"}
    with torch.no_grad():
        for found, wanted in zip(*map(torch.utils._pytree.tree_leaves, (program(*inputs), net(*inputs))), strict=True):
            assert sqnr(found, wanted) > 20


@pytest.mark.few(1)
@pytest.mark.parametrize("half", [False, True])
def test_products_of_attention_are_quantized_and_functions_stay_float(half, tmp_path):
    torch.manual_seed(0)
    net, inputs = Attention().eval(), (torch.randn(2, 16, 64),)
    reference = quantized(net, inputs)
    program: Any = TENSORRT.lower(reference, inputs, float_dtype=torch.float16 if half else torch.float32)
    graph = written(program, tmp_path)
    kinds = require_rules(graph, half)
    assert [kinds.count(kind) for kind in ("MatMul", "Softmax", "LayerNormalization", "Gelu")] == [6, 1, 2, 1]
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in ("Gelu", "Softmax", "LayerNormalization"):
            assert makers.get(node.input[0], node).op_type != "DequantizeLinear"
    require_same(program, reference, *inputs, decibels=25 if half else 60)
    floats = {operator.target for operator in program.ops if operator.placement == "float"}
    assert {"aten.gelu.default", "aten.layer_norm.default", "aten.softmax.int"} <= floats
    assert [op.placement for op in program.ops if "linear" in op.node or "matmul" in op.node] == ["int8"] * 6
    with torch.no_grad():
        assert sqnr(program(*inputs), net(*inputs)) > 25


def test_half_precision_is_around_the_integers_and_its_file_loads(residual, tmp_path):
    reference, _ = residual
    inputs = (torch.randn(2, 3, 16, 16),)
    program: Any = TENSORRT.lower(reference, inputs, float_dtype=torch.float16)
    graph = written(program, tmp_path)
    require_rules(graph, half=True)
    assert not [each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    assert [graph.input[0].type.tensor_type.elem_type, graph.output[0].type.tensor_type.elem_type] == [1, 1]
    assert {operator.placement for operator in program.ops} == {"int8"}
    for size in (1, 4):
        x = torch.randn(size, 3, 16, 16)
        require_same(program, reference, x, decibels=25)
        assert torch.equal(TensorRTProgram.load(tmp_path / "model.onnx")(x)["logits"], program(x)["logits"])
    with pytest.raises(LoweringError, match=r"float_dtype is torch.bfloat16; choose torch.float32 or torch.float16"):
        TENSORRT.lower(reference, inputs, float_dtype=torch.bfloat16)


def test_four_bits_are_blocks_of_input_channels_beside_floats(tmp_path):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), (torch.randn(3, 256),)
    reference = quantized(model, inputs, "int4_weight_only")
    program: Any = TENSORRT.lower(reference, inputs)
    model_file = onnx.load(program.save(tmp_path / "model.onnx"))
    (node,) = (each for each in model_file.graph.node if each.op_type == "DequantizeLinear")
    held = {each.name: each for each in model_file.graph.initializer}
    assert model_file.opset_import[0].version == 21
    assert held[node.input[0]].data_type == onnx.TensorProto.INT4
    assert list(held[node.input[1]].dims) == [2, 64]
    assert {each.name: each.i for each in node.attribute} == {"axis": 0, "block_size": 128}
    require_same(program, reference, *inputs)
    assert [op.placement for op in program.ops] == ["int8", "int8", "float"]
    assert "64 input channels are no multiple of the group of 128" in program.ops[2].reason
    assert torch.equal(TensorRTProgram.load(tmp_path / "model.onnx")(*inputs), program(*inputs))
    quantizer = quantplug.get_quantizer("tensorrt").set_global(TENSORRT.config("int4_weight_only", group_size=32))
    annotated = torch.export.export(model, inputs).module()
    quantizer.annotate(annotated)
    (told, *_) = (row.reason for row in quantplug.explain(annotated).rows if row.node == "linear")
    assert "a scale for every 32 input channels, the kernel for 64 or 128" in told


def test_int32_biases_are_float_in_the_file(tmp_path):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8, 8),)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    reference = quantized(model, inputs, "int8_signed", backend="onnxruntime")
    assert any(buffer.dtype == torch.int32 for buffer in reference.buffers())
    program = lower(reference, inputs)
    require_rules(written(program, tmp_path))
    require_same(program, reference, *inputs)


def test_a_range_narrower_than_its_dtype_is_a_clip_of_floats(tmp_path):
    ends = (-127, 100)
    net = Net(
        lambda m, x: fake(F.linear(fake(x, ZERO, *ends), m.weight()), ZERO, *ends),
        weight=Weight(8, 16, zero_points=False),
    )
    inputs = (30 * torch.randn(4, 16),)
    reference = graph_of(net, *inputs)
    program = lower(reference, inputs)
    graph = written(program, tmp_path)
    readers = [node.op_type for node in graph.node for name in node.input if name == graph.input[0].name]
    assert readers == ["Clip"]
    require_same(program, reference, *inputs, decibels=100)
    assert float(program(*inputs).max()) == pytest.approx(100 * ZERO[0])


def mean_of(model, x):
    return fake(F.conv2d(fake(x, ZERO), model.weight()).mean((2, 3)), ZERO)


FOREIGN = {
    "zero points": (
        lambda m, x: F.linear(fake(x, (0.03, 4)), m.weight()),
        r"QuantizeLinear .* has zero point 4, not 0",
    ),
    "uint8": (
        lambda m, x: F.linear(fake(x, ZERO, 0, 255, torch.uint8), m.weight()),
        r"QuantizeLinear .* has integers of uint8, not of int8",
    ),
    "int16": (
        lambda m, x: F.linear(fake(x, ZERO, -32768, 32767, torch.int16), m.weight()),
        r"has integers of int16, not of int8",
    ),
    "run time": (lambda m, x: F.linear(dynamic(x), m.weight()), r"DynamicQuantizeLinear .* computes on integers"),
    "weights alone": (lambda m, x: F.linear(x, m.weight()), r"MatMul 'matmul' reads integer weights beside floats"),
    "rounded before relu": (
        lambda m, x: F.relu(fake(F.linear(fake(x, ZERO), m.weight()), ZERO)),
        r"Relu 'relu' reads MatMul 'matmul' rounded, whose kernel would take it in",
    ),
    "rounded before a sum": (
        lambda m, x: fake(F.linear(fake(x, ZERO), m.weight()), ZERO) + fake(x[:, :8], ZERO),
        r"Add 'add' reads MatMul 'matmul' rounded",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_graph_that_tensorrt_does_not_read_is_one_sentence(name):
    function, sentence = FOREIGN[name]
    torch.manual_seed(0)
    inputs = (torch.randn(4, 16),)
    graph = graph_of(Net(function, weight=TensorWeight(8, 16)), *inputs)
    with pytest.raises(LoweringError, match=sentence) as raised:
        lower(graph, inputs)
    assert "\n" not in str(raised.value)
    assert "which TensorRT's explicit quantization does not take (rule '" in str(raised.value)


@pytest.mark.slow
def test_graphs_of_other_backends_are_refused_before_they_run(residual):
    inputs = (torch.randn(2, 3, 8, 8),)
    for backend in ("xnnpack", "onnxruntime"):
        graph = quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), inputs, backend=backend)
        with pytest.raises(LoweringError, match=r"'quantize_per_tensor' has .*quantize with the configs of backend"):
            lower(graph, inputs)


def find(graph, kind, number=0):
    return [node for node in graph if node.op_type == kind][number]


def value_of(graph, array, name):
    found = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name))
    found.dtype, found.shape = found.const_value.dtype, found.const_value.shape
    graph.register_initializer(found)
    return found


def set_number(kind, place, array):
    def broken(graph):
        find(graph, kind).replace_input_with(place, value_of(graph, np.array(array), "planted"))

    return broken


def pair_behind(kind, number=0):
    """Rounds the result of a node for all that read it."""

    def broken(graph):
        node = find(graph, kind, number)
        result = node.outputs[0]
        scale, zero = value_of(graph, np.float32(0.1), "planted"), value_of(graph, np.int8(0), "planted_zero")
        users = [(use.node, use.idx) for use in result.uses()]
        quantize = onnx_ir.node("QuantizeLinear", [result, scale, zero], name="planted")
        dequantize = onnx_ir.node("DequantizeLinear", [quantize.outputs[0], scale, zero], name="planted")
        graph.insert_after(node, [quantize, dequantize])
        dequantize.outputs[0].shape = result.shape
        for user, place in users:
            user.replace_input_with(place, dequantize.outputs[0])

    return broken


def turn_axis(graph):
    node = find(graph, "Conv").inputs[1].producer()
    node.attributes["axis"] = onnx_ir.AttrInt64("axis", 1)


def read_integers(graph):
    find(graph, "Relu").replace_input_with(0, find(graph, "QuantizeLinear").outputs[0])


def read_float_activation(graph):
    find(graph, "Conv").replace_input_with(0, graph.inputs[0])


def read_float_weight(graph):
    find(graph, "Conv").replace_input_with(1, value_of(graph, np.zeros((16, 3, 3, 3), np.float32), "planted"))


def dequantize_bias(graph):
    node = find(graph, "Conv")
    integers, scale = value_of(graph, np.zeros(16, np.int8), "planted"), value_of(graph, np.float32(1), "planted_scale")
    dequantize = onnx_ir.node("DequantizeLinear", [integers, scale], name="planted")
    graph.insert_before(node, dequantize)
    node.replace_input_with(2, dequantize.outputs[0])


def skip_rounding(graph):
    node = find(graph, "AveragePool")
    for reader in node.outputs[0].consumers():
        for step in reader.outputs[0].consumers():
            step.outputs[0].replace_all_uses_with(node.outputs[0])
    rounding = [reader for reader in node.outputs[0].consumers() if reader.op_type == "QuantizeLinear"]
    for step in [*(s for r in rounding for s in r.outputs[0].consumers()), *rounding]:
        graph.remove(step, safe=True)


def change_scale_behind_pool(graph):
    for step in find(graph, "MaxPool").outputs[0].consumers():
        step.replace_input_with(1, value_of(graph, np.float32(0.5), "planted"))


BROKEN = {
    "integers": [
        (set_number("QuantizeLinear", 2, np.uint8(0)), "QuantizeLinear 'quantize_per_tensor' has integers of uint8")
    ],
    "zero points": [(set_number("QuantizeLinear", 2, np.int8(3)), "'quantize_per_tensor' has zero point 3, not 0")],
    "scales": [
        (set_number("QuantizeLinear", 1, np.float32(0)), "'quantize_per_tensor' has scale 0, which is not positive"),
        (set_number("DequantizeLinear", 1, np.float32(np.inf)), "has scale inf, which is not positive"),
    ],
    "granularity": [
        (turn_axis, "has scales along axis 1 of a weight of Conv"),
        (set_number("QuantizeLinear", 1, np.ones(3, np.float32)), "has 3 scales for an activation, not one"),
    ],
    "ends": [(read_integers, "QuantizeLinear 'quantize_per_tensor' is read by Relu, not by DequantizeLinear")],
    "weights alone": [(read_float_activation, "Conv 'conv2d' reads integer weights beside floats")],
    "biases": [(dequantize_bias, "Conv 'conv2d' has a bias behind DequantizeLinear, not a float one")],
    "fusion": [
        (pair_behind("Conv"), "Relu 'relu' reads Conv 'conv2d' rounded, whose kernel would take it in"),
        (pair_behind("Conv", 1), r"Add 'add\w*' reads Conv 'conv2d_1' rounded, whose kernel would take it in"),
        (pair_behind("Conv", 2), "Clip 'hardtanh' reads Conv 'conv2d_2' rounded, whose kernel would take it in"),
    ],
    "all inputs": [
        (read_float_weight, "Conv 'conv2d' is declared int8 and reads 'planted' in float"),
        (read_float_activation, "Conv 'conv2d' is declared int8 and reads 'x' in float"),
    ],
    "both sides": [(skip_rounding, "AveragePool 'avg_pool2d' is declared int8 and its result is not rounded")],
    "one scale": [(change_scale_behind_pool, r"MaxPool 'max_pool2d' has integers of scale .* and of scale")],
}


CASES = [(rule, *case) for rule, cases in BROKEN.items() for case in cases]


@pytest.mark.parametrize(("rule", "breaks", "sentence"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_file_names_the_node_and_the_rule(residual, rule, breaks, sentence):
    _, program = residual
    model = onnx_ir.from_proto(onnx_ir.to_proto(program.model))
    declared = {number for node in model.graph if (number := number_of(node.name)) is not None}
    assert list(objections(model, declared)) == []
    breaks(model.graph)
    told = [(node, why) for node, name, why in objections(model, declared) if name == rule]
    found = [f"{node.op_type} '{node.name.partition('@')[0]}' {why}" for node, why in told]
    assert any(re.search(sentence, each) for each in found), found


def test_each_rule_is_broken_once():
    assert set(BROKEN) == set(RULES)


def test_a_file_that_is_not_explicit_is_not_loaded(residual, tmp_path):
    _, program = residual
    path = program.save(tmp_path / "model.onnx")
    model = onnx.load(path)
    rounding = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    (zero,) = [each for each in model.graph.initializer if each.name == rounding.input[2]]
    zero.CopyFrom(onnx.numpy_helper.from_array(np.int8(5), zero.name))
    onnx.save(model, path)
    with pytest.raises(LoweringError, match=r"QuantizeLinear 'quantize_per_tensor' has zero point 5, not 0"):
        TensorRTProgram.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ArtefactError, match=r"no program of the onnx lowering .*`TensorRTProgram.save` wrote"):
        TensorRTProgram.load(path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "options", "kind", "sentence"),
    [
        (
            Function(lambda m, x: torch.lgamma(m.layer(x)), layer=nn.Linear(8, 4)),
            {},
            LoweringError,
            r"has no form of .*lgamma.*; keep .* outside of the model or choose a later opset\.$",
        ),
        (Counter(), {}, LoweringError, r"the model writes buffer 'seen'; pass it as an input and return it\.$"),
        (nn.Linear(8, 4), {"opset": 11}, ConfigError, "opset is 11; choose one of 18 to 23"),
    ],
)
def test_what_has_no_form_is_one_sentence(model, options, kind, sentence):
    inputs = (torch.randn(2, 8),)
    with pytest.raises(kind, match=sentence) as raised:
        TENSORRT.lower(quantized(model, inputs), inputs, **options)
    assert "\n" not in str(raised.value)


def test_an_opset_without_four_bits_is_one_sentence():
    inputs = (torch.randn(2, 128),)
    reference = quantized(nn.Linear(128, 8), inputs, "int4_weight_only")
    with pytest.raises(ConfigError, match=r"opset is 20, and 'dequantize\w*' .* from opset 21 on; give opset=21"):
        TENSORRT.lower(reference, inputs, opset=20)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21, 23])
def test_every_opset_keeps_every_rule(residual, opset, tmp_path):
    reference, _ = residual
    x = torch.randn(2, 3, 16, 16)
    program: Any = TENSORRT.lower(reference, (x,), opset=opset)
    require_rules(written(program, tmp_path))
    require_same(program, reference, x)


def test_a_config_that_tensorrt_has_no_kernels_for_is_told():
    annotated = torch.export.export(nn.Linear(8, 4).eval(), (torch.randn(2, 8),)).module()
    config = quantplug.get_quantizer("x86").backend.config("int8_dynamic")
    quantplug.get_quantizer("tensorrt").set_global(config).annotate(annotated)
    (row,) = quantplug.explain(annotated).rows
    assert "it has no dynamic kernel, only 'int8'" in row.reason


class FakeTensorRT(SimpleNamespace):
    """TensorRT's Python interface as far as an engine is built with it; keeps what it was given."""

    Logger: Any = type("Logger", (), {"ERROR": 0, "__init__": lambda self, level: None})
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    ProfilingVerbosity = SimpleNamespace(DETAILED=2)
    LayerInformationFormat = SimpleNamespace(JSON=1)

    def __init__(self, parses=True, builds=True, shape=(-1, 3, 16, 16)):
        ports = [{"Name": "a", "Format/Datatype": "Int8 NC/32HW32"}], [{"Name": "b", "Format/Datatype": "Half"}]
        layers = [{"Name": "conv2d@6@", "LayerType": "CaskConvolution", "Inputs": ports[0], "Outputs": ports[1]}]
        given: dict[str, Any] = {"profile": {}}
        self.given = given
        config = SimpleNamespace(profiling_verbosity=None, add_optimization_profile=lambda profile: None)
        profile = SimpleNamespace(set_shape=lambda name, *ends: given["profile"].update({name: ends}))
        network = SimpleNamespace(num_inputs=1, get_input=lambda index: SimpleNamespace(name="x", shape=shape))
        self.Builder = lambda logger: SimpleNamespace(
            create_network=lambda flags: given.update(flags=flags) or network,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=lambda network, config: memoryview(b"a plan") if builds else None,
        )
        error = SimpleNamespace(desc=lambda: "node 3: Assertion failed")
        self.OnnxParser = lambda network, logger: SimpleNamespace(
            parse_from_file=lambda path: given.update(parsed=Path(path).read_bytes()) or parses,
            num_errors=1,
            get_error=lambda index: error,
        )
        told = json.dumps({"Layers": layers})
        inspector = SimpleNamespace(get_engine_information=lambda form: told)
        engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)


def test_an_engine_is_built_of_the_file_and_told_layer_by_layer(residual, monkeypatch, tmp_path):
    """Against TensorRT's documented interface, not against TensorRT: it builds on GPUs of NVIDIA alone."""
    _, program = residual
    fake_trt = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake_trt)
    small, large = (torch.randn(1, 3, 16, 16),), (torch.randn(8, 3, 16, 16),)
    (layer,) = program.build(tmp_path / "model.engine", smallest=small, largest=large)
    assert (layer.name, layer.kind, layer.is_int8, layer.writes) == ("conv2d@6@", "CaskConvolution", True, ("Half",))
    assert (tmp_path / "model.engine").read_bytes() == b"a plan"
    assert fake_trt.given["parsed"] == program.save(tmp_path / "model.onnx").read_bytes()
    assert fake_trt.given["profile"] == {"x": ((1, 3, 16, 16), (8, 3, 16, 16), (8, 3, 16, 16))}
    assert fake_trt.given["flags"] == 2


def test_what_keeps_tensorrt_from_an_engine_is_one_sentence(residual, monkeypatch, tmp_path):
    _, program = residual
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(LoweringError, match=r"built by TensorRT, which is not installed .*; run pip install tensorrt"):
        program.build()

    def no_gpu(logger):
        raise RuntimeError("CUDA initialization failure with error: 35")

    for fake_trt, sentence in (
        (FakeTensorRT(parses=False), r"TensorRT does not take the file \(node 3: Assertion failed\)"),
        (
            FakeTensorRT(),
            r"Input 'x' has open sizes \(-1, 3, 16, 16\), .* give inputs of the smallest and of the largest",
        ),
        (FakeTensorRT(builds=False, shape=(2, 3, 16, 16)), "TensorRT builds no engine of the file"),
        (
            SimpleNamespace(Logger=FakeTensorRT.Logger, Builder=no_gpu),
            r"TensorRT does not start \(.*35.*\); build where",
        ),
    ):
        monkeypatch.setitem(sys.modules, "tensorrt", fake_trt)
        with pytest.raises(LoweringError, match=sentence) as raised:
            program.build(tmp_path / "model.engine")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "model.engine").exists()


def test_the_command_line_writes_the_file(tmp_path, monkeypatch, capsys):
    from quantplug import cli

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 8, 8),)), tmp_path / "model.pt2")
    data = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", data)
    monkeypatch.chdir(tmp_path)
    line = "quantplug quantize model.pt2 --backend tensorrt --calibration data.npz --out model.onnx"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr().err
    program = TensorRTProgram.load(tmp_path / "model.onnx")
    require_rules(onnx.load(tmp_path / "model.onnx").graph)
    x = torch.from_numpy(data[:2])
    with torch.no_grad():
        assert sqnr(program(x), model(x)) > 25
