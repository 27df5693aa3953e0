"""The q/dq graph as ONNX: integers in the file, integer kernels in ONNX Runtime, the q/dq graph's numbers, refusals."""

import collections
import importlib
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.errors import ArtefactError, ConfigError, LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.onnxruntime import ONNXRUNTIME

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx_graphs  # noqa: E402
from models import Function, MobileNet, ResNet18, needs_vnni  # noqa: E402
from onnx_graphs import BATCH, Counter, written  # noqa: E402
from qdq_graphs import Net, TensorWeight, Weight, fake, graph_of  # noqa: E402

from quantplug.lowering.onnx import ONNXProgram, lower  # noqa: E402
from quantplug.lowering.onnx.runtime import session  # noqa: E402


class Residual(nn.Module):
    """A residual block, pooling and a head; yields a dictionary."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.one(x))
        x = F.max_pool2d(F.relu(x + self.two(x)), 2)
        return {"logits": self.head(x.mean((2, 3)))}


quantized = partial(onnx_graphs.quantized, backend="onnxruntime")


def decibels(program, reference, *inputs):
    with torch.no_grad():
        return sqnr(program(*inputs), reference(*inputs))


def types(graph):
    """Returns the types of the constants that stand in a file, by the operators that read them."""
    held = {each.name: onnx.TensorProto.DataType.Name(each.data_type) for each in graph.initializer}
    return {(node.op_type, held[node.input[0]]) for node in graph.node if node.input and node.input[0] in held}


def running(program, folder):
    """Returns how often each operator stands in the graph that ONNX Runtime runs."""
    optimized = folder / "optimized.onnx"
    session(str(program.save(folder / "model.onnx")), str(optimized))
    return collections.Counter(node.op_type for node in onnx.load(optimized).graph.node)


@pytest.fixture(scope="module")
def residual():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 16, 16),)
    reference = quantized(Residual(), inputs, dynamic_shapes=BATCH)
    return reference, ONNXRUNTIME.lower(reference, inputs)


@needs_vnni
def test_a_residual_net_runs_on_integer_kernels_for_any_batch(residual):
    reference, program = residual
    assert {operator.placement for operator in program.ops} == {"int8"}
    kernels = sorted(program.kernels.values())
    assert kernels.count("QLinearConv") == 2
    assert {"QLinearAdd", "QLinearAveragePool", "QGemm"} <= set(kernels)
    for size in (1, 2, 5):
        x = torch.randn(size, 3, 16, 16)
        with torch.no_grad():
            assert sqnr(program(x)["logits"], reference(x)["logits"]) > 60
    with pytest.raises(LoweringError, match=r"Input 0 of the program is .* found torch.float32"):
        program(torch.randn(2, 3, 17, 16))


@needs_vnni
def test_weights_and_biases_are_integers_in_the_file(residual, tmp_path):
    _, program = residual
    graph = written(program, tmp_path)
    assert types(graph) == {("DequantizeLinear", "INT8"), ("DequantizeLinear", "INT32")}
    floats = [each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    assert max(int(np.prod(each.dims)) for each in floats) <= 16  # scales of channels
    assert not any(node.op_type == "QuantizeLinear" and "weight" in node.input[0] for node in graph.node)


@needs_vnni
def test_a_saved_program_loads_and_is_a_plain_model_of_onnx(residual, tmp_path):
    _, program = residual
    x = torch.randn(3, 3, 16, 16)
    path = program.save(tmp_path / "model.onnx")
    assert path.stat().st_size == program.nbytes
    assert torch.equal(ONNXProgram.load(path)(x)["logits"], program(x)["logits"])
    plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = plain.run(None, {plain.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(found), program(x)["logits"])
    assert "/" not in "".join(onnx.load(path).metadata_props[0].value)  # no path of the machine that wrote it


@needs_vnni
def test_weights_beyond_the_size_of_a_file_lie_beside_it(residual, tmp_path):
    _, program = residual
    x = torch.randn(3, 3, 16, 16)
    path = program.save(tmp_path / "model.onnx", largest=1000)
    (weights,) = tmp_path.glob("weights-*.bin")
    assert weights.stat().st_size > path.stat().st_size / 4
    assert torch.equal(ONNXProgram.load(path)(x)["logits"], program(x)["logits"])
    assert program.save(tmp_path / "again.onnx", largest=1000).read_bytes() == path.read_bytes()
    assert torch.equal(ONNXProgram.load(program.save(tmp_path / "whole.onnx"))(x)["logits"], program(x)["logits"])
    weights.unlink()
    with pytest.raises(ArtefactError, match="no program of the onnx lowering"):
        ONNXProgram.load(path)


def test_files_that_are_no_program_are_one_sentence(residual, tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(ArtefactError, match="There is no file"):
        ONNXProgram.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ArtefactError, match="no program of the onnx lowering"):
        ONNXProgram.load(path)
    model = onnx.load(residual[1].save(path))
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(ArtefactError, match="without the metadata that `save` writes"):
        ONNXProgram.load(path)
    model = onnx.load(residual[1].save(path))
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="../../weights.bin")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtefactError, match="leads out of its folder"):
        ONNXProgram.load(path)
    with pytest.raises(ArtefactError, match="create it first"):
        residual[1].save(tmp_path / "nowhere" / "model.onnx")


GEOMETRIES = {
    "a line": (nn.Conv1d(6, 8, 3, padding="same"), (2, 6, 12)),
    "an image": (nn.Conv2d(6, 8, (3, 2), (2, 1), (1, 0), bias=False), (2, 6, 9, 8)),
    "a volume": (nn.Conv3d(4, 8, 3, padding=1), (1, 4, 5, 6, 7)),
    "groups": (nn.Conv2d(8, 16, 3, groups=4, dilation=2), (2, 8, 9, 8)),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 9, 8)),
    "one vector": (nn.Linear(16, 8), (16,)),
    "a matrix": (nn.Linear(16, 8, bias=False), (4, 16)),
    "rows of rows": (nn.Linear(16, 8), (2, 3, 4, 16)),
}


@needs_vnni
@pytest.mark.few(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_layers_of_any_geometry_run_on_integer_kernels_per_channel(name, strict):
    layer, shape = GEOMETRIES[name]
    model, inputs = nn.Sequential(layer, nn.ReLU6()), (torch.randn(*shape),)
    reference = quantized(model, inputs, strict=strict)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    assert {operator.placement for operator in program.ops} == {"int8"}
    x = torch.randn(*shape)
    assert decibels(program, reference, x) > 50
    with torch.no_grad():
        assert sqnr(program(*inputs), model(*inputs)) > 25


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("zero_points", [False, True])
def test_channels_are_on_the_right_axis_with_and_without_zero_points(axis, zero_points, tmp_path):
    net = Net(
        lambda m, x: F.conv_transpose2d(x, m.weight()), weight=Weight(6, 4, 3, 3, axis=axis, zero_points=zero_points)
    )
    inputs = (torch.randn(2, 6, 5, 5),)
    reference = graph_of(net, *inputs)
    program = lower(reference, inputs)
    assert decibels(program, reference, *inputs) > 100
    (node,) = (n for n in written(program, tmp_path).node if n.op_type == "DequantizeLinear")
    assert {each.name: each.i for each in node.attribute}["axis"] == axis


@needs_vnni
def test_activations_of_int8_are_those_of_uint8_in_the_file(tmp_path):
    inputs = (torch.randn(2, 3, 8, 8),)
    parts: dict[str, Any] = {
        "conv": nn.Conv2d(3, 4, 3),
        "head": nn.Linear(144, 5),
        "shift": nn.Parameter(torch.randn(4, 1, 1)),
    }
    model = Function(lambda m, x: m.head((m.conv(x) + m.shift).flatten(1)), **parts)
    reference = quantized(model, inputs, "int8_signed")
    assert any(torch.int8 in node.args for node in reference.graph.nodes)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    assert {operator.placement for operator in program.ops} == {"int8"}
    assert decibels(program, reference, torch.randn(2, 3, 8, 8)) > 50
    assert all(each.data_type != onnx.TensorProto.INT8 or each.dims for each in written(program, tmp_path).initializer)


@needs_vnni
def test_attention_multiplies_integers_and_what_stays_float_says_why(tmp_path):
    torch.manual_seed(0)
    model, inputs = (
        nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True),
        (torch.randn(2, 16, 64),),
    )
    reference = quantized(model, inputs)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    kernels = list(program.kernels.values())
    products = ("QGemm", "MatMulIntegerToFloat", "QLinearMatMul")
    assert {name: kernels.count(name) for name in products} == dict(zip(products, (4, 1, 1), strict=True))
    assert decibels(program, reference, *inputs) > 40
    with torch.no_grad():
        assert sqnr(program(*inputs), model(*inputs)) > 35
    told = {row.node: row.reason for row in quantplug.explain(reference).rows if not row.quantized}
    assert "its kernel of integers takes several times as long" in told["softmax_int"]
    assert told == {op.node: op.reason for op in program.ops if op.placement != "int8"}
    # Kernels that take several times as long as what they stand for.
    assert not {"SkipLayerNormalization", "QLinearSoftmax"} & set(running(program, tmp_path))


FLOAT_RESULTS = {
    "a residual sum": (nn.Conv2d(32, 32, 3, padding=1), lambda x, y: F.relu(x + y), (2, 32, 9, 8)),
    "a sum without bias": (nn.Conv1d(32, 32, 3, padding="same", bias=False), lambda x, y: y + x, (2, 32, 12)),
    "single places": (nn.Conv2d(8, 8, 1), lambda x, y: F.hardswish(y), (2, 8, 9, 8)),
    "strides": (nn.Conv2d(32, 16, (3, 2), (2, 1), (1, 0)), lambda x, y: F.silu(y), (2, 32, 9, 8)),
    "holes": (nn.Conv2d(32, 16, 3, dilation=2, padding=2), lambda x, y: F.gelu(y), (2, 32, 9, 8)),
    "a volume": (nn.Conv3d(32, 8, (2, 1, 3), padding=(1, 0, 1)), lambda x, y: torch.tanh(y), (2, 32, 5, 4, 6)),
}


@needs_vnni
@pytest.mark.few(2)
@pytest.mark.parametrize("name", FLOAT_RESULTS)
def test_convolutions_with_a_float_result_multiply_integers(name, tmp_path):
    """As x86's kernels take sums and functions in, nothing is rounded between them and the convolution."""
    torch.manual_seed(0)
    layer, end, shape = FLOAT_RESULTS[name]
    model = Function(lambda m, x: end(x := F.relu(x + 0.5), m.layer(x)), layer=layer)
    inputs = (torch.randn(*shape),)
    reference = onnx_graphs.quantized(model, inputs, backend="x86", dynamic_shapes=(BATCH,))
    program: Any = lower(reference, inputs)
    assert [op.placement for op in program.ops if "conv" in op.target] == ["int8"]
    assert not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(running(program, tmp_path))
    for size in (2, 5):
        assert decibels(program, reference, 2 * torch.randn(size, *shape[1:])) > 80


