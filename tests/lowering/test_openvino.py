"""The same q/dq graph in OpenVINO's compiler: integer kernels, the q/dq graph's numbers, files, refusals."""

import copy
import logging
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.errors import ArtefactError, LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.quantizers.openvino import OPENVINO

from models import Function  # isort: skip

BATCH = ({0: torch.export.Dim("batch", min=1, max=16)},)


class Residual(nn.Module):
    """A residual block, pooling and a head; yields a dictionary."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.one(x))
        x = F.max_pool2d(F.relu(x + self.two(x)), 2)
        return {"logits": self.head(x.mean((2, 3)))}


def quantized(model, inputs, config="int8", dynamic_shapes=None):
    quantizer = quantplug.get_quantizer("openvino").set_global(config)
    prepared = quantplug.prepare_pt2e(
        torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic_shapes).module(), quantizer
    )
    with torch.no_grad():
        prepared(*inputs)
    return quantplug.convert_pt2e(prepared)


def integer_products(program):
    """Counts the convolutions and linears that OpenVINO computes on integers."""
    infos = [node.get_rt_info() for node in program.compiled.get_runtime_model().get_ops()]
    found = [(info["layerType"].value, info["primitiveType"].value) for info in infos]
    return sum(kind in ("Convolution", "FullyConnected") and "I8" in kernel for kind, kernel in found)


@pytest.fixture(scope="module")
def residual():
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 32, 32),)
    reference = quantized(Residual(), inputs, dynamic_shapes=BATCH)
    return reference, OPENVINO.lower(reference, inputs, dynamic_shapes=BATCH)


@pytest.mark.slow
def test_openvino_runs_integer_kernels_and_computes_what_the_qdq_graph_says(residual):
    reference, program = residual
    assert {operator.placement for operator in program.ops} == {"int8"}
    assert integer_products(program) == 3  # two convolutions, one linear
    x = torch.randn(5, 3, 32, 32)  # another batch size than the example's
    with torch.no_grad():
        assert sqnr(reference(x)["logits"], program(x)["logits"]) > 60


@pytest.mark.slow
def test_a_saved_openvino_program_loads_with_its_weights_as_integers(residual, tmp_path):
    _, program = residual
    path = program.save(tmp_path / "model.zip")
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(OpenVINOProgram.load(path)(x)["logits"], program(x)["logits"])
    floats = sum(weight.numel() for weight in Residual().parameters()) * 4
    assert zipfile.ZipFile(path).getinfo("model.bin").file_size < floats / 3
    assert path.stat().st_size == program.nbytes
    path.write_bytes(b"nothing")
    with pytest.raises(ArtefactError, match="no program of the openvino lowering"):
        OpenVINOProgram.load(path)
    with pytest.raises(ArtefactError, match="create it first"):
        program.save(tmp_path / "nowhere" / "model.zip")


@pytest.mark.slow
def test_attention_and_weight_only_models_reach_openvino():
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    inputs = (torch.randn(2, 16, 64),)
    model = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True).eval()
    for config, least in (("int8", 40), ("int8_weight_only", 100)):
        reference = quantized(model, inputs, config)
        program = OPENVINO.lower(reference, inputs)
        with torch.no_grad():
            assert sqnr(reference(*inputs), program(*inputs)) > least
        assert any("OpenVINO runs it in f32" in operator.reason for operator in program.ops)


@pytest.mark.slow
def test_the_open_sizes_of_a_model_of_any_number_of_inputs_stay_open():
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = Function(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=nn.MultiheadAttention(32, 4))
    inputs, sizes = (torch.randn(2, 16, 32),), (BATCH,)
    reference = quantized(model, inputs, dynamic_shapes=sizes)
    program = OPENVINO.lower(reference, inputs, dynamic_shapes=sizes)
    for size in (2, 5):
        x = torch.randn(size, 16, 32)
        with torch.no_grad():
            assert sqnr(reference(x), program(x)) > 40


@pytest.mark.slow
def test_the_open_sizes_of_an_exported_program_stay_open_without_being_named_again(residual, tmp_path):
    reference, _ = residual
    program = OPENVINO.lower(reference, (torch.randn(2, 3, 32, 32),))
    loaded = OpenVINOProgram.load(program.save(tmp_path / "model.zip"))
    for size in (1, 16, 3):
        x = torch.randn(size, 3, 32, 32)
        with torch.no_grad():
            expected = reference(x)["logits"]
        for each in (program, loaded):
            assert sqnr(expected, each(x)["logits"]) > 60


@pytest.mark.slow
def test_what_stays_float_computes_in_bfloat16_on_demand_also_when_loaded(tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    inputs = (torch.randn(2, 16, 64),)
    model = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True).eval()
    reference = quantized(model, inputs)
    program = OPENVINO.lower(reference, inputs, float_dtype=torch.bfloat16)
    loaded = OpenVINOProgram.load(program.save(tmp_path / "model.zip"))
    with torch.no_grad():
        assert sqnr(reference(*inputs), program(*inputs)) > 25
        assert torch.equal(program(*inputs), loaded(*inputs))
    assert loaded.options["INFERENCE_PRECISION_HINT"] == "bf16"
    if torch.cpu.get_capabilities()["avx512_bw"]:  # processors without compute in float32 all the same
        assert "bfloat16" in str(loaded.compiled.get_property("INFERENCE_PRECISION_HINT"))
    replaced = OpenVINOProgram.load(tmp_path / "model.zip", {"INFERENCE_PRECISION_HINT": "f32"})
    assert replaced.options["INFERENCE_PRECISION_HINT"] == "f32"


class Halves(nn.Module):
    """Takes, keeps and returns bfloat16, which numpy does not know."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("last", torch.zeros(2, 8, dtype=torch.bfloat16))

    def forward(self, x):
        y = self.layer(x.float()).to(torch.bfloat16)
        mean = (self.last + y) / 2
        self.last.copy_(y)
        return mean, y.float()


