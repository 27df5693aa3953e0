"""The ways to run a lowered program: compiled, packaged, on a processor without VNNI, autotuned."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators of quantized_decomposed)
from torch import nn
from torch.nn import functional as F
from x86_programs import alone

from quantplug.core.errors import ArtefactError, LoweringError
from quantplug.lowering.processor import highest_integer
from quantplug.lowering.x86 import lower

QD = torch.ops.quantized_decomposed
BATCH = ({0: torch.export.Dim("batch", min=1, max=16)},)


def rounded(x, scale=0.05, zero_point=100, qmax=255):
    args = (scale, zero_point, 0, qmax, torch.uint8)
    return QD.dequantize_per_tensor(QD.quantize_per_tensor(x, *args), *args)


class Layer(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("values", torch.randint(-127, 128, shape, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(shape[0]) * 0.003 + 0.001)
        self.register_buffer("zeros", torch.zeros(shape[0], dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(shape[0]))

    def forward(self, x):
        weight = QD.dequantize_per_channel(self.values, self.scales, self.zeros, 0, -127, 127, torch.int8)
        return F.linear(x, weight, self.bias) if weight.dim() == 2 else F.conv2d(x, weight, self.bias, padding=1)


class Reference(nn.Module):
    """A residual block and a head as a q/dq graph; `qmax` 127 is what processors without VNNI need."""

    def __init__(self, qmax):
        super().__init__()
        self.one, self.two, self.head = Layer(16, 3, 3, 3), Layer(16, 16, 3, 3), Layer(8, 16)
        self.zero_point, self.qmax = (qmax + 1) // 2, qmax

    def forward(self, x):
        step = 0.08 * 255 / self.qmax
        x = rounded(F.relu(self.one(rounded(x, step / 2, self.zero_point, self.qmax))), step, 0, self.qmax)
        x = rounded(F.relu(self.two(x) + x), 2 * step, 0, self.qmax)
        x = rounded(x.mean((2, 3)), step, 0, self.qmax)
        return self.head(x)


@pytest.fixture(scope="module")
def lowered():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8, 8),)
    graph = torch.export.export(Reference(highest_integer()).eval(), inputs, dynamic_shapes=BATCH).module()
    return graph, inputs, lower(graph, inputs, dynamic_shapes=BATCH)


@pytest.mark.slow
def test_torch_compile_gives_the_same_numbers_on_the_same_kernels(lowered):
    _, inputs, program = lowered
    torch.testing.assert_close(program.compile()(*inputs), program(*inputs), rtol=0, atol=0.05)


@pytest.mark.slow
def test_a_package_runs_without_quantplug_and_takes_other_batch_sizes(lowered, tmp_path):
    _, _, program = lowered
    path = program.package(tmp_path / "model.pt2")
    inputs = [(torch.randn(size, 3, 8, 8),) for size in (1, 2, 5)]
    for given, found in zip(inputs, alone(path, *inputs), strict=True):
        torch.testing.assert_close(found, program(*given), rtol=0, atol=0.05)  # the mean sums in another order


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="where packages have a malloc of their own")
def test_a_packages_library_aligns_its_weights(lowered, tmp_path):
    with zipfile.ZipFile(lowered[2].package(tmp_path / "model.pt2")) as archive:
        library = next(name for name in archive.namelist() if name.endswith(".so"))
        listed = subprocess.run(["nm", archive.extract(library, tmp_path)], check=True, capture_output=True, text=True)
    functions = {line.split()[-1]: line.split()[-2] for line in listed.stdout.splitlines()}
    assert functions["malloc"] == "t", "a local function: nobody else's memory comes from it"
    assert functions["aligned_alloc@GLIBC_2.16"] == "U"


def test_without_a_compiler_compiling_is_refused_and_eager_still_runs(lowered, tmp_path, monkeypatch):
    graph, inputs, program = lowered
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LoweringError, match="no-such-compiler"):
        program.compile()
    with pytest.raises(LoweringError, match="no-such-compiler"):
        program.package(tmp_path / "model.pt2")
    torch.testing.assert_close(program(*inputs), graph(*inputs), rtol=0.05, atol=0.05)


def test_a_package_needs_a_name_that_inductor_takes(lowered, tmp_path):
    with pytest.raises(ArtefactError, match=r"\.pt2"):
        lowered[2].package(tmp_path / "model.so")


WITHOUT_VNNI = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_x86_compiled import Reference
from quantplug.core.errors import ArtefactError
from quantplug.lowering.x86 import X86Program, lower
for qmax, integer in ((127, 3), (255, 0)):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8, 8),)
    model = Reference(qmax).eval()
    model.one.values.clamp_(min=120)  # beside activations of full range, sums of two products overflow
    graph = torch.export.export(model, inputs).module()
    program = lower(graph, inputs)
    layers = [o for o in program.ops if o.target in ("aten.conv2d.default", "aten.linear.default")]
    assert sum(o.placement == "int8" for o in layers) == integer, layers
    assert all("no VNNI" in o.reason for o in layers if o.placement == "float"), layers
    expected = graph(*inputs).detach()
    for run in (program, program.compile()):
        noise, signal = (run(*inputs) - expected).pow(2).sum(), expected.pow(2).sum()
        assert 10 * torch.log10(signal / noise.clamp_min(1e-30)) > 35, (run, signal, noise)

# our own quantizer: with 8 bits every product says what to do; with 7 of weights, which it takes by itself, all run
import warnings
import quantplug
from torch import nn
layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4)
model, inputs = nn.Sequential(*layers).eval(), (torch.randn(2, 3, 8, 8),)
for bits, reduced in ((8, False), (7, False), (8, True), (None, True), (None, False)):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = quantplug.get_x86_quantization_config(reduce_range=reduced, weight_bits=bits)
        artefact = quantplug.quantize(model, inputs, "x86", [inputs], config, progress=False)
    asked = bits is None and not reduced
    assert any("take 7 bits here" in str(w.message) for w in told) == asked, told
    how = artefact.report.rows[0].how
    assert ("int8 of 7 bits per channel" in how, "uint8 of 7 bits" in how) == (asked or bits == 7, reduced), how
    products = [o for o in artefact.program.ops if o.target.split(".")[1] in ("conv2d", "linear", "avg_pool2d")]
    placed = ["float", "int8", "float", "float"] if bits == 8 and not reduced else ["int8"] * 4
    assert [o.placement for o in products] == placed, products
    assert all(o.reason.endswith("quantize with weight_bits=7") for o in products if o.placement == "float"), products
    found, true = artefact(*inputs), model(*inputs).detach()
    assert 10 * torch.log10(true.pow(2).sum() / (found - true).pow(2).sum()) > 25
    artefact.save(sys.argv[2] + ".here")
    assert torch.equal(X86Program.load(sys.argv[2] + ".here")(*inputs), found)
try:
    X86Program.load(sys.argv[2])
except ArtefactError as error:
    assert "no VNNI" in str(error), error
else:
    raise AssertionError("a program of full range was loaded")
"""


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_a_processor_without_vnni_gets_right_numbers_and_is_told_what_that_costs(
    instructions, lowered, tmp_path, monkeypatch
):
    monkeypatch.setattr(lowered[2], "pair", 2 * 255 * 127)
    path = lowered[2].save(tmp_path / "full_range.pt2")
    script = [sys.executable, "-c", WITHOUT_VNNI, str(Path(__file__).parent), str(path)]
    subprocess.run(script, check=True, env={"ONEDNN_MAX_CPU_ISA": instructions, "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize(("qmin", "qmax"), [(-128, 127), (-64, 63)])
def test_signed_activations_start_at_zero_when_they_become_unsigned(qmin, qmax):
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(8, 16)

        def forward(self, x):
            args = (0.05, 3, qmin, qmax, torch.int8)
            return self.layer(QD.dequantize_per_tensor(QD.quantize_per_tensor(x, *args), *args))

    torch.manual_seed(0)
    inputs = (torch.randn(4, 16),)
    graph = torch.export.export(Signed(), inputs).module()
    program = lower(graph, inputs)
    pair = 2 * (qmax - qmin) * int(graph.layer.values.abs().max())
    assert program.pair == (pair if qmax - qmin <= highest_integer() else 0)
    torch.testing.assert_close(program(*inputs), graph(*inputs).detach(), rtol=1e-4, atol=1e-4)


def test_autotune_says_which_layers_it_left_float_and_keeps_the_numbers(lowered):
    graph, inputs, _ = lowered
    program = lower(graph, inputs, dynamic_shapes=BATCH, autotune=True)
    layers = [o for o in program.ops if o.target in ("aten.conv2d.default", "aten.linear.default")]
    assert len(layers) == 3
    assert all(
        o.placement == "int8" or re.match("measured: the (float|bfloat16) kernel takes", o.reason) for o in layers
    )
    torch.testing.assert_close(program(*inputs), graph(*inputs), rtol=0.05, atol=0.05)