@needs_vnni
def test_what_moves_the_operand_of_a_product_is_no_kernel_of_it():
    kernels = importlib.import_module("quantplug.lowering.onnx.kernels")
    parts: Any = {1: frozenset({"conv2d"}), 2: frozenset({"conv2d"}), 3: frozenset({"flatten"})}
    moved = {1: "Pad", 3: "Reshape"}
    assert kernels.carried_out(moved, parts, {"conv2d"}) == {"flatten": "Reshape"}
    assert kernels.carried_out({**moved, 2: "QGemm"}, parts, {"conv2d"})["conv2d"] == "QGemm"


@needs_vnni
def test_weights_of_operators_in_float_are_dequantized_once(tmp_path):
    torch.manual_seed(0)
    model = Function(lambda m, x: F.relu(x + F.gelu(m.layer(x))), layer=nn.Conv2d(16, 16, 3, padding=1, groups=4))
    inputs = (torch.randn(2, 16, 8, 8),)
    reference = onnx_graphs.quantized(model, inputs, backend="x86")
    program: Any = lower(reference, inputs)
    path, optimized = program.save(tmp_path / "model.onnx"), tmp_path / "optimized.onnx"
    assert types(onnx.load(path).graph) >= {("DequantizeLinear", "INT8")}
    session(str(path), str(optimized))
    assert not any(kind == "DequantizeLinear" for kind, _ in types(onnx.load(optimized).graph))
    for data in (inputs[0], torch.randn(2, 16, 8, 8)):
        assert decibels(program, reference, data) > 80
    assert torch.equal(ONNXProgram.load(path)(*inputs), program(*inputs))


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "least"), [(lambda: ResNet18(8, 10), 30), (MobileNet, 30)], ids=["resnet18", "mobilenet"]
)
def test_whole_nets_are_all_integers(model, least):
    torch.manual_seed(0)
    net, inputs = model().eval(), (torch.randn(1, 3, 32, 32),)
    reference = quantized(net, inputs)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    assert {operator.placement for operator in program.ops} == {"int8"}
    assert decibels(program, reference, *inputs) > 50
    with torch.no_grad():
        assert sqnr(program(*inputs), net(*inputs)) > least


