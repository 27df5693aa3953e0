"""What Arm's NPUs run of networks, by Vela's estimate, and whether TOSA's reference model and the emulation agree.

    python benchmarks/arm.py [--models kws_dscnn transformer resnet18 mobilenet_v2] [--configs int8 int16_activations]
        [--targets ethos-u55-128 ethos-u65-256 ethos-u85-256] [--size 96]

Weights are random, with the statistics of four batches; images have `size` pixels a side.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import stored
import torch
from torch import Tensor, nn
from vision import torchvision_models
from xnnpack_models import with_statistics

import quantplug

COLUMNS = ("model", "config", "target", "int8", "graphs", "differ", "to float", "cycles", "ms", "SRAM")


class KeywordNet(nn.Module):
    """The depthwise-separable net of MLPerf Tiny for keywords: 49 steps of 10 MFCC, 12 classes."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 64, (10, 4), 2, (5, 1))]
        for _ in range(4):
            layers += [nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 64, 1)]
        self.body = nn.Sequential(*(nn.Sequential(layer, nn.BatchNorm2d(64), nn.ReLU()) for layer in layers))
        self.head = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of features (batch, 1, 49, 10)."""
        return self.head(self.body(x).mean((2, 3)))


class Encoder(nn.Module):
    """A transformer layer of four heads over 32 tokens of 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits for each token."""
        return self.head(self.layer(x))


def build(name: str, size: int) -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    """Returns a model by its name, and a function from a seed to its inputs."""
    torch.manual_seed(0)
    sizes = {"kws_dscnn": (1, 1, 49, 10), "transformer": (1, 32, 64)}.get(name, (1, 3, size, size))

    def sample(seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)),)

    made: dict[str, Callable[[], nn.Module]] = {"kws_dscnn": KeywordNet, "transformer": Encoder}
    model = made[name]() if name in made else getattr(torchvision_models(), name)(weights=None)
    return with_statistics(model, sample), sample


def rows(name: str, config: str, targets: list[str], size: int) -> Iterator[tuple[Any, ...]]:
    """Yields the cells of one model on each target."""
    model, sample = build(name, size)
    batches, fresh = [sample(seed) for seed in range(8)], sample(100)
    artefact = quantplug.quantize(model, batches[0], "arm", batches, config, progress=False, target="tosa")
    emulated = quantplug.emulate(artefact.reference, fresh, "tosa")(*fresh)
    with torch.no_grad():
        expected = model(*fresh)
    backend = quantplug.get_quantizer("arm").backend
    for target in targets:
        program = backend.lower(artefact.reference, batches[0], target=target)
        yield name, config, target, *cells(program, program(*fresh), emulated, expected)


def cells(program: Any, found: Tensor, emulated: Tensor, expected: Tensor) -> tuple[str, ...]:
    """Returns what a program runs in integers, how well it agrees, and Vela's estimate."""
    integers = sum(operator.placement == "int8" for operator in program.ops)
    estimate, differing = program.estimate, int((found != emulated).sum())
    return (
        *(f"{integers}/{len(program.ops)}", str(len(program.tosa)), f"{differing}/{found.numel()}"),
        *(f"{quantplug.sqnr(found, expected):.1f} dB", f"{estimate.cycles:,}", f"{estimate.seconds * 1e3:.3g}"),
        f"{estimate.sram_bytes / 1024:.0f} KiB",
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["kws_dscnn", "transformer", "resnet18", "mobilenet_v2"])
    parser.add_argument("--configs", nargs="*", default=["int8", "int16_activations"])
    parser.add_argument("--targets", nargs="*", default=["ethos-u55-128", "ethos-u65-256", "ethos-u85-256"])
    parser.add_argument("--size", type=int, default=96)
    stored.add_option(parser)
    given = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for name in given.models:
        for config in given.configs:
            for row in rows(name, config, given.targets, given.size):
                print(f"| {' | '.join(row)} |", flush=True)
                stored.store(given.store, [dict(zip(COLUMNS, row, strict=True))], ("model", "config", "target"))


if __name__ == "__main__":
    main()
