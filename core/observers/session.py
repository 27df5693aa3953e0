"""Many observers at once: small tensors are counted together, ranges are searched together.

Observers whose states have the same form differ only in their data, and every update and search
works on rows; so the states of hundreds of observers are put below each other and treated in one
call. A tiny layer's observer then costs one copy of its tensor in the forward pass.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.core.observers.activity import Activity, ChannelActivity, see_together
from quantplug.core.observers.base import DataObserver, State

# Up to this size copying a tensor (64 KB) is cheaper than the dozen calls that count it on its own.
SMALL = 1 << 14
# Elements that may wait to be counted (16 MB), whatever the number of batches.
WAITING = 1 << 22


class Session:
    """Records what reaches observers during a calibration run, batch by batch, with the batch as a transaction.

    Args:
        repeats: observers that stand more than once behind the same tensor: for each of their calls
            in a forward pass, whether it is to be counted.
        activity: observers whose tensors' channels are watched.

    Attributes:
        activity: the same.
        widened: number of the batch in which an observer's range was last seen to grow.
        batch: number of batches ended.
    """

    def __init__(
        self,
        repeats: dict[DataObserver, Sequence[bool]] | None = None,
        activity: Mapping[DataObserver, ChannelActivity] | None = None,
    ) -> None:
        self._repeats = dict(repeats or {})
        self.activity: dict[nn.Module, ChannelActivity] = dict(activity or {})
        self._watching = dict(self.activity)
        self._turns = {observer: cycle(flags) for observer, flags in self._repeats.items()}
        self._fresh: list[tuple[DataObserver, Tensor]] = []
        self._before: dict[DataObserver, State | None] = {}
        self._seen_before: dict[DataObserver, Activity] = {}
        self._waiting: dict[DataObserver, list[Tensor]] = defaultdict(list)
        self._elements = 0
        self.widened: dict[nn.Module, int] = {}
        self.batch = 0

    def stand_in(self, observer: DataObserver) -> Callable[[Tensor], Tensor]:
        """Returns a function that takes what reaches an observer, and passes it on."""

        def taken(value: Tensor) -> Tensor:
            self.record(observer, value)
            return value

        return taken

    def record(self, observer: DataObserver, value: Tensor) -> None:
        """Takes one tensor that reached an observer; to be called without gradients. Empty ones leave no trace.

        Raises:
            NonFiniteError: a large tensor holds NaN or infinity and the observer raises on it.
        """
        if (observer in self._turns and not next(self._turns[observer])) or not value.numel():
            return
        if value.numel() <= SMALL and not observer.ordered:
            self._fresh.append((observer, value.clone()))
            return
        self._before.setdefault(observer, observer.state)
        if observer in self._watching:
            self._seen_before.setdefault(observer, self._watching[observer].saved())
            self._watch(observer, [value])
        self._observe(observer, value)

    def _watch(self, observer: DataObserver, values: Sequence[Tensor]) -> None:
        activity = self._watching[observer]
        for value in values:
            activity.see(value)
        if activity.done:
            del self._watching[observer]

    def _watch_all(self, ready: Mapping[DataObserver, Sequence[Tensor]]) -> None:
        """Watches channels, together where one tensor of one shape is the first that several activities see."""
        first: dict[Hashable, list[DataObserver]] = defaultdict(list)
        for observer in ready.keys() & self._watching.keys():
            values, activity = ready[observer], self._watching[observer]
            if len(values) == 1 and activity.silent is None and values[0].dim() > 1 and values[0].numel():
                first[activity.axis, values[0].shape, values[0].dtype, values[0].device].append(observer)
            else:
                self._watch(observer, values)
        for group in first.values():
            see_together([self._watching[o] for o in group], torch.stack([ready[o][0] for o in group]))
            for observer in group:
                self._watch(observer, ())

    def _joined(self, observer: DataObserver, values: list[Tensor]) -> list[Tensor]:
        """Returns one tensor in place of several where ranges and channels come out the same."""
        first, activity = values[0], self.activity.get(observer)
        alike = first.dim() > 0 and len({(value.shape, value.dtype) for value in values}) == 1
        if observer.per_channel or not alike or (activity is not None and activity.along(first, 0)):
            return values
        return [torch.cat(values)]

    def commit(self) -> None:
        """Ends a batch: what it brought stays.

        Raises:
            NonFiniteError: a small tensor holds NaN or infinity and its observer raises on it.
        """
        if not _all_finite([value for _, value in self._fresh]):
            self._fresh = [pair for pair in self._fresh if not self._took_spoiled(*pair)]
        for observer, value in self._fresh:
            self._waiting[observer].append(value)
            self._elements += value.numel()
        self._next_batch()
        if self._elements > WAITING:
            self.flush()

    def rollback(self) -> None:
        """Ends a batch as if it had not been."""
        for observer, state in self._before.items():
            observer.state = state
        for observer, saved in self._seen_before.items():
            self._watching[observer] = self.activity[observer]
            self.activity[observer].restore(saved)
        self._next_batch()

    def flush(self) -> None:
        """Counts everything that waits."""
        waiting, self._waiting, self._elements = self._waiting, defaultdict(list), 0
        groups: dict[Hashable, list[tuple[DataObserver, Tensor]]] = defaultdict(list)
        ready = {observer: self._joined(observer, values) for observer, values in waiting.items()}
        self._watch_all(ready)
        for observer, joined in ready.items():
            if observer.per_channel or observer.constant is not None:
                for value in joined:
                    self._observe(observer, value)
                continue
            flat = [value.reshape(-1) for value in joined]
            value = flat[0] if len(flat) == 1 else torch.cat(flat)
            fresh = observer.state is None
            groups[observer.update_key(), fresh, value.numel(), value.dtype, value.device].append((observer, value))
        for group in groups.values():
            self._update_together(group)

    def _update_together(self, group: list[tuple[DataObserver, Tensor]]) -> None:
        first, device = group[0][0], group[0][1].device
        rows = first.rows(torch.stack([value for _, value in group])).view(len(group), -1)
        states = [observer.moved(observer.state, device) for observer, _ in group]
        before = None if states[0] is None else _stacked([state for state in states if state is not None])
        after = first.updated(before, rows)
        wider = (torch.ones(len(group), dtype=torch.bool) if before is None else _widened(before, after)).tolist()
        for (observer, _), state, grew in zip(group, _unstacked(after), wider, strict=True):
            observer.state = state
            if grew:
                self.widened[observer] = self.batch

    def _took_spoiled(self, observer: DataObserver, value: Tensor) -> bool:
        if _all_finite([value]):
            return False
        self._before.setdefault(observer, observer.state)
        self._observe(observer, value)
        return True

    def _observe(self, observer: DataObserver, value: Tensor) -> None:
        before = observer.moved(observer.state, value.device)
        observer.observe([value])
        after = observer.state
        if after is not None and (before is None or bool(_widened(before, after).any())):
            self.widened[observer] = self.batch

    def _next_batch(self) -> None:
        self._fresh, self._before, self._seen_before = [], {}, {}
        self._turns = {observer: cycle(flags) for observer, flags in self._repeats.items()}
        self.batch += 1


def find_ranges(observers: Iterable[DataObserver]) -> None:
    """Searches the ranges of all observers that have seen data, together where their searches agree.

    Afterwards `ranges()` and `calculate_qparams()` of each only look up what was found.
    """
    groups: dict[Hashable, list[DataObserver]] = defaultdict(list)
    for observer in observers:
        if observer.constant is not None:
            observer.ranges()  # reads the parameter, whose histogram is not kept
        elif observer.has_data and observer.found is None:
            groups[observer.search_key(), _known(observer)[0].device].append(observer)
    for group in groups.values():
        states = [_known(observer) for observer in group]
        low, high = group[0].search(_stacked(states))
        sizes = [len(state[0]) for state in states]
        for observer, ends in zip(
            group, zip(torch.split(low, sizes), torch.split(high, sizes), strict=True), strict=True
        ):
            observer.remember(*ends)


def _known(observer: DataObserver) -> State:
    state = observer.state
    assert state is not None
    return state


def _stacked(states: Sequence[State]) -> State:
    return type(states[0])(*(torch.cat(fields) for fields in zip(*states, strict=True)))


def _unstacked(state: State) -> list[Any]:
    return [type(state)(*fields) for fields in zip(*(torch.split(field, 1) for field in state), strict=True)]


def _widened(before: State, after: State) -> Tensor:
    return (after[0] < before[0]) | (after[1] > before[1])


def _all_finite(values: Sequence[Tensor]) -> bool:
    floats = [value.reshape(-1) for value in values if value.is_floating_point()]
    if not floats:
        return True
    joined = torch.cat(floats)
    # A sum costs a fifth of the test of each element, and is finite only if they all are.
    return bool(torch.isfinite(joined.sum())) or bool(torch.isfinite(joined).all())
