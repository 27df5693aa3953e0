"""The pattern language: values that describe a piece of an ATen graph.

Before: an `fx.Node`. After: a `Match` that binds the names of the pattern, or a `Miss` that says which
predicate failed first. Patterns are immutable values; matching only reads the graph, goes from the root
(the last node of the piece) to its producers, and never looks at `source_fn_stack` or `torch_fn`, so
strict, non-strict and decomposed exports of one model match alike.

    conv = op("conv2d", input=value("x"), weight=constant("w"), bias=optional(constant("b")), name="conv")
    relu = op("relu", self=single_use(conv), name="relu")
    found = relu.match(node)

Operands are named as in the ATen schema. A bare operator name stands for all its functional overloads
and, where ATen has one, the in-place form: `op("relu")` matches `relu` and `relu_`.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import fx

from quantplug.core.errors import PatternError
from quantplug.core.graph.facts import describe, is_constant, is_held, operands
from quantplug.core.graph.operators import Target, operator_overloads
from quantplug.core.peers.torch_names import OpOverload, OpOverloadPacket, schema_of

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
        """Returns what a name is bound to, or the default where an optional part was absent."""
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
class _State:
    """One branch of the search: what is bound and which operator nodes are part of the piece."""

    bindings: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()

    def bind(self, name: str | None, found: Any) -> "_State | None":
        if name is None:
            return self
        if name in self.bindings:
            return self if self.bindings[name] is found else None
        return _State({**self.bindings, name: found}, self.nodes)


class _Trace:
    """Keeps the miss that came furthest in one search."""

    def __init__(self) -> None:
        self.furthest = Miss("nothing was compared", -1)

    def miss(self, state: _State, reason: str) -> None:
        if len(state.nodes) > self.furthest.matched:
            self.furthest = Miss(reason, len(state.nodes))


class Pattern(ABC):
    """What an operand, or the root of a piece of graph, has to be."""

    @abstractmethod
    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
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
        trace = _Trace()
        for state in self._solve(node, _State(), trace, "the root"):
            return Match(node, state.nodes, state.bindings)
        return trace.furthest

    def mentions(self) -> frozenset[Target]:
        """Returns the operators that occur anywhere in the pattern."""
        return self.targets.union(*(part.mentions() for part in self.parts))


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

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        reason = None if self.accepts(found) else f"{where} is {_show(found)}, not {self.kind}"
        reason = reason or next(filter(None, (check(found) for check in self.conditions)), None)
        bound = state.bind(self.name, found) if reason is None else None
        if bound is not None:
            yield bound
            return
        already = state.bindings.get(self.name or "")
        trace.miss(state, reason or f"{where} is {_show(found)}, but '{self.name}' is already {_show(already)}")


@dataclass(frozen=True)
class Literal(Pattern):
    """A literal out of several; made by `literal`."""

    values: tuple[Any, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return " or ".join(repr(v) for v in self.values)

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        if not isinstance(found, fx.Node) and any(_plain(found) == v for v in self.values):
            bound = state.bind(self.name, found)
            if bound is not None:
                yield bound
                return
        trace.miss(state, f"{where} is {_show(found)}, not {self.text}")


@dataclass(frozen=True)
class Maybe(Pattern):
    """A pattern, or nothing in its place; made by `optional`."""

    inner: Pattern

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return f"{self.inner.text} or nothing"

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns directly inside."""
        return (self.inner,)

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
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

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        for choice in self.choices:
            yield from choice._solve(found, state, trace, where)


@dataclass(frozen=True)
class Each(Pattern):
    """A list whose every element fits a pattern; made by `each`."""

    inner: Pattern
    name: str | None

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return f"a list of {self.inner.text}"

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns directly inside."""
        return (self.inner,)

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        if not isinstance(found, list | tuple) or not found:
            trace.miss(state, f"{where} is {_show(found)}, not {self.text}")
            return
        states = [state]
        for position, element in enumerate(found):
            states = [s for old in states for s in self.inner._solve(element, old, trace, f"{where}[{position}]")]
        for solved in states:
            bound = solved.bind(self.name, found)
            if bound is not None:
                yield bound


@dataclass(frozen=True)
class SingleUse(Pattern):
    """A node whose result has one user; made by `single_use`."""

    inner: Pattern

    @property
    def text(self) -> str:
        """What it asks for, in words."""
        return f"{self.inner.text} used once"

    @property
    def targets(self) -> frozenset[Target]:
        """The operators that a root matched by it can have."""
        return self.inner.targets

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns directly inside."""
        return (self.inner,)

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        for solved in self.inner._solve(found, state, trace, where):
            if len(found.users) == 1:
                yield solved
            else:
                users = ", ".join(f"'{user.name}'" for user in list(found.users)[:3])
                trace.miss(solved, f"{where} is {_show(found)}, which {len(found.users)} nodes use ({users})")


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

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        if not isinstance(found, fx.Node) or found.op != "call_function" or found.target not in self.overloads:
            trace.miss(state, f"{where} is {_show(found)}, not {self.label}")
            return
        bound = state.bind(self.name, found)
        if bound is None:
            trace.miss(state, f"{where} is {_show(found)}, but '{self.name}' is already another node")
            return
        start = _State(bound.bindings, (*bound.nodes, found))
        for solved in self._solve_inputs(found, start, trace):
            reason = self._objection(found, solved)
            if reason is None:
                yield solved
            else:
                trace.miss(solved, reason)

    def _solve_inputs(self, node: fx.Node, state: _State, trace: _Trace) -> Iterator[_State]:
        given = operands(node)
        yield from _solve_all(self.inputs, given, node, state, trace)
        if self.commutative:
            one, other = self.commutative
            exchanged = {**given, one: given.get(other), other: given.get(one)}
            yield from _solve_all(self.inputs, exchanged, node, state, trace)

    def _objection(self, node: fx.Node, state: _State) -> str | None:
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

    def _solve(self, found: Any, state: _State, trace: _Trace, where: str) -> Iterator[_State]:
        is_call = isinstance(found, fx.Node) and isinstance(found.target, OpOverload)
        reason = None if is_call else f"{where} is {_show(found)}, not {self.text}"
        reason = reason or next(filter(None, (check(found) for check in self.conditions)), None)
        bound = state.bind(self.name, found) if reason is None else None
        if bound is not None:
            yield _State(bound.bindings, (*bound.nodes, found))
        else:
            trace.miss(state, reason or f"{where} is {_show(found)}, but '{self.name}' is already another node")


