"""Equalization and smoothing: other parameters, the same function, and better integers with anybody's quantizer."""

import copy
import gc
from functools import partial
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
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import quantplug
from quantplug.algorithms import equalize, smooth
from quantplug.algorithms.equalize import Equalize
from quantplug.algorithms.judge import Judge
from quantplug.algorithms.rotate import Rotate
from quantplug.algorithms.scaling import Scales
from quantplug.algorithms.smooth import Smooth
from quantplug.algorithms.trial import Tried, compared
from quantplug.core.calibration.node_by_node import batches_of
from quantplug.core.errors import CalibrationError, ConfigError, ModelError
from quantplug.core.specs.levels import sqnr


def spread(model, seed=0, deviation=1.0):
    """Gives every parameter channels of very different sizes, and every batch norm statistics of a trained one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            rows = torch.randn(len(value), generator=generator).mul(deviation).exp()
            value.mul_(rows.reshape(-1, *[1] * (value.dim() - 1))).add_(
                0.01 * torch.randn(value.shape, generator=generator)
            )
        for name, value in model.named_buffers():
            if "running" in name:
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return model.eval()


def exported(model, *inputs, strict=False):
    return torch.export.export(model, inputs, strict=strict).module()


def difference(one, other):
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


class Vision(nn.Module):
    """Convolutions of every kind behind each other, with what may stand between them."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.grouped, self.gate = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1)
        self.last, self.head, self.out = nn.Conv2d(8, 12, 3, padding=1), nn.Linear(12 * 4, 10), nn.Linear(10, 3)

    def forward(self, x):
        for name in ("first", "depthwise", "grouped"):
            for step in self.between[name]:
                x = STEPS[step](self, x)
            x = getattr(self, name)(x)
            if name == "first":
                x = self.norm(x)
            if name == "depthwise":
                x = self.norm2(x)
        x = torch.relu(self.last(torch.relu(x)))
        return self.out(F.leaky_relu(self.head(F.adaptive_avg_pool2d(x, 2).flatten(1)), 0.2))


class Decoder(nn.Module):
    """Transposed convolutions before and behind others, in groups too."""

    def __init__(self, spatial, groups, norm):
        super().__init__()
        torch.manual_seed(0)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[spatial - 1]
        batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[spatial - 1]
        self.first, self.norm = transposed(4, 8, 3, 2, 1), batch_norm(8) if norm else nn.Identity()
        self.second, self.third = transposed(8, 12, 2, groups=groups), transposed(12, 6, 3, 2, 1, 1, groups=2)
        self.last = conv(6, 3, 1)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.last(torch.relu(self.third(x)))


STEPS = {
    "relu": lambda net, x: torch.relu(x),
    "leaky": lambda net, x: F.leaky_relu(x, 0.1),
    "relu6": lambda net, x: F.relu6(x),
    "gelu": lambda net, x: F.gelu(x),
    "pool": lambda net, x: F.max_pool2d(x, 3, 1, 1),
    "mean": lambda net, x: F.avg_pool2d(x, 3, 1, 1),
    "pad": lambda net, x: F.pad(x, (1, 0, 0, 1)),
    "mirror": lambda net, x: F.pad(x, (1, 1, 1, 1), "reflect"),
    "drop": lambda net, x: F.dropout(x, 0.5, net.training),
    "residual": lambda net, x: x + torch.relu(x),
    "squeeze": lambda net, x: x * torch.sigmoid(net.gate(x.mean((2, 3), keepdim=True))) if x.shape[1] == 8 else x,
    "cut": lambda net, x: x[:, :, 1:],
    "turn": lambda net, x: x.transpose(2, 3),
    "halves": lambda net, x: torch.cat([*x.chunk(2, 1)][::-1], 1) if x.shape[1] == 8 else x,
    "beside": lambda net, x: torch.cat([x[:, :4], torch.sigmoid(x[:, 4:])], 1) if x.shape[1] == 8 else x,
}


