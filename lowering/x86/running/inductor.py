"""A lowered graph kept from what inductor of torch 2.13 would compile wrongly.

Before: the portable graph. After: a copy for inductor, and the passes that it runs on it. What is wrong there is said
at each step.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, finish, replace, viewed
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.peers.torch_names import custom_graph_pass
from quantplug.lowering.starting import starting
from quantplug.lowering.x86.bfloat16 import KERNELS
from quantplug.lowering.x86.kernels.few_rows import stream
from quantplug.lowering.x86.kernels.sums import fuse_sums
from quantplug.lowering.x86.running.packing import UNPACK, fold
from quantplug.lowering.x86.running.runtime_ranges import spell_out_ranges

aten = torch.ops.aten
_GRAPH_PASS: Any = custom_graph_pass()


def for_compilers(portable: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a lowered module without what inductor compiles wrongly, or slowly on this machine.

    Weights of layers that stay float are float in it: inductor would find their dequantization and put the integer
    kernel there that the lowering had a reason not to take.
    """
    module = starting(portable)
    fold(module, UNPACK)
    spell_out_ranges(module.graph)
    apply(module.graph, MAX_POOLS)
    stream(module.graph)
    finish(module)
    return module


def _channels_last(match: Match) -> fx.Node:
    """Puts images in the memory in which inductor is told that the max-pool's result lies, whatever its input's."""
    rows = viewed(match.root, aten.permute.default, match["images"], (0, 2, 3, 1))
    rows = call(match.root, aten.contiguous.default, (rows,), rows)
    match.root.replace_input_with(match["images"], viewed(match.root, aten.permute.default, rows, (0, 3, 1, 2)))
    return match.root


MAX_POOLS = (Rule(op("quantized::max_pool2d", qx=value("images")), _channels_last),)


class Shield(_GRAPH_PASS):
    """Hides from inductor what reads a kernel, until its own passes for quantized graphs are over.

    They would fuse it, whatever the kernel ends in already: a linear with relu whose result is added to something ends
    in an AssertionError without words.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        for kernel in [node for node in graph.nodes if node.target in KERNELS]:
            with graph.inserting_after(kernel):
                shield = graph.call_function(aten.alias.default, (kernel,))
            shield.meta.update(kernel.meta)
            kernel.replace_all_uses_with(shield, delete_user_cb=lambda user, shield=shield: user is not shield)

    def uuid(self) -> str:
        """Returns what inductor's cache tells this pass from others by."""
        return "quantplug.x86.shield.1"


class FuseSums(_GRAPH_PASS):
    """Fuses residual sums after AOT autograd has made the graph functional and weights are packed."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        for node in [node for node in graph.nodes if node.target is aten.alias.default]:
            if node.args[0].target in KERNELS:
                replace(node, node.args[0])
        fuse_sums(graph)

    def uuid(self) -> str:
        """Returns what inductor's cache tells this pass from others by."""
        return "quantplug.x86.fuse_sums.2"