def _solve_all(
    inputs: tuple[tuple[str, Pattern], ...], given: Mapping[str, Any], node: fx.Node, state: _State, trace: _Trace
) -> Iterator[_State]:
    if not inputs:
        yield state
        return
    (name, pattern), rest = inputs[0], inputs[1:]
    for solved in pattern._solve(given.get(name), state, trace, f"operand '{name}' of {describe(node)}"):
        yield from _solve_all(rest, given, node, solved, trace)


def _show(found: Any) -> str:
    return describe(found) if isinstance(found, fx.Node) else repr(found)


def _plain(found: Any) -> Any:
    return tuple(found) if isinstance(found, list | tuple) else found


def value(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for any node; each condition gets the node and returns None or a reason."""
    return Value(name, conditions)


def constant(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for a parameter, buffer or lifted constant that the graph does not write to."""
    return Value(name, (_is_same, *conditions), "a constant", lambda found: is_held(found) or is_constant(found))


def _is_same(found: fx.Node) -> str | None:
    return None if is_constant(found) else f"the graph writes to '{found.target}' when it runs"


def anything(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for any operand at all: node, literal, list or None."""
    return Value(name, conditions, "anything", lambda found: True)


def literal(*values: Any, name: str | None = None) -> Pattern:
    """Returns a pattern for a literal operand equal to one of the values (lists compare as tuples)."""
    return Literal(tuple(_plain(v) for v in values), name)


def optional(inner: Pattern) -> Pattern:
    """Returns a pattern for an operand that may be None or absent."""
    return Maybe(inner)


def either(*choices: Pattern) -> Pattern:
    """Returns a pattern that holds where one of the choices does; they are tried in order."""
    return Either(choices)


def each(inner: Pattern, name: str | None = None) -> Pattern:
    """Returns a pattern for a non-empty list operand whose every element fits; binds the list."""
    return Each(inner, name)


def single_use(inner: Pattern) -> Pattern:
    """Returns a pattern for a node whose result has exactly one user: a node that may be fused away."""
    return SingleUse(inner)


def item(source: Pattern, index: int, name: str | None = None) -> Op:
    """Returns a pattern for one result of an operator that yields several."""
    return Op(
        f"result {index} of {source.text}", frozenset({operator.getitem}), (("0", source), ("1", literal(index))), name
    )


def op(
    *targets: str | OpOverload | OpOverloadPacket,
    name: str | None = None,
    commutative: tuple[str, str] | None = None,
    where: tuple[Callable[[Match], str | None], ...] = (),
    **inputs: Any,
) -> Op:
    """Returns a pattern for a call of one of several operators.

    Args:
        targets: ATen names ("relu", "add.Tensor", or "library::name" outside ATen), packets or overloads.
            A name stands for all functional overloads of the operator and of its in-place form.
        name: what the operator node is bound to in a match.
        commutative: two operand names that may be exchanged.
        where: conditions over the match so far, each None or the reason against it.
        inputs: patterns, or literals, by the operand names of the schema. Overloads that lack one of
            the names are left out; operands that are not named may be anything.

    Raises:
        PatternError: an operator does not exist, or none of its overloads has the operand names.
    """
    if not targets:
        raise PatternError("op() names no operator; pass at least one, such as op('relu').")
    patterns = tuple((k, v if isinstance(v, Pattern) else literal(v)) for k, v in inputs.items())
    wanted = frozenset(inputs).union(commutative or ())
    overloads = frozenset().union(*(_resolve(target, wanted) for target in targets))
    label = "|".join(dict.fromkeys(_label(target) for target in targets))
    return Op(label, overloads, patterns, name, commutative, where)


def any_op(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for a call of any operator; each condition gets the node and returns None or a reason.

    It is tried at every operator of a graph, so that its conditions have to be cheap, and comes nearest to none: where
    it fails, reports say what failed of the rules that are about the operator.
    """
    return AnyOp(name, conditions)


def _resolve(target: str | OpOverload | OpOverloadPacket, wanted: frozenset[str]) -> set[Target]:
    candidates = operator_overloads(target)
    fitting = {o for o in candidates if wanted <= {a.name for a in schema_of(o).arguments}}
    if fitting:
        return fitting
    offered = sorted({str(schema_of(o)) for o in candidates})
    have = {a.name for o in candidates for a in schema_of(o).arguments}
    wrong = sorted(wanted - have) or sorted(wanted)
    raise PatternError(f"Operator '{_label(target)}' has no operand {wrong}; its schema offers {'; '.join(offered)}.")


def _label(target: str | OpOverload | OpOverloadPacket) -> str:
    return target if isinstance(target, str) else str(target)