class Language(nn.Module):
    """A transformer layer: either norm, grouped queries, attention as one operator or written out, gated or not."""

    def __init__(self, *, rms, heads, shared, fused, written, gated):
        super().__init__()
        torch.manual_seed(0)
        width, self.size = 16, 16 // heads
        self.heads, self.shared, self.fused, self.written, self.gated = heads, shared, fused, written, gated
        self.first, self.second = (nn.RMSNorm(width) if rms else nn.LayerNorm(width) for _ in range(2))
        inner = width + 2 * shared * self.size
        self.parts = nn.ModuleList([nn.Linear(width, n) for n in (width, shared * self.size, shared * self.size)])
        self.qkv, self.output = nn.Linear(width, inner), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def split(self, x, heads):
        return x.view(x.shape[0], x.shape[1], heads, self.size).transpose(1, 2)

    def attend(self, x):
        widths = [16, *[self.shared * self.size] * 2]
        found = self.qkv(x).split(widths, -1) if self.fused else [part(x) for part in self.parts]
        q, k, v = (self.split(one, n) for one, n in zip(found, (self.heads, self.shared, self.shared), strict=True))
        if self.written:
            times = self.heads // self.shared
            k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for t in (k, v))
            attended = torch.softmax(q @ k.transpose(2, 3) / self.size**0.5, -1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.shared)
        return self.output(attended.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.first(x))
        y = self.second(x)
        inner = F.silu(self.gate(y)) * self.up(y) if self.gated else F.gelu(self.up(y))
        return x + self.down(inner)


def both(graph, batches):
    """Applies both algorithms, with scales that are surely not 1."""
    return Equalize().apply(graph), Smooth(alpha=0.7).apply(graph, batches)


# Each example is exported: to shrink one takes minutes.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
_STEP_LISTS = st.lists(st.sampled_from(sorted(STEPS)), max_size=3)


@pytest.mark.slow
@settings(max_examples=7, deadline=None, phases=_PHASES)
@given(
    between=st.fixed_dictionaries({"first": st.just([]), "depthwise": _STEP_LISTS, "grouped": _STEP_LISTS}),
    strict=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_vision_model_computes_the_same_whatever_stands_between_its_layers(between, strict, seed):
    model, x = spread(Vision(between), seed), torch.randn(2, 3, 10, 10)
    before = copy.deepcopy(model.state_dict())
    graph = exported(model, x, strict=strict)
    wanted = model(x)
    equalized, smoothed = both(graph, [x])
    assert difference(graph(x), wanted) < 1e-4
    assert {"linear", "linear_1"} <= set(equalized), equalized.left
    assert set(smoothed) | set(smoothed.left) == {n.name for n in graph.graph.nodes if _is_layer(n)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@settings(max_examples=5, deadline=None, phases=_PHASES)
@given(
    spatial=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 4]),
    norm=st.booleans(),
    export=st.sampled_from(["strict", "not strict", "decomposed"]),
    seed=st.integers(0, 99),
)
def test_transposed_convolutions_give_and_take_scales(spatial, groups, norm, export, seed):
    model, x = spread(Decoder(spatial, groups, norm), seed), torch.randn(2, 4, *[5] * spatial)
    program = torch.export.export(model, (x,), strict=export == "strict")
    graph = (program.run_decompositions() if export == "decomposed" else program).module()
    wanted = model(x)
    equalized, smoothed = both(graph, [x])
    assert difference(graph(x), wanted) < 1e-4
    assert len(equalized) == len(smoothed) == 3, smoothed.left


def test_rows_of_transposed_convolutions_are_evened_out():
    model, x = spread(nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.Conv2d(8, 3, 1))), torch.randn(2, 4, 5, 5)
    graph = exported(model, x)
    Equalize().apply(graph)
    written, read = (graph.get_submodule(name).weight.detach().abs() for name in "01")
    by_row = written.reshape(2, 2, 4, 9).transpose(1, 2).reshape(8, -1).amax(1)
    assert torch.allclose(by_row, read.flatten(2).amax((0, 2)), rtol=0.05)


def _is_layer(node):
    return any(str(node.target).startswith(f"aten.{name}.") for name in ("conv2d", "linear"))


