"""Speed of prepare and convert against torchao's core: same annotations, both cores in one process.

    python benchmarks/core.py [--sizes 500 2000 8000] [--repeat 3] [--memory 100 400]

Prints seconds, ratios of medians and growth exponents. Peers and ours run alternately (A B A B). Ours compiles
its graphs when they are first run, torchao while it edits them: the ratio "with first runs" counts the first run
of the prepared and of the converted model as well. Then the peak of resident memory that each core needs beside
a model with so many MB of float weights, each in a process of its own (Linux).
"""

import argparse
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import resident
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e import quantize_pt2e as peer
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e


class EveryOperator(Quantizer):
    """Quantizes the input, weight and output of every convolution, linear layer, addition and activation."""

    TARGETS = (
        torch.ops.aten.conv2d.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.gelu.default,
        torch.ops.aten.relu.default,
    )

    def __init__(self, observer: Any) -> None:
        """Takes the observer class of the activations."""
        self.activation = QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)
        self.weight = QuantizationSpec(
            torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
        )

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Annotates without re-exporting anything, so that the cores alone are measured."""
        for node in model.graph.nodes:
            if node.target in self.TARGETS:
                inputs = {n: self.weight if n.op == "get_attr" else self.activation for n in node.all_input_nodes[:2]}
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, self.activation, _annotated=True)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Accepts everything."""


class Block(nn.Module):
    """conv-bn-relu with a residual connection every second time."""

    def __init__(self, residual: bool) -> None:
        """Takes whether the input is added to the output."""
        super().__init__()
        self.conv, self.bn, self.residual = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), residual

    def forward(self, x: Tensor) -> Tensor:
        """Computes (batch, 4, h, w) from the same shape."""
        y = torch.relu(self.bn(self.conv(x)))
        return y + x if self.residual else y


def convolutions(nodes: int) -> tuple[nn.Module, Tensor]:
    """Returns a chain of conv-bn-relu with residuals of about so many nodes, and an input."""
    # A block has eleven nodes: seven parameters and buffers, three operators, an addition every second time.
    return nn.Sequential(*(Block(i % 2 == 1) for i in range(nodes // 10))), torch.randn(1, 4, 6, 6)


def linears(nodes: int) -> tuple[nn.Module, Tensor]:
    """Returns a stack of linear-gelu of about so many nodes, and an input."""
    layers: list[nn.Module] = []
    for _ in range(nodes // 4):
        layers += [nn.Linear(16, 16), nn.GELU()]
    return nn.Sequential(*layers), torch.randn(8, 16)


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the time an action took and its result."""
    gc.collect()
    started = time.perf_counter()
    result = act()
    return time.perf_counter() - started, result


def flow(prepare: Any, convert: Any, make: Callable[[], fx.GraphModule], observer: Any, x: Tensor) -> tuple[float, ...]:
    """Returns the seconds of prepare, of convert, and of the first runs of what they returned."""
    model, quantizer = make(), EveryOperator(observer)
    prepared_in, prepared = seconds(lambda: prepare(model, quantizer))
    with torch.no_grad():
        calibrated_in, _ = seconds(lambda: prepared(x))
        prepared(torch.randn_like(x))
    converted_in, converted = seconds(lambda: convert(prepared))
    with torch.no_grad():
        run_in, _ = seconds(lambda: converted(x))
    return prepared_in, converted_in, calibrated_in, run_in


def row(name: str, build: Any, nodes: int, observer: Any, repeat: int, with_peer: bool) -> tuple[int, float, float]:
    """Measures one graph and prints its line; returns nodes and our medians."""
    module, x = build(nodes)
    program = torch.export.export(module.eval(), (x,))
    size = len(program.module().graph.nodes)
    ours, theirs = [], []
    for _ in range(repeat):
        ours.append(flow(prepare_pt2e, convert_pt2e, program.module, observer, x))
        if with_peer:
            theirs.append(flow(peer.prepare_pt2e, peer.convert_pt2e, program.module, observer, x))
    mine = [statistics.median(column) for column in zip(*ours, strict=True)]
    line = f"{name:28} {size:6} nodes  ours {mine[0]:7.3f} {mine[1]:7.3f} s"
    if theirs:
        other = [statistics.median(column) for column in zip(*theirs, strict=True)]
        line += f"  torchao {other[0]:7.3f} {other[1]:7.3f} s  ratio {sum(other[:2]) / sum(mine[:2]):6.1f}"
        line += f", with first runs {sum(other) / sum(mine):6.1f}"
    print(line, flush=True)
    return size, mine[0], mine[1]


def exponent(first: tuple[int, float], last: tuple[int, float]) -> float:
    """Returns the power of the number of nodes that the time grew with."""
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


class Wide(nn.Module):
    """Feed-forward blocks of BERT's width with about so many MB of float weights."""

    def __init__(self, megabytes: int) -> None:
        """Takes the size of the weights."""
        super().__init__()
        # 2 x 768 x 3072 floats a block.
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(megabytes // 18))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Computes (batch, 768) from the same shape."""
        return self.blocks(x)


CORES = {"ours": (prepare_pt2e, convert_pt2e), "torchao": (peer.prepare_pt2e, peer.convert_pt2e)}


def peak_of(core: str, megabytes: int) -> None:
    """Prints the MB of weights, and the peak and the rest of memory above the exported model, of one core."""
    prepare, convert = CORES[core]
    x = torch.randn(8, 768)
    model = torch.export.export(Wide(megabytes).eval(), (x,)).module()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    gc.collect()
    before = resident("VmRSS")
    # Sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    prepared = prepare(model, EveryOperator(MinMaxObserver))
    with torch.no_grad():
        prepared(x)
        converted = convert(prepared)
        peak = resident("VmHWM")
        del model, prepared
        gc.collect()
        kept = resident("VmRSS")
        converted(x)
    print(weights, peak - before, kept - before)


def memory(megabytes: int) -> None:
    """Prints the memory of both cores, measured in processes of their own."""
    for core in CORES:
        command = [sys.executable, __file__, "--peak-of", core, "--memory", str(megabytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        weights, peak, kept = (float(found) for found in done.stdout.split()[-3:])
        print(f"{core:8} {weights:6.0f} MB of weights: peak {peak:+6.0f} MB, then {kept:+6.0f} MB", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 2000, 8000, 20000])
    parser.add_argument("--peer-limit", type=int, default=2000, help="largest graph that torchao is run on")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="*", default=[100, 400], help="MB of float weights")
    parser.add_argument("--peak-of", choices=CORES, help="measure the memory of one core in this process")
    options = parser.parse_args()
    if options.peak_of:
        peak_of(options.peak_of, options.memory[0])
        return
    torch.set_num_threads(1)
    for name, build in (("conv-bn-relu, min-max", convolutions), ("linear-gelu, min-max", linears)):
        found = [row(name, build, n, MinMaxObserver, options.repeat, n <= options.peer_limit) for n in options.sizes]
        if len(found) > 1:
            growth = [exponent((found[0][0], found[0][i]), (found[-1][0], found[-1][i])) for i in (1, 2)]
            print(f"    growth: prepare n^{growth[0]:.2f}, convert n^{growth[1]:.2f}")
    row("linear-gelu, histogram", linears, 800, HistogramObserver, 1, options.peer_limit >= 800)
    for megabytes in options.memory:
        memory(megabytes)


if __name__ == "__main__":
    main()
