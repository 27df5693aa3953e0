"""Numbers of channels: tensors whose elements say which channel each element of a value belongs to.

A number from 1 on is a channel that may have another scale; elements of one number have one scale.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from quantplug.core.graph.union_find import UnionFind

# Elements that are zero under any scale, and elements that keep their scale.
ZERO, KEPT = -1, 0

Value: TypeAlias = "Tensor | str | tuple[Value, ...]"
"""The numbers of a tensor's elements, or why all keep their scale; a tuple for operators with several results."""


class Numbering:
    """Gives numbers to channels and keeps which of them have one scale, and why others keep theirs."""

    def __init__(self) -> None:
        self._next = 1
        self._pairs: list[tuple[int, int]] = []
        self._kept: dict[int, str] = {}

    def fresh(self, count: int) -> Tensor:
        """Returns numbers that no channel has yet."""
        self._next += count
        return torch.arange(self._next - count, self._next)

    def keep(self, value: Value, reason: str) -> None:
        """Notes why channels keep their scale."""
        for labels in _tensors(value):
            for number in distinct(labels):
                if number > KEPT:
                    self._kept.setdefault(number, reason)

    def join(self, one: Tensor, other: Tensor, reason: str) -> Tensor:
        """Notes that elements have one scale, and returns their numbers.

        Args:
            one: numbers of the elements of a tensor.
            other: those of a tensor that fits it by broadcasting.
            reason: why a channel keeps its scale that has to have that of one that does.
        """
        one, other = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
        # Two numbers in one: to find the distinct pairs of a matrix takes a sort of its rows.
        for code in distinct((one + 1) * 2**31 + other + 1):
            self._join(code // 2**31 - 1, code % 2**31 - 1, reason)
        return torch.where(one == ZERO, other, one)

    def _join(self, one: int, other: int, reason: str) -> None:
        if one == other or ZERO in (one, other):
            return
        if KEPT in (one, other):
            self._kept.setdefault(one or other, reason)
            return
        self._pairs.append((one, other))

    def settled(self) -> tuple[Tensor, dict[int, str]]:
        """Returns by number the one that stands for all of its scale, 0 where that is kept, and why it is."""
        found, reasons = torch.zeros(self._next, dtype=torch.int64), dict[int, str]()
        union = UnionFind(range(1, self._next))
        for one, other in self._pairs:
            union.join(one, other)
        for members in union.groups():
            reason = next((self._kept[number] for number in members if number in self._kept), None)
            found[members] = members[0] if reason is None else KEPT
            reasons |= {} if reason is None else dict.fromkeys(members, reason)
        return found, reasons


def along(channels: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """Returns the numbers of a tensor's elements, given those along one axis; they take no memory of their own."""
    return channels.reshape([-1 if at == axis % len(sizes) else 1 for at in range(len(sizes))]).expand(*sizes)


def merged(labels: Tensor, dims: Sequence[int]) -> Tensor | None:
    """Returns the numbers that are the same along dimensions, which have size 1 then; None where they differ."""
    if not dims:
        return labels
    for dim in dims:
        labels = labels.narrow(dim, 0, 1) if labels.stride(dim) == 0 else labels
    top = labels.amax(list(dims), keepdim=True)
    return top if bool(((labels == top) | (labels == ZERO)).all()) else None


def distinct(labels: Tensor) -> list[int]:
    """Returns the numbers that elements have, each once."""
    for dim in range(labels.dim()):
        labels = labels.narrow(dim, 0, 1) if labels.stride(dim) == 0 and labels.shape[dim] else labels
    found: list[int] = torch.unique(labels).tolist()
    return found


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