@needs_vnni
def test_a_layer_with_scales_of_run_time_is_one_integer_kernel():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8, bias=False)), (torch.randn(3, 5, 64),)
    reference = quantized(model, inputs, "int8_dynamic", dynamic_shapes=BATCH)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    assert list(program.kernels.values()) == ["DynamicQuantizeMatMul"] * 2
    assert [op.placement for op in program.ops if "linear" in op.node] == ["int8"] * 2
    for factor, size in ((1.0, 3), (7.0, 2)):
        x = factor * torch.randn(size, 5, 64)
        assert decibels(program, reference, x) > 45
        with torch.no_grad():
            assert sqnr(program(x), model(x)) > 30


@pytest.mark.parametrize(
    ("config", "stored", "bits"), [("int8_weight_only", "INT8", 8), ("int4_weight_only", "INT4", 4)]
)
def test_weights_alone_are_stored_in_their_bits_and_read_by_the_kernel(config, stored, bits, tmp_path):
    torch.manual_seed(0)
    model, inputs = nn.Linear(128, 64), (torch.randn(3, 128),)
    reference = quantized(model, inputs, config)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    assert types(written(program, tmp_path)) == {("DequantizeLinear", stored)}
    assert program.kernels == {next(iter(program.kernels)): "MatMulNBits"}
    assert program.ops[0].placement == "int8"
    assert decibels(program, reference, *inputs) > 100  # activations stay float
    held = 128 * 64 * bits // 8
    assert held < program.nbytes < held + 128 * 64 // 32 * 4 + 4000
    assert torch.equal(ONNXProgram.load(tmp_path / "model.onnx")(*inputs), program(*inputs))


