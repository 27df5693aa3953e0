"""Each rewrite computes the numbers of the graph that it replaces, on strict and non-strict exports."""

from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from quantplug.core.graph.facts import module_path
from quantplug.lowering.rewrites.movement import still_permutation_is_view
from quantplug.lowering.xnnpack import rewrites
from quantplug.lowering.xnnpack.rewrites import rewrite_for_xnnpack

IMAGE, VOLUME = (2, 8, 6, 6), (2, 3, 5, 6, 6)


class Function(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def normalized(channels):
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    return norm


def targets(graph):
    return {node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")}


GLOBAL, AVERAGE, INDEX = "global_pooling_is_mean", "average_pooling_is_depthwise", "index_is_slices"
# name -> (function, parts, shape, operator that must be gone, rewrite)
CASES: dict[str, Any] = {
    "mean": (lambda s, x: x.mean((2, 3)), {}, IMAGE, None, "spatial_mean_keeps_dims"),
    "mean of negative dims": (lambda s, x: x.mean((-1, -2)), {}, IMAGE, None, "spatial_mean_keeps_dims"),
    "global pooling": (lambda s, x: F.adaptive_avg_pool2d(x, 1), {}, IMAGE, "adaptive_avg_pool2d", GLOBAL),
    "whole-image pooling": (lambda s, x: F.avg_pool2d(x, 6), {}, IMAGE, "avg_pool2d", GLOBAL),
    "average pooling": (lambda s, x: F.avg_pool2d(x, 2), {}, IMAGE, "avg_pool2d", AVERAGE),
    "padded average pooling": (lambda s, x: F.avg_pool2d(x, 3, 2, 1), {}, IMAGE, "avg_pool2d", AVERAGE),
    "chunk": (lambda s, x: torch.cat(x.chunk(3, 1)[::-1], 1), {}, IMAGE, "chunk", "split_is_slices"),
    "split": (lambda s, x: x.split([3, 5], -3)[1] * 2, {}, IMAGE, "split_with_sizes", "split_is_slices"),
    "unbind": (lambda s, x: x.unbind(1)[2] + x.unbind(1)[-1], {}, IMAGE, "unbind", "split_is_slices"),
    "select": (lambda s, x: x[:, -1] + x.select(-1, 2).sum(), {}, IMAGE, "select", "select_is_slice"),
    "patches": (lambda s, x: F.unfold(x, (2, 3), stride=(2, 3)), {}, IMAGE, "im2col", "patches_are_views"),
    "image of patches": (
        lambda s, x: F.fold(x.reshape(2, 48, 6), (6, 6), (2, 3), stride=(2, 3)),
        {},
        IMAGE,
        "col2im",
        "patches_are_views",
    ),
    "index of one": (lambda s, x: x[:, s.i], {"i": nn.Buffer(torch.tensor([-2]))}, IMAGE, "index", INDEX),
    "index of neighbours": (lambda s, x: x[..., s.i], {"i": nn.Buffer(torch.arange(2, 5))}, IMAGE, "index", INDEX),
    "index_select": (
        lambda s, x: x.index_select(-1, s.i),
        {"i": nn.Buffer(torch.tensor([4, 5]))},
        IMAGE,
        "index_select",
        INDEX,
    ),
    "squeeze": (lambda s, x: x[:, :1].squeeze(1).unsqueeze(0), {}, IMAGE, "squeeze", "squeeze_is_view"),
    "one image": (
        lambda s, x: F.max_pool2d(s.conv(x), 2),
        {"conv": nn.Conv2d(8, 4, 3)},
        IMAGE[1:],
        None,
        "sample_is_batch",
    ),
    "transpose of one": (
        lambda s, x: x.transpose(1, 0) * 2,
        {},
        (1, 5, 6),
        "transpose",
        "still_permutation_is_view",
    ),
    "permute of ones": (
        lambda s, x: x.permute(2, 1, 0, -1) * 2,
        {},
        (1, 5, 1, 6),
        "permute",
        "still_permutation_is_view",
    ),
    "views of views": (
        lambda s, x: (x * 2).view(2, 8, 36).reshape(2, 4, 2, 36).view(8, 72) + (x * 2).view(2, 8, 36).view(8, 72),
        {},
        IMAGE,
        "reshape",
        "view_of_view_is_view",
    ),
    "cat of one": (lambda s, x: torch.cat([x * 2]), {}, IMAGE, "cat", "lone_concatenation_is_copy"),
    "silu": (lambda s, x: F.silu(x), {}, IMAGE, "silu", "silu_is_product"),
    "silu in place": (lambda s, x: F.silu(x * 2, inplace=True), {}, IMAGE, "silu_", "silu_is_product"),
    "hardsigmoid": (lambda s, x: F.hardsigmoid(x * 3), {}, IMAGE, "hardsigmoid", "hardsigmoid_is_clamp"),
    "gate behind a convolution": (
        lambda s, x: F.hardsigmoid(s.c(x)),
        {"c": nn.Conv2d(8, 8, 1)},
        IMAGE,
        "mul",
        "hardsigmoid_is_clamp",
    ),
    "gate without a bias": (
        lambda s, x: F.hardsigmoid(s.c(x)),
        {"c": nn.Linear(6, 4, bias=False)},
        IMAGE,
        "hardsigmoid",
        "hardsigmoid_is_clamp",
    ),
    "rrelu": (lambda s, x: F.rrelu(x), {}, IMAGE, "rrelu", "rrelu_is_leaky_relu"),
    "conv3d": (lambda s, x: s.c(x), {"c": nn.Conv3d(3, 4, 3)}, VOLUME, "conv3d", "convolution_3d_is_2d"),
    "strided conv3d": (
        lambda s, x: s.c(x),
        {"c": nn.Conv3d(3, 4, (3, 1, 2), (2, 1, 2), (1, 0, 1), (1, 1, 2), bias=False)},
        VOLUME,
        "conv3d",
        "convolution_3d_is_2d",
    ),
    "max_pool3d": (lambda s, x: F.max_pool3d(x, 3, 2, 1), {}, VOLUME, "max_pool3d", "pooling_3d_is_2d"),
    "avg_pool3d": (lambda s, x: F.avg_pool3d(x, (3, 2, 2)), {}, VOLUME, "avg_pool3d", "pooling_3d_is_2d"),
    "local response": (lambda s, x: F.local_response_norm(x, 3), {}, IMAGE, "avg_pool3d", "pooling_3d_is_2d"),
    "max_pool1d": (lambda s, x: F.max_pool1d(x, 3, 2, 1), {}, (2, 4, 9), "max_pool1d", "pooling_1d_is_2d"),
    "avg_pool1d": (lambda s, x: F.avg_pool1d(x, 3, 2, 1), {}, (2, 4, 9), "avg_pool1d", "pooling_1d_is_2d"),
    "mean of a row": (
        lambda s, x: F.adaptive_avg_pool1d(x, 1),
        {},
        (2, 4, 9),
        "adaptive_avg_pool1d",
        "global_pooling_is_2d",
    ),
    "mean of a volume": (
        lambda s, x: F.adaptive_avg_pool3d(x, 1),
        {},
        VOLUME,
        "adaptive_avg_pool3d",
        "global_pooling_is_2d",
    ),
    "pooling with positions": (
        lambda s, x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0],
        {},
        IMAGE,
        "max_pool2d_with_indices",
        "indexed_pooling_is_plain",
    ),
    "a scalar": (lambda s, x: x - x.mean(), {}, IMAGE, "", "scalars_have_dimensions"),
    "clamp": (lambda s, x: x.clamp(-0.5, 1) + x.clamp(min=0), {}, IMAGE, "clamp", "clamp_is_activation"),
    "numbers": (lambda s, x: (x * 2.5 + 1) / 3 - 0.25, {}, IMAGE, "div", "numbers_are_constants"),
    "batch norm": (lambda s, x: s.n(x + 1), {"n": normalized(8)}, IMAGE, "batch_norm", "batch_norm_is_depthwise"),
    "attention": (
        lambda s, x: F.scaled_dot_product_attention(x, x + 1, x * 2, scale=0.3),
        {},
        IMAGE,
        "scaled_dot_product_attention",
        "attention_is_products",
    ),
    "causal attention": (
        lambda s, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        {},
        IMAGE,
        "scaled_dot_product_attention",
        "attention_is_products",
    ),
    "attention with a boolean mask": (
        lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=s.m),
        {"m": nn.Buffer(torch.eye(6) + torch.ones(6, 6).tril(-2) > 0)},
        IMAGE,
        "scaled_dot_product_attention",
        "attention_is_products",
    ),
    "positions": (
        lambda s, x: x * torch.cos(torch.arange(6.0) * s.f) + torch.ones_like(x),
        {"f": nn.Buffer(torch.rand(6))},
        IMAGE,
        "arange",
        "constant_expressions_are_folded",
    ),
    "masked attention": (
        lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=s.m),
        {"m": nn.Buffer(torch.randn(6, 6))},
        IMAGE,
        "scaled_dot_product_attention",
        "attention_is_products",
    ),
}  # fmt: skip


