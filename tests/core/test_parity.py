"""Our core against torchao's: the same quantizers on the same models give the same graphs and numbers."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.arm.quantizer import TOSAQuantizer
from executorch.backends.arm.quantizer import get_symmetric_quantization_config as tosa_config
from executorch.backends.arm.tosa import TosaSpecification

# isort: split
# The Cortex-M operators cannot be imported before the passes that import them.
import executorch.backends.cortex_m.passes  # noqa: F401

# isort: split
from executorch.backends.cortex_m.quantizer.quantizer import CortexMQuantizer
from executorch.backends.vulkan.quantizer.vulkan_quantizer import VulkanQuantizer
from executorch.backends.vulkan.quantizer.vulkan_quantizer import get_symmetric_quantization_config as vulkan_config
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torchao.quantization.pt2e import quantize_pt2e as peer
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, Quantizer
from torchao.quantization.pt2e.quantizer.arm_inductor_quantizer import ArmInductorQuantizer
from torchao.quantization.pt2e.quantizer.arm_inductor_quantizer import (
    get_default_arm_inductor_quantization_config as arm_config,
)
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    get_default_x86_inductor_quantization_config as x86_config,
)

from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from quantplug.core.qdq.format import differences
from quantplug.core.specs.levels import sqnr


class Residual(nn.Module):
    def __init__(self, pool: bool = True) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.bn(self.stem(x))), 2)
        y = F.relu(self.bn2(self.conv(y)) + y)
        return self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.bn = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.depth, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.project, self.bn3 = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardtanh(self.bn(self.expand(x)), 0.0, 6.0)
        y = F.hardswish(self.bn2(self.depth(y)))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.bn3(self.project(y * gate))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(7, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, self.one(x)], 1)
        z = torch.cat([y, F.relu(self.two(y))], 1)
        return F.avg_pool2d(z, 2)[:, 2:].permute(0, 2, 3, 1)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = F.softmax(q @ k.transpose(-1, -2) * 0.35, -1)
        return self.norm(x + self.out(weights @ v))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(self.embed(x)))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(6, 6, bias=False), nn.Conv1d(2, 2, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.fc(F.relu(self.fc(self.conv(x)))))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(2, 4)
        for step in range(3):
            h, c = self.cell(x[:, step], (h, c))
        return h


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ConvTranspose2d(6, 3, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.up(F.leaky_relu(self.down(x)))) * x


class Fan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x
        for branch in self.branches:
            total = total + branch(x)
        return total, x * 2


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1.0)
        self.cache.copy_(self.fc(x))
        return self.cache + x


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv3d(1, 2, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x))).split(2, dim=1)[0].squeeze(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (2, 3, 16, 16)),
    "inverted": (Inverted, (2, 4, 8, 8)),
    "dense": (Dense, (2, 3, 8, 8)),
    "perceptron": (Perceptron, (3, 6)),
    "attention": (Attention, (2, 5, 8)),
    "tagger": (Tagger, (3, 5)),
    "shared": (Shared, (2, 2, 6)),
    "cell": (Cell, (2, 3, 4)),
    "upscaler": (Upscaler, (2, 3, 8, 8)),
    "fan": (Fan, (2, 4)),
    "counter": (Counter, (2, 4)),
    "volume": (Volume, (2, 1, 3, 4, 4)),
}


def xnnpack(**options: Any) -> Quantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**options))


def tosa(**options: Any) -> Quantizer:
    quantizer = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
    return quantizer.set_global(tosa_config(**options))


QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "xnnpack": lambda: xnnpack(),
    "xnnpack per channel": lambda: xnnpack(is_per_channel=True),
    "xnnpack dynamic": lambda: xnnpack(is_per_channel=True, is_dynamic=True),
    "xnnpack 4 bit": lambda: xnnpack(weight_qmin=-8, weight_qmax=7),
    "x86": lambda: X86InductorQuantizer().set_global(x86_config()),
    "x86 dynamic": lambda: X86InductorQuantizer().set_global(x86_config(is_dynamic=True)),
    "x86 reduced": lambda: X86InductorQuantizer().set_global(x86_config(reduce_range=True)),
    "arm": lambda: ArmInductorQuantizer().set_global(arm_config()),
    "arm dynamic": lambda: ArmInductorQuantizer().set_global(arm_config(is_dynamic=True)),
    "embedding": lambda: EmbeddingQuantizer(),
    "vulkan": lambda: VulkanQuantizer().set_global(vulkan_config()),
    "composed": lambda: ComposableQuantizer([EmbeddingQuantizer(), xnnpack(is_per_channel=True)]),
    "cortex m": lambda: CortexMQuantizer(),
    "tosa": lambda: tosa(),
    "tosa per tensor": lambda: tosa(is_per_channel=False),
}

# torchao's histogram searches for a range of 256 integers whatever the spec has; ours searches for the spec's.
OTHER_RANGES = {"x86 reduced"}

# TOSA's layer norm reshapes its constant scale and bias. torchao's convert leaves the reshape in the graph, between
# two pairs with the same qparams; ours stores the reshaped integers.
CONSTANT_MOVES = {("tosa", "attention"): 2, ("tosa per tensor", "attention"): 2}
MOVE = (
    "aten.reshape.default",
    "quantized_decomposed.quantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.default",
)

# The Cortex-M quantizer has no configuration for training.
QAT_QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "xnnpack": lambda: xnnpack(is_qat=True),
    "xnnpack per channel": lambda: xnnpack(is_qat=True, is_per_channel=True),
    "x86": lambda: X86InductorQuantizer().set_global(x86_config(is_qat=True)),
    "arm": lambda: ArmInductorQuantizer().set_global(arm_config(is_qat=True)),
    "tosa": lambda: tosa(is_qat=True),
}

# Their passes interpret the graph and know no call of the module that holds the input guards.
WITHOUT_GUARDS = {"cortex m", "tosa", "tosa per tensor"}


def exported(name: str, quantizer: str, training: bool = False) -> tuple[torch.fx.GraphModule, Tensor]:
    torch.manual_seed(len(name))
    make, shape = MODELS[name]
    model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_()
            module.running_var.uniform_(0.5, 2.0)
    example = torch.randint(0, 10, shape) if name == "tagger" else torch.randn(shape)
    # The x86 quantizers look for source_fn_stack metadata, which only strict export leaves.
    program = torch.export.export(model.train(training), (example,), strict=True)
    return program.module(check_guards=quantizer not in WITHOUT_GUARDS), example


def run(prepare: Any, convert: Any, model: torch.fx.GraphModule, quantizer: Quantizer, x: Tensor) -> Any:
    prepared = prepare(model, quantizer)
    for scale in (1, 2) if x.is_floating_point() else (1, 1):
        prepared(x * scale)
    return convert(prepared)


ALL = [(quantizer, model) for quantizer in QUANTIZERS for model in MODELS]
# Every quantizer once by default, the models in turn; the rest is slow because of the exports.
SOME = [(quantizer, list(MODELS)[i % len(MODELS)]) for i, quantizer in enumerate(QUANTIZERS)]


def some_and_all(some: list[Any], everything: list[Any]) -> list[Any]:
    rest = [pytest.param(*pair, marks=pytest.mark.slow) for pair in everything if pair not in some]
    return [pytest.param(*pair) for pair in some] + rest


@pytest.mark.few(1)
@pytest.mark.parametrize(("quantizer", "model"), some_and_all(SOME, ALL))
def test_post_training_graphs_equal_the_peers(quantizer: str, model: str) -> None:
    module, x = exported(model, quantizer)
    expected = module(x)
    ours = run(prepare_pt2e, convert_pt2e, module, QUANTIZERS[quantizer](), x)
    module, x = exported(model, quantizer)
    try:
        theirs = run(peer.prepare_pt2e, peer.convert_pt2e, module, QUANTIZERS[quantizer](), x)
    except Exception:
        # Where torchao raises, ours has to work all the same.
        assert sqnr(flat(ours(x)), flat(expected)) > 15
        return
    if quantizer in OTHER_RANGES:
        assert calls(ours) == calls(theirs)
        assert sqnr(flat(ours(x)), flat(expected)) >= sqnr(flat(theirs(x)), flat(expected)) - 0.5
        return
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    moves = CONSTANT_MOVES.get((quantizer, model), 0)
    if moves:
        assert calls(theirs) - calls(ours) == collections.Counter(dict.fromkeys(MOVE, moves))
        assert not calls(ours) - calls(theirs)
        return
    assert differences(ours, theirs) == []


def flat(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else torch.cat([value.flatten() for value in outputs])


def calls(model: torch.fx.GraphModule) -> collections.Counter[str]:
    return collections.Counter(str(node.target) for node in model.graph.nodes if node.op == "call_function")


# TOSA quantizes the result of a convolution before its batch norm, so the two are no pair to fuse, and ours keeps both.
# torchao fuses them all the same and cannot fold them again: its converted graph still scales by the variance.
LEFT_SCALED = {("tosa", "residual"), ("tosa", "inverted")}

QAT_MODELS = ("residual", "inverted", "perceptron", "shared")
# Each quantizer with a model that batch norms are fused in, and one with all of them: a case takes half a minute.
TRAINED = [
    *(("xnnpack per channel", model) for model in QAT_MODELS),
    *(("xnnpack", "residual"), ("x86", "inverted"), ("arm", "residual"), ("tosa", "inverted")),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("quantizer", "model"), some_and_all([("xnnpack", "residual"), ("x86", "inverted")], TRAINED))
def test_e18_trained_graphs_equal_the_peers(quantizer: str, model: str) -> None:
    """Forward values, gradients of a few steps and the converted graphs are equal bit for bit."""
    outcomes = []
    for prepare, convert in ((peer.prepare_qat_pt2e, peer.convert_pt2e), (prepare_qat_pt2e, convert_pt2e)):
        module, x = exported(model, quantizer, training=True)
        prepared = prepare(module, QAT_QUANTIZERS[quantizer]())
        optimizer = torch.optim.SGD([p for p in prepared.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = prepared(x * (1 + 0.1 * step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        outcomes.append((torch.stack(losses), convert(prepared), x))
    (their_losses, theirs, x), (our_losses, ours, _) = outcomes
    if (quantizer, model) in LEFT_SCALED:
        assert calls(theirs)["aten.sqrt.default"] > 0
        assert calls(ours)["aten.sqrt.default"] == 0
        assert calls(ours)["aten.batch_norm.default"] == calls(theirs)["aten.batch_norm.default"]
        return
    torch.testing.assert_close(our_losses, their_losses, rtol=0, atol=0)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert differences(ours, theirs) == []