def test_weights_in_float16_are_halves_in_the_file(tmp_path):
    torch.manual_seed(0)
    model, inputs = nn.LSTM(16, 32, batch_first=True), (torch.randn(2, 5, 16),)
    reference = quantized(Function(lambda m, x: m.cell(x)[0], cell=model), inputs, "float16")
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    assert decibels(program, reference, *inputs) > 100
    graph = written(program, tmp_path)
    kinds = [each.data_type for each in graph.initializer if np.prod(each.dims) > 1000]
    assert set(kinds) == {onnx.TensorProto.FLOAT16}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "ends"), [(torch.int16, (-32768, 32767)), (torch.uint8, (0, 127)), (torch.int8, (-127, 127))]
)
def test_ranges_of_any_width_are_those_of_the_graph(dtype, ends, tmp_path):
    step = (8.0 / (ends[1] - ends[0]), (sum(ends) + 1) // 2)
    net = Net(
        lambda m, x: fake(F.linear(fake(x, step, ends[0], ends[1], dtype), m.weight()), step, ends[0], ends[1], dtype),
        weight=TensorWeight(8, 16),
    )
    inputs = (3 * torch.randn(4, 16),)
    reference = graph_of(net, *inputs)
    program = lower(reference, inputs)
    found, wanted = program(*inputs), reference(*inputs)
    assert float((found - wanted).abs().max()) <= step[0] * 1.001
    assert sqnr(found, wanted) > 40
    version = onnx.load(program.save(tmp_path / "model.onnx")).opset_import[0].version
    assert version == (21 if dtype == torch.int16 else 20)


def test_int32_biases_of_the_graph_stay_what_they_are(tmp_path):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8, 8),)
    exported = torch.export.export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), inputs).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack").set_global("int8"))
    prepared(*inputs)
    reference = quantplug.convert_pt2e(prepared)
    (bias,) = (buffer for _, buffer in reference.named_buffers() if buffer.dtype == torch.int32 and buffer.any())
    program = lower(reference, inputs)
    assert decibels(program, reference, *inputs) > 50
    (stored,) = (each for each in written(program, tmp_path).initializer if each.data_type == onnx.TensorProto.INT32)
    assert np.array_equal(onnx.numpy_helper.to_array(stored), bias.numpy())
    assert "QLinearConv" in program.kernels.values()