@pytest.mark.slow
@settings(max_examples=6, deadline=None, phases=_PHASES)
@given(
    rms=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 1)]),
    fused=st.booleans(),
    written=st.booleans(),
    gated=st.booleans(),
    export=st.sampled_from(["strict", "not strict", "decomposed"]),
    seed=st.integers(0, 99),
)
def test_a_transformer_computes_the_same_and_every_place_that_can_take_scales_has_some(
    rms, heads, fused, written, gated, export, seed
):
    model = Language(rms=rms, heads=heads[0], shared=heads[1], fused=fused, written=written, gated=gated)
    model, x = spread(model, seed, 0.5), torch.randn(2, 5, 16)
    wanted = model(x)
    program = torch.export.export(model, (x,), strict=export == "strict")
    graph = (program.run_decompositions() if export == "decomposed" else program).module()
    _, smoothed = both(graph, [x])
    assert difference(graph(x), wanted) < 1e-4
    layers = {n.args[1].name.removeprefix("p_"): n.name for n in graph.graph.nodes if _is_layer(n)}
    if export == "decomposed":
        assert len(smoothed) >= (2 if fused else 4)
        return
    expected = {"qkv_weight"} if fused else {f"parts_{n}_weight" for n in range(3)}
    expected |= {"output_weight", "up_weight"} | ({"gate_weight", "down_weight"} if gated else set())
    assert {layers[name] for name in expected} <= set(smoothed), smoothed.left
    if not gated:
        assert "aten::gelu" in smoothed.left[layers["down_weight"]]


def test_heads_that_come_from_one_have_one_scale():
    torch.manual_seed(0)
    model = spread(Language(rms=True, heads=4, shared=2, fused=False, written=False, gated=True))
    x = torch.randn(2, 5, 16)
    graph = exported(model, x)
    Smooth(alpha=1.0).apply(graph, [x])
    factors = (graph.output.weight / model.output.weight).reshape(16, 2, 2, 4)
    assert torch.allclose(factors[:, :, 0], factors[:, :, 1], rtol=1e-4)
    assert factors[0].std() > 0.1
    rows = model.parts[2].bias / graph.get_submodule("parts.2").bias
    assert torch.allclose(rows, factors[0, :, 0].flatten(), rtol=1e-4)


def levels(model, batches, fresh, quantizer, algorithm):
    """Returns decibels without and with an algorithm."""
    found = []
    for applied in (None, algorithm):
        graph = exported(model, batches[0])
        if applied is not None:
            applied.apply(graph, batches)
        prepared = quantplug.prepare_pt2e(graph, quantizer())
        quantplug.calibrate(prepared, batches, progress=False)
        found.append(sqnr(quantplug.convert_pt2e(prepared)(fresh), model(fresh)))
    return found


