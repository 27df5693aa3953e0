"""Sweeps over operators, scales, shapes and random graphs: every program loads and agrees within a declared level."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantplug.lowering.xnnpack import lower

from qdq_graphs import Weight, dynamic, fake, graph_of  # isort: skip

# level -> largest difference in steps of the output's scale, largest share of elements that differ
LEVELS = {"exact": (0, 0.0), "rounding": (1, 0.02), "one step": (1, 1.0)}

# operator -> (level, function, kind of inputs). "rounding": a result near the middle between two integers may
# fall to either side, because the kernel sums or scales in another order.
OPERATORS = {
    "add": ("rounding", torch.add, "two"),
    "sub": ("rounding", torch.sub, "two"),
    "mul": ("rounding", torch.mul, "two"),
    "div": ("rounding", lambda x, y: x / (y.abs() + 0.5), "float denominator"),
    "maximum": ("rounding", torch.maximum, "two"),
    "minimum": ("rounding", torch.minimum, "two"),
    "add of one number for each channel": ("rounding", lambda x, y: x + y[:, :, :1, :1], "two"),
    "sigmoid": ("rounding", torch.sigmoid, "one"),
    "tanh": ("rounding", torch.tanh, "one"),
    "hardswish": ("rounding", F.hardswish, "one"),
    "gelu": ("rounding", F.gelu, "one"),
    "gelu, tanh form": ("one step", lambda x: F.gelu(x, approximate="tanh"), "one"),
    "leaky_relu": ("one step", lambda x: F.leaky_relu(x, 0.1), "one"),
    "elu": ("rounding", F.elu, "one"),
    "abs": ("rounding", torch.abs, "one"),
    "neg": ("rounding", torch.neg, "one"),
    "exp": ("rounding", torch.exp, "one"),
    "square": ("rounding", torch.square, "one"),
    "log": ("rounding", torch.log, "positive"),
    "sqrt": ("rounding", torch.sqrt, "positive"),
    "rsqrt": ("rounding", torch.rsqrt, "positive"),
    # Its few distinct results can all lie on the middle between two integers.
    "floor": ("one step", torch.floor, "one"),
    "ceil": ("rounding", torch.ceil, "one"),
    "relu": ("one step", F.relu, "one"),
    "relu6": ("one step", F.relu6, "one"),
    "hardtanh": ("one step", F.hardtanh, "one"),
    "clamp": ("one step", lambda x: x.clamp(-1.0, 0.5), "one"),
    "max_pool2d": ("rounding", lambda x: F.max_pool2d(x, 2), "one"),
    "mean over the image": ("rounding", lambda x: x.mean((2, 3), keepdim=True), "one"),
    "cat": ("rounding", lambda x, y: torch.cat([x, y], 1), "two"),
    "permute": ("rounding", lambda x: x.permute(0, 2, 3, 1), "one"),
    "reshape": ("rounding", lambda x: x.reshape(x.shape[0], -1), "one"),
    "slice": ("rounding", lambda x: x[:, 1:3], "one"),
    "zero pad": ("rounding", lambda x: F.pad(x, (1, 2, 0, 1)), "one"),
}  # fmt: skip


def fitting(values: Tensor, spread: float = 1.0) -> tuple[float, int]:
    """Returns qparams that cover a tensor, its range widened by a factor."""
    low, high = min(float(values.min()), 0.0) * spread, max(float(values.max()), 0.0) * spread
    scale = max(high - low, 1e-5) / 255
    return scale, max(-128, min(127, round(-128 - low / scale)))


class Operators(nn.Module):
    """Every operator of the sweep on its own, between quantized neighbours."""

    def __init__(self, x: Tensor, y: Tensor, spread: float):
        super().__init__()
        self.x, self.y, self.positive = (fitting(v) for v in (x, y, x.abs() + 0.1))
        self.spread = spread
        self.outputs: dict[str, tuple[float, int]] = {}
        for name, value in self.values(x, y):
            self.outputs[name] = fitting(value, spread)

    def values(self, x: Tensor, y: Tensor):
        for name, (_, function, kind) in OPERATORS.items():
            if kind == "two":
                yield name, function(fake(x, self.x), fake(y, self.y))
            elif kind == "float denominator":
                denominator = fake(y.abs() + 0.5, (0.02, -128))
                yield name, fake(x, self.x) / denominator
            else:
                yield name, function(fake(x, self.x) if kind == "one" else fake(x.abs() + 0.1, self.positive))

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [fake(value, self.outputs[name]) for name, value in self.values(x, y)]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spread"), [((1, 4, 6, 6), 1.0), ((2, 5, 7, 4), 0.5), ((1, 16, 2, 3), 3.0)], ids=str)
def test_every_operator_agrees_within_its_level(shape, spread):
    torch.manual_seed(int(spread * 10))
    x, y = torch.randn(*shape) * 2, torch.randn(*shape)
    model = Operators(x, y, spread).eval()
    graph = graph_of(model, x, y)
    program = lower(graph, (x, y), minimum_sqnr=20.0)
    # What is float here makes the tests' own positive operands, before they are quantized.
    assert {op.target for op in program.ops if op.placement != "int8"} <= {
        "aten.abs.default",
        "aten.add.Tensor",
        "aten.slice.Tensor",
    }
    assert program.delegates == 1
    report = []
    for name, found, expected in zip(OPERATORS, program(x, y), graph(x, y), strict=True):
        steps = ((found - expected) / model.outputs[name][0]).round().abs()
        most, share = int(steps.max()), float((steps > 0).float().mean())
        limit, allowed = LEVELS[OPERATORS[name][0]]
        print(f"{name:36s} {OPERATORS[name][0]:10s} steps {most} share {share:.4f}")
        if most > limit or share > max(allowed, 1.5 / steps.numel()):
            report.append((name, most, share))
    assert not report


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(-0.25, 0.75),
    "clamp from below": lambda x: x.clamp(min=-0.5),
}
LAYERS = {
    "linear": ((6, 12), lambda x, w, b: F.linear(x, w, b), (4, 12), 0, True),
    "conv1d": ((6, 4, 3), lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 4, 9), 0, False),
    "conv2d": ((6, 4, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 2, 1), (1, 4, 7, 8), 0, True),
    "depthwise": ((4, 1, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 4), (1, 4, 7, 8), 0, False),
    "grouped": ((6, 2, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 1, 0, 1, 2), (1, 4, 7, 8), 0, True),
    "dilated": ((6, 4, 3, 3), lambda x, w, b: F.conv2d(x, w, b, 1, 2, 2), (1, 4, 7, 8), 0, True),
    "transposed": ((4, 6, 3, 3), lambda x, w, b: F.conv_transpose2d(x, w, b, 2), (1, 4, 5, 4), 1, False),
}


class Layers(nn.Module):
    """Every activation behind one kind of layer."""

    def __init__(self, kind: str, mode: str, x: Tensor):
        super().__init__()
        shape, self.layer, _, axis, _ = LAYERS[kind]
        self.mode, self.input = mode, fitting(x)
        self.weights = nn.ModuleList(Weight(*shape, axis=axis) for _ in ACTIVATIONS)
        self.bias = nn.Buffer(torch.randn(shape[axis]))
        self.outputs = [fitting(value) for value in self.values(x)]

    def values(self, x: Tensor):
        source = dynamic(x) if self.mode == "dynamic" else fake(x, self.input)
        for weight, activation in zip(self.weights, ACTIVATIONS.values(), strict=True):
            yield activation(self.layer(source, weight(), self.bias))

    def forward(self, x: Tensor) -> list[Tensor]:
        values = list(self.values(x))
        return values if self.mode == "dynamic" else [fake(v, q) for v, q in zip(values, self.outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_with_every_activation(kind, mode):
    torch.manual_seed(0)
    x = torch.randn(*LAYERS[kind][2])
    model = Layers(kind, mode, x).eval()
    graph = graph_of(model, x)
    program = lower(graph, (x,))
    assert program.delegates == 1
    layers = [op for op in program.ops if "conv" in op.target or "linear" in op.target]
    integer = mode == "static" or LAYERS[kind][4]
    assert {op.placement for op in layers} == {"int8" if integer else "float"}, layers
    for found, expected, (scale, _) in zip(program(x), graph(x), model.outputs, strict=True):
        # Dynamic kernels scale each row (linear) by itself, the graph the whole tensor: half a percent of its range.
        assert ((found - expected).abs() / scale).max() <= (1.01 if mode == "static" else 4.0)


def random_graph(seed: int) -> tuple[nn.Module, Tensor]:
    """Returns a random chain of quantized and float operators with branches."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    steps = [
        (pick(8), pick(2), 0.02 + 0.06 * float(torch.rand(1, generator=generator)), pick(100) - 50) for _ in range(8)
    ]

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seed)
            self.weights = nn.ModuleList(Weight(4, 4, 3, 3) for _ in steps)

        def forward(self, x: Tensor) -> Tensor:
            before = value = fake(x)
            for weight, (kind, quantized, scale, zero) in zip(self.weights, steps, strict=True):
                made = self.step(kind, value, before, weight)
                before, value = value, fake(made, (scale, zero)) if quantized else made
            return value

        def step(self, kind: int, value: Tensor, before: Tensor, weight: nn.Module) -> Tensor:
            choices = (
                lambda: F.conv2d(value, weight(), None, padding=1),
                lambda: F.relu(value),
                lambda: value + before,
                lambda: value * torch.sigmoid(before),
                lambda: torch.cat([value[:, :2], before[:, 2:]], 1),
                lambda: F.max_pool2d(value, 3, 1, 1),
                lambda: F.pad(value, (1, 0, 0, 1))[:, :, 1:, 1:],
                lambda: value.softmax(-1),
            )
            return choices[kind]()

    return Chain(), torch.randn(1, 4, 6, 6, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_random_graphs_load_and_agree(seed):
    model, x = random_graph(seed)
    graph = graph_of(model, x)
    program = lower(graph, (x,))
    assert program.sqnr >= 25
    assert not program.counts.portable
