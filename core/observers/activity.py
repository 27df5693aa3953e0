"""Channels that never change: a tensor's batches -> the channels that are constant in all of them."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Activity: TypeAlias = tuple[int, Tensor | None, Tensor | None]


class ChannelActivity:
    """Looks for channels that ever take two values, at ever fewer channels.

    Most channels show two values in the first sample of the first batch; from then on only the few
    others are looked at, and none once all are known to be active.

    Args:
        axis: channel axis.
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.channels = 0
        self.first: Tensor | None = None
        self.silent: Tensor | None = None

    @property
    def done(self) -> bool:
        """Tells whether all channels are known to be active."""
        return self.silent is not None and self.silent.numel() == 0

    def along(self, value: Tensor, axis: int) -> bool:
        """Tells whether a tensor's channels lie along an axis."""
        return self.axis % value.dim() == axis

    @property
    def silent_channels(self) -> tuple[int, ...]:
        """Channels that have kept one value."""
        return () if self.silent is None else tuple(self.silent.tolist())

    def saved(self) -> Activity:
        """Returns what `restore` needs to go on from here."""
        return self.channels, self.first, self.silent

    def restore(self, saved: Activity) -> None:
        """Goes on from what `saved` returned."""
        self.channels, self.first, self.silent = saved
        if self.silent is not None and not (isinstance(self.silent, Tensor) and self.silent.dtype == torch.int64):
            raise ValueError("the channels that are silent are no indices")

    def see(self, value: Tensor) -> None:
        """Takes one tensor, of any sizes but that of the channel axis."""
        if value.numel() == 0 or value.dim() < 2:
            return
        value = value.detach()
        if self.silent is None:
            self.channels = value.shape[self.axis]
            self.silent = torch.arange(self.channels, device=value.device)
            self.first = value.movedim(self.axis, -1)[(0,) * (value.dim() - 1)].clone()
            if value.shape[0] > 1 and not self.along(value, 0):
                self._narrow(value[:1])
        if not self.done:
            self._narrow(value)

    def _narrow(self, value: Tensor) -> None:
        assert self.silent is not None
        assert self.first is not None
        if value.shape[self.axis] != self.channels:
            return
        self.silent, self.first = self.silent.to(value.device), self.first.to(value.device)
        shown, first = value, self.first
        if len(self.silent) < self.channels:
            shown, first = value.index_select(self.axis, self.silent), first[self.silent]
        axis = self.axis % value.dim()
        others = [other for other in range(value.dim()) if other != axis]
        unchanged = shown == first.view(-1, *[1] * (value.dim() - 1 - axis))
        self.silent = self.silent[unchanged.all(dim=others)]


def see_together(activities: Sequence[ChannelActivity], values: Tensor) -> None:
    """Shows tensors of one shape, `values[i]`, to activities of one axis that have seen none."""
    axis = activities[0].axis % (values.dim() - 1) + 1
    channels = values.movedim(axis, 1).flatten(2)
    firsts = channels[:, :, 0]
    unchanged = (channels == firsts[:, :, None]).all(2)
    for activity, first, silent in zip(activities, firsts, unchanged, strict=True):
        activity.restore((len(silent), first.clone(), silent.nonzero()[:, 0]))


class Watch:
    """The channels of what many observers see, each looked at until all are known to be active.

    Args:
        activity: observers whose tensors' channels are watched.

    Attributes:
        activity: the same.
    """

    def __init__(self, activity: Mapping[nn.Module, ChannelActivity]) -> None:
        self.activity = dict(activity)
        self._open = dict(self.activity)
        self._before: dict[nn.Module, Activity] = {}

    def see(self, observer: nn.Module, value: Tensor) -> None:
        """Takes a tensor of a batch that may yet be undone."""
        if observer in self._open:
            self._before.setdefault(observer, self._open[observer].saved())
            self._look(observer, [value])

    def keep(self) -> None:
        """Ends a batch: what it showed stays."""
        self._before = {}

    def undo(self) -> None:
        """Ends a batch as if it had not been."""
        for observer, saved in self._before.items():
            self._open[observer] = self.activity[observer]
            self.activity[observer].restore(saved)
        self._before = {}

    def see_all(self, ready: Mapping[Any, Sequence[Tensor]]) -> None:
        """Takes tensors for good, together where one of one shape is the first that several activities see."""
        first: dict[Hashable, list[nn.Module]] = defaultdict(list)
        for observer in ready.keys() & self._open.keys():
            values, activity = ready[observer], self._open[observer]
            if len(values) == 1 and activity.silent is None and values[0].dim() > 1 and values[0].numel():
                first[activity.axis, values[0].shape, values[0].dtype, values[0].device].append(observer)
            else:
                self._look(observer, values)
        for group in first.values():
            see_together([self._open[o] for o in group], torch.stack([ready[o][0] for o in group]))
            for observer in group:
                self._look(observer, ())

    def _look(self, observer: nn.Module, values: Sequence[Tensor]) -> None:
        activity = self._open[observer]
        for value in values:
            activity.see(value)
        if activity.done:
            del self._open[observer]