@pytest.mark.slow
def test_bfloat16_at_the_ends_and_in_the_state_is_bfloat16(tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    batches = [torch.randn(2, 16).bfloat16() for _ in range(3)]
    reference = quantized(Halves(), (batches[0],))
    program = OPENVINO.lower(reference, (batches[0],))
    loaded = OpenVINOProgram.load(program.save(tmp_path / "model.zip"))
    expected = copy.deepcopy(reference)
    for x in batches:
        mean, y = expected(x)
        for run in (program, loaded):
            found = run(x)
            assert found[0].dtype == torch.bfloat16
            assert sqnr(found[0].float(), mean.float()) > 40
            assert sqnr(found[1], y) > 40


def test_threads_take_turns(residual):
    """A request of OpenVINO's that several threads use mixes their inputs up: most answers were another thread's."""
    torch.manual_seed(0)
    _, program = residual
    batches = [torch.randn(2, 3, 32, 32) for _ in range(4)]
    expected = [program(x)["logits"] for x in batches]

    def calls(number):
        return all(torch.equal(program(batches[number])["logits"], expected[number]) for _ in range(100))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))


WITHOUT_VNNI = """
import sys
sys.path[:0] = sys.argv[1:3]
import pytest, torch
from test_openvino import *
inputs = (torch.randn(2, 3, 32, 32),)
full = quantized(Residual(), inputs, quantplug.get_x86_quantization_config(weight_bits=8))
with pytest.raises(LoweringError, match="would give wrong numbers in OpenVINO: .* quantize with weight_bits=7"):
    OPENVINO.lower(full, inputs)
with pytest.raises(ArtefactError, match="would give wrong numbers here"):
    OpenVINOProgram.load(sys.argv[3])
reference = quantized(Residual(), inputs)
program = OPENVINO.lower(reference, inputs)
assert integer_products(program) == 3
with torch.no_grad():
    assert sqnr(reference(*inputs)["logits"], program(*inputs)["logits"]) > 60
"""


@pytest.mark.slow
def test_without_vnni_openvino_gets_seven_bits_and_nothing_that_its_kernels_saturate_at(
    residual, tmp_path, monkeypatch
):
    monkeypatch.setattr(residual[1], "pair", 2 * 255 * 127)
    path = residual[1].save(tmp_path / "model.zip")
    here = Path(__file__).parent
    command = [sys.executable, "-c", WITHOUT_VNNI, str(here), str(here.parent), str(path)]
    subprocess.run(command, check=True, env={"ONEDNN_MAX_CPU_ISA": "AVX2", "PATH": "/usr/bin:/bin"})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"reduce_range": True}, {"weight_bits": 7}])
def test_seven_bits_run_on_openvinos_integer_kernels(options):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 32, 32),)
    reference = quantized(Residual(), inputs, quantplug.get_x86_quantization_config(**options))
    program = OPENVINO.lower(reference, inputs)
    assert integer_products(program) == 3
    with torch.no_grad():
        assert sqnr(reference(*inputs)["logits"], program(*inputs)["logits"]) > 60


