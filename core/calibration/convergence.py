"""When calibration may stop: ranges at one check and the next -> whether they are at rest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantplug.core.calibration.observer_places import ObserverPlace
from quantplug.core.calibration.result import summarize
from quantplug.core.files.typed import typed
from quantplug.core.observers import DataObserver
from quantplug.core.observers.together import find_ranges

# Checks in a row that must agree: one alone may fall between two rare batches.
AGREEING_CHECKS = 2

Saved = tuple[int, Tensor | None]


class Convergence:
    """Compares ranges from check to check.

    Args:
        tolerance: share of a range by which its ends may move between two checks.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._agreed = 0
        self._ends: Tensor | None = None

    @property
    def reached(self) -> bool:
        """Tells whether enough checks in a row have agreed."""
        return self._agreed >= AGREEING_CHECKS

    def check(self, places: Sequence[ObserverPlace]) -> None:
        """Compares the ranges of observers of activations with those of the last check."""
        now, last = _ends([place for place in places if not place.of_constants]), self._ends
        self._ends = now
        still = now.numel() > 0 and last is not None and last.shape == now.shape
        if still and last is not None:
            still = bool(((now - last).abs() <= self.tolerance * (now[1] - now[0])).all())
        self._agreed = self._agreed + 1 if still else 0

    def saved(self) -> Saved:
        """Returns what `restore` needs to go on from here."""
        return self._agreed, self._ends

    def restore(self, saved: Saved) -> None:
        """Goes on from what `saved` returned."""
        agreed, self._ends = saved
        self._agreed = typed(agreed, int, "the number of checks that agreed")


def _ends(places: Sequence[ObserverPlace]) -> Tensor:
    """Returns low and high ends, float64 [2, ranges]; of other libraries' observers the extremes that they saw."""
    ours = [place.observer for place in places if isinstance(place.observer, DataObserver) and place.observer.has_data]
    find_ranges(ours)
    found = [torch.stack(observer.ranges()).double().cpu() for observer in ours]
    seen = [summarize(place) for place in places if not isinstance(place.observer, DataObserver)]
    extremes = [(s.low, s.high) for s in seen if s.low is not None and s.high is not None]
    return torch.cat([*found, torch.tensor(extremes, dtype=torch.float64).view(-1, 2).T], 1)
