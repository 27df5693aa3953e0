"""Compares our XNNPACK backend with ExecuTorch's own quantizer and partitioner, in one process.

Prints, for each model and both flows: kernel calls inside the delegates (int8, f32, converts), delegates,
portable operators, agreement with the q/dq graph and with float, size of the `.pte`, and the ratio of the
median latencies (theirs / ours, runs interleaved A B A B).

    python benchmarks/xnnpack.py                      # models that need nothing but torch
    python benchmarks/xnnpack.py mobilenet_v3_small   # torchvision's, by name
    python benchmarks/xnnpack.py --size 224 --rounds 30 resnet18 mobilenet_v2
"""

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as torchao_convert
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare

from quantplug.core.convert import convert_pt2e
from quantplug.core.prepare import prepare_pt2e
from quantplug.lowering.xnnpack import KernelCounts, lower
from quantplug.lowering.xnnpack.placement import place
from quantplug.lowering.xnnpack.records import recorded_kernel_calls
from quantplug.lowering.xnnpack.runtime import Method, quiet
from quantplug.quantizers.xnnpack import XNNPACKQuantizer


@dataclass
class Outcome:
    """What one flow made of one model."""

    run: Callable[[], Any]
    counts: KernelCounts
    nbytes: int
    to_reference: float
    to_float: float


class Recurrent(nn.Module):
    """A recurrent layer and a classifier on its last step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(32, 64, batch_first=True)
        self.classify = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        """Returns the logits of a (batch, time, features) sequence."""
        return self.classify(self.layer(x)[0][:, -1])


class SqueezeExcite(nn.Module):
    """Depthwise convolution, gate and residual, as in mobile networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.BatchNorm2d(32), nn.SiLU())
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1), nn.Hardsigmoid()
        )
        self.classify = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        """Returns the logits of a (batch, 3, height, width) image."""
        x = self.stem(x)
        y = self.depthwise(x)
        return self.classify((x + y * self.gate(y)).mean((2, 3)))


def built_in(size: int) -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    """Returns the models that need nothing but torch, as makers of (model, input)."""
    return {
        "LSTM": lambda: (Recurrent("LSTM"), torch.randn(1, 8, 32)),
        "GRU": lambda: (Recurrent("GRU"), torch.randn(1, 8, 32)),
        "squeeze_excite": lambda: (SqueezeExcite(), torch.randn(1, 3, size, size)),
        "encoder": lambda: (
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True),
            torch.randn(1, 64, 128),
        ),
    }


def make(name: str, size: int) -> tuple[nn.Module, Tensor]:
    """Returns a model with random weights and running statistics, and an input for it."""
    torch.manual_seed(0)
    own = built_in(size)
    if name in own:
        model, x = own[name]()
    else:
        import torchvision

        model, x = torchvision.models.get_model(name, weights=None), torch.randn(1, 3, size, size)
    model.train()
    for norm in (m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))):
        norm.momentum = None  # plain averages: after three batches the statistics are those of the weights
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, *x.shape[1:]))
    return model.eval(), x


def reference(model: nn.Module, x: Tensor, ours: bool) -> fx.GraphModule:
    """Returns the calibrated q/dq graph of one flow."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer as TheirQuantizer,
    )
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import get_symmetric_quantization_config

    graph = torch.export.export(model, (x,)).module()
    if ours:
        prepared = prepare_pt2e(graph, XNNPACKQuantizer())
    else:
        config = get_symmetric_quantization_config(is_per_channel=True)
        prepared = torchao_prepare(graph, TheirQuantizer().set_global(config))
    with torch.no_grad():
        for _ in range(4):
            prepared(torch.randn_like(x))
        prepared(x)
    return convert_pt2e(prepared) if ours else torchao_convert(prepared)


def lowered_by_them(graph: fx.GraphModule, x: Tensor) -> tuple[Method, KernelCounts]:
    """Lowers with ExecuTorch's stock partitioner."""
    import executorch.kernels.quantized  # noqa: F401
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with quiet(), torch.no_grad(), recorded_kernel_calls() as calls:
        exported = torch.export.export(graph, (x,))
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        buffer = edge.to_executorch().buffer
    return Method(buffer), place(graph, edge.exported_program(), calls, {})[1]


def decibels(found: Any, expected: Any) -> float:
    """Returns the signal-to-noise ratio of the first tensors of two results."""
    first, second = (next(iter(v.values())) if isinstance(v, dict) else v for v in (found, expected))
    noise = (first.double() - second.double()).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(second.double().square().sum() / noise))


def outcome(model: nn.Module, x: Tensor, ours: bool) -> Outcome:
    """Quantizes, lowers and measures a model with one flow."""
    graph = reference(model, x, ours)
    with torch.no_grad():
        expected, exact = graph(x), model(x)
    if ours:
        program = lower(graph, (x,))
        method, counts = Method(program.buffer), program.counts
    else:
        method, counts = lowered_by_them(graph, x)
    found = method([x])[0]
    # Both flows run as bare methods: the checks of our own program's inputs are no part of the kernels' time.
    return Outcome(lambda: method([x]), counts, len(method.buffer), decibels(found, expected), decibels(found, exact))


def interleaved(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Returns both medians in milliseconds of runs that take turns, so that other load strikes both."""
    times: tuple[list[float], list[float]] = ([], [])
    for function in (first, second) * 3:
        function()
    for _ in range(rounds):
        for function, kept in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            kept.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def row(name: str, flow: str, found: Outcome | str, latency: str) -> tuple[str, ...]:
    """Returns one line of the table."""
    if isinstance(found, str):
        return (name, flow, *["-"] * 8, found)
    c = found.counts
    cells = (c.int8, c.f32, c.converts, c.delegates, c.portable, f"{found.nbytes / 1e6:.2f}")
    return (name, flow, *map(str, cells), f"{found.to_reference:.1f}", f"{found.to_float:.1f}", latency)


def attempt(model: nn.Module, x: Tensor, ours: bool) -> Outcome | str:
    """Returns the outcome of a flow, or what it failed with."""
    try:
        return outcome(model, x, ours)
    except Exception as error:  # a peer may fail in any way; the table says so
        traceback.print_exc(limit=1, file=sys.stderr)
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:60]


def main() -> None:
    """Runs the comparison for the models on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--size", type=int, default=96, help="height and width of images")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["model", "flow", "int8", "f32", "conv", "deleg", "portable", "MB", "dB(q/dq)", "dB(float)", "ms"]
    table = Table(*columns, title="XNNPACK: ExecuTorch's flow and ours")
    ratios = []
    for name in options.models or built_in(options.size):
        model, x = make(name, options.size)
        theirs, ours = attempt(model, x, ours=False), attempt(model, x, ours=True)
        latencies = ("-", "-")
        if isinstance(theirs, Outcome) and isinstance(ours, Outcome):
            slow, fast = interleaved(theirs.run, ours.run, options.rounds)
            ratios.append(slow / fast)
            latencies = (f"{slow:.2f}", f"{fast:.2f} ({slow / fast:.2f}x)")
        table.add_row(*row(name, "theirs", theirs, latencies[0]))
        table.add_row(*row(name, "ours", ours, latencies[1]))
    console = Console(width=130)
    console.print(table)
    if ratios:
        console.print(f"theirs / ours, geometric mean of the latencies: {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
