"""Forms of models that ExecuTorch's passes for TOSA stumble over, in both configs, element by element."""

import pytest
import torch
import torch.nn.functional as F
from models import Function
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr

pytest.importorskip("tosa_reference_model")
pytest.importorskip("ethosu.vela")

MAP = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(5))
ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(6))


def drawn(*sizes):
    return nn.Parameter(torch.randn(*sizes, generator=torch.Generator().manual_seed(7)))


def lowered(model, x, config, target="tosa"):
    torch.manual_seed(0)
    return quantplug.quantize(model.eval(), (x,), "arm", [x], config, progress=False, target=target)


def require_equal(artefact, x):
    """Makes sure that reference model and emulation yield the same numbers, within the calibrated range and beyond."""
    emulated = quantplug.emulate(artefact.reference, (x,), "tosa")
    for factor in (1.0, 0.9, 3.0):
        for given in (factor * x, factor * x.flip(-1)):
            assert torch.equal(artefact(given), emulated(given))
            assert sqnr(artefact(given), artefact.reference(given)) > 30


def products(combine):
    """Returns a model of what combines three products of one map."""
    torch.manual_seed(0)
    first, second, third = (nn.Conv2d(4, 4, 1) for _ in range(3))
    return Function(lambda m, x: combine(m.a(x), m.b(x), m.c(x)), a=first, b=second, c=third)


def again(a, b, c):
    """Sums whose second operand has the largest scale both times."""
    y = a + b
    return (y + c) + y


def of_one_scale(m, x):
    """A sum that has the range of its input, since nothing is added at its ends, and another behind it."""
    hill = F.relu(0.5 - x * x)
    return (x + hill) + hill


SUMS = {
    "again": products(again),
    "of one scale": Function(of_one_scale),
    "turned": products(lambda a, b, c: (a + b).transpose(1, 2) + c.transpose(1, 2)),
    "flat": products(lambda a, b, c: (a + b).flatten(1) + c.flatten(1)),
    "chain of products": products(lambda a, b, c: (a * b) * c - a),
    "largest": products(lambda a, b, c: torch.maximum(a + b, c) + c),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "config"),
    sorted(((name, config) for name in SUMS for config in ("16a8w", "int8")), key=lambda each: each[1] == "int8"),
)
def test_sums_behind_each_other_round_as_the_graph_does(name, config):
    artefact = lowered(SUMS[name], MAP, config)
    require_equal(artefact, MAP)


PRODUCTS = {
    "by w": (Function(lambda m, x: x @ m.w, w=drawn(4, 6)), "int8"),
    "by w turned": (Function(lambda m, x: F.relu(x @ m.w.t()) @ m.w, w=drawn(6, 4)), "int8"),
    "mm by w turned": (Function(lambda m, x: torch.mm(x, m.w.T), w=drawn(6, 4)), "int8"),
    "by a column": (Function(lambda m, x: m.layer(x) @ m.w, layer=nn.Linear(4, 4), w=drawn(4)), "portable"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("config", ["16a8w", "int8"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_constants_have_weights_of_8_bits(name, config):
    model, placement = PRODUCTS[name]
    artefact = lowered(model, ROWS, config)
    last = [op for op in artefact.program.ops if op.target in ("aten.matmul.default", "aten.linear.default")][-1]
    assert last.placement == placement
    if placement == "portable" and config == "16a8w":
        assert "a constant of 16 bits" in last.reason
    assert sqnr(artefact(2 * ROWS), artefact.reference(2 * ROWS)) > 40


SAMPLES = {
    "conv2d": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)), MAP[0, :3]),
    "conv1d": (nn.Sequential(nn.Conv1d(4, 4, 2), nn.ReLU(), nn.Conv1d(4, 2, 1)), MAP[0, :, 0]),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2), nn.ReLU(), nn.AvgPool2d(2)), MAP[0]),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SAMPLES)
def test_one_sample_without_a_batch_runs_on_integers(name):
    model, x = SAMPLES[name]
    artefact = lowered(model, x, "int8")
    assert "int8" in {op.placement for op in artefact.program.ops if "conv" in op.target}
    require_equal(artefact, x)


PADS = {
    "reflect": nn.ReflectionPad2d(2),
    "replicate": nn.ReplicationPad2d((1, 2, 0, 1)),
    "circular": nn.CircularPad2d(1),
    "a number": nn.ConstantPad2d(1, 0.5),
    "zeros": nn.ZeroPad2d(1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PADS)
def test_padding_of_any_mode_is_in_the_file(name):
    model = nn.Sequential(PADS[name], nn.Conv2d(4, 4, 3), PADS[name], nn.Conv2d(4, 2, 3))
    require_equal(lowered(model, MAP, "int8", "ethos-u85-256"), MAP)


class Masked(nn.Module):
    """Attention in which a mask hides what comes later."""

    def __init__(self, way):
        super().__init__()
        self.joined, self.last, self.way = nn.Linear(16, 48), nn.Linear(16, 16), way
        seen = torch.ones(6, 6, dtype=torch.bool).tril()
        self.seen, self.slopes = nn.Buffer(seen), nn.Buffer(torch.where(seen, -0.2 * torch.arange(6.0), -1e9))

    def forward(self, x):
        query, key, value = self.joined(x).view(-1, 6, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "by hand":
            scores = (query @ key.transpose(-2, -1) / 2).masked_fill(~self.seen, -1e4)
            found = scores.softmax(-1) @ value
        elif self.way == "causal":
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=getattr(self, self.way))
        return x + self.last(found.transpose(1, 2).reshape(-1, 6, 16))


@pytest.mark.few(2)
@pytest.mark.parametrize("config", ["int8", "16a8w"])
@pytest.mark.parametrize("way", ["causal", "by hand", "seen", "slopes"])
def test_attention_that_a_mask_hides_a_part_of(way, config):
    model, x = Masked(way), torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0))
    artefact = lowered(model, x, config)
    assert sqnr(artefact(x), model(x)) > {"int8": 30, "16a8w": 50}[config]
    require_equal(artefact, x)
    with torch.no_grad():  # what comes later changes nothing of what was before
        later = torch.cat([x[:, :5], -x[:, 5:]], 1)
        assert torch.equal(artefact(later)[:, :5], artefact(x)[:, :5])


def test_a_mask_of_run_time_leaves_the_softmax_float():
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    model = Function(lambda m, x, hidden: m.layer(x, x, x, key_padding_mask=hidden)[0], layer=layer)
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    hidden[0, 3:] = True
    torch.manual_seed(0)
    artefact = quantplug.quantize(model.eval(), (x, hidden), "arm", [(x, hidden)], progress=False, target="tosa")
    (softmax,) = [op for op in artefact.program.ops if "softmax" in op.target]
    assert softmax.placement == "portable"
    for given in (hidden, ~hidden.flip(1)):
        assert sqnr(artefact(x, given), artefact.reference(x, given)) > 40
    assert sqnr(artefact(x, hidden), model(x, hidden)) > 25
