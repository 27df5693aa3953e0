"""From a module to two real runtimes in one call each.

Run it: python examples/one_call.py
"""

import torch
from torch import nn

import quantplug

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
batches = [torch.randn(8, 64) for _ in range(8)]
example_inputs = (batches[0],)

for backend in ("xnnpack", "x86"):
    artefact = quantplug.quantize(model, example_inputs, backend=backend, calibration=batches, progress=False)
    error = (artefact(*example_inputs) - model(*example_inputs)).abs().max().item()
    print(f"{backend}: {artefact.report.summary()} {artefact.nbytes} bytes, largest difference to float {error:.4f}")

# Dynamic: activation scales are computed at run time, so no data is needed.
dynamic = quantplug.quantize(model, example_inputs, backend="xnnpack", config="int8_dynamic")
print(dynamic.report)
