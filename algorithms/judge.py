"""What a change of a float graph is judged by: what becomes of the model with it.

Before: an exported float graph whose parameters are to change. After: the same, quantized as far as can be known there.
What a quantizer makes of it is nearer to what a user gets than 8 bits: SmolLM2, equalized and smoothed, gains in 8
bits, and has a perplexity of 38 instead of 34 with weights of 4.
"""

from dataclasses import dataclass

from torch import fx
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.algorithms.changes import put_parameters
from quantplug.algorithms.gptq import GPTQ
from quantplug.algorithms.scaling import Scales
from quantplug.algorithms.trial import Tried
from quantplug.algorithms.weights import weights_of
from quantplug.core.calibration.node_by_node import Batches
from quantplug.core.calibration.observer_places import waits_for_data
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.pt2e.prepare import prepare_pt2e

# Of so many batches GPTQ sees one in a trial.
_SEEN = 4


@dataclass(frozen=True)
class Judge:
    """How a changed model is quantized to be judged.

    Attributes:
        quantizer: the model's own. None, and one whose observers have to see data first: all layers are in 8 bits.
        per_channel: which weights of 8 bits are tried: True for per-channel scales, False for per-tensor ones; None
            for both.
        before_gptq: whether a short GPTQ rounds the weights of few bits.
    """

    quantizer: Quantizer | None
    per_channel: bool | None
    before_gptq: bool

    def parts(self, batches: Batches) -> tuple[Batches, Batches]:
        """Returns the batches that GPTQ sees, and those to judge by."""
        seen = batches[: max(1, len(batches) // _SEEN)]
        apart = self.before_gptq and self.quantizer is not None and len(batches) > 1
        return seen, batches[len(seen) :] if apart else batches

    def tried(self, scales: Scales, seen: Batches) -> Tried:
        """Returns a model under scales, quantized.

        Args:
            scales: as they are now.
            seen: what GPTQ sees.
        """
        prepared = self._prepared(scales)
        if prepared is None or waits_for_data(prepared):
            return Tried.of(scales, self.per_channel)
        if self.before_gptq and has_few_bits(prepared):
            GPTQ(scales=False, sweeps=0).rounded_on(prepared, seen)
        return Tried.by(scales.model, prepared)

    def _prepared(self, scales: Scales) -> fx.GraphModule | None:
        if self.quantizer is None:
            return None
        scaled = over_same_tensors(scales.model)
        put_parameters(scaled, scales.changed())
        return prepare_pt2e(scaled, self.quantizer)


def has_few_bits(prepared: fx.GraphModule) -> bool:
    """Tells whether a weight of a prepared graph has few bits."""
    weights, _ = weights_of(prepared)
    return any(weight.grid.is_of_few_bits for weight in weights)
