"""Convolutions whose scales are found at run time, behind each other and beside what is no convolution."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr


class Readers(nn.Module):
    """Several convolutions of one tensor."""

    def __init__(self, *readers, behind=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.behind = behind or nn.Identity()
        self.readers = nn.ModuleList(make() for make in readers)

    def forward(self, x):
        y = self.behind(self.first(x))
        return self.last(sum(reader(y) for reader in self.readers))


def windows():
    return nn.Conv2d(16, 16, 3, padding=1)


def pixels():
    return nn.Conv2d(16, 16, 1)


class Turned(nn.Module):
    """A layer over tokens, between images."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


def counts(artefact):
    return artefact.program.counts


NETS = {
    "window and pixels": lambda: Readers(windows, pixels),
    "pixels first": lambda: Readers(pixels, windows, pixels),
    "two windows": lambda: Readers(windows, lambda: nn.Conv2d(16, 16, 5, padding=2)),
    "two of pixels": lambda: Readers(pixels, pixels),
    "strides": lambda: Readers(lambda: nn.Conv2d(16, 16, 3, 2, 1), lambda: nn.Conv2d(16, 16, 1, 2)),
    "behind a group norm": lambda: Readers(windows, pixels, behind=nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU())),
    "behind tokens": lambda: Readers(windows, pixels, behind=Turned()),
    "beside itself": lambda: Readers(windows, nn.Identity, behind=Turned()),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NETS)
def test_readers_of_one_tensor_read_what_was_quantized_for_them(name):
    """XNNPACK's kernels over windows and of pixels do not read the same integers: what shared them kept 10 dB."""
    model = NETS[name]().eval()
    batches = [(torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", config="int8_dynamic", progress=False)
    found = counts(artefact)
    assert (found.delegates, found.portable) == (1, 0)
    assert found.int8 >= 2 + sum(isinstance(reader, nn.Conv2d) for reader in model.readers)
    for [x] in (*batches[:2], batches[0]):
        # Single integers at ties in the first layer are what tells them apart.
        assert sqnr(artefact(x), artefact.reference(x)) > 28
        assert sqnr(artefact(x), model(x)) > 28
