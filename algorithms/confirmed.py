"""Whether weights that were rounded anew are worth it to a whole model.

Before: a calibrated graph, whose weights are as they were, and what was rounded. After: the same, and what the model's
outputs confirm. Rounding brings the results of layers nearer to float; weights of many bits are so near that what else
is rounded in a model hides it, and to move them all the same is to throw dice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from quantplug.algorithms.rounded import Rounded
from quantplug.core.calibration.node_by_node import Batch, Batches, BatchRun, FloatRun
from quantplug.core.calibration.outputs import OutputNoise, by_sample
from quantplug.core.calibration.processes import Alone, Exchange
from quantplug.core.graph.facts import operands
from quantplug.core.pt2e.convert import convert_pt2e


def without_doubt(
    model: fx.GraphModule, batches: Batches, rounded: Sequence[Rounded], ranks: Exchange | Alone
) -> tuple[list[Rounded], str | None]:
    """Returns the weights that are to be moved, and why not the others.

    Args:
        model: the calibrated graph.
        batches: the inputs, of all ranks.
        rounded: what was rounded.
        ranks: of the run; each asks its own batches.
    """
    few = [one for one in rounded if one.weight.grid.is_of_few_bits]  # which gain so much that there is nothing to ask
    if len(few) == len(rounded):
        return list(rounded), None
    before, after = _noises(model, batches, (few, rounded), ranks)
    if not len(before.errors) or after.is_less_than(before):
        return list(rounded), None
    kept = f"the model's outputs keep {before.decibels:.1f} dB, and {after.decibels:.1f} with weights rounded anew"
    return few, kept


def _noises(
    model: fx.GraphModule, batches: Batches, tried: Sequence[Sequence[Rounded]], ranks: Exchange | Alone
) -> list[OutputNoise]:
    """Returns what the quantized model's outputs lose with each choice of weights in the place of its own."""
    quantized = convert_pt2e(model)
    layers = {node.name: node for node in quantized.graph.nodes}
    choices: list[dict[fx.Node, Rounded]] = [
        {operands(layers[layer.node.name])["weight"]: one for one in choice for layer in one.weight.layers}
        for choice in tried
    ]
    own, every = ([OutputNoise() for _ in tried] for _ in range(2))
    for batch in batches[ranks.rank :: ranks.size]:
        wanted = by_sample(FloatRun(model, batch).result())
        for noise, values in zip(own, choices, strict=True):
            noise.add(by_sample(_RunWith(quantized, batch, values).result()), wanted)
    for of_rank in ranks.gather(own):
        for noise, other in zip(every, of_rank, strict=True):
            noise.take(other)
    return every


class _RunWith(BatchRun):
    """Runs a q/dq graph with other weights in the place of those that it dequantizes."""

    def __init__(self, model: fx.GraphModule, batch: Batch, values: Mapping[fx.Node, Rounded]) -> None:
        super().__init__(model, batch)
        self._values = values

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; a weight that was rounded anew is that one."""
        found: Tensor | None = self._values[n].value if n in self._values else None
        return super().run_node(n) if found is None else found