def test_a_dynamically_quantized_graph_is_refused_in_one_sentence():
    pytest.importorskip("openvino")
    inputs = (torch.randn(2, 16),)
    prepared = quantplug.prepare_pt2e(
        torch.export.export(nn.Linear(16, 8).eval(), inputs).module(),
        quantplug.get_quantizer("x86").set_global("int8_dynamic"),
    )
    prepared(*inputs)
    with pytest.raises(LoweringError, match=r"choose_qparams.*at run time.*static or weight-only"):
        OPENVINO.lower(quantplug.convert_pt2e(prepared), inputs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "refused",
    [
        (lambda m, x: F.avg_pool2d(m.conv(x), 3, divisor_override=7), "aten.avg_pool2d.default: .* divisor_override"),
        (lambda m, x: torch.lgamma(m.conv(x)), "No conversion rule found for operations: aten.lgamma.default"),
    ],
)
def test_an_operator_that_openvino_does_not_convert_is_a_whole_sentence(refused):
    pytest.importorskip("openvino")
    function, reason = refused
    inputs = (torch.randn(2, 3, 12, 12),)
    reference = quantized(Function(function, conv=nn.Conv2d(3, 8, 3)), inputs)
    root = logging.getLogger()
    logs = root.level, list(root.filters), list(root.handlers)
    with pytest.raises(LoweringError, match=rf"^OpenVINO does not take .* \({reason}[^.:]*\); keep the operator"):
        OPENVINO.lower(reference, inputs)
    assert (root.level, root.filters, root.handlers) == logs


@pytest.mark.slow
def test_a_squeeze_without_dimensions_takes_away_those_of_one_element():
    pytest.importorskip("openvino")
    inputs = (torch.randn(2, 3, 1, 8),)
    model = Function(lambda m, x: m.head(m.conv(x).squeeze()), conv=nn.Conv2d(3, 3, 1), head=nn.Linear(8, 8))
    reference = quantized(model, inputs)
    program = OPENVINO.lower(reference, inputs)
    assert program(*inputs).shape == (2, 3, 8)
    assert {operator.placement for operator in program.ops} == {"int8"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "operator", "reason"),
    [
        (lambda m, x: m.last(m.conv(x) + x), "add", "is an input, which OpenVINO adds in float"),
        (lambda m, x: m.last(m.conv(x).clamp(min=0.1)), "clamp", "one bound"),
        (lambda m, x: m.last(F.max_pool2d(m.conv(x), 2, ceil_mode=True)), "max_pool2d", "rounds sizes up"),
    ],
)
def test_what_openvino_computes_in_float_is_float_in_the_report(function, operator, reason):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    inputs = (torch.randn(2, 8, 9, 9),)
    model = Function(function, conv=nn.Conv2d(8, 8, 3, padding=1), last=nn.Conv2d(8, 8, 1))
    reference = quantized(model, inputs)
    row = quantplug.explain(reference).row(operator)
    assert not row.quantized
    assert reason in row.reason
    placed = {op.node: op.placement for op in OPENVINO.lower(reference, inputs).ops}
    assert placed[operator] == "float"


@pytest.mark.few(1)
@pytest.mark.parametrize("product", [lambda y: torch.mm(y, y.t()), lambda y: F.linear(y, y)])
def test_products_of_two_activations_with_open_columns_lower(product):
    pytest.importorskip("openvino")
    inputs, sizes = (torch.randn(4, 8),), (BATCH[0],)
    model = Function(lambda m, x: product(m.linear(x)), linear=nn.Linear(8, 8))
    reference = quantized(model, inputs, dynamic_shapes=(sizes,))
    program = OPENVINO.lower(reference, inputs)
    for rows in (4, 7):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            assert sqnr(reference(x), program(x)) > 60


@pytest.mark.slow
def test_without_openvino_the_backend_names_the_extra():
    script = """
import sys, torch
sys.modules["openvino"] = None
from quantplug.quantizers.openvino import OPENVINO
inputs = (torch.randn(1, 4),)
try:
    OPENVINO.lower(torch.export.export(torch.nn.Linear(4, 4), inputs).module(), inputs)
except Exception as error:
    print(type(error).__name__, error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.startswith("LoweringError Backend 'openvino' needs the package openvino")
    assert "pip install 'quantplug[openvino]'" in found


@pytest.mark.slow
def test_operators_that_export_names_anew_keep_their_own_kernels():
    """A product that is spelled as a linear layer is exported under the name that the layer behind it had."""

    class Spelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))
            self.last = nn.Linear(64, 64)

        def forward(self, x):
            return self.last(F.hardtanh(torch.addmm(self.bias, x, self.weight)))

    torch.manual_seed(0)
    x = torch.randn(32, 64)  # in one thread OpenVINO computes small products in one float kernel
    quantizer = quantplug.get_quantizer("openvino").set_global("int8").set_module_name("last", None)
    program = quantplug.quantize(Spelled().eval(), (x,), quantizer, [x], progress=False).program
    assert {op.node: op.placement for op in program.ops} == {"addmm": "int8", "hardtanh": "int8", "linear": "float"}
