"""What a change of a float graph is judged by: what becomes of the model with it.

Before: an exported float graph whose parameters are to change. After: the same, quantized as far as can be known there.
What a quantizer makes of it is nearer to what a user gets than 8 bits: SmolLM2, equalized and smoothed, gains in 8
bits, and has a perplexity of 38 instead of 34 with weights of 4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import Quantizer
from typing_extensions import Self

from quantplug.algorithms.changes import put_parameters
from quantplug.algorithms.gptq import GPTQ
from quantplug.algorithms.scaling import Scales
from quantplug.algorithms.trial import Compared, Tried, compared
from quantplug.algorithms.weights import weights_of
from quantplug.core.calibration.node_by_node import Batches
from quantplug.core.calibration.observer_places import waits_for_data
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.pt2e.prepare import prepare_pt2e

# Of so many batches GPTQ sees one in a trial.
_SEEN = 4
# Decibels by which what it rounds differs with the order of sums, as threads have it: SmolLM2 under other scales kept
# 14.9 with one thread and 17.1 with two.
_OF_GPTQ = 1.0


@dataclass(frozen=True)
class Judge:
    """How a changed model is quantized to be judged.

    Attributes:
        quantizer: the model's own; None for all layers in 8 bits.
        per_channel: which weights of 8 bits are tried: True for per-channel scales, False for per-tensor ones; None
            for both.
        has_few_bits: whether the model's own quantizer gives a weight few bits.
        rounds: whether a short GPTQ rounds these.
    """

    quantizer: Quantizer | None
    per_channel: bool | None
    has_few_bits: bool
    rounds: bool

    @classmethod
    def of(
        cls, model: fx.GraphModule, quantizer: Quantizer | None, per_channel: bool | None, *, before_gptq: bool
    ) -> "Judge":
        """Returns the judge of a float graph.

        Args:
            model: the graph.
            quantizer: its own, if it is known; one whose observers have to see data first cannot be tried.
            per_channel: which weights of 8 bits are tried.
            before_gptq: whether GPTQ comes behind the change.
        """
        if quantizer is None:
            return cls(None, per_channel, has_few_bits=False, rounds=False)
        prepared = prepare_pt2e(over_same_tensors(model), quantizer)
        few = any(weight.grid.is_of_few_bits for weight in weights_of(prepared)[0])
        known = not waits_for_data(prepared)
        return cls(quantizer if known else None, per_channel, few, rounds=known and few and before_gptq)

    def parts(self, batches: Batches) -> tuple[Batches, Batches]:
        """Returns the batches that GPTQ sees, and those to judge by: all of them where there is no GPTQ."""
        seen = batches[: max(1, len(batches) // _SEEN)]
        return seen, batches[len(seen) :] if self.rounds and len(batches) > 1 else batches

    def tried(self, scales: Scales, seen: Batches) -> Tried:
        """Returns a model under scales, quantized.

        Args:
            scales: as they are now.
            seen: what GPTQ sees.
        """
        if self.quantizer is None:
            return Tried.of(scales, self.per_channel)
        scaled = over_same_tensors(scales.model)
        put_parameters(scaled, scales.changed())
        prepared = prepare_pt2e(scaled, self.quantizer)
        if not self.rounds:
            return Tried.by(scales.model, prepared)
        GPTQ(scales=False, sweeps=0).rounded_on(prepared, seen)
        return Tried.by(scales.model, prepared, _OF_GPTQ)

    def outcome(
        self, before: fx.GraphModule, after: fx.GraphModule, batches: Batches, advance: Callable[[], None]
    ) -> Compared:
        """Returns what a model's outputs lose before and after a change; see `compared`."""
        seen, others = self.parts(batches)
        then, now = (self.tried(Scales(each, []), seen) for each in (before, after))
        return compared(then, now, others, advance)


class Judged:
    """What an algorithm has that is judged by the model's own quantizer, a dataclass with a field for it."""

    quantizer: Quantizer | None

    def for_quantizer(self, quantizer: Quantizer) -> Self:
        """Returns the same, measured with what a quantizer makes of the model, unless it has one already."""
        own: Any = self
        found: Self = own if self.quantizer is not None else replace(own, quantizer=quantizer)
        return found
