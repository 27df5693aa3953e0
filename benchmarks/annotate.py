"""Speed of annotation against ExecuTorch's XNNPACKQuantizer: the same graphs, alternately in one process.

    python benchmarks/annotate.py [--nodes 250 500 1000 2000] [--repeat 3] [--scopes 10]

Prints seconds (medians), the ratio of medians, and the growth exponent of ours over the sizes.
"""

import argparse
import copy
import math
import statistics
import time

import torch
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as executorch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug import XNNPACKQuantizer


class Chain(nn.Module):
    """Convolution, relu and residual addition: five graph nodes a block, two of them parameters."""

    def __init__(self, blocks: int) -> None:
        """Takes the number of blocks."""
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Runs the blocks on [N, 2, H, W]."""
        for conv in self.convs:
            x = x + torch.relu(conv(x))
        return x


def exported(nodes: int) -> fx.GraphModule:
    """Returns an exported graph of about so many nodes."""
    return torch.export.export(Chain(nodes // 5).eval(), (torch.randn(1, 2, 4, 4),)).module()


def ours(scopes: int) -> Quantizer:
    """Returns our quantizer with so many module-name scopes."""
    quantizer = XNNPACKQuantizer().set_global("int8")
    for index in range(scopes):
        quantizer.set_module_name(f"convs.{index}", "int8_per_tensor")
    return quantizer


def theirs(scopes: int) -> Quantizer:
    """Returns ExecuTorch's quantizer with the same scopes."""
    quantizer = executorch.XNNPACKQuantizer().set_global(executorch.get_symmetric_quantization_config(True))
    for index in range(scopes):
        quantizer.set_module_name(f"convs.{index}", executorch.get_symmetric_quantization_config(False))
    return quantizer


def seconds(model: fx.GraphModule, quantizer: Quantizer) -> float:
    """Returns how long annotating a fresh copy of the graph takes."""
    fresh = copy.deepcopy(model)
    started = time.perf_counter()
    quantizer.annotate(quantizer.transform_for_annotation(fresh))
    return time.perf_counter() - started


def main() -> None:
    """Prints one line for each size."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--nodes", type=int, nargs="+", default=[250, 500, 1000, 2000])
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--scopes", type=int, default=0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found: list[tuple[int, float]] = []
    print("  nodes    ours, s  ExecuTorch, s  ratio")
    for nodes in given.nodes:
        model = exported(nodes)
        pairs = [
            (seconds(model, ours(given.scopes)), seconds(model, theirs(given.scopes))) for _ in range(given.repeat)
        ]
        mine, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
        found.append((len(model.graph.nodes), mine))
        print(f"{found[-1][0]:7d} {mine:10.4f} {peer:14.4f} {peer / mine:6.1f}")
    (first, early), (last, late) = found[0], found[-1]
    if last > first:
        print(f"Growth of ours: nodes ** {math.log(late / early) / math.log(last / first):.2f}")


if __name__ == "__main__":
    main()