class Separable(nn.Module):
    """A depthwise convolution between two others, its channels of very different sizes, which the last one undoes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.depthwise, self.last = (
            nn.Conv2d(3, 16, 1),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.Conv2d(16, 8, 1),
        )
        with torch.no_grad():
            sizes = torch.logspace(-1.5, 1.5, 16)
            self.depthwise.weight.mul_(sizes.reshape(-1, 1, 1, 1))
            self.depthwise.bias.mul_(sizes)
            self.last.weight.div_(sizes.reshape(1, -1, 1, 1))

    def forward(self, x):
        return self.last(torch.relu(self.depthwise(torch.relu(self.first(x)))))


class Outliers(nn.Module):
    """A block of a transformer whose norms make a few channels large, as those of trained ones do."""

    def __init__(self):
        super().__init__()
        self.body = Language(rms=False, heads=4, shared=4, fused=False, written=False, gated=False)
        with torch.no_grad():
            for norm in (self.body.first, self.body.second):
                norm.weight[3] = 60.0
                norm.weight[7] = 25.0
            for part in (*self.body.parts, self.body.gate, self.body.up):
                part.weight[:, [3, 7]] /= 40.0

    def forward(self, x):
        return self.body(x)


def images(seed):
    return torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def sequences(seed):
    return torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(seed))


def executorch():
    return XNNPACKQuantizer().set_global(executorch_config(is_per_channel=False))


def executorch_by_channel():
    return XNNPACKQuantizer().set_global(executorch_config(is_per_channel=True))


def torchao():
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def per_tensor():
    return quantplug.get_quantizer("x86").set_global("int8_per_tensor")


@pytest.mark.few(1)
@pytest.mark.parametrize("quantizer", [per_tensor, executorch])
def test_equalized_channels_fit_one_scale(quantizer):
    plain, equalized = levels(Separable().eval(), [images(0), images(1)], images(2), quantizer, Equalize())
    assert equalized > plain + 10


@pytest.mark.few(1)
@pytest.mark.parametrize("quantizer", [lambda: quantplug.get_quantizer("x86"), torchao, executorch_by_channel])
def test_smoothed_outliers_fit_one_scale(quantizer):
    plain, smoothed = levels(Outliers().eval(), [sequences(0), sequences(1)], sequences(2), quantizer, Smooth())
    assert smoothed > plain + 3


def test_an_even_model_is_left_alone_where_batches_tell():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    batches = [torch.randn(32, 16)]
    graph = exported(model, batches[0])
    before = dict(graph.named_parameters())
    found = Equalize(per_channel=True).apply(graph, batches)
    assert not found
    assert "dB in 8 bits" in found.left["linear_1"]
    assert all(value is before[name] for name, value in graph.named_parameters())


class Tied(nn.Module):
    fixed: torch.Tensor

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.own = nn.Linear(8, 4, bias=False), nn.Linear(8, 8)
        self.register_buffer("fixed", torch.randn(4, 8))

    def forward(self, x):
        x = torch.relu(self.again(torch.relu(self.again(torch.relu(self.first(x))))))
        y = self.own(x)
        z = F.linear(torch.relu(y), self.fixed)
        return self.last(F.relu6(self.own.weight @ x.T).T), z, F.silu(y)


def test_what_another_reads_too_is_left_with_its_reason():
    model = spread(Tied())
    x = torch.randn(4, 8)
    graph = exported(model, x)
    before = dict(graph.named_parameters())
    for found in both(graph, [x]):
        assert not found
        assert found.left["linear"] == "'x' is an input of the model"
        assert found.left["linear_1"] == "'linear_2' reads the weight of 'linear_1' too"
        assert found.left["linear_2"] == "'linear_2' reads the weight of 'linear_1' too"
        assert "aten::relu6" in found.left["linear_5"]
        assert len(found.left) == 6
        assert "left" in str(found) or "No layer" in str(found)
    assert all(value is before[name] for name, value in graph.named_parameters())


class Shared(nn.Module):
    """A value that a layer and something else read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        shared = torch.relu(self.first(x))
        return self.third(torch.relu(self.second(shared))), shared


def test_a_value_that_the_model_yields_keeps_its_scale():
    model, x = spread(Shared()), torch.randn(4, 8)
    graph = exported(model, x)
    for found in both(graph, [x]):
        assert set(found) == {"linear_2"}
        assert found.left["linear_1"] == "it is an output of the model"
    assert all(difference(*pair) < 1e-5 for pair in zip(graph(x), model(x), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_what_they_are_to_the_bit(dtype):
    """Scales of halves are powers of two, which round nothing."""
    model = spread(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))).to(dtype)
    x = torch.randn(5, 8).to(dtype)
    graph = exported(model, x)
    found = Equalize().apply(graph)
    assert found["linear_1"].most > 1.5
    assert {value.dtype for value in graph.parameters()} == {dtype}
    assert difference(graph(x).float(), model(x).float()) < 2e-3


