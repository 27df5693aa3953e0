"""One model for several backends: a table of words, an encoder on XNNPACK, a head on another target's kernels.

Run it: python examples/mixed_backends.py
"""

import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import quantplug
from quantplug import Region

torch.manual_seed(0)


class Tagger(nn.Module):
    """A table of words, an encoder of each word, and a head over their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 32)
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Scores the sentences of a batch, given as indices of words."""
        scores: torch.Tensor = self.head(self.encoder(self.words(indices)).mean(1))
        return scores


model = Tagger().eval()
batches = [torch.randint(0, 1000, (4, 12)) for _ in range(8)]
encoder, head = Region(module="encoder"), Region(module="head")

# The greater precedence wins where regions overlap; the order of the calls means nothing.
quantizer = (
    quantplug.ComposableQuantizer()
    .add(quantplug.EmbeddingQuantizer(), precedence=2)
    .add(quantplug.get_quantizer("xnnpack").set_global("int8_dynamic"), encoder, precedence=1)
    .add(quantplug.get_quantizer("x86"), head, precedence=1)
)
exported = torch.export.export(model, (batches[0],)).module()
prepared = quantplug.prepare_pt2e(exported, quantizer)
quantplug.calibrate(prepared, batches, progress=False)
converted = quantplug.convert_pt2e(prepared)

# Who took which operator, and where numbers pass from one to another.
report = quantplug.explain(converted)
print(report)
for node, decibels in quantplug.measure_boundaries(converted, (batches[0],)).items():
    print(f"{node} keeps {decibels:.1f} dB")

# One ExecuTorch program: the encoder on XNNPACK, what `accepts` refuses on portable kernels.
program = quantplug.get_quantizer("xnnpack").backend.lower(
    converted, (batches[0],), accepts=lambda node: node not in head
)
with tempfile.TemporaryDirectory() as folder:
    size = program.save(Path(folder) / "tagger.pte").stat().st_size
print(f"{size} bytes, {dict(Counter(op.placement for op in program.ops))}")
print(f"largest difference to float: {(program(batches[0]) - model(batches[0])).abs().max().item():.4f}")
