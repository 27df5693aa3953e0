"""Rotation: streams and values in another basis, the same function, and better integers with anybody's quantizer."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    get_symmetric_quantization_config as executorch_config,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import quantplug
from quantplug.algorithms.orthogonal import rotation
from quantplug.algorithms.rotate import Rotate
from quantplug.core.errors import CalibrationError, ConfigError, ModelError
from quantplug.core.specs.levels import sqnr


class WrittenRMS(nn.Module):
    """As transformers writes it for Llama."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class WrittenLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        apart = x - x.mean(-1, keepdim=True)
        return apart / torch.sqrt((apart * apart).mean(-1, keepdim=True) + 1e-5) * self.weight


NORMS = {"written rms": WrittenRMS, "rms": nn.RMSNorm, "layer": nn.LayerNorm, "written layer": WrittenLayerNorm}


class Block(nn.Module):
    def __init__(self, width, heads, shared, norm, written, gated, post):
        super().__init__()
        self.heads, self.shared, self.size, self.written, self.post = heads, shared, width // heads, written, post
        self.first, self.second = NORMS[norm](width), NORMS[norm](width)
        inner = shared * self.size
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(width, inner)
        self.output = nn.Linear(width, width, bias=not gated)
        self.gate = nn.Linear(width, 2 * width, bias=False) if gated else None
        self.up, self.down = nn.Linear(width, 2 * width, bias=not gated), nn.Linear(2 * width, width)

    def attend(self, x):
        pairs = ((self.query, self.heads), (self.key, self.shared), (self.value, self.shared))
        q, k, v = (part(x).view(*x.shape[:2], n, self.size).transpose(1, 2) for part, n in pairs)
        if self.written:
            times = self.heads // self.shared
            k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for t in (k, v))
            found = torch.softmax(q @ k.transpose(2, 3) / self.size**0.5, -1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.shared)
        return self.output(found.transpose(1, 2).reshape(x.shape))

    def feed(self, x):
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        if self.post:
            x = self.first(x + self.attend(x))
            return self.second(x + self.feed(x))
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    """A small language model, its norms before the layers unless told otherwise."""

    def __init__(
        self,
        width=32,
        heads=4,
        shared=2,
        norm="written rms",
        *,
        tied=True,
        positions=False,
        written=False,
        gated=True,
        post=False,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, width)
        self.positions = nn.Parameter(torch.randn(1, 16, width)) if positions else None
        self.blocks = nn.ModuleList(Block(width, heads, shared, norm, written, gated, post) for _ in range(2))
        self.norm, self.head = NORMS[norm](width), nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.words.weight
        with torch.no_grad():
            for name, value in self.named_parameters():
                if "norm" in name or "first" in name or "second" in name:
                    value.add_(0.3 * torch.randn(value.shape))

    def forward(self, ids):
        x = self.words(ids)
        if self.positions is not None:
            x = x + self.positions[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def with_outliers(model):
    """Makes two channels of the stream far larger than the others, as in trained models, of little meaning."""
    with torch.no_grad():
        model.words.weight[:, [3, 11]] = torch.tensor([30.0, -45.0])
        for block in model.blocks:
            for layer in (block.query, block.key, block.value, block.gate, block.up):
                if layer is not None:
                    layer.weight[:, [3, 11]] *= 0.02
        if model.head.weight is not model.words.weight:
            model.head.weight[:, [3, 11]] *= 0.02
    return model.eval()


def tokens(seed, count=8):
    return torch.randint(0, 40, (count, 7), generator=torch.Generator().manual_seed(seed))


def exported(model, ids, *, strict=False, dynamic_shapes=None):
    return torch.export.export(model, (ids,), strict=strict, dynamic_shapes=dynamic_shapes).module()


def difference(one, other):
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).abs().max() / other.abs().max())


