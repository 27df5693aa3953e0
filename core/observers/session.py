"""What reaches observers during a calibration run, batch by batch, with the batch as a transaction.

Small tensors are copied in the forward pass and counted later, those of hundreds of observers in one
call. A tiny layer's observer then costs one copy of its tensor.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor, nn

from quantplug.core.observers.activity import ChannelActivity, Watch
from quantplug.core.observers.base import DataObserver
from quantplug.core.observers.seen import Seen, on_device
from quantplug.core.observers.together import Shown, groups_to_update, update_together, widened

# Up to this size copying a tensor (64 KB) is cheaper than the dozen calls that count it on its own.
SMALL = 1 << 14
# Elements that may wait to be counted (16 MB), whatever the number of batches.
WAITING = 1 << 22


class Session:
    """Takes what reaches observers, keeps or undoes it by the batch, and counts it when enough has come together.

    Args:
        repeats: observers that stand more than once behind the same tensor: for each of their calls
            in a forward pass, whether it is to be counted.
        activity: observers whose tensors' channels are watched.

    Attributes:
        watch: the watched channels.
        widened: number of the batch in which an observer's range was last seen to grow.
        batch: number of batches ended.
    """

    def __init__(
        self,
        repeats: Mapping[DataObserver, Sequence[bool]] | None = None,
        activity: Mapping[nn.Module, ChannelActivity] | None = None,
    ) -> None:
        self._repeats = dict(repeats or {})
        self._turns = {observer: cycle(flags) for observer, flags in self._repeats.items()}
        self._fresh: list[Shown] = []
        self._before: dict[DataObserver, Seen] = {}
        self._waiting: dict[DataObserver, list[Tensor]] = defaultdict(list)
        self._elements = 0
        self.watch = Watch(activity or {})
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
        self._before.setdefault(observer, observer.seen)
        self.watch.see(observer, value)
        self._observe(observer, value)

    def commit(self) -> None:
        """Ends a batch: what it brought stays.

        Raises:
            NonFiniteError: a small tensor holds NaN or infinity and its observer raises on it.
        """
        if not _all_finite([value for _, value in self._fresh]):
            self._fresh = [shown for shown in self._fresh if not self._took_spoiled(*shown)]
        for observer, value in self._fresh:
            self._waiting[observer].append(value)
            self._elements += value.numel()
        self.watch.keep()
        self._next_batch()
        if self._elements > WAITING:
            self.flush()

    def rollback(self) -> None:
        """Ends a batch as if it had not been."""
        for observer, seen in self._before.items():
            observer.seen = seen
        self.watch.undo()
        self._next_batch()

    def flush(self) -> None:
        """Counts everything that waits."""
        waiting, self._waiting, self._elements = self._waiting, defaultdict(list), 0
        ready = {observer: self._joined(observer, values) for observer, values in waiting.items()}
        self.watch.see_all(ready)
        together: list[Shown] = []
        for observer, values in ready.items():
            if observer.per_channel or observer.seen.constant is not None:
                for value in values:
                    self._observe(observer, value)
            else:
                flat = [value.reshape(-1) for value in values]
                together.append((observer, flat[0] if len(flat) == 1 else torch.cat(flat)))
        for group in groups_to_update(together):
            self.widened |= dict.fromkeys(update_together(group), self.batch)

    def _joined(self, observer: DataObserver, values: list[Tensor]) -> list[Tensor]:
        """Returns one tensor in place of several where ranges and channels come out the same."""
        first, activity = values[0], self.watch.activity.get(observer)
        alike = first.dim() > 0 and len({(value.shape, value.dtype) for value in values}) == 1
        if observer.per_channel or not alike or (activity is not None and activity.along(first, 0)):
            return values
        return [torch.cat(values)]

    def _took_spoiled(self, observer: DataObserver, value: Tensor) -> bool:
        if _all_finite([value]):
            return False
        self._before.setdefault(observer, observer.seen)
        self._observe(observer, value)
        return True

    def _observe(self, observer: DataObserver, value: Tensor) -> None:
        before = on_device(observer.state, value.device)
        observer.observe([value])
        after = observer.state
        if after is not None and (before is None or bool(widened(before, after).any())):
            self.widened[observer] = self.batch

    def _next_batch(self) -> None:
        self._fresh, self._before = [], {}
        self._turns = {observer: cycle(flags) for observer, flags in self._repeats.items()}
        self.batch += 1


def _all_finite(values: Sequence[Tensor]) -> bool:
    floats = [value.reshape(-1) for value in values if value.is_floating_point()]
    if not floats:
        return True
    joined = torch.cat(floats)
    # A sum costs a fifth of the test of each element, and is finite only if they all are.
    return bool(torch.isfinite(joined.sum())) or bool(torch.isfinite(joined).all())
