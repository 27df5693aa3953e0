"""Channels that never change: a tensor's batches -> the channels that are constant in all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

Activity = tuple[int, Tensor | None, Tensor | None]


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
        self.reference: Tensor | None = None
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
        return self.channels, self.reference, self.silent

    def restore(self, saved: Activity) -> None:
        """Goes on from what `saved` returned."""
        self.channels, self.reference, self.silent = saved
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
            self.reference = value.movedim(self.axis, -1)[(0,) * (value.dim() - 1)].clone()
            if value.shape[0] > 1 and not self.along(value, 0):
                self._narrow(value[:1])
        if not self.done:
            self._narrow(value)

    def _narrow(self, value: Tensor) -> None:
        assert self.silent is not None
        assert self.reference is not None
        if value.shape[self.axis] != self.channels:
            return
        self.silent, self.reference = self.silent.to(value.device), self.reference.to(value.device)
        shown, first = value, self.reference
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
    references = channels[:, :, 0]
    unchanged = (channels == references[:, :, None]).all(2)
    for activity, reference, silent in zip(activities, references, unchanged, strict=True):
        activity.restore((len(silent), reference.clone(), silent.nonzero()[:, 0]))
