"""Weights that were rounded, and those of them that a run had rounded which was killed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantplug.algorithms.kept import Kept
from quantplug.algorithms.weights import Weight
from quantplug.core.errors import ArtefactError


@dataclass(frozen=True)
class Rounded:
    """A weight's new value, and how near the layer's result is to float, in decibels.

    Attributes:
        weight: which.
        value: in its shape and dtype.
        scale: of its integers, in the shape in which its observer gives it.
        before: rounded to nearest.
        after: with the new value.
    """

    weight: Weight
    value: Tensor
    scale: Tensor
    before: float
    after: float


class Log:
    """What a run has rounded so far.

    Args:
        kept: the file that keeps it.
        weights: of the model.
        resume: whether what is in the file counts.

    Raises:
        ArtefactError: the file is no checkpoint.
        CalibrationError: it is of another model, data or options, or another process failed.
    """

    def __init__(self, kept: Kept, weights: list[Weight], *, resume: bool) -> None:
        content, names = kept.content(resume=resume), {_name(weight): weight for weight in weights}
        try:
            rows = [] if content is None else list(content["weights"])
            self._taken = {name: Rounded(names[name], *numbers) for name, *numbers in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(
                f"'{kept.name}' is no checkpoint of GPTQ ({type(error).__name__}); delete it."
            ) from error
        self._kept, self._rows = kept, list[tuple[Any, ...]]()

    def found(self, weight: Weight) -> Rounded | None:
        """Returns a weight that an earlier run has rounded."""
        return self._taken.get(_name(weight))

    def add(self, one: Rounded) -> None:
        """Keeps a rounded weight.

        Raises:
            ArtefactError: the file cannot be written.
        """
        self._rows.append((_name(one.weight), one.value, one.scale, one.before, one.after))
        if len(self._rows) > len(self._taken):
            self._kept.write(lambda: {"weights": self._rows})


def _name(weight: Weight) -> str:
    return weight.paths[0]