@pytest.mark.few(15)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_rewrite_keeps_the_numbers(name, strict):
    function, parts, shape, gone, rewrite = CASES[name]
    model = Function(function, **parts).eval()
    x = torch.randn(*shape)
    graph = torch.export.export(model, (x,), strict=strict).module()
    before = str(graph.graph)
    graph = getattr(rewrites, rewrite)(graph)
    assert str(graph.graph) != before
    assert f"aten::{gone}" not in targets(graph)
    for _ in range(3):
        fresh = torch.randn(*shape)
        torch.testing.assert_close(graph(fresh), model(fresh), rtol=1e-5, atol=1e-5)


RECURRENT = [
    ("LSTM", {}),
    ("LSTM", {"batch_first": True, "num_layers": 2}),
    ("LSTM", {"bidirectional": True, "bias": False}),
    ("LSTM", {"bidirectional": True, "num_layers": 2, "proj_size": 3}),
    ("GRU", {"batch_first": True}),
    ("GRU", {"num_layers": 2, "bidirectional": True}),
    ("RNN", {"batch_first": True}),
    ("RNN", {"nonlinearity": "relu", "num_layers": 2}),
]


@pytest.mark.parametrize(("kind", "options"), RECURRENT, ids=str)
def test_recurrences_are_unrolled(kind, options):
    torch.manual_seed(0)
    model, x = getattr(nn, kind)(5, 7, **options).eval(), torch.randn(3, 4, 5)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    assert not any(name.startswith(f"aten::{kind.lower()}") for name in targets(graph))
    fresh = torch.randn(3, 4, 5)
    torch.testing.assert_close(graph(fresh), model(fresh), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_are_layers(kind):
    torch.manual_seed(0)
    model, x = getattr(nn, kind)(5, 7).eval(), torch.randn(3, 5)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    assert not any("cell" in name for name in targets(graph))
    fresh = torch.randn(3, 5)
    torch.testing.assert_close(graph(fresh), model(fresh), rtol=1e-5, atol=1e-5)


def test_values_and_module_paths_are_kept():
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Hardsigmoid()).eval()
    graph = torch.export.export(model, (torch.randn(*IMAGE),)).module()
    graph = rewrite_for_xnnpack(graph)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert {module_path(node) for node in calls} == {"0", "1", "2", "3", "4"}
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in calls)
    assert [tuple(n.meta["val"].shape) for n in calls if module_path(n) == "1"] == [IMAGE, IMAGE]


