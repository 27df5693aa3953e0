"""What the tests of both engines of ONNX files begin with: q/dq graphs, their files, and a model with a state."""

import onnx
import torch
from torch import nn

import quantplug

BATCH = ({0: torch.export.Dim("batch", min=1, max=16)},)


class Counter(nn.Module):
    """Writes a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 4), nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1.0)
        return self.layer(x) * self.seen


def quantized(model, inputs, config="int8", *, backend, strict=False, **sizes):
    exported = torch.export.export(model.eval(), inputs, strict=strict, **sizes).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer(backend).set_global(config))
    with torch.no_grad():
        prepared(*inputs)
    return quantplug.convert_pt2e(prepared)


def written(program, folder):
    return onnx.load(program.save(folder / "model.onnx")).graph
