"""What scales are worth to a whole model: its outputs with every layer in 8 bits, against those of float.

Before: an exported float graph, batches and scales. After: decibels; the graph is only read. Layer by layer scales may
gain while the model loses, because outputs of a layer do not count alike for what comes behind it.
"""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.algorithms.layers import Layer, layer_of
from quantplug.algorithms.scaling import Scales
from quantplug.core.calibration.node_by_node import BatchRun
from quantplug.core.graph.facts import is_constant
from quantplug.core.peers.torch_names import pytree
from quantplug.core.specs.levels import sqnr


def level(scales: Scales, batches: list[tuple[Any, ...]], *, per_channel: bool) -> float:
    """Returns decibels of a model's outputs under scales, with what layers read and their weights in 8 bits.

    Args:
        scales: the scales, of the model to try.
        batches: the inputs.
        per_channel: whether each output channel of a weight has a scale, or the whole weight one.
    """
    found = [_outputs(_RoundedRun(scales, batch, per_channel=per_channel)) for batch in batches]
    wanted = [_outputs(BatchRun(scales.model, batch)) for batch in batches]
    return sqnr(torch.cat(found), torch.cat(wanted)) if any(map(len, wanted)) else float("inf")


def _outputs(run: BatchRun) -> Tensor:
    """Returns all numbers of floating point that a run yields."""
    for node in run.graph.nodes:
        run.env[node] = run.run_node(node)
        for used in run.user_to_last_uses.get(node, []):
            del run.env[used]
    leaves = pytree.tree_leaves(run.env[next(reversed(run.graph.nodes))])
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([leaf.double().flatten() for leaf in floats]) if floats else torch.zeros(0)


# Of 8 bits: of a range, and of a weight around 0 to either side.
STEPS, STEPS_OF_WEIGHTS = 255, 127


class _RoundedRun(BatchRun):
    """Runs a model under scales, with what its layers read and their weights rounded to 8 bits."""

    def __init__(self, scales: Scales, batch: tuple[Any, ...], *, per_channel: bool) -> None:
        super().__init__(scales.model, batch)
        self._scales, self._per_channel = scales, per_channel
        layers = filter(None, map(layer_of, scales.model.graph.nodes))
        self._layers = {layer.weight: layer for layer in layers}

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node on parameters under the scales, a layer on rounded numbers."""
        if n in self._layers and is_constant(n):
            return self._weight(self._layers[n])
        if n in self._scales.parameters:
            return self._scales.value(n).to(self._scales.original(n).dtype)
        layer = layer_of(n)
        return super().run_node(n) if layer is None else self._result(layer)

    def _weight(self, layer: Layer) -> Tensor:
        weight, folded = self._scales.value(layer.weight), self._scales.folded(layer)
        rows, own = (each.flatten(1).abs().amax(1) for each in (folded, weight))
        # Rows that a batch norm makes larger have smaller steps before it.
        step = own if self._per_channel else own * (rows.max() / rows)
        step = step.nan_to_num(0.0, 0.0).reshape(-1, *[1] * (weight.dim() - 1)) / STEPS_OF_WEIGHTS
        return round_to(weight, step).to(self._scales.original(layer.weight).dtype)

    def _result(self, layer: Layer) -> Any:
        value = self.env[layer.input]
        low, high = value.amin().clamp(max=0), value.amax().clamp(min=0)
        self.env[layer.input] = round_to(value, (high - low) / STEPS)
        try:
            return super().run_node(layer.node)
        finally:
            self.env[layer.input] = value


def round_to(value: Tensor, step: Tensor) -> Tensor:
    """Returns the nearest multiples of a step; a step of 0 leaves a value as it is."""
    return torch.where(step > 0, torch.round(value / step) * step, value)
