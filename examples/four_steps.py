"""Export, prepare, calibrate, convert: the four steps on one page, and then the lowering.

Run it: python examples/four_steps.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import quantplug

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 10)
).eval()
batches = [torch.randn(4, 3, 16, 16) for _ in range(8)]
example_inputs = (batches[0],)

# 1. A graph of ATen operators.
exported = torch.export.export(model, example_inputs).module()

# 2. Observers in. `None` keeps a layer float; a typo in the module name would be an error.
quantizer = quantplug.get_quantizer("xnnpack").set_global("int8").set_module_name("5", None)
prepared = quantplug.prepare_pt2e(exported, quantizer)

# 3. Ranges from data.
quantplug.calibrate(prepared, batches, progress=False)

# 4. Integers: the reference model, with quantize and dequantize nodes, runs anywhere in PyTorch.
converted = quantplug.convert_pt2e(prepared)
print(quantplug.explain(converted))

# Then kernels: the program was loaded in the ExecuTorch runtime, run and compared before it came back.
program = quantizer.backend.lower(converted, example_inputs)
with tempfile.TemporaryDirectory() as folder:
    path = program.save(Path(folder) / "model.pte")
    print(f"{path.name}: {path.stat().st_size} bytes")
difference = (program(*example_inputs) - model(*example_inputs)).abs().max().item()
print(f"largest difference to float: {difference:.4f}")
