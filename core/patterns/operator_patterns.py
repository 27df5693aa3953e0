"""Patterns of operator calls: of some operators with patterns of their operands, or of any operator.

Before: a node. After: the states of the search in which it is such a call, each with the nodes of the piece so far.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from quantplug.core.graph.facts import describe, operands
from quantplug.core.graph.operators import Target
from quantplug.core.patterns.match import Condition, Match, Pattern, State, Trace
from quantplug.core.patterns.operand_patterns import show
from quantplug.core.peers.torch_names import OpOverload


@dataclass(frozen=True)
class Op(Pattern):
    """An operator call; made by `op`.

    Attributes:
        label: the operator names as declared.
        overloads: the operator overloads that fit.
        inputs: (schema operand name, pattern) pairs.
        name: what the operator node is bound to, or None.
        commutative: two operand names that may be exchanged, or None.
        conditions: predicates over the match so far, each None or the reason against it.
    """

    label: str
    overloads: frozenset[Target]
    inputs: tuple[tuple[str, Pattern], ...]
    name: str | None = None
    commutative: tuple[str, str] | None = None
    conditions: tuple[Callable[[Match], str | None], ...] = ()

    @property
    def text(self) -> str:
        """The operator names as declared."""
        return self.label

    @property
    def targets(self) -> frozenset[Target]:
        """The operator overloads that fit."""
        return self.overloads

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns of the operands."""
        return tuple(pattern for _, pattern in self.inputs)

    def where(self, *conditions: Callable[[Match], str | None]) -> "Op":
        """Returns the same pattern with further conditions, each None or the reason against the match."""
        return replace(self, conditions=self.conditions + conditions)

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        if not isinstance(found, fx.Node) or found.op != "call_function" or found.target not in self.overloads:
            trace.miss(state, f"{where} is {show(found)}, not {self.label}")
            return
        bound = state.bind(self.name, found)
        if bound is None:
            trace.miss(state, f"{where} is {show(found)}, but '{self.name}' is already another node")
            return
        start = State(bound.bindings, (*bound.nodes, found))
        for solved in self._solve_inputs(found, start, trace):
            reason = self._objection(found, solved)
            if reason is None:
                yield solved
            else:
                trace.miss(solved, reason)

    def _solve_inputs(self, node: fx.Node, state: State, trace: Trace) -> Iterator[State]:
        given = operands(node)
        yield from _solve_all(self.inputs, given, node, state, trace)
        if self.commutative:
            one, other = self.commutative
            exchanged = {**given, one: given.get(other), other: given.get(one)}
            yield from _solve_all(self.inputs, exchanged, node, state, trace)

    def _objection(self, node: fx.Node, state: State) -> str | None:
        so_far = Match(node, state.nodes, state.bindings)
        return next(filter(None, (check(so_far) for check in self.conditions)), None)


@dataclass(frozen=True)
class AnyOp(Pattern):
    """A call of any operator; made by `any_op`.

    Attributes:
        name: what the operator node is bound to, or None.
        conditions: predicates over the node, each None or the reason against it.
    """

    name: str | None
    conditions: tuple[Condition, ...]

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return "any operator"

    @property
    def is_open(self) -> bool:
        """Whether a root matched by it can have any operator at all."""
        return True

    def _solve(self, found: Any, state: State, trace: Trace, where: str) -> Iterator[State]:
        is_call = isinstance(found, fx.Node) and isinstance(found.target, OpOverload)
        reason = None if is_call else f"{where} is {show(found)}, not {self.text}"
        reason = reason or next(filter(None, (check(found) for check in self.conditions)), None)
        bound = state.bind(self.name, found) if reason is None else None
        if bound is not None:
            yield State(bound.bindings, (*bound.nodes, found))
        else:
            trace.miss(state, reason or f"{where} is {show(found)}, but '{self.name}' is already another node")


def _solve_all(
    inputs: tuple[tuple[str, Pattern], ...], given: Mapping[str, Any], node: fx.Node, state: State, trace: Trace
) -> Iterator[State]:
    if not inputs:
        yield state
        return
    (name, pattern), rest = inputs[0], inputs[1:]
    for solved in pattern._solve(given.get(name), state, trace, f"operand '{name}' of {describe(node)}"):
        yield from _solve_all(rest, given, node, solved, trace)
