"""Weights that were rounded, and the file that keeps them while others are.

Before: a file that a run left which was killed, or none. After: what it had rounded, and a file with more. It appears
whole or not at all; to write it takes a small share of the time.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantplug.algorithms.weights import Weight
from quantplug.core.calibration.checkpoint import read_checkpoint, remove_checkpoint, write_checkpoint
from quantplug.core.calibration.processes import Alone, Exchange
from quantplug.core.errors import ArtefactError

# The file is written again after so many times what writing it took.
_PAUSE = 20


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


@dataclass
class Log:
    """What a run has rounded so far.

    Attributes:
        path: of the file that keeps it; None for none.
        fingerprint: of what would be rounded otherwise.
        taken: by the weight's name what an earlier run has rounded.
    """

    path: Path | None
    fingerprint: list[str]
    taken: dict[str, Rounded]
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _due: float = 0.0

    @classmethod
    def taken_up(
        cls, path: Path | None, fingerprint: list[str], weights: list[Weight], ranks: Exchange | Alone, *, resume: bool
    ) -> "Log":
        """Returns what a file holds that an earlier run left, the first rank's on all of them.

        Raises:
            ArtefactError: the file is no checkpoint.
            CalibrationError: it is of another model, data or options, or another process failed.
        """
        read = None if path is None or not resume else read_checkpoint(path, fingerprint)
        content = ranks.gather(read)[0]
        names = {_name(weight): weight for weight in weights}
        try:
            rows = [] if content is None else list(content["weights"])
            taken = {name: Rounded(names[name], *numbers) for name, *numbers in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"'{path}' is no checkpoint of GPTQ ({type(error).__name__}); delete it.") from error
        return cls(path, fingerprint, taken)

    def found(self, weight: Weight) -> Rounded | None:
        """Returns a weight that an earlier run has rounded."""
        return self.taken.get(_name(weight))

    def add(self, one: Rounded) -> None:
        """Keeps a rounded weight.

        Raises:
            ArtefactError: the file cannot be written.
        """
        if self.path is None:
            return
        self._rows.append((_name(one.weight), one.value, one.scale, one.before, one.after))
        started = time.monotonic()
        if started < self._due or len(self._rows) <= len(self.taken):
            return
        write_checkpoint(self.path, {"fingerprint": self.fingerprint, "weights": self._rows})
        ended = time.monotonic()
        self._due = ended + _PAUSE * (ended - started)

    def remove(self) -> None:
        """Removes the file."""
        if self.path is not None:
            remove_checkpoint(self.path)


def _name(weight: Weight) -> str:
    return weight.paths[0]
