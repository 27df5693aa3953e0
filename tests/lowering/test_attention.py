"""Attention inside of XNNPACK's delegates: masks of run time, heads in groups, rotary positions, open lengths."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr

WIDTH, HEADS, LENGTH = 32, 4, 6


class Attention(nn.Module):
    """A layer of attention between linear layers.

    Args:
        grouped: how keys and values of fewer heads are shared: "", "enabled", "expanded" or "interleaved".
        turned: whether queries and keys are turned by their positions.
        options: of `scaled_dot_product_attention`.
    """

    def __init__(self, grouped="", turned=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.grouped, self.turned, self.options = grouped, turned, options
        self.held = HEADS // 2 if grouped else HEADS
        size = WIDTH // HEADS
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, size * self.held)
        self.values, self.end = nn.Linear(WIDTH, size * self.held), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        queries, keys, values = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.queries, HEADS), (self.keys, self.held), (self.values, self.held))
        )
        if self.turned:
            queries, keys = turned(queries), turned(keys)
        options = dict(self.options)
        if self.grouped == "enabled":
            options["enable_gqa"] = True
        elif self.grouped == "expanded":
            keys, values = (repeated(part) for part in (keys, values))
        elif self.grouped == "interleaved":
            keys, values = (part.repeat_interleave(2, dim=1) for part in (keys, values))
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, **options)
        return self.end(found.transpose(1, 2).flatten(2))


def repeated(part):
    """As transformers writes it."""
    batch, heads, length, size = part.shape
    return part[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, heads * 2, length, size)


def turned(part):
    """As transformers writes rotary positions."""
    size = part.shape[-1]
    angles = torch.arange(part.shape[-2])[:, None] / 10.0 ** (torch.arange(0, size, 2) / size)
    angles = torch.cat((angles, angles), dim=-1)
    first, second = part[..., : size // 2], part[..., size // 2 :]
    return part * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Layers(nn.Module):
    """Two layers that see the same."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention(grouped="enabled")

    def forward(self, x, mask):
        return self.second(self.first(x, mask), mask)


def sequences(count, length=LENGTH):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, length, WIDTH, generator=generator) for _ in range(count)]


def seen(shape, seed):
    """What sees something in every row, a mask of bools."""
    found = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    found[..., 0] = True
    return found


def added(shape, seed):
    """A bias with holes."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise.masked_fill(~seen(shape, seed), -math.inf)


def lowered(model, batches, **options):
    """Calibration takes finite numbers alone."""
    finite = [tuple(None if part is None else _finite(part) for part in batch) for batch in batches]
    return quantplug.quantize(model.eval(), batches[0], "xnnpack", finite, progress=False, **options)


def _finite(part):
    return part.clamp(min=-100.0) if part.is_floating_point() else part


def true(model, given):
    with torch.no_grad():
        return model(*given)


def holds(artefact, model, batches, bound=20):
    """Two calls with different inputs and the first again, against the file's graph and the float model."""
    for given in (*batches[:2], batches[0]):
        found = artefact(*given)
        assert sqnr(found, artefact.reference(*given)) > 30
        assert sqnr(found, true(model, given)) > bound


SHAPES = {"all alike": (LENGTH, LENGTH), "each text": (2, 1, LENGTH, LENGTH), "each head": (2, HEADS, LENGTH, LENGTH)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [seen, added])
def test_a_mask_of_run_time(make, shape):
    model = Attention(scale=0.3)
    batches = [(x, make(SHAPES[shape], seed)) for seed, x in enumerate(sequences(3))]
    artefact = lowered(model, batches)
    holds(artefact, model, batches)
    # What a mask says is found once, outside; all else is inside.
    assert artefact.program.counts.delegates <= 2
    assert artefact.program.counts.portable <= 8
    [row] = [row for row in artefact.program.ops if "attention" in row.target]
    assert row.placement == "float"


@pytest.mark.slow
@pytest.mark.parametrize("make", [seen, added])
def test_a_row_that_sees_nothing_is_nothing(make):
    model = Attention()
    blind = make((2, 1, LENGTH, LENGTH), 5)
    blind[1, 0, 2:4] = False if blind.dtype == torch.bool else -math.inf
    batches = [(x, make((2, 1, LENGTH, LENGTH), seed)) for seed, x in enumerate(sequences(3))]
    artefact = lowered(model, batches)
    given = (batches[0][0], blind)
    found, wanted = artefact(*given), true(model, given)
    assert torch.isfinite(found).all()
    assert sqnr(found, wanted) > 20
    # All that is left of such a row is the last layer's bias.
    assert sqnr(found[1, 2:4], model.end.bias.detach().expand(2, WIDTH)) > 25
    holds(artefact, model, batches)


@pytest.mark.slow
def test_layers_share_a_mask():
    model = Layers()
    batches = [(x, seen((2, 1, LENGTH, LENGTH), seed)) for seed, x in enumerate(sequences(3))]
    artefact = lowered(model, batches)
    holds(artefact, model, batches, bound=15)
    assert artefact.program.counts.delegates <= 2
    assert artefact.program.counts.portable <= 8


@pytest.mark.slow
@pytest.mark.parametrize("grouped", ["enabled", "expanded", "interleaved"])
def test_heads_in_groups(grouped):
    model = Attention(grouped, is_causal=True)
    batches = [(x,) for x in sequences(3)]
    artefact = lowered(model, batches)
    holds(artefact, model, batches)
    assert (artefact.program.counts.delegates, artefact.program.counts.portable) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", ["", "enabled", "expanded"])
def test_rotary_positions_of_any_length(grouped):
    model = Attention(grouped, turned=True)
    batches = [(x,) for length in (5, 9) for x in sequences(2, length)]
    shapes = {"x": {1: torch.export.Dim("length", min=2, max=16)}, "mask": None}
    artefact = lowered(model, [(x, None) for (x,) in batches], config="int8_dynamic", dynamic_shapes=shapes)
    for given in (batches[0], batches[3], batches[0]):
        found = artefact(*given, None)
        assert sqnr(found, true(model, given)) > 20
    # Positions are numbered outside.
    assert artefact.program.counts.delegates <= 2
    assert artefact.program.counts.portable <= 8


@pytest.mark.slow
def test_half_precision_runs():
    model = Attention(turned=True).eval()
    x, mask = sequences(1)[0], seen((2, 1, LENGTH, LENGTH), 3)
    artefact = quantplug.quantize(model, (x, mask), "xnnpack", config="float16", progress=False)
    for _ in range(2):
        assert sqnr(artefact(x, mask), true(model, (x, mask))) > 40
