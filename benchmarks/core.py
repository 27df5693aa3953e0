"""Speed of prepare and convert against torchao's core: same annotations, both cores in one process.

    python benchmarks/core.py [--sizes 500 2000 8000] [--repeat 3]

Prints seconds, ratios of medians and growth exponents. Peers and ours run alternately (A B A B).
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e import quantize_pt2e as peer
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.convert import convert_pt2e
from quantplug.core.prepare import prepare_pt2e


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
    """Returns the seconds of prepare and of convert."""
    model, quantizer = make(), EveryOperator(observer)
    prepared_in, prepared = seconds(lambda: prepare(model, quantizer))
    with torch.no_grad():
        for _ in range(2):
            prepared(torch.randn_like(x))
    converted_in, _ = seconds(lambda: convert(prepared))
    return prepared_in, converted_in


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
        line += f"  torchao {other[0]:7.3f} {other[1]:7.3f} s  ratio {sum(other) / sum(mine):6.1f}"
    print(line, flush=True)
    return size, mine[0], mine[1]


def exponent(first: tuple[int, float], last: tuple[int, float]) -> float:
    """Returns the power of the number of nodes that the time grew with."""
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 2000, 8000, 20000])
    parser.add_argument("--peer-limit", type=int, default=2000, help="largest graph that torchao is run on")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, build in (("conv-bn-relu, min-max", convolutions), ("linear-gelu, min-max", linears)):
        found = [row(name, build, n, MinMaxObserver, options.repeat, n <= options.peer_limit) for n in options.sizes]
        if len(found) > 1:
            growth = [exponent((found[0][0], found[0][i]), (found[-1][0], found[-1][i])) for i in (1, 2)]
            print(f"    growth: prepare n^{growth[0]:.2f}, convert n^{growth[1]:.2f}")
    row("linear-gelu, histogram", linears, 800, HistogramObserver, 1, options.peer_limit >= 800)


if __name__ == "__main__":
    main()