def test_sizes_may_be_open_and_samples_alone():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.next = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.last(torch.relu(self.first(self.next(torch.relu(self.conv(x))).mean((0, 2, 3)))))

    model, batches = spread(Head()), [torch.randn(size, 3, size + 7, 9) for size in (3, 2, 4)]
    sizes = {0: torch.export.Dim("n", min=2, max=8), 2: torch.export.Dim("h", min=6, max=64)}
    graph = torch.export.export(model, (batches[0],), dynamic_shapes=(sizes,)).module()
    _, smoothed = both(graph, batches)
    assert set(smoothed) == {"conv2d_1", "linear", "linear_1"}
    assert all(difference(graph(x), model(x)) < 1e-4 for x in batches)
    assert Equalize().apply(graph, batches).left


def test_channels_of_zeros_have_scale_one():
    model = spread(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    with torch.no_grad():
        model[0].weight[3] = 0.0
        model[0].bias[3] = 0.0
        model[2].weight[:, 5] = 0.0
    x = torch.randn(5, 8)
    graph = exported(model, x)
    both(graph, [x])
    assert torch.equal(graph.get_submodule("0").weight[5], model[0].weight[5])
    assert torch.equal(graph.get_submodule("2").weight[:, 3], model[2].weight[:, 3])
    assert difference(graph(x), model(x)) < 1e-5


def test_bad_input_is_a_sentence_and_changes_nothing():
    model, x = spread(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))), torch.randn(5, 8)
    graph = exported(model, x)
    before = dict(graph.named_parameters())
    for wrong in (-0.1, 1.5, "half", True):
        with pytest.raises(ConfigError, match="alpha from 0 to 1"):
            Smooth(alpha=wrong)  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="Smooth takes 1 or more batches"):
        Smooth().apply(graph, [])
    with pytest.raises(CalibrationError, match="NaN or infinity in what 'linear_1'"):
        Smooth().apply(graph, [x * float("inf"), x])
    alone = exported(nn.Linear(8, 4).eval(), x)
    for found in (graph, alone):
        for step in (Equalize(), Smooth(), Rotate()):
            with pytest.raises(CalibrationError, match=f"{type(step).__name__} found NaN in 'input.*' of batch 1"):
                step.apply(found, [x, x * float("nan")])
    with pytest.raises(CalibrationError, match="expected"):
        Smooth().apply(graph, [x[:, :3]])
    with pytest.raises(CalibrationError, match="Equalize takes 1 or more batches"):
        Equalize().apply(graph, [])
    prepared = quantplug.prepare_pt2e(exported(model, x), quantplug.get_quantizer("x86"))
    for apply in (Equalize().apply, lambda found: Smooth().apply(found, [x])):
        with pytest.raises(ModelError, match="before prepare_pt2e"):
            apply(prepared)
        with pytest.raises(ModelError, match="exported graph module"):
            apply(model)
    assert all(value is before[name] for name, value in graph.named_parameters())


