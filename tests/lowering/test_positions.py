"""Positions and angles of rotary embeddings stay float: 8 bits of 500 positions are steps of a third of a turn."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.openvino import INTEGER_PRODUCTS, OPENVINO


class Rotary(nn.Module):
    """Turns pairs of a linear layer's numbers by angles of run time, as a decoder with a cache does."""

    def __init__(self, product):
        super().__init__()
        self.product, self.linear = product, nn.Linear(16, 16)
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(0, 16, 2) / 16))

    def forward(self, x, start):
        angles = self.product(torch.arange(x.shape[1]) + start, self.frequencies)
        angles = torch.cat([angles, angles], -1)
        return self.linear(x) * angles.cos() + x * angles.sin()


class ByPosition(nn.Module):
    """A weight for each position, as those of decaying memories are."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, start):
        places = (torch.arange(x.shape[1]) + start).float()
        return self.other(self.one(x) * (places / 400)[:, None])


class Products(BackendQuantizer):
    """OpenVINO with products of activations in integers."""

    backend = derive(OPENVINO, "openvino_products", add=INTEGER_PRODUCTS)


def bmm(places, frequencies):
    return torch.bmm(places.float()[None, :, None], frequencies[None, None])


def matmul(places, frequencies):
    columns = frequencies[None, :, None].expand(1, -1, 1).float()
    return (columns @ places[None, None].float()).transpose(1, 2)


def mul(places, frequencies):
    return (places.float()[:, None] * frequencies)[None]


def layer(places, frequencies):
    return nn.functional.linear(places.float()[:, None], frequencies[:, None])[None]


def in_front(places, frequencies):
    return (frequencies[:, None] @ places.float()[None]).T[None]


CALLS = [
    (torch.randn(2, 120, 16, generator=torch.manual_seed(start)), torch.tensor(start)) for start in (0, 150, 300, 380)
]


def quantized(model, backend, quantizer=None):
    torch.manual_seed(0)
    return quantplug.quantize(model.eval(), CALLS[0], backend, CALLS, quantizer=quantizer, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "product"),
    [
        *((backend, product) for backend in ("x86", "xnnpack") for product in (bmm, matmul, mul, layer, in_front)),
        *(("openvino", matmul), ("openvino", mul), ("cortex_m", layer), ("products", bmm), ("products", matmul)),
    ],
)
def test_angles_of_run_time_stay_float(backend, product):
    pytest.importorskip("openvino")
    model, quantizer = Rotary(product), Products() if backend == "products" else None
    artefact = quantized(model, "openvino" if quantizer else backend, quantizer)
    taken = {row.operator for row in artefact.report.rows if row.quantized}
    assert "linear" in taken
    assert not taken & {"bmm", "matmul", "cat", "reshape", "transpose.int"}
    for call in CALLS:
        assert sqnr(artefact.reference(*call), model(*call)) > 30
        assert sqnr(artefact(*call), artefact.reference(*call)) > 30


@pytest.mark.slow
def test_the_report_says_so():
    reason = quantized(Rotary(mul), "xnnpack").report.row("mul").reason
    assert reason.endswith("'mul' (aten.mul.Tensor) is an angle of sin or cos, which 8 bits do not hold")


@pytest.mark.slow
def test_operators_that_scale_positions_stay_float():
    model = ByPosition()
    artefact = quantized(model, "xnnpack")
    quantized_operators = {row.operator: row.quantized for row in artefact.report.rows}
    assert quantized_operators["linear"]
    assert "is made from integers alone, as positions are" in artefact.report.row("mul").reason


@pytest.mark.slow
def test_images_of_integers_are_no_positions():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    class OfBytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, image):
            return self.net(image.float() * 0.01)

    for kind in (torch.uint8, torch.int64):
        images = [(torch.randint(0, 256, (2, 3, 8, 8), dtype=kind),) for _ in range(3)]
        artefact = quantplug.quantize(OfBytes().eval(), images[0], "xnnpack", images, progress=False)
        assert all(row.quantized for row in artefact.report.rows if row.operator.startswith(("conv", "linear")))


@pytest.mark.slow
def test_a_scope_that_names_the_operator_is_obeyed():
    quantizer = quantplug.get_quantizer("xnnpack")
    quantizer.set_global("int8").set_operator_type("mul", "int8")
    assert quantized(ByPosition(), "xnnpack", quantizer).report.row("mul").quantized