def layers_of(graph):
    return {
        node.args[1].name.removeprefix("p_"): node.name
        for node in graph.graph.nodes
        if str(node.target) == "aten.linear.default"
    }


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 12, 20, 28, 36, 40, 64, 96, 384, 576])
def test_a_rotation_is_orthogonal_even_and_keeps_the_mean_where_it_has_to(size, keeps_mean):
    matrix = rotation(size, seed=1, keeps_mean=keeps_mean)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    if keeps_mean:
        assert torch.allclose(matrix.sum(0), torch.ones(size, dtype=torch.float64), atol=1e-12)
        return
    is_hadamard = size % 4 == 0 or size == 2
    assert float(matrix.abs().max()) * math.sqrt(size) < (1 + 1e-9 if is_hadamard else 1.5)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    norm=st.sampled_from(sorted(NORMS)),
    heads=st.sampled_from([(4, 4), (4, 2), (2, 1)]),
    width=st.sampled_from([24, 32, 40]),
    tied=st.booleans(),
    positions=st.booleans(),
    written=st.booleans(),
    gated=st.booleans(),
    strict=st.booleans(),
    is_open=st.booleans(),
)
def test_a_transformer_computes_the_same_in_another_basis(
    norm, heads, width, tied, positions, written, gated, strict, is_open
):
    model = (
        Model(width, heads[0], heads[1], norm, tied=tied, positions=positions, written=written, gated=gated)
        .double()
        .eval()
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = ({0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=3, max=16)},)
    graph = exported(model, tokens(0), strict=strict, dynamic_shapes=sizes if is_open else None)
    layers = layers_of(graph)
    found = Rotate().apply(graph)
    # The written rms norm casts to float32.
    assert difference(graph(tokens(1)), model(tokens(1))) < (1e-5 if norm == "written rms" else 1e-12)
    kept = {layers[f"blocks_{n}_down_weight"] for n in range(2)}
    assert set(found.left) == kept
    assert set(found) == set(layers.values()) - kept | {name for name in _linears(graph) if name not in kept}
    assert {layer.size for layer in found.values()} == {width, width // heads[0]}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if is_open:
        assert difference(graph(tokens(1, 3)[:, :4]), model(tokens(1, 3)[:, :4])) < 1e-5


def _linears(graph):
    return {node.name for node in graph.graph.nodes if str(node.target) == "aten.linear.default"}


def test_weights_are_those_of_the_papers_formulas():
    """W' = Qᵀ W for what writes the stream, W diag(g) Q for what reads it, both for each head of the values."""
    model = Model(32, 4, 2, "rms").eval()
    graph = exported(model, tokens(0))
    Rotate(seed=3).apply(graph)
    stream, head = rotation(32, seed=3, keeps_mean=False), rotation(8, seed=3, keeps_mean=False)
    block, turned = model.blocks[0], graph.get_submodule("blocks.0")
    assert torch.allclose(graph.words.weight.double(), model.words.weight.double() @ stream, atol=1e-5)
    read = block.value.weight.double() * block.first.weight.double() @ stream
    heads = torch.kron(torch.eye(2, dtype=torch.float64), head)
    assert torch.allclose(turned.value.weight.double(), heads.T @ read, atol=1e-5)
    assert torch.allclose(turned.value.bias.double(), heads.T @ block.value.bias.double(), atol=1e-5)
    written = block.output.weight.double() @ torch.kron(torch.eye(4, dtype=torch.float64), head)
    assert torch.allclose(turned.output.weight.double(), stream.T @ written, atol=1e-5)
    assert torch.equal(turned.first.weight, torch.ones(32))


def x86():
    return quantplug.get_quantizer("x86")


def executorch():
    return XNNPACKQuantizer().set_global(executorch_config(is_per_channel=True))


def torchao():
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def level(graph, model, quantizer):
    prepared = quantplug.prepare_pt2e(graph, quantizer())
    quantplug.calibrate(prepared, [tokens(0), tokens(1)], progress=False)
    return sqnr(quantplug.convert_pt2e(prepared)(tokens(2)), model(tokens(2)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("quantizer", "kind"),
    [
        (x86, {}),
        (executorch, {"norm": "layer", "positions": True, "gated": False, "shared": 4, "tied": False}),
        (executorch, {}),
        (torchao, {}),
        (x86, {"norm": "layer", "positions": True, "gated": False, "shared": 4, "tied": False}),
    ],
)
def test_outliers_of_a_stream_are_spread(quantizer, kind):
    given: dict[str, Any] = {"shared": 2, "tied": False, **kind}
    model = with_outliers(Model(64, 4, **given))
    plain = level(exported(model, tokens(0)), model, quantizer)
    graph = exported(model, tokens(0))
    found = Rotate().apply(graph, [tokens(0), tokens(1)])
    assert len(found) > 8, found.left
    assert "blocks of 64, 16" in str(found)
    assert level(graph, model, quantizer) > plain + 3.5


def test_an_even_model_is_left_alone_where_batches_tell():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)).eval()
    graph = torch.export.export(model, (torch.randn(64, 16),)).module()
    before = dict(graph.named_parameters())
    found = Rotate().apply(graph, [torch.randn(64, 16)])
    assert not found
    assert "is an input of the model" in found.left["linear"]
    assert "dB in 8 bits" in found.left["linear_1"]
    assert all(value is before[name] for name, value in graph.named_parameters())


def few_bits():
    return quantplug.get_quantizer("xnnpack").set_global("int4_dynamic_groups")


def test_the_gain_is_measured_with_what_the_quantizer_makes_of_the_model():
    """Outliers that mean little gain in 8 bits; rotated, every weight of 4 bits meets a share of them."""
    model, data = with_outliers(Model(64, 4, shared=2, tied=False)), [tokens(0), tokens(1)]
    plain = level(exported(model, tokens(0)), model, few_bits)
    graph = exported(model, tokens(0))
    assert len(Rotate().apply(graph, data)) > 8
    assert level(graph, model, few_bits) < plain - 3
    found = Rotate(quantizer=few_bits()).apply(exported(model, tokens(0)), data)
    assert "dB when quantized" in str(found)

    def kept(recipe):
        given = {"calibration": [tokens(seed) for seed in range(8, 16)], "recipe": recipe, "progress": False}
        artefact = quantplug.quantize(model, (tokens(0),), "xnnpack", config="int4_dynamic_groups", **given)
        return sqnr(artefact(tokens(2)), model(tokens(2))), artefact

    level_of_gptq, _ = kept([quantplug.GPTQ()])
    level_of_recipe, artefact = kept("accurate")
    assert "rotated channels" in str(artefact.applied[0])  # errors make up for each other behind it
    assert level_of_recipe > level_of_gptq + 1


