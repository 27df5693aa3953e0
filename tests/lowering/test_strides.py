"""as_strided reads memory: what it finds there must not depend on how a kernel lays its result out."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.core.specs.levels import sqnr

SHAPE = (2, 4, 6, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(6, 6)


class Groups(Model):
    """The channels of a convolution in another order."""

    def forward(self, x):
        y = self.conv(x).as_strided((2, 4, 2, 6, 6), (288, 36, 144, 6, 1))
        return self.linear(y.reshape(2, 8, 6, 6))


class Windows(Model):
    """Overlapping windows over a transposed tensor, whose memory is that of the tensor before."""

    def forward(self, x):
        return self.linear(torch.as_strided(self.conv(x).transpose(2, 3), (2, 8, 5, 2, 6), (288, 36, 6, 6, 1)))


class Offset(Model):
    """All but the first row of each channel of the input, by numbers."""

    def forward(self, x):
        return self.linear(x.as_strided((2, 4, 5, 6), (144, 36, 6, 1), 6))


class Part(Model):
    """From where the second image begins."""

    def forward(self, x):
        return self.linear(self.conv(x)[1].as_strided((4, 6), (72, 1)))


class Beyond(Model):
    """Begins at the second image and reads the first one's numbers."""

    def forward(self, x):
        return self.linear(self.conv(x)[1].as_strided((8, 6), (36, 1), 0))


class Sparse(Model):
    """Every second column, by the numbers of all of them."""

    def forward(self, x):
        return self.linear(self.conv(x)[..., ::2].as_strided((8, 6), (36, 1)))


class Written(Model):
    """Writes into a transposed tensor's memory."""

    def forward(self, x):
        y = self.conv(self.linear(x)).transpose(2, 3)
        y.as_strided((2, 8, 6), (288, 36, 1)).mul_(2)
        return y * 2


def quantized(model, backend):
    torch.manual_seed(0)
    module, data = model().eval(), [torch.randn(SHAPE) for _ in range(4)]
    program = quantplug.quantize(module, (data[0],), backend, data, "int8", progress=False)
    return module, data, program


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
@pytest.mark.parametrize("model", [Groups, Windows, Offset, Part])
def test_strides_are_those_of_the_exported_program(model, backend):
    module, data, program = quantized(model, backend)
    for x in data:
        assert sqnr(module(x), program.reference(x)) > 20
        assert sqnr(module(x), program(x)) > 20


@pytest.mark.few(4)
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Beyond, "the others are another tensor's"),
        (Sparse, "does not fix; take the part"),
        (Written, "does not fix; take the part"),
    ],
)
def test_memory_of_other_tensors_is_refused(model, words, backend):
    with pytest.raises(LoweringError, match=words):
        quantized(model, backend)


def test_open_sizes_are_read_where_the_memory_is_plain():
    class Rows(Model):
        def forward(self, x):
            return self.linear(self.conv(x).as_strided((x.shape[0], 8, 6), (288, 36, 1)))

    module, x = Rows().eval(), torch.randn(SHAPE)
    shapes = ({0: torch.export.Dim("batch", min=2, max=16)},)
    program = quantplug.quantize(module, (x,), "x86", [x], "int8", dynamic_shapes=shapes, progress=False)
    for batch in (2, 7):
        y = x.repeat(4, 1, 1, 1)[:batch]
        assert sqnr(module(y), program(y)) > 20
