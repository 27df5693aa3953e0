"""How near a model's outputs are to those of float, sample by sample, and whether a gain is more than chance.

Before: what two runs of each batch return. After: the squared error of each sample, and decibels of all.
"""

import math
from typing import Any

import torch
from torch import Tensor

from quantplug.core.peers.torch_names import pytree
from quantplug.core.specs.levels import decibels

# A gain below this many decibels may be chance: moving the end of one range by a few percent changes as much.
LEAST_GAIN = 0.2


def floats_of(result: Any) -> list[Tensor]:
    """Returns the tensors of a model's result that have an error: those of floating point."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def rows_of(tensors: list[Tensor]) -> int:
    """Returns how many samples results hold; 1 where they do not all begin with the samples."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    return (sizes.pop() if len(sizes) == 1 else 0) or 1


def by_sample(result: Any) -> Tensor | None:
    """Returns the numbers of a model's result that have an error, None where it has none.

    Returns:
        Of double precision, [samples, numbers]; one row where the tensors do not all begin with the samples.
    """
    tensors = floats_of(result)
    if not tensors:
        return None
    rows = rows_of(tensors)
    return torch.cat([tensor.double().reshape(rows, -1) for tensor in tensors], 1)


class OutputNoise:
    """What a changed model loses against the float one, over batches.

    Attributes:
        energy: of the float outputs.
    """

    def __init__(self) -> None:
        self.energy = 0.0
        self._errors = [torch.zeros(0, dtype=torch.float64)]

    def add(self, found: Tensor | None, wanted: Tensor | None) -> None:
        """Adds a batch.

        Args:
            found: outputs of the changed model, as `by_sample` gives them.
            wanted: those of the float model.
        """
        if found is not None and wanted is not None:
            self._errors.append((found - wanted).square().sum(1).cpu())
            self.energy += float(wanted.square().sum())

    def take(self, other: "OutputNoise") -> None:
        """Adds what was added to another one."""
        self._errors.append(other.errors)
        self.energy += other.energy

    @property
    def errors(self) -> Tensor:
        """The squared error of each sample's outputs, [samples]."""
        return torch.cat(self._errors)

    @property
    def decibels(self) -> float:
        """How near the outputs are to float; minus infinity where nothing can be compared."""
        errors = self.errors
        return decibels(self.energy, float(errors.sum())) if len(errors) else -math.inf

    def is_less_than(self, other: "OutputNoise", least: float = LEAST_GAIN) -> bool:
        """Tells whether the outputs are nearer to float than others, by more than chance.

        Args:
            other: what the others lose, on the same samples.
            least: decibels that may be chance.
        """
        return self.decibels > other.decibels + least and is_no_chance(other.errors - self.errors)


def is_no_chance(gains: Tensor, times: float = 1.0) -> bool:
    """Tells whether samples gain, and not by chance (one-sided t-test, 95 %); one sample tells nothing.

    Args:
        gains: by sample, [samples].
        times: the mean gain has to be so many times what the test asks for.
    """
    if len(gains) < 2:
        return True
    # Student's quantile, to within 7 % from three samples on.
    quantile = times * 1.65 * (1 + 1.5 / (len(gains) - 1))
    return bool(gains.mean() > quantile * gains.std() / math.sqrt(len(gains)))
