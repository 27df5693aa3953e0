"""What a pattern is, and what a search for it finds.

Before: an `fx.Node` and a pattern. After: a `Match` that binds the names of the pattern, or a `Miss` that says which
predicate failed first. A search goes from the root to its producers and branches where a pattern has alternatives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from quantplug.core.graph.operators import Target

Condition: TypeAlias = Callable[[Any], str | None]


@dataclass(frozen=True)
class Match:
    """A pattern that holds at a root node.

    Attributes:
        root: the last node of the piece.
        nodes: every operator node of the piece, the root first.
        bindings: what the names of the pattern stand for: nodes, lists of nodes or literals.
    """

    root: fx.Node
    nodes: tuple[fx.Node, ...]
    bindings: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns what a name of the pattern is bound to; KeyError if the pattern did not bind it."""
        return self.bindings[name]

    def __contains__(self, name: str) -> bool:
        return name in self.bindings

    def get(self, name: str, default: Any = None) -> Any:
        """Returns what a name is bound to, or the default where an optional part was absent.

        Args:
            name: what the pattern calls it.
            default: what is returned where it is absent.
        """
        return self.bindings.get(name, default)


@dataclass(frozen=True)
class Miss:
    """Why a pattern does not hold at a root node; false in a condition.

    Attributes:
        reason: the first failing predicate of the alternative that came furthest, in words.
        matched: number of operator nodes that had matched when it failed.
    """

    reason: str
    matched: int

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class State:
    """One branch of the search: what is bound and which operator nodes are part of the piece."""

    bindings: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()

    def bind(self, name: str | None, found: Any) -> "State | None":
        """Returns the state with a name bound, or None where it stands for something else already."""
        if name is None:
            return self
        if name in self.bindings:
            return self if self.bindings[name] is found else None
        return State({**self.bindings, name: found}, self.nodes)


class Trace:
    """Keeps the miss that came furthest in one search."""

    def __init__(self) -> None:
        self.furthest = Miss("nothing was compared", -1)

    def miss(self, state: State, reason: str) -> None:
        """Keeps a reason if its branch came further than those before."""
        if len(state.nodes) > self.furthest.matched:
            self.furthest = Miss(reason, len(state.nodes))


class Pattern(ABC):
    """What an operand, or the root of a piece of graph, has to be."""

    @abstractmethod
    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        """Yields every way in which the operand fits, from a state of the search."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The pattern in a few words, for reasons and reports."""

    @property
    def targets(self) -> frozenset[Target]:
        """The operators that a root matched by this pattern can have; empty if it is no operator."""
        return frozenset()

    @property
    def is_open(self) -> bool:
        """Whether a root matched by this pattern can have any operator at all."""
        return False

    @property
    def parts(self) -> tuple["Pattern", ...]:
        """The patterns directly inside this one."""
        return ()

    def match(self, node: fx.Node) -> Match | Miss:
        """Matches the piece of graph that ends in `node`; time grows with the pattern, not the graph."""
        trace = Trace()
        for state in self._solve(node, State(), trace, "the root"):
            return Match(node, state.nodes, state.bindings)
        return trace.furthest

    def mentions(self) -> frozenset[Target]:
        """Returns the operators that occur anywhere in the pattern."""
        return self.targets.union(*(part.mentions() for part in self.parts))
