"""Linears, sums, pooling and means of any size on x86 against their graphs, in two calls and with open batches."""

import random

import pytest
import torch
from models import Function
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.lowering.x86 import X86Program

FUNCTIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "relu6": F.relu6,
}
WIDTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 48, 64, 65, 100)


def linears(r):
    """Layers one behind the other, ranks 1 to 4, with functions, residual sums and sums of two layers."""
    inner, outer = r.choice(WIDTHS), r.choice(WIDTHS)
    shape = r.choice(((r.randint(1, 20), inner), (r.randint(1, 4), r.randint(1, 9), inner), (2, 3, 2, inner), (inner,)))
    function, kind = FUNCTIONS[r.choice(list(FUNCTIONS))], r.choice(("plain", "residual", "both", "shared"))
    first, second = nn.Linear(inner, outer, bias=r.random() < 0.7), nn.Linear(outer, outer, bias=r.random() < 0.7)
    last = nn.Linear(outer, r.choice(WIDTHS))

    def forward(m, x):
        y = function(m.first(x))
        if kind == "residual":
            y = y + m.second(y)
        if kind == "both":
            y = torch.relu(m.second(y) + m.first(x))
        if kind == "shared":
            y = m.second(m.second(y))
        return m.last(y)

    config = r.choice(("int8", "int8", "int8_dynamic", "int8_weight_only", "int8_per_tensor"))
    return Function(forward, first=first, second=second, last=last), shape, config


def maps(r, forward):
    channels, made = r.choice((1, 2, 3, 8, 16, 17)), r.choice((1, 4, 7, 16))
    shape = (r.choice((1, 2, 5)), channels, r.randint(3, 14), r.randint(3, 14))
    first, last = nn.Conv2d(channels, made, 3, padding=1), nn.Conv2d(made, 4, 1)
    side = nn.Conv2d(made, made, 1)
    return Function(forward, first=first, last=last, side=side), shape, r.choice(("int8", "int8_per_tensor"))


def sums(r):
    """Sums of layers in either order, broadcast over batch, channels or pixels, in place, with functions behind."""
    function, kind, order = FUNCTIONS[r.choice(("none", "relu", "clamp", "silu"))], r.randrange(6), r.random() < 0.5

    def forward(m, x):
        y = torch.relu(m.first(x))
        other = (
            y,
            m.side(y),
            y.mean((2, 3), keepdim=True),
            y[:1],
            y[:, :1],
            y.amax(3, keepdim=True),
        )[kind]
        found = m.side(y)
        return m.last(function(other + found if order else found + other))

    return maps(r, forward)


def pooling(r):
    """Pools of any window between layers, and means over any dimensions."""
    window, stride = (r.randint(1, 3), r.randint(1, 3)), (r.randint(1, 3), r.randint(1, 3))
    padding = tuple(r.randint(0, size // 2) for size in window)
    ceil, included, divisor = r.random() < 0.4, r.random() < 0.5, r.choice((None, None, 3))
    dilation, dims, keep = r.choice((1, 1, 2, (2, 1))), r.choice(((2, 3), (3,), (1,), (2,))), r.random() < 0.5
    size, kind = r.choice((1, 2, (1, 2), (None, 1), 3)), r.choice(("max", "avg", "adaptive", "mean", "adaptive max"))
    pools = {
        "max": lambda x: F.max_pool2d(x, window, stride, padding, dilation, ceil),
        "avg": lambda x: F.avg_pool2d(x, window, stride, padding, ceil, included, divisor),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, size),
        "adaptive max": lambda x: F.adaptive_max_pool2d(x, size),
        "mean": lambda x: x.mean(dims, keepdim=keep),
    }

    def forward(m, x):
        y = pools[kind](torch.relu(m.first(x)) if included else m.first(x))
        return m.last(y) if y.dim() == 4 and y.shape[1] == m.last.in_channels else y

    return maps(r, forward)


def differences(make, seed):
    """Returns the model and what parts it from its graph, "" where nothing does, None where it is no model."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    model, shape, config = make(r)
    calls = [torch.randn(*shape) for _ in range(3)]
    is_open = len(shape) > 1 and r.random() < 0.5
    try:
        model.eval()(calls[0])
    except RuntimeError:  # a window of more than the image
        return None
    if is_open:
        calls.append(torch.randn(7, *shape[1:]))
    sizes = (({0: torch.export.Dim("batch", min=1, max=64)},),) if is_open and shape[0] > 1 else None
    exported = torch.export.export(model, tuple(calls[:1]), dynamic_shapes=sizes)
    data = [(x,) for x in calls[:2]]
    artefact = quantplug.quantize(exported, data[0], "x86", data, config, progress=False)
    if (
        config.startswith("int8")
        and "only" not in config
        and {op.placement for op in artefact.program.ops} == {"float"}
    ):
        return f"{shape} {config}: nothing runs on integers"
    for x in calls if sizes else calls[:3]:
        expected, found = artefact.reference(x), artefact(x)
        # Integers may differ by one where a sum lies between two, and few of them make few decibels.
        error, level = (found - expected).abs(), expected.abs().max().clamp(min=1e-3)
        if found.shape != expected.shape or not (error.mean() < 0.01 * level and error.max() < 0.05 * level):
            return f"{shape} {config} open {bool(sizes)}: {float(error.max()):.3g} of {float(level):.3g}"
    return ""


def sweep(make, seeds):
    with torch.no_grad():
        found = {seed: differences(make, seed) for seed in seeds}
    tried = [seed for seed, told in found.items() if told is not None]
    return len(tried), {seed: told for seed, told in found.items() if told}


def test_the_sweep_finds_a_kernel_that_is_a_little_off(monkeypatch):
    called = X86Program.__call__
    monkeypatch.setattr(X86Program, "__call__", lambda self, *inputs: called(self, *inputs) * 0.97)
    tried, wrong = sweep(linears, range(4))
    assert len(wrong) == tried == 4


@pytest.mark.slow
@pytest.mark.parametrize("make", [linears, sums, pooling])
def test_kernels_of_any_size_compute_what_their_graph_does(make):
    tried, wrong = sweep(make, range(75))
    assert wrong == {}
    assert tried > 50
