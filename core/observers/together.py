"""Many observers at once: their tensors are counted together, their ranges searched together.

Observers whose states have the same form differ only in their data, and every update and search
works on rows; so the states of hundreds of observers are put below each other and treated in one call.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantplug.core.observers.base import DataObserver, search_key, update_key
from quantplug.core.observers.seen import State, on_device

Shown = tuple[DataObserver, Tensor]
"""An observer and a tensor that is to be counted."""


def groups_to_update(shown: Iterable[Shown]) -> list[list[Shown]]:
    """Returns tensors of per-tensor observers in groups that can be counted as rows of one."""
    groups: dict[Hashable, list[Shown]] = defaultdict(list)
    for observer, value in shown:
        fresh = not observer.has_data
        groups[update_key(observer), fresh, value.numel(), value.dtype, value.device].append((observer, value))
    return list(groups.values())


def update_together(group: Sequence[Shown]) -> list[DataObserver]:
    """Counts a group's tensors and returns the observers whose extremes grew."""
    first, device = group[0][0], group[0][1].device
    rows = first.rows(torch.stack([value for _, value in group])).view(len(group), -1)
    states = [on_device(observer.state, device) for observer, _ in group]
    before = None if states[0] is None else _stacked([state for state in states if state is not None])
    after = first.updated(before, rows)
    grew = [True] * len(group) if before is None else widened(before, after).tolist()
    for (observer, _), state in zip(group, _unstacked(after), strict=True):
        observer.state = state
    return [observer for (observer, _), wider in zip(group, grew, strict=True) if wider]


def find_ranges(observers: Iterable[DataObserver]) -> None:
    """Searches the ranges of all observers that have seen data, together where their searches agree.

    Afterwards `ranges()` and `calculate_qparams()` of each only look up what was found.
    """
    groups: dict[Hashable, list[tuple[DataObserver, State]]] = defaultdict(list)
    for observer in observers:
        state = observer.seen.state
        if state is None and observer.has_data:
            observer.ranges()  # reads the parameter, whose histogram is not kept
        elif state is not None and observer.seen.range is None:
            groups[search_key(observer), state[0].device].append((observer, state))
    for group in groups.values():
        low, high = group[0][0].search(_stacked([state for _, state in group]))
        sizes = [len(state[0]) for _, state in group]
        ends = zip(torch.split(low, sizes), torch.split(high, sizes), strict=True)
        for (observer, _), found in zip(group, ends, strict=True):
            observer.seen = observer.seen.with_range(*found)


def widened(before: State, after: State) -> Tensor:
    """Returns of each row whether its extremes grew."""
    return (after[0] < before[0]) | (after[1] > before[1])


def _stacked(states: Sequence[State]) -> State:
    return type(states[0])(*(torch.cat(fields) for fields in zip(*states, strict=True)))


def _unstacked(state: State) -> list[Any]:
    return [type(state)(*fields) for fields in zip(*(torch.split(field, 1) for field in state), strict=True)]
