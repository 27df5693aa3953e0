"""Patterns of operands: nodes, constants, literals and lists, and what may be said about another pattern.

Before: what an operator's operand is. After: the states of the search in which it fits, or the reason why it does not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantplug.core.graph.facts import describe
from quantplug.core.graph.operators import Target
from quantplug.core.patterns.match import Condition, Pattern, State, Trace


@dataclass(frozen=True)
class Value(Pattern):
    """Any node, any constant or anything at all; made by `value`, `constant` and `anything`.

    Attributes:
        name: what the operand is bound to, or None.
        conditions: predicates over the operand, each None or the reason against it.
        kind: what it may be, in words.
        accepts: tells whether an operand is of the kind.
    """

    name: str | None
    conditions: tuple[Condition, ...]
    kind: str = "a tensor"
    accepts: Callable[[Any], bool] = lambda found: isinstance(found, fx.Node)

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return self.kind

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        reason = None if self.accepts(found) else f"{where} is {show(found)}, not {self.kind}"
        reason = reason or next(filter(None, (check(found) for check in self.conditions)), None)
        bound = state.bind(self.name, found) if reason is None else None
        if bound is not None:
            yield bound
            return
        already = state.bindings.get(self.name or "")
        trace.miss(state, reason or f"{where} is {show(found)}, but '{self.name}' is already {show(already)}")


@dataclass(frozen=True)
class Literal(Pattern):
    """A literal out of several; made by `literal`."""

    values: tuple[Any, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return " or ".join(repr(v) for v in self.values)

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        if not isinstance(found, fx.Node) and any(plain(found) == v for v in self.values):
            bound = state.bind(self.name, found)
            if bound is not None:
                yield bound
                return
        trace.miss(state, f"{where} is {show(found)}, not {self.text}")


@dataclass(frozen=True)
class _Around(Pattern):
    """What is said about another pattern."""

    inner: Pattern

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns directly inside."""
        return (self.inner,)


@dataclass(frozen=True)
class Maybe(_Around):
    """A pattern, or nothing in its place; made by `optional`."""

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return f"{self.inner.text} or nothing"

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        if found is None:
            yield state
        else:
            yield from self.inner._solve(found, state, trace, where)


@dataclass(frozen=True)
class Either(Pattern):
    """One of several patterns, tried in order; made by `either`."""

    choices: tuple[Pattern, ...]

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return " or ".join(choice.text for choice in self.choices)

    @property
    def targets(self) -> frozenset[Target]:
        """The operators that a root matched by it can have."""
        return frozenset().union(*(choice.targets for choice in self.choices))

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns directly inside."""
        return self.choices

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        for choice in self.choices:
            yield from choice._solve(found, state, trace, where)


@dataclass(frozen=True)
class Each(_Around):
    """A list whose every element fits a pattern; made by `each`."""

    name: str | None

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return f"a list of {self.inner.text}"

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        if not isinstance(found, list | tuple) or not found:
            trace.miss(state, f"{where} is {show(found)}, not {self.text}")
            return
        states = [state]
        for position, element in enumerate(found):
            states = [s for old in states for s in self.inner._solve(element, old, trace, f"{where}[{position}]")]
        for solved in states:
            bound = solved.bind(self.name, found)
            if bound is not None:
                yield bound


@dataclass(frozen=True)
class SingleUse(_Around):
    """A node whose result has one user; made by `single_use`."""

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return f"{self.inner.text} used once"

    @property
    def targets(self) -> frozenset[Target]:
        """The operators that a root matched by it can have."""
        return self.inner.targets

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        for solved in self.inner._solve(found, state, trace, where):
            if len(found.users) == 1:
                yield solved
            else:
                users = ", ".join(f"'{user.name}'" for user in list(found.users)[:3])
                trace.miss(solved, f"{where} is {show(found)}, which {len(found.users)} nodes use ({users})")


def show(found: Any) -> str:
    """Returns what an operand is, in words."""
    return describe(found) if isinstance(found, fx.Node) else repr(found)


def plain(found: Any) -> Any:
    """Returns a literal such that lists compare as tuples."""
    return tuple(found) if isinstance(found, list | tuple) else found
