"""Views and copies of turned, sliced, repeated and flipped tensors: programs that run, at any batch size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.lowering.xnnpack.rewrites import rewrite_for_xnnpack

BATCH = torch.export.Dim("batch", min=1, max=16)


def grouped(x, groups=2):
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2)


def space_to_depth(x):
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).contiguous().view(b, c * 4, h // 2, w // 2)


def windows_and_back(x):
    b, c, h, w = x.shape
    parts = x.permute(0, 2, 3, 1).contiguous().view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
    scaled = parts.contiguous().view(-1, 16, c) * 1.5
    whole = scaled.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
    return whole.permute(0, 3, 1, 2).contiguous()


def halves_swapped(x):
    b, c, h, w = x.shape
    first, second = grouped(x).unbind(2)
    return torch.cat([second.contiguous().view(b, c // 2, h, w), first], 1)


def attended(x):
    """Export drops the last copy: attention yields the strides that it asks for."""
    b, c, h, w = x.shape
    query, key, value = (x.flatten(2).transpose(1, 2).view(b, h * w, 2, c // 2).transpose(1, 2) for _ in range(3))
    found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous()
    return found.view(b, h * w, c).transpose(1, 2).contiguous().view(b, c, h, w)


def read_twice(x):
    turned = x.mT.contiguous()
    return turned.view(-1, 16, 4, 8) * turned.view(-1, 16, 4, 8)


# name -> moves of images (batch, 8, 8, 8), and the channels that they give
MOVES = {
    "shuffle of channels": (lambda x: grouped(x).contiguous().view(x.shape), 8),
    "shuffle of four groups": (lambda x: grouped(x, 4).contiguous().view(x.shape[0], -1, *x.shape[2:]), 8),
    "clone": (lambda x: grouped(x).clone(memory_format=torch.contiguous_format).view(x.shape), 8),
    "reshape": (lambda x: grouped(x).reshape(x.shape), 8),
    "flatten": (lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2), 8),
    "activation between": (lambda x: F.relu(grouped(x)).contiguous().view(x.shape), 8),
    "channels last behind": (
        lambda x: grouped(x).contiguous().view(x.shape).contiguous(memory_format=torch.channels_last),
        8,
    ),
    "space to depth": (space_to_depth, 32),
    "windows": (windows_and_back, 8),
    "halves swapped": (halves_swapped, 8),
    "slice": (lambda x: x[:, 2:6].contiguous().view(x.shape[0], 8, 4, 8), 8),
    "every second": (lambda x: x[:, :, ::2, 1::2].contiguous().view(x.shape[0], 16, 2, 4), 16),
    "expand": (lambda x: x.unsqueeze(2).expand(x.shape[0], 8, 2, 8, 8).contiguous().view(x.shape[0], 16, 8, 8), 16),
    "flip": (lambda x: x.transpose(2, 3).flip(2).contiguous().view(x.shape[0], 16, 4, 8), 16),
    "two readers": (read_twice, 16),
    "dimension of one": (lambda x: x.mT.unsqueeze(1).contiguous().squeeze(1).view(x.shape[0], 16, 4, 8), 16),
    "attention": (attended, 8),
}


def around(name):
    """Returns a model that moves between two convolutions, and batches for it."""
    torch.manual_seed(0)
    moves, channels = MOVES[name]
    parts = {"first": nn.Conv2d(3, 8, 3, padding=1), "last": nn.Conv2d(channels, 4, 1)}
    return Net(lambda net, x: net.last(moves(net.first(x))), **parts).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "is_open"), [("int8", False), ("int8_dynamic", True)])
@pytest.mark.parametrize("name", MOVES)
def test_moved_tensors_are_copied_and_viewed(name, config, is_open):
    model, inputs = around(name), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    data, shapes = inputs if config == "int8" else None, (({0: BATCH},),) if is_open else None
    artefact = quantplug.quantize(model, (inputs[0],), "xnnpack", data, config, dynamic_shapes=shapes, progress=False)
    for x in (*inputs[1:], *((torch.randn(7, 3, 8, 8),) if is_open else ())):
        reference = artefact.reference(x)
        assert artefact(x).shape == reference.shape
        assert decibels(artefact(x), reference if config == "int8" else model(x)) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shuffle of channels", "reshape", "space to depth", "windows"])
def test_copies_between_integers_cost_no_conversion(name):
    x = torch.randn(2, 3, 8, 8)
    program: Any = quantplug.quantize(around(name), (x,), "xnnpack", [x], progress=False).program
    assert (program.counts.converts, program.counts.delegates, program.counts.portable) == (2, 1, 0)


def test_a_view_through_which_memory_is_changed_stays_a_view():
    def doubled_in_part(net, x):
        y = x * 2.0
        y.view(2, -1)[0].mul_(3.0)
        return y

    x = torch.randn(2, 3)
    model = Net(doubled_in_part)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)


def test_parameters_that_are_parts_of_others_are_written_as_parts():
    """ExecuTorch 1.4 writes the memory that a view is a part of, from its beginning."""
    torch.manual_seed(0)
    whole = torch.randn(64)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 16)).eval()
    model[0].bias, model[1].weight, model[1].bias = (nn.Parameter(whole[at : at + 8]) for at in (8, 24, 40))
    model[2].weight = nn.Parameter(torch.randn(3, 16, 8)[1])
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int8_dynamic").set_module_name("2", None)
    x = torch.randn(4, 8)
    artefact = quantplug.quantize(model, (x,), quantizer, progress=False)
    assert decibels(artefact(x), artefact.reference(x)) > 60


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "portable"), [(2, 0), (3, 16)])
def test_patches_leave_layers_in_delegates(kernel, portable):
    """MobileViTv2 cuts images so, without overlap; what ExecuTorch makes of other patches had none of them load."""
    torch.manual_seed(0)
    layers = {name: nn.Conv2d(8, 8, 1) for name in ("first", "last")}
    cut = (lambda y: F.unfold(y, kernel, stride=2, padding=kernel // 3)).__call__
    net = Net(lambda net, x: net.last((cut(net.first(x)) * 0.5).reshape(2, 8, -1, 16)), **layers).eval()
    x = torch.randn(2, 8, 8, 8)
    artefact = quantplug.quantize(net, (x,), "xnnpack", [x], progress=False)
    assert decibels(artefact(x), artefact.reference(x)) > 40
    counts: Any = artefact.program.counts  # type: ignore[attr-defined]
    assert (counts.int8, bool(counts.portable)) == (3, bool(portable))


MAXIMA = {
    "last, kept": (lambda y: y - y.max(dim=-1, keepdim=True).values, 1, 0),
    "third, kept": (lambda y: y - y.max(2, keepdim=True)[0], 1, 0),
    "dropped": (lambda y: y - y.max(3).values[..., None], 1, 1),
    "second": (lambda y: y - y.max(1, keepdim=True)[0], 1, 1),
    "of rows": (lambda y: y[0] - y[0].max(-1, keepdim=True)[0], 1, 1),
    "with positions": (lambda y: y - y.max(-1, keepdim=True)[1], 0, 1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", MAXIMA)
def test_maxima_run(name, is_open):
    """GPT-OSS has them. The differences stay in a delegate, the maxima too where XNNPACK has them."""
    torch.manual_seed(0)
    found, floats, portable = MAXIMA[name]
    net = Net(lambda net, x: net.last(found(net.first(x))), first=nn.Linear(8, 8), last=nn.Linear(8, 4)).eval()
    shapes = ({2: torch.export.Dim("length", max=16)},) if is_open else None
    first = torch.randn(1, 4, 6, 8)
    options: Any = {"config": "int8_dynamic", "dynamic_shapes": (shapes,) if is_open else None, "progress": False}
    artefact = quantplug.quantize(net, (first,), "xnnpack", **options)
    for x in (first, torch.randn(1, 4, 3 if is_open else 6, 8)):
        assert decibels(artefact(x), artefact.reference(x)) > 40
    where = {op.target: op.placement for op in artefact.program.ops}
    assert where["aten.max.dim"] == ("portable" if portable or is_open else "float")
    assert (where["aten.sub.Tensor"] == "float") is bool(floats)
