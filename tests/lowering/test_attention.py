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


class ByHand(nn.Module):
    """Attention as models write it themselves, with a function of the scores and of what they are given."""

    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.values, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, hidden):
        queries, keys, values = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.queries, self.keys, self.values)
        )
        scores = self.masked(queries @ keys.transpose(2, 3) / math.sqrt(WIDTH // HEADS), hidden[:, None, None])
        return self.end((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
LEAST = torch.finfo(torch.float32).min
# How scores are hidden, and how many operators outside of the delegate that takes.
HIDDEN = {
    "minus infinity": (lambda scores, hidden: scores.masked_fill(hidden, -math.inf), 3),
    "a large number": (lambda scores, hidden: scores.masked_fill(hidden, -1e9), 5),
    "the least number": (lambda scores, hidden: torch.where(hidden, LEAST, scores), 5),
    "shown": (lambda scores, hidden: torch.where(~hidden, scores, -1e4), 5),
    "later ones": (lambda scores, hidden: scores.masked_fill(LATER, -math.inf), 0),
    "later ones by a number": (lambda scores, hidden: scores.masked_fill(LATER, -1e9), 0),
    "both": (lambda scores, hidden: scores.masked_fill(LATER, -math.inf).masked_fill(hidden, -math.inf), 3),
    "added": (lambda scores, hidden: scores + hidden.float() * -1e4, 4),
}


def padding(seed):
    """Texts of which the last tokens are hidden."""
    lengths = torch.randint(1, LENGTH + 1, (2, 1), generator=torch.Generator().manual_seed(seed))
    return torch.arange(LENGTH)[None] >= lengths


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_scores_hidden_by_hand_stay_in_one_delegate(name, config):
    masked, outside = HIDDEN[name]
    model = ByHand(masked)
    batches = [(x, padding(seed)) for seed, x in enumerate(sequences(4))]
    artefact = lowered(model, batches, config=config)
    holds(artefact, model, batches)
    assert artefact.program.counts.delegates == 1
    assert artefact.program.counts.portable <= outside


@pytest.mark.slow
def test_infinity_below_a_large_number_is_left_as_it_is():
    """Minus infinity times nothing is no number: the second mask cannot be a product."""
    model = ByHand(lambda scores, hidden: scores.masked_fill(LATER, -math.inf).masked_fill(hidden, -1e9))
    batches = [(x, padding(seed)) for seed, x in enumerate(sequences(4))]
    artefact = lowered(model, batches)
    holds(artefact, model, batches)
    everything = torch.ones(2, LENGTH, dtype=torch.bool)
    x = batches[0][0]
    assert sqnr(artefact(x, everything), true(model, (x, everything))) > 20


@pytest.mark.slow
def test_rows_of_which_all_is_hidden_are_means():
    model = ByHand(lambda scores, hidden: scores.masked_fill(hidden, -1e9))
    batches = [(x, padding(seed)) for seed, x in enumerate(sequences(4))]
    artefact = lowered(model, batches)
    everything = torch.ones(2, LENGTH, dtype=torch.bool)
    for x, _ in batches[:2]:
        assert sqnr(artefact(x, everything), true(model, (x, everything))) > 20


class Padded(nn.Module):
    """torch's own encoder, whose layers write views of the mask each for itself."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x, hidden):
        return self.encoder(x, src_key_padding_mask=hidden)


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", [3, 1])
def test_padding_of_torchs_encoder_is_computed_once(layers):
    model = Padded(layers)
    batches = [(x, padding(seed)) for seed, x in enumerate(sequences(4))]
    artefact = lowered(model, batches)
    for given in (*batches[:2], batches[0]):
        assert sqnr(artefact(*given), artefact.reference(*given)) > 30
        shown = ~given[1]
        assert sqnr(artefact(*given)[shown], true(model, given)[shown]) > 15
    assert artefact.program.counts.delegates == 1
    assert artefact.program.counts.portable <= 10, "however many layers there are"


@pytest.mark.slow
@pytest.mark.parametrize("is_expanded", [True, False])
def test_one_head_for_all_queries(is_expanded):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.queries, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // HEADS)
            self.end = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            queries = self.queries(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            heads = HEADS if is_expanded else 1
            pair = (part[:, None].expand(-1, heads, -1, -1) for part in self.pair(x).chunk(2, -1))
            found = F.scaled_dot_product_attention(queries, next(pair), next(pair), is_causal=True)
            return self.end(found.transpose(1, 2).flatten(2))

    model, batches = Shared(), [(x,) for x in sequences(4)]
    artefact = lowered(model, batches)
    holds(artefact, model, batches)
    assert (artefact.program.counts.delegates, artefact.program.counts.portable) == (1, 0)


class Complex(nn.Module):
    """Rotary positions as Llama's first code has them, held or computed."""

    def __init__(self, held):
        super().__init__()
        torch.manual_seed(0)
        self.held, self.attention = held, Attention(is_causal=True)
        self.before, self.size = nn.Linear(WIDTH, WIDTH), WIDTH // HEADS
        self.register_buffer("turns", self.of(torch.arange(2 * LENGTH)))

    def of(self, positions):
        angles = torch.outer(positions, 10.0 ** -(torch.arange(0, self.size, 2) / self.size))
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x, positions):
        turns = self.turns[: x.shape[1]] if self.held else self.of(positions.float()) * 1.0
        heads = self.before(x).unflatten(-1, (HEADS, self.size // 2, 2))
        turned = torch.view_as_real(torch.view_as_complex(heads) * turns[:, None]).flatten(2)
        return self.attention(turned)


@pytest.mark.few(1)
@pytest.mark.parametrize("held", [True, False])
def test_complex_rotary_positions(held):
    model = Complex(held)
    batches = [(x, torch.arange(LENGTH) + seed * (not held)) for seed, x in enumerate(sequences(4))]
    artefact = lowered(model, batches)
    holds(artefact, model, batches)
    assert artefact.program.counts.delegates == 1
    assert artefact.program.counts.portable <= (0 if held else 1), "integers become floats outside"


@pytest.mark.slow
def test_half_precision_runs():
    model = Attention(turned=True).eval()
    x, mask = sequences(1)[0], seen((2, 1, LENGTH, LENGTH), 3)
    artefact = quantplug.quantize(model, (x, mask), "xnnpack", config="float16", progress=False)
    for _ in range(2):
        assert sqnr(artefact(x, mask), true(model, (x, mask))) > 40
