"""Comparing two graphs of one model: signal to quantization noise, per output and per layer.

Before: a float graph and a graph derived from it, with the same node names. After: for each node that
both have, its value in both.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import compute_nodes
from quantplug.core.graph.meta import FOLDINGS
from quantplug.core.specs.decision import decision


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, wanted: set[str]) -> None:
        super().__init__(module)
        self.wanted, self.values = wanted, dict[str, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node and keeps a copy of its value, before an in-place operator can change it."""
        value = super().run_node(n)
        if n.name in self.wanted and isinstance(value, Tensor):
            self.values[n.name] = value.detach().clone()
        return value


def node_values(module: fx.GraphModule, inputs: tuple[Any, ...], nodes: set[str]) -> dict[str, Tensor]:
    """Runs a graph and returns the tensors that the named nodes yield.

    Args:
        module: an exported, prepared or converted graph.
        inputs: its positional inputs.
        nodes: names of nodes; those that the graph does not have are left out.
    """
    recorder = _Recorder(module, nodes)
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.values


def _ends_a_piece(node: fx.Node) -> bool:
    found = decision(node)
    return found is None or found.root == node.name


def compare_layers(
    float_model: fx.GraphModule, quantized: fx.GraphModule, inputs: tuple[Any, ...]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (float value, quantized value) of every layer that both graphs have, in graph order.

    Values inside a fused piece are left out, and a producer into which a batch norm was folded is
    compared with that batch norm.

    Args:
        float_model: the exported graph.
        quantized: the graph that prepare or convert made of it.
        inputs: positional inputs of both.
    """
    # A folded batch norm lives on in its producer, which now yields what the batch norm yielded.
    norms = {f.producer: f.batch_norm for f in FOLDINGS.get(quantized, ()) if f.folded}
    float_names = {n.name: norms.get(n.name, n.name) for n in compute_nodes(quantized.graph) if _ends_a_piece(n)}
    expected = node_values(float_model, inputs, set(float_names.values()))
    found = node_values(quantized, inputs, set(float_names))
    return {name: (expected[float_names[name]], v) for name, v in found.items() if float_names[name] in expected}
