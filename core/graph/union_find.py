"""Which items belong together: union-find over anything that can be a key.

Before: items, and pairs of them that belong together. After: groups, in the order of the items.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class UnionFind(Generic[Item]):
    """Union-find with path halving (Tarjan and van Leeuwen 1984); iterative, so chains of any length work."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._parent: dict[Item, Item] = {item: item for item in items}

    def __contains__(self, item: Item) -> bool:
        return item in self._parent

    def join(self, one: Item, other: Item) -> None:
        """Puts two items, and what belongs to each, into one group."""
        self._parent[self._find(other)] = self._find(one)

    def groups(self) -> list[list[Item]]:
        """Returns the groups in the order of their first items, each in the order of the items."""
        members: dict[Item, list[Item]] = {}
        for item in self._parent:
            members.setdefault(self._find(item), []).append(item)
        return list(members.values())

    def _find(self, item: Item) -> Item:
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item