def test_a_model_without_weights_of_few_bits_stays():
    model, data = with_outliers(Model(64, 4, shared=2, tied=False)), [tokens(0), tokens(1)]
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int8_dynamic")
    found = Rotate(few_bits=True).for_quantizer(quantizer).apply(exported(model, tokens(0)), data)
    assert "no weight has 5 bits or fewer" in str(found)


def test_what_gains_nothing_with_the_quantizer_is_left():
    graph = exported(Model(64, 4, tied=False).eval(), tokens(0))
    before = dict(graph.named_parameters())
    found = Rotate(quantizer=few_bits()).apply(graph, [tokens(0), tokens(1)])
    assert "dB when quantized, and" in str(found)
    assert all(value is before[name] for name, value in graph.named_parameters())


def test_few_bits_are_those_of_a_quantizer():
    with pytest.raises(ConfigError, match=r"knows no quantizer; pass Rotate\(quantizer=\.\.\.\)"):
        Rotate(few_bits=True).apply(exported(Model().eval(), tokens(0)), [tokens(0)])


@pytest.mark.slow
def test_a_norm_behind_the_sum_keeps_its_stream_where_it_is():
    model = Model(32, 4, 4, "layer", post=True, tied=False).double().eval()
    graph = exported(model, tokens(0))
    layers = layers_of(graph)
    found = Rotate().apply(graph)
    assert {found[name].size for name in found} == {8}  # the heads' values alone
    assert "reads what the weight of another norm stands before" in found.left[layers["blocks_1_up_weight"]]
    assert difference(graph(tokens(1)), model(tokens(1))) < 1e-12


class Twice(nn.Module):
    """A layer that is called twice, and a stream that something else reads."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.words = way, nn.Embedding(40, 16)
        self.norm, self.other = nn.RMSNorm(16), nn.Linear(16, 16)

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.other(self.norm(x))
        if self.way == "twice":
            return self.other(x)
        return x.relu() if self.way == "relu" else x * torch.arange(16)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("twice", "reads the weight of 'linear"),
        ("relu", "'relu' (aten::relu) is not the same in another basis"),
        ("multiplied", "'mul' (aten::mul) is not the same in another basis"),
    ],
)
def test_a_stream_that_cannot_be_turned_says_why(way, reason):
    model = Twice(way).eval()
    graph = exported(model, tokens(0))
    before = dict(graph.named_parameters())
    found = Rotate().apply(graph)
    assert not found
    assert reason in found.left["linear"]
    assert all(value is before[name] for name, value in graph.named_parameters())


class Images(nn.Module):
    """Patches as tokens, one of them learned, and a classifier that reads that one: positions are a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.first = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(1, 1, 32))
        self.positions = nn.Parameter(torch.randn(1, 5, 32))
        self.block, self.norm = Block(32, 4, 4, "layer", False, False, False), nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.block(x))[:, 0])


def test_patches_of_an_image_are_a_stream_too():
    model, x = Images().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = torch.export.export(model, (x,)).module()
    found = Rotate().apply(graph)
    assert len(found) == 6, found.left
    assert difference(graph(x), model(x)) < 1e-12


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-2), (torch.bfloat16, 1e-1)])
def test_halves_are_turned_within_their_rounding(dtype, most):
    model = Model(32, 4, 2, "rms").to(dtype).eval()
    graph = exported(model, tokens(0))
    assert len(Rotate().apply(graph)) == 13
    assert {value.dtype for value in graph.parameters()} == {dtype}
    assert difference(graph(tokens(1)), model(tokens(1))) < most


@pytest.mark.slow
def test_bad_input_is_a_sentence_and_changes_nothing():
    model = Model().eval()
    graph = exported(model, tokens(0))
    before = dict(graph.named_parameters())
    with pytest.raises(CalibrationError, match="Rotate takes 1 or more batches"):
        Rotate().apply(graph, [])
    with pytest.raises(ModelError, match="exported graph module"):
        Rotate().apply(model)  # type: ignore[arg-type]
    prepared = quantplug.prepare_pt2e(exported(model, tokens(0)), x86())
    with pytest.raises(ModelError, match="before prepare_pt2e"):
        Rotate().apply(prepared)
    assert all(value is before[name] for name, value in graph.named_parameters())
    large = Model(32, 4, 4, "rms", tied=False).half().eval()
    with torch.no_grad():
        large.blocks[0].first.weight.fill_(6e4)
        large.blocks[0].value.weight.fill_(100.0)
    graph = exported(large, tokens(0))
    before = dict(graph.named_parameters())
    with pytest.raises(ModelError, match=r"Rotated, the parameter 'blocks\.0\.value\.weight' leaves the range"):
        Rotate().apply(graph)
    assert all(value is before[name] for name, value in graph.named_parameters())
