"""Finding a bad layer: a network for digits that int8 spoils, what an inspection says of it, and the remedy.

The network was calibrated with pictures of a camera in the dark. The figures of docs/inspect.md are what this prints on
one thread; it writes `before.html` and `after.html` to a folder for temporary files.

Run it: OMP_NUM_THREADS=1 python examples/find_a_bad_layer.py
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import quantplug

bundled = load_digits()
order = torch.randperm(len(bundled.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(bundled.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(bundled.target)[order]
train, test = slice(0, 1400), slice(1400, None)
out = Path(tempfile.mkdtemp())

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(8):
    for chosen in torch.randperm(1400).split(50):
        loss = nn.functional.cross_entropy(model(images[train][chosen]), labels[train][chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
model.eval()

dim = (0.15 * images[train][:400]).split(50)
every = images[train][:400].split(50)
scored = list(zip(images[test].split(50), labels[test].split(50), strict=True))
looked_at = [images[test][:50]]

spoiled = quantplug.quantize(model, (dim[0],), "x86", dim, progress=False)
print(quantplug.evaluate(model, spoiled, scored))
before = quantplug.inspect(model, spoiled, looked_at)
print(before)
(out / "before.html").write_text(before.html("Calibrated in the dark"), "utf-8")

mended = quantplug.quantize(model, (every[0],), "x86", every, progress=False)
print(quantplug.evaluate(model, mended, scored))
after = quantplug.inspect(model, mended, looked_at)
print(after)
(out / "after.html").write_text(after.html("Calibrated by day", before=before), "utf-8")
print(f"Wrote {out / 'before.html'} and {out / 'after.html'}.")
