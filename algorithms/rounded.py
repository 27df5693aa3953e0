"""Weights that were rounded, and those of them that a run had rounded which was killed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantplug.algorithms.kept import Kept
from quantplug.algorithms.weights import Weight
from quantplug.core.calibration.node_by_node import Batches
from quantplug.core.calibration.parking import Parked
from quantplug.core.errors import ArtefactError


@dataclass(frozen=True)
class Rounded:
    """A weight's new value, and how near the layer's result is to float, in decibels.

    Attributes:
        weight: which.
        parked: its new value, which waits until all are rounded.
        scale: of its integers, in the shape in which its observer gives it.
        before: rounded to nearest.
        after: with the new value.
    """

    weight: Weight
    parked: Parked
    scale: Tensor
    before: float
    after: float

    @property
    def value(self) -> Tensor:
        """The new value, in the weight's shape and dtype."""
        found: Tensor = self.parked.values()
        return found


class Log:
    """What a run has rounded so far.

    Args:
        kept: the file that keeps it.
        weights: of the model.
        batches: beside which rounded weights wait.
        resume: whether what is in the file counts.

    Raises:
        ArtefactError: the file is no checkpoint.
        CalibrationError: it is of another model, data or options, or another process failed.
    """

    def __init__(self, kept: Kept, weights: list[Weight], batches: Batches, *, resume: bool) -> None:
        content, names = kept.content(resume=resume), {_name(weight): weight for weight in weights}
        try:
            rows = [] if content is None else list(content["weights"])
            self._taken = {
                name: Rounded(names[name], batches.parked(value), *numbers) for name, value, *numbers in rows
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(
                f"'{kept.name}' is no checkpoint of GPTQ ({type(error).__name__}); delete it."
            ) from error
        self._kept, self._done = kept, list[Rounded]()

    def found(self, weight: Weight) -> Rounded | None:
        """Returns a weight that an earlier run has rounded."""
        return self._taken.get(_name(weight))

    def add(self, one: Rounded) -> None:
        """Keeps a rounded weight.

        Raises:
            ArtefactError: the file cannot be written.
        """
        self._done.append(one)
        if len(self._done) > len(self._taken):
            self._kept.write(lambda: {"weights": [_row(each) for each in self._done]})


def _row(one: Rounded) -> tuple[Any, ...]:
    return _name(one.weight), one.value, one.scale, one.before, one.after


def _name(weight: Weight) -> str:
    return weight.layers[0].node.name  # a table and a head may have one path
