"""What other parameters are worth to a whole model: its outputs when it is quantized, against those of float.

Before: an exported float graph, the same with other parameters, and batches. After: decibels; the graphs are only read.
Every layer is in 8 bits, or as a quantizer has it. Layer by layer other parameters may gain while the model loses,
because outputs of a layer do not count alike for what comes behind it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.algorithms.layers import Layer, layer_of
from quantplug.algorithms.scaling import Scales
from quantplug.core.calibration.node_by_node import Batch, BatchRun
from quantplug.core.calibration.outputs import LEAST_GAIN, OutputNoise, by_sample, is_no_chance
from quantplug.core.graph.facts import is_constant
from quantplug.core.peers.torch_names import pytree
from quantplug.core.pt2e.convert import convert_pt2e

# Decibels that may be lost in a trial where another one gains.
_LEAST_LOSS = 0.1
# A trial that loses or gains on so many samples, by so many times what tells it from chance, will do so on the rest.
_ENOUGH, _CERTAIN = 8, 2.0


@dataclass(frozen=True)
class Tried:
    """A float model, and what quantization makes of it.

    Attributes:
        model: the float graph.
        runs: of each trial, given a batch.
        how: in words what is tried.
        chance: decibels that two trials of one model may differ by.
    """

    model: fx.GraphModule
    runs: list[Callable[[Batch], BatchRun]]
    how: str
    chance: float = LEAST_GAIN

    @classmethod
    def of(cls, scales: Scales, per_channel: bool | None) -> "Tried":
        """Returns a model under scales, with what its layers read and their weights in 8 bits.

        Args:
            scales: as they are now.
            per_channel: whether each output channel of a weight has a scale, or the whole weight one; None for a trial
                of each.
        """
        kinds = (True, False) if per_channel is None else (per_channel,)
        given = [_parameters(scales, per_channel=kind) for kind in kinds]
        return cls(scales.model, [partial(_RoundedRun, scales.model, each) for each in given], "in 8 bits")

    @classmethod
    def by(cls, model: fx.GraphModule, prepared: fx.GraphModule, chance: float = LEAST_GAIN) -> "Tried":
        """Returns a model with what convert makes of it, prepared for a quantizer and calibrated."""
        return cls(model, [partial(BatchRun, convert_pt2e(prepared))], "when quantized", chance)

    def noises(self) -> list[OutputNoise]:
        """Returns an empty record for each trial."""
        return [OutputNoise() for _ in self.runs]

    def add(self, batch: Batch, wanted: Tensor | None, noises: list[OutputNoise]) -> None:
        """Adds what a batch's outputs lose to the records of the trials."""
        for noise, run in zip(noises, self.runs, strict=True):
            noise.add(by_sample(run(batch).result()), wanted)


@dataclass(frozen=True)
class Compared:
    """What a model's outputs lose in each trial, before and after a change."""

    before: list[OutputNoise]
    after: list[OutputNoise]
    how: str
    chance: float = LEAST_GAIN

    @property
    def gains(self) -> bool:
        """Whether a trial gains and none loses."""
        return any(now.is_less_than(then, self.chance) for then, now in self._pairs()) and not any(self._losses())

    @property
    def is_settled(self) -> bool:
        """Whether a trial loses, or all gain, by more than chance, even if it is asked after each batch."""
        pairs = self._pairs()
        if any(len(now.errors) < _ENOUGH for _, now in pairs):
            return False
        is_lost = (is_no_chance(now.errors - then.errors, _CERTAIN) for then, now in pairs)
        is_won = (is_no_chance(then.errors - now.errors, _CERTAIN) for then, now in pairs)
        return any(map(bool.__and__, self._losses(), is_lost)) or (self.gains and all(is_won))

    def told(self, changed: str = "with scales") -> str:
        """Returns in words what the trials keep."""
        then, now = (" and ".join(f"{each.decibels:.1f}" for each in tried) for tried in (self.before, self.after))
        return f"the outputs keep {then} dB {self.how}, and {now} {changed}"

    def _pairs(self) -> list[tuple[OutputNoise, OutputNoise]]:
        return list(zip(self.before, self.after, strict=True))

    def _losses(self) -> list[bool]:
        return [now.decibels <= then.decibels - _LEAST_LOSS for then, now in self._pairs()]


def compared(before: Tried, after: Tried, batches: Iterable[Batch], advance: Callable[[], None]) -> Compared:
    """Returns what a model's outputs lose before and after a change, on all batches or until that is settled.

    Args:
        before: the model.
        after: the model, changed so that it computes the same in float.
        batches: the inputs.
        advance: is called after each batch.
    """
    found = Compared(before.noises(), after.noises(), before.how, before.chance)
    for batch in batches:
        wanted = by_sample(BatchRun(before.model, batch).result())
        before.add(batch, wanted, found.before)
        after.add(batch, wanted, found.after)
        advance()
        if found.is_settled:
            break
    return found


# Of 8 bits: of a range, and of a weight around 0 to either side.
STEPS, STEPS_OF_WEIGHTS = 255, 127


@dataclass(frozen=True)
class _Rounded:
    """A layer's weight in 8 bits, kept as integers: in float all weights would be one more model for each trial.

    Attributes:
        layer: whose it is.
        integers: int8 [out, in / groups, ...].
        step: what 1 of them stands for, one for each row.
        dtype: of the weight.
    """

    layer: Layer
    integers: Tensor
    step: Tensor
    dtype: torch.dtype

    def value(self) -> Tensor:
        """Returns the weight as the layer holds it."""
        return self.layer.as_held(self.integers * self.step).to(self.dtype)


def _parameters(scales: Scales, *, per_channel: bool) -> dict[fx.Node, Tensor | _Rounded]:
    """Returns the weights of all layers in 8 bits, and the other parameters that have scales."""
    layers = [layer for layer in map(layer_of, scales.model.graph.nodes) if layer and is_constant(layer.weight)]
    weights = {layer.weight: _rounded(scales, layer, per_channel=per_channel) for layer in layers}
    others = [node for node in scales.parameters if node not in weights]
    return {node: scales.value(node).to(scales.original(node).dtype) for node in others} | weights


def _rounded(scales: Scales, layer: Layer, *, per_channel: bool) -> _Rounded:
    weight, folded = layer.by_rows(scales.value(layer.weight)), scales.folded(layer)
    rows, own = (each.flatten(1).abs().amax(1) for each in (folded, weight))
    # Rows that a batch norm makes larger have smaller steps before it.
    step = own if per_channel else own * (rows.max() / rows)
    step = step.nan_to_num(0.0, 0.0).reshape(-1, *[1] * (weight.dim() - 1)) / STEPS_OF_WEIGHTS
    integers = torch.where(step > 0, weight / step, 0).round_().to(torch.int8)
    return _Rounded(layer, integers, step, scales.original(layer.weight).dtype)


class _RoundedRun(BatchRun):
    """Runs a model on other parameters, with what its layers read rounded to 8 bits."""

    def __init__(self, model: fx.GraphModule, parameters: dict[fx.Node, Tensor | _Rounded], batch: Batch) -> None:
        super().__init__(model, batch)
        self._parameters = parameters

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, a layer on rounded numbers."""
        if n in self._parameters:
            return self._parameters[n]
        layer = layer_of(n)
        return super().run_node(n) if layer is None else self._result(layer)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Returns what a node reads; weights are float from here on, for export reads all of them at the beginning."""
        return pytree.tree_map_only(_Rounded, _Rounded.value, super().fetch_args_kwargs_from_env(n))

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
