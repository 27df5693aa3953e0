"""When calibration may stop: ranges at one check and the next -> whether they have settled."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantplug.core.calibration.coverage import summarize
from quantplug.core.calibration.observer_places import ObserverPlace
from quantplug.core.observers import DataObserver
from quantplug.core.observers.session import find_ranges

# Checks in a row that must agree before ranges count as settled: one alone may fall between two rare batches.
SETTLED_CHECKS = 2

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
    def settled(self) -> bool:
        """Tells whether enough checks in a row have agreed."""
        return self._agreed >= SETTLED_CHECKS

    def check(self, sites: Sequence[ObserverPlace]) -> None:
        """Compares the ranges of observers of activations with those of the last check."""
        now, last = _ends([site for site in sites if not site.of_constants]), self._ends
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
        self._agreed, self._ends = saved


def _ends(sites: Sequence[ObserverPlace]) -> Tensor:
    """Returns low and high ends, float64 [2, ranges]; of other libraries' observers the extremes that they saw."""
    ours = [s.observer for s in sites if isinstance(s.observer, DataObserver) and s.observer.has_data]
    find_ranges(ours)
    found = [torch.stack(observer.ranges()).double().cpu() for observer in ours]
    seen = [summarize(site) for site in sites if not isinstance(site.observer, DataObserver)]
    extremes = [(s.low, s.high) for s in seen if s.low is not None and s.high is not None]
    return torch.cat([*found, torch.tensor(extremes, dtype=torch.float64).view(-1, 2).T], 1)