class Activated(nn.Module):
    """Outliers that come from no operator that takes a scale: two layers and something else read them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one, self.other = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        with torch.no_grad():
            self.first.bias[[2, 9]] = torch.tensor([60.0, 30.0])
            for layer in (self.one, self.other):
                layer.weight[:, [2, 9]] *= 0.02

    def forward(self, x):
        y = F.gelu(self.first(x))
        return self.one(y) + torch.sigmoid(self.other(y)) + y.mean(-1, keepdim=True)


def rows(seed):
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strict", [False, True])
def test_a_multiplication_takes_scales_where_it_may_and_nothing_else_does(strict):
    model, batches = Activated().eval(), [rows(0), rows(1)]
    graph = exported(model, rows(0), strict=strict)
    kept = Smooth().apply(graph, batches)
    assert not kept
    assert not kept.inserted
    names = [node.name for node in graph.graph.nodes]
    found = Smooth(multiply=True).apply(graph, batches)
    assert found.inserted["gelu_smoothed"] == "gelu"
    assert {"linear_1", "linear_2"} <= set(found)
    assert found["linear_1"].sources == ("gelu_smoothed",)
    assert f"{len(found.inserted)} multiplications inserted" in str(found)
    added = {node.name for node in graph.graph.nodes if node.name not in names}
    assert added == {name + end for name in found.inserted for end in ("", "_scale")}
    assert {user.name for user in next(n for n in graph.graph.nodes if n.name == "gelu").users} == {
        "gelu_smoothed",
        "mean",
    }
    assert difference(graph(rows(2)), model(rows(2))) < 1e-5
    graph.graph.lint()


def test_a_multiplication_that_gains_nothing_is_not_inserted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    graph = exported(model, rows(0))
    before, code = dict(graph.named_parameters()), graph.code
    assert not Smooth(multiply=True).apply(graph, [rows(0), rows(1)]).inserted
    assert dict(graph.named_parameters()) == before
    assert graph.code == code


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", [lambda: quantplug.get_quantizer("x86"), torchao, executorch_by_channel])
def test_a_multiplication_gains_with_any_quantizer(quantizer):
    model = Activated().eval()
    plain, smoothed = levels(model, [rows(0), rows(1)], rows(2), quantizer, Smooth(multiply=True))
    assert smoothed > plain + 3


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_a_multiplication_is_lowered(backend):
    model = Activated().eval()
    recipe = [Smooth(multiply=True)]
    artefact = quantplug.quantize(model, (rows(0),), backend, [rows(0), rows(1)], "int8", recipe=recipe)
    assert "multiplications inserted" in str(artefact.applied[0])
    found = artefact.program(rows(2))
    assert sqnr(found[0] if isinstance(found, (list, tuple)) else found, model(rows(2))) > 25


class Shifted(nn.Module):
    """Channels that lie far from each other: nothing clips the first ones, the second a relu that they stay above."""

    def __init__(self, padding=0, *, above=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=padding, groups=2)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            self.first.bias.copy_(torch.linspace(-30, 30, 8))
            if above:
                self.third.bias.copy_(torch.linspace(10, 60, 8))

    def forward(self, x):
        x = self.second(self.first(x)).amax((2, 3))
        return self.last(torch.relu(self.third(x / 20)))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("absorb", "padding", "absorbing"),
    [
        (None, 0, set()),
        ("exact", 0, {"conv2d"}),
        ("exact", 1, set()),
        ("seen", 0, {"conv2d", "linear"}),
        ("seen", 1, {"linear"}),
    ],
)
def test_biases_are_absorbed_where_the_layer_behind_can_take_them(absorb, padding, absorbing, strict):
    model, batches = Shifted(padding, above=absorb == "seen").eval(), [images(0), images(1)]
    graph = exported(model, images(0), strict=strict)
    found = Equalize(absorb=absorb).apply(graph, batches)
    assert set(found.absorbed) == absorbing, found.left
    assert ("absorbed" in str(found)) == bool(absorbing)
    assert difference(graph(images(2)), model(images(2))) < 1e-5
    graph.graph.lint()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("quantizer", "above", "gain"),
    [(lambda: quantplug.get_quantizer("x86"), True, 20), (torchao, False, 3), (executorch_by_channel, False, 3)],
)
def test_absorbed_biases_gain(quantizer, above, gain):
    model, batches = Shifted(above=above).eval(), [images(0), images(1)]
    plain, moved = levels(model, batches, images(2), quantizer, Equalize(absorb="seen"))
    assert moved > plain + gain


def test_biases_are_absorbed_as_the_user_asks():
    model, x = Shifted().eval(), images(0)
    with pytest.raises(ConfigError, match="'exact' or 'seen', found 'all'"):
        Equalize(absorb="all")  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="got no loader; pass one"):
        Equalize(absorb="exact").apply(exported(model, x))
    clipped = Shifted().eval()
    with torch.no_grad():
        read = clipped.second(clipped.first(x)).amax((2, 3)) / 20
        clipped.third.bias.sub_(clipped.third(read).mean(0))  # the relu clips some of each channel
    graph = exported(clipped, x)
    assert "linear" not in Equalize(absorb="seen").apply(graph, [x]).absorbed
    assert difference(graph(images(1) * 100), clipped(images(1) * 100)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplications_and_biases_take_open_sizes_and_halves(dtype):
    model, batches = Activated().eval().to(dtype), [rows(0).to(dtype), rows(1)[:20].to(dtype)]
    sizes = ({0: torch.export.Dim("n", min=2, max=128)},)
    graph = torch.export.export(model, (batches[0],), dynamic_shapes=sizes).module()
    assert "gelu_smoothed" in Smooth(multiply=True).apply(graph, batches).inserted
    most = 1e-5 if dtype == torch.float32 else 3e-2
    assert all(difference(graph(x).float(), model(x).float()) < most for x in (*batches, batches[0][:3]))
    shifted, batches = Shifted().eval().to(dtype), [images(0).to(dtype), images(1)[:5].to(dtype)]
    graph = torch.export.export(shifted, (batches[0],), dynamic_shapes=sizes).module()
    assert Equalize(absorb="seen").apply(graph, batches).absorbed
    assert all(difference(graph(x).float(), shifted(x).float()) < most for x in (*batches, batches[0][:3]))
    assert {value.dtype for value in graph.parameters()} == {dtype}


class Copies(TorchDispatchMode):
    """Notes how many float tensors as large as a weight there are at most beside the model's when a layer runs."""

    def __init__(self, model):
        super().__init__()
        self.own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self.most = self.layers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            memories = {
                each.untyped_storage().data_ptr()
                for each in gc.get_objects()
                if type(each) is torch.Tensor and each.shape == (40, 40) and each.dtype == torch.float32
            }
            self.most, self.layers = max(self.most, len(memories - self.own)), self.layers + 1
        return func(*args, **kwargs or {})


