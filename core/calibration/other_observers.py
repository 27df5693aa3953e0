"""Observers of other libraries in a calibration run: their states saved, given back, and looked at for NaN.

They record by themselves whatever reaches them, so that a batch is taken back from them by their state dicts.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quantplug.core.calibration.coverage import summarize
from quantplug.core.calibration.observer_places import ObserverPlace
from quantplug.core.errors import CalibrationError
from quantplug.core.observers import DataObserver, NonFiniteError

# A fake quantize has the state of the observer within it, which may be a dictionary.
States = dict[str, dict[str, Any]]


def places_of_others(sites: Sequence[ObserverPlace]) -> list[ObserverPlace]:
    """Returns the sites whose observers are not ours."""
    return [site for site in sites if not isinstance(site.observer, DataObserver)]


def states_of_others(sites: Sequence[ObserverPlace]) -> States:
    """Returns copies of observers' states by their names."""
    return {site.name: copy.deepcopy(dict(site.observer.state_dict())) for site in sites}


def restore_others(sites: Sequence[ObserverPlace], states: States) -> None:
    """Gives observers back what `states_of_others` returned."""
    for site in sites:
        if site.name in states:
            site.observer.load_state_dict(states[site.name])


def require_finite(sites: Sequence[ObserverPlace]) -> None:
    """Finds NaN and infinity in the ranges of observers that do not look for them themselves.

    Raises:
        NonFiniteError: an end of a range is not finite.
    """
    for site in sites:
        summary = summarize(site)
        ends = torch.tensor([end for end in (summary.low, summary.high) if end is not None])
        if not bool(torch.isfinite(ends).all()):
            raise NonFiniteError(
                f"{summary.kind} of {site.place} has the range [{summary.low}, {summary.high}]; find the operator "
                "that makes NaN or infinity, or calibrate with nonfinite='skip'."
            )


def require_mergeable(sites: Sequence[ObserverPlace]) -> None:
    """Refuses observers that have seen activations, since nothing is known of how their states merge.

    Raises:
        CalibrationError: there is such an observer.
    """
    for site in sites:
        if not site.of_constants and summarize(site).low is not None:
            raise CalibrationError(
                f"{type(site.observer).__name__} of {site.place} cannot be merged across processes; use an "
                "observer of quantplug.core.observers."
            )


@contextmanager
def undone_on_error(sites: list[ObserverPlace]) -> Iterator[list[ObserverPlace]]:
    """Gives all observers, ours and others, their former data back if the block raises."""
    before = [(s.observer, s.observer.data) for s in sites if isinstance(s.observer, DataObserver)]
    foreign = places_of_others(sites)
    states = states_of_others(foreign)
    try:
        yield sites
    except BaseException:
        for observer, data in before:
            observer.data = data
        restore_others(foreign, states)
        raise
