"""What the x86 lowering does when a program is packed: weights in the kernels' layout, conversions spelled out."""

import subprocess
import sys

import pytest
import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators of quantized_decomposed)
from torch import fx, nn

from quantplug.lowering.x86.running.eager_conversions import spell_out

QD = torch.ops.quantized_decomposed
RANGES = [(torch.uint8, 0, 255), (torch.uint8, 0, 127), (torch.int8, -128, 127), (torch.int8, -127, 127)]

SCRIPT = """
import torch
from torch import nn
import quantplug
from quantplug.lowering.x86 import X86Program, lower

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(96, 576, 1), nn.ReLU(), nn.Conv2d(576, 576, 3, padding=1, groups=576), nn.ReLU(),
    nn.Conv2d(576, 512, 1), nn.ReLU(), nn.Conv2d(512, 512, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(512 * 49, 1024),
).eval()
inputs = (torch.randn({batch}, 96, 7, 7),)
shapes = ({{0: torch.export.Dim("batch", min=1, max=16)}},) if {dynamic} else None
exported = torch.export.export(model, inputs, dynamic_shapes=shapes).module()
prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
with torch.no_grad():
    prepared(*inputs)
    program = lower(quantplug.convert_pt2e(prepared), inputs, dynamic_shapes=shapes)
    program.save("{path}")
    for each in (program, X86Program.load("{path}")):
        each(*inputs)
        print("RUN", flush=True)
        each(*inputs)
        print("PACK", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "dynamic"), [(1, False), (4, True)])
def test_no_weight_is_reordered_when_a_program_runs(tmp_path, batch, dynamic):
    script = SCRIPT.format(batch=batch, dynamic=dynamic, path=tmp_path / "program.pt2")
    environment = {"ONEDNN_VERBOSE": "1", "PATH": ""}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    ).stdout
    runs = [part.split("PACK")[0] for part in found.split("RUN")[1:]]
    assert len(runs) == 2
    for run in runs:
        assert run.count(",exec,cpu,convolution,") == 4
        assert ",exec,cpu,reorder," not in run


class Quantize(nn.Module):
    def __init__(self, *params):
        super().__init__()
        self.params = params

    def forward(self, x):
        return QD.quantize_per_tensor.default(x, *self.params)


@pytest.mark.parametrize(("dtype", "qmin", "qmax"), RANGES)
def test_a_spelled_out_quantization_yields_the_same_integers(dtype, qmin, qmax):
    extremes = torch.tensor([float("inf"), -float("inf"), 1e30, -1e30])
    ties = torch.arange(-600, 600) * 0.025
    x = torch.cat([torch.randn(1000) * 5, extremes, ties])
    for zero_point in (qmin, 3, (qmin + qmax + 1) // 2, qmax):
        reference = Quantize(0.05, zero_point, qmin, qmax, dtype)
        module = fx.symbolic_trace(reference)
        for node in module.graph.nodes:
            node.meta["val"] = torch.empty(1, dtype=torch.float32 if node.op == "placeholder" else dtype)
        spell_out(module.graph)
        module.recompile()
        assert not any("quantized_decomposed" in str(node.target) for node in module.graph.nodes)
        assert module(x).dtype == dtype
        assert torch.equal(module(x), reference(x))
