"""Passes that are left out because they find nothing: files are the same, byte for byte, as with all of them."""

import pytest
import torch
from language_models import causal
from test_reasons_xnnpack import of_the_benchmark, quantized
from torch import fx, nn
from torch.nn import functional as F

import quantplug
from quantplug.lowering.xnnpack.serializer import passes


class Kinds(nn.Module):
    """What single passes look for."""

    def __init__(self):
        super().__init__()
        self.rows, self.image = nn.Conv1d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.slope, self.norm, self.last = nn.PReLU(8), nn.BatchNorm2d(8), nn.Linear(8, 8)

    def forward(self, x):
        x = F.relu(self.rows(x)).reshape(1, 8, 4, 4)
        y = self.slope(self.norm(F.pad(self.image(x), (1, 1, 1, 1))))
        y = F.max_pool2d(torch.cat([y, y + 1, y, y, y, y], 1), 2)
        y = F.interpolate(y, scale_factor=2.0, mode="bilinear")
        y = F.scaled_dot_product_attention(y, y, y).mean((2, 3))[:, :8]
        return self.last(y).clamp(-1, 1)


def made(name):
    torch.manual_seed(0)
    if name == "language model":
        model = causal(num_hidden_layers=1)
        return quantplug.quantize_language_model(model, "xnnpack", context=32, progress=False).program
    if name == "kinds":
        return quantized(Kinds().eval(), (torch.randn(1, 4, 18),)).program
    model, inputs = of_the_benchmark(name)
    return quantized(model, inputs).program


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kinds", *(pytest.param(name, marks=pytest.mark.slow) for name in ("language model", "kws_dscnn", "bert"))]
)
def test_a_file_is_the_same_without_passes_that_find_nothing(name, monkeypatch, tmp_path):
    ran: list[tuple[str, bool]] = []

    def noted(kind: str, graph: fx.Graph) -> bool:
        ran.append((kind, has_work(kind, graph)))
        return ran[-1][1]

    has_work = passes.has_work
    monkeypatch.setattr(passes, "has_work", noted)
    found = made(name).save(tmp_path / "without.pte").read_bytes()
    monkeypatch.setattr(passes, "has_work", lambda *_: True)
    assert found == made(name).save(tmp_path / "all.pte").read_bytes()
    left_out = [kind for kind, works in ran if not works]
    assert len(left_out) > len(ran) / 3


def test_executorch_has_its_passes_again():
    from executorch.backends.xnnpack import xnnpack_preprocess

    stock = xnnpack_preprocess.XNNPACKPassManager
    with passes.idle_passes_left_out():
        assert xnnpack_preprocess.XNNPACKPassManager is not stock
    assert xnnpack_preprocess.XNNPACKPassManager is stock
    # Every pass that is named is one of ExecuTorch's.
    assert {*passes._LOOKS_FOR} <= {one.__name__ for one in stock(None).passes}