def test_a_trial_keeps_no_second_model_in_float():
    """Of a language model it would be as large as the model, for each kind of scales."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(40, 40), nn.ReLU()))).eval()
    graph, batches = torch.export.export(model, (torch.randn(3, 40),)).module(), [(torch.randn(3, 40),)]
    with torch.no_grad(), Copies(graph) as copies:
        tried = Tried.of(Scales(graph, []), None)
        noises = compared(tried, tried, batches, lambda: None).before
    assert all(20 < noise.decibels < 60 for noise in noises)
    assert copies.layers == 5 * 6
    assert 1 <= copies.most <= 2


@pytest.mark.parametrize("batches", [6, 40])
@pytest.mark.parametrize("algorithm", [quantplug.Equalize(), quantplug.Smooth()], ids=["equalize", "smooth"])
def test_what_is_lost_is_given_up_after_a_few_samples(algorithm, batches, monkeypatch):
    """A trial takes as long as five runs of the model, and a language model's texts are many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    asked = []

    def spoils(scales, *_):
        for index, group in enumerate(scales.groups):
            scales.multiply(index, torch.logspace(-1.5, 1.5, 1 + group.count, dtype=torch.float64))

    def spoils_one(self, scales, index, seen, found):
        spoils(scales) if not index else None

    def counting(before, after, given, _):
        asked.append(0)
        return compared(before, after, given, lambda: asked.__setitem__(-1, asked[-1] + 1))

    monkeypatch.setattr(equalize, "_even_out", spoils)
    monkeypatch.setattr(quantplug.Smooth, "_smooth", spoils_one)
    for module in (equalize, smooth):
        monkeypatch.setattr(module, "compared", counting)
    graph = torch.export.export(model, (torch.randn(1, 16),)).module()
    before = {name: value.clone() for name, value in graph.named_parameters()}
    found = algorithm.apply(graph, [torch.randn(1, 16) for _ in range(batches)])
    assert len(found) == 0
    held_back = batches if isinstance(algorithm, quantplug.Equalize) else batches // 2
    assert min(held_back, 8) <= asked[0] <= min(held_back, 12)
    assert all(torch.equal(value, before[name]) for name, value in graph.named_parameters())


