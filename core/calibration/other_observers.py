"""Observers of other libraries in a calibration run: their states saved, given back, and looked at for NaN.

They record by themselves whatever reaches them, so that a batch is taken back from them by their state dicts.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quantplug.core.calibration.observer_places import ObserverPlace
from quantplug.core.calibration.result import summarize
from quantplug.core.errors import CalibrationError
from quantplug.core.observers import DataObserver, NonFiniteError

# A fake quantize has the state of the observer within it, which may be a dictionary.
States = dict[str, dict[str, Any]]


def places_of_others(places: Sequence[ObserverPlace]) -> list[ObserverPlace]:
    """Returns the places whose observers are not ours."""
    return [place for place in places if not isinstance(place.observer, DataObserver)]


def states_of_others(places: Sequence[ObserverPlace]) -> States:
    """Returns copies of observers' states by their names."""
    return {place.name: copy.deepcopy(dict(place.observer.state_dict())) for place in places}


def restore_others(places: Sequence[ObserverPlace], states: States) -> None:
    """Gives observers back what `states_of_others` returned."""
    for place in places:
        if place.name in states:
            place.observer.load_state_dict(states[place.name])


def require_finite(places: Sequence[ObserverPlace]) -> None:
    """Finds NaN and infinity in the ranges of observers that do not look for them themselves.

    Raises:
        NonFiniteError: an end of a range is not finite.
    """
    for place in places:
        summary = summarize(place)
        ends = torch.tensor([end for end in (summary.low, summary.high) if end is not None])
        if not bool(torch.isfinite(ends).all()):
            raise NonFiniteError(
                f"{summary.kind} of {place.text} has the range [{summary.low}, {summary.high}]; find the operator "
                "that makes NaN or infinity, or calibrate with nonfinite='skip'."
            )


def require_mergeable(places: Sequence[ObserverPlace]) -> None:
    """Refuses observers that have seen activations, since nothing is known of how their states merge.

    Raises:
        CalibrationError: there is such an observer.
    """
    for place in places:
        if not place.of_constants and summarize(place).low is not None:
            raise CalibrationError(
                f"{type(place.observer).__name__} of {place.text} cannot be merged across processes; use an "
                "observer of quantplug.core.observers."
            )


@contextmanager
def undone_on_error(places: list[ObserverPlace]) -> Iterator[list[ObserverPlace]]:
    """Gives all observers, ours and others, their former data back if the block raises."""
    before = [(s.observer, s.observer.seen) for s in places if isinstance(s.observer, DataObserver)]
    others = places_of_others(places)
    states = states_of_others(others)
    try:
        yield places
    except BaseException:
        for observer, seen in before:
            observer.seen = seen
        restore_others(others, states)
        raise