def test_what_a_condition_chooses_is_chosen_in_the_program():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            return torch.cond(x.sum() > 0, lambda y: y * 2.0, lambda y: y - 1.0, (x,))

    torch.manual_seed(0)
    inputs = (torch.randn(2, 8),)
    reference = quantized(Chosen(), inputs)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    for x in (inputs[0], -inputs[0]):
        assert decibels(program, reference, x) > 50


def test_outputs_come_back_in_their_structure_each_its_own():
    inputs = (torch.randn(2, 8), 3)

    def several(m, x, times):
        y = m.layer(x)
        return {"all": (y, y, None), "times": times, "in": x}

    reference = quantized(Function(several, layer=nn.Linear(8, 4)), inputs)
    found, wanted = ONNXRUNTIME.lower(reference, inputs)(*inputs), reference(*inputs)
    assert found["times"] == 3
    assert found["all"][2] is None
    assert found["all"][0] is not found["all"][1]
    assert sqnr(found["all"][1], wanted["all"][1]) > 60
    assert torch.equal(found["in"], inputs[0])


def test_what_has_no_integer_kernel_is_told_before_and_after():
    inputs = (torch.randn(2, 4, 8, 8),)
    model = Function(lambda m, x: m.up(m.conv(x)) - 1.0, conv=nn.Conv2d(4, 4, 3), up=nn.ConvTranspose2d(4, 4, 2))
    reference = quantized(model, inputs)
    program: Any = ONNXRUNTIME.lower(reference, inputs)
    told = {row.node: row.reason for row in quantplug.explain(reference).rows if not row.quantized}
    assert "weight-only config" in told["conv_transpose2d"]
    assert told == {op.node: op.reason for op in program.ops if op.placement == "float"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Function(lambda m, x: torch.lgamma(m.layer(x)), layer=nn.Linear(8, 4)), r"has no form of .*lgamma.*; keep"),
        (Counter(), "keeps no state, and the model writes buffer 'seen'"),
    ],
)
def test_what_onnx_has_no_form_for_is_one_sentence(model, sentence):
    inputs = (torch.randn(2, 8),)
    with pytest.raises(LoweringError, match=sentence) as raised:
        ONNXRUNTIME.lower(quantized(model, inputs), inputs)
    assert "\n" not in str(raised.value)


