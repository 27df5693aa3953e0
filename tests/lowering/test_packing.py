"""Weights of the x86 lowering are packed in the layout that the kernels want: none is reordered when a program runs."""

import subprocess
import sys

import pytest

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