@pytest.mark.parametrize("batches", [6, 40])
def test_what_gains_is_kept_after_a_few_samples(batches, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    with torch.no_grad():
        model[0].weight[3] *= 30.0
    asked = []

    def counting(before, after, given, _):
        return compared(before, after, given, lambda: asked.append(0))

    monkeypatch.setattr(equalize, "compared", counting)
    graph = torch.export.export(model, (torch.randn(1, 16),)).module()
    assert len(quantplug.Equalize(per_channel=False).apply(graph, [torch.randn(1, 16) for _ in range(batches)])) == 1
    assert min(batches, 8) <= len(asked) <= min(batches, 12)


@pytest.mark.parametrize(("chance", "is_kept"), [(0.2, True), (1.0, False)])
def test_a_gain_has_to_be_more_than_trials_of_one_model_differ_by(chance, is_kept):
    """What a short GPTQ makes of a model is another thing with another number of threads."""

    class Noisy:
        def __init__(self, size, batch):
            self.size, self.batch = size, batch

        def result(self):
            return self.batch[0] * (1 + self.size)

    graph = torch.export.export(nn.Identity(), (torch.randn(1, 16),)).module()
    runs: list[Any] = [[partial(Noisy, size)] for size in (0.1, 0.093)]
    before, after = (Tried(graph, each, "", chance) for each in runs)
    outcome = compared(before, after, [(torch.randn(1, 16),) for _ in range(6)], lambda: None)
    assert 0.5 < outcome.after[0].decibels - outcome.before[0].decibels < 0.8
    assert outcome.gains == is_kept


def outlier():
    """Returns layers behind a norm with a channel much larger than the others, and batches."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(64)
    with torch.no_grad():
        norm.weight[5] = 20.0
    model = nn.Sequential(norm, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    return model, [torch.randn(32, 64) for _ in range(8)]


@pytest.mark.parametrize("before_gptq", [False, True])
def test_what_gains_in_8_bits_is_judged_by_what_the_models_own_quantizer_makes_of_it(before_gptq):
    """Outliers that move into weights are no good to 4 bits, whose activations have a scale for each row."""
    model, data = outlier()
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int4_dynamic_groups")
    assert len(Smooth().apply(exported(model, data[0]), data)) == 2
    graph = exported(model, data[0])
    before = {name: value.clone() for name, value in graph.named_parameters()}
    found = Smooth(before_gptq=before_gptq).for_quantizer(quantizer).apply(graph, data)
    assert not found
    assert "dB when quantized" in found.left["linear"]
    assert all(torch.equal(value, before[name]) for name, value in graph.named_parameters())


def test_equalization_is_judged_by_the_models_own_quantizer_too():
    """Columns of different sizes are no good to 4 bits with a scale for each row."""
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 16)
    with torch.no_grad():
        second.weight.mul_(torch.randn(64).exp())
    model, data = nn.Sequential(first, nn.ReLU(), second).eval(), [torch.randn(32, 64) for _ in range(8)]
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int4_dynamic")
    equalized = Equalize(quantizer=quantizer).apply(graph := exported(model, data[0]), data)
    assert set(equalized) == {"linear_1"}
    plain, scaled = (
        sqnr(quantplug.quantize(each, (data[0],), quantizer, progress=False).reference(data[1]), model(data[1]))
        for each in (exported(model, data[0]), graph)
    )
    assert scaled > plain + 0.5


def test_the_accurate_recipe_is_as_good_as_rounding_by_gptq_alone_in_4_bits():
    model, data = outlier()
    wanted, kept = model(data[1]), []
    for recipe in ([quantplug.GPTQ()], "accurate"):
        made = quantplug.quantize(
            model, (data[0],), "xnnpack", data, "int4_dynamic_groups", recipe=recipe, progress=False
        )
        kept.append(sqnr(made.reference(data[1]), wanted))
    assert kept[1] > kept[0] - 0.5


@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_without_a_gptq_all_batches_judge(config):
    """Static configs are judged in 8 bits, dynamic ones as they are: no batch is kept for rounding by GPTQ."""
    model, data = outlier()
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    judge = Judge.of(exported(model, data[0]), quantizer, None, before_gptq=True)
    assert (judge.quantizer is None, judge.rounds) == (config == "int8", False)
    with batches_of(exported(model, data[0]), data, 256, None, least=1, step="a test") as batches:
        assert len(judge.parts(batches)[1]) == len(data)