def test_a_permutation_that_moves_data_stays():
    model = Function(lambda _, x: x.transpose(1, 2).permute(1, 0, 2) * 2).eval()
    graph = torch.export.export(model, (torch.randn(1, 5, 6),)).module()
    rewritten = still_permutation_is_view(graph)
    assert "aten::transpose" in targets(rewritten)


def test_an_in_place_operator_whose_operand_is_read_again_stays():
    def function(s, x):
        y = x * 2
        F.silu(y, inplace=True)
        return y + 1

    model, x = Function(function).eval(), torch.randn(*IMAGE)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    torch.testing.assert_close(graph(x), model(x))


STEPS = {
    "silu": F.silu,
    "hardsigmoid": F.hardsigmoid,
    "scaled": lambda x: x * 1.5 - 0.5,
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "pooled": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "gated": lambda x: x * F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x + x.mean((2, 3))[..., None, None],
    "selected": lambda x: x + x[:, 1].unsqueeze(1),
    "clamped": lambda x: x.clamp(-1, 1),
    "attended": lambda x: F.scaled_dot_product_attention(x, x, x),
    "relu": lambda x: F.relu(x, inplace=False),
}


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_all_rewrites_together_keep_the_numbers_of_random_chains(steps, seed):
    def function(s, x):
        for step in steps:
            x = STEPS[step](x)
        return x

    torch.manual_seed(seed)
    model, x = Function(function).eval(), torch.randn(1, 4, 5, 5)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    graph.graph.lint()
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)
