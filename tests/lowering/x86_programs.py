"""Programs of the x86 backend, and packages in a process that does not know quantplug."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import quantplug

ALONE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([run(*inputs) for inputs in torch.load(sys.argv[2])], sys.argv[2])
assert not [name for name in sys.modules if name.startswith("quantplug")]
"""


def quantized(model, *inputs, config=None, strict=False, types=()):
    """Quantizes for x86, calibrated on the inputs; returns the q/dq graph and the program."""
    torch.manual_seed(0)
    quantizer = quantplug.get_quantizer("x86").set_global(config or "int8")
    for kind, its_config in types:
        quantizer.set_module_type(kind, its_config)
    exported = torch.export.export(model.eval(), inputs, strict=strict).module()
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    with torch.no_grad():
        prepared(*inputs)
    reference = quantplug.convert_pt2e(prepared)
    return reference, quantizer.backend.lower(reference, inputs)


def alone(package: Path, *inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Runs a package on inputs in a process without quantplug; returns its outputs."""
    samples = package.with_suffix(".samples")
    torch.save(inputs, samples)
    script = [sys.executable, "-c", ALONE, str(package), str(samples)]
    subprocess.run(script, check=True, cwd=package.parent)
    return torch.load(samples)