def test_an_opset_without_the_integers_of_the_graph_is_one_sentence():
    inputs = (torch.randn(2, 64),)
    reference = quantized(nn.Linear(64, 8), inputs, "int4_weight_only")
    with pytest.raises(ConfigError, match=r"opset is 20, and 'dequantize\w*' .* from opset 21 on; give opset=21"):
        ONNXRUNTIME.lower(reference, inputs, opset=20)
    with pytest.raises(ConfigError, match="opset is 11; choose one of 18 to 23"):
        ONNXRUNTIME.lower(reference, inputs, opset=11)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize("opset", range(18, 24))
def test_every_opset_has_the_same_kernels(residual, opset):
    reference, _ = residual
    x = torch.randn(2, 3, 16, 16)
    program = ONNXRUNTIME.lower(reference, (x,), opset=opset)
    assert {operator.placement for operator in program.ops} == {"int8"}
    assert sqnr(program(x)["logits"], reference(x)["logits"]) > 60


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_a_program_that_computes_something_else_is_refused(backend, monkeypatch):
    program: Any = importlib.import_module("quantplug.lowering.onnx.program")
    inputs = (torch.randn(2, 8),)
    reference = onnx_graphs.quantized(nn.Linear(8, 4), inputs, backend=backend)
    honest = program.from_numpy
    monkeypatch.setattr(program, "from_numpy", lambda array: honest(array) + 1.0)
    with pytest.raises(LoweringError, match=r"Output 0 of the program keeps .* dB of the q/dq graph"):
        quantplug.get_quantizer(backend).backend.lower(reference, inputs)


WITHOUT = """
import sys, torch
sys.modules["{package}"] = None
import quantplug
inputs = (torch.randn(1, 4),)
backend = quantplug.get_quantizer("{backend}").backend
try:
    backend.lower(torch.export.export(torch.nn.Linear(4, 4), inputs).module(), inputs)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "package"),
    [
        ("onnxruntime", "onnx"),
        ("onnxruntime", "onnxscript"),
        ("onnxruntime", "onnxruntime"),
        ("tensorrt", "onnxscript"),
    ],
)
def test_without_a_package_the_backend_names_the_extra(backend, package):
    instead = ", or use backend 'x86'" if backend == "onnxruntime" else ""
    command = [sys.executable, "-c", WITHOUT.format(backend=backend, package=package)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.startswith(f"LoweringError Backend '{backend}' needs the package {package}, which is not installed")
    assert found.endswith(f"run pip install 'quantplug[onnx]'{instead}.\n")


WITHOUT_VNNI = """
import sys
sys.path[:0] = sys.argv[1:3]
import pytest
from test_onnx import *
inputs = (torch.randn(2, 3, 16, 16),)
full = quantized(Residual(), inputs, quantplug.get_x86_quantization_config(weight_bits=8))
with pytest.raises(LoweringError, match="would give wrong numbers in ONNX Runtime: .* quantize with weight_bits=7"):
    ONNXRUNTIME.lower(full, inputs)
with pytest.raises(ArtefactError, match="would give wrong numbers here"):
    ONNXProgram.load(sys.argv[3])
program = ONNXRUNTIME.lower(quantized(Residual(), inputs), inputs)
assert list(program.kernels.values()).count("QLinearConv") == 2
"""


@needs_vnni
@pytest.mark.slow
def test_without_vnni_weights_take_seven_bits_and_nothing_that_saturates_runs(residual, tmp_path):
    path = residual[1].save(tmp_path / "model.onnx")
    here = __file__.rpartition("/")[0]
    command = [sys.executable, "-c", WITHOUT_VNNI, here, here.rpartition("/")[0], str(path)]
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, env=environment | {"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("bounds", [(0.1, 3), (0, 0.5), (None, 2), (-1, 1)])
def test_bounds_of_both_kinds_of_numbers_are_written(bounds):
    model = Function(lambda parts, x: x.clamp(*bounds) * 2)
    x = torch.randn(4, 8)
    graph = torch.export.export(model, (x,)).module()
    program = quantplug.get_quantizer("onnxruntime").backend.lower(graph, (x,))
    for values in (x, 3 * x):
        assert torch.equal(program(values), model(values))
