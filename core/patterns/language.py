"""The pattern language: the words for values that describe a piece of an ATen graph.

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
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from quantplug.core.errors import PatternError
from quantplug.core.graph.facts import is_constant, is_held
from quantplug.core.graph.operators import DROPOUTS, Target, operator_overloads
from quantplug.core.patterns.match import Condition, Match, Miss, Pattern
from quantplug.core.patterns.operand_patterns import Each, Either, Literal, Maybe, SingleUse, Value, plain
from quantplug.core.patterns.operator_patterns import AnyOp, Op
from quantplug.core.peers.torch_names import OpOverload, OpOverloadPacket, schema_of

__all__ = [
    "AnyOp",
    "Condition",
    "Each",
    "Either",
    "Literal",
    "Match",
    "Maybe",
    "Miss",
    "Op",
    "Pattern",
    "SingleUse",
    "Value",
    "any_op",
    "anything",
    "constant",
    "dropouts",
    "each",
    "either",
    "item",
    "literal",
    "op",
    "optional",
    "single_use",
    "value",
]


def value(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for any node; each condition gets the node and returns None or a reason.

    Args:
        name: what the match calls the node; None for nothing.
        conditions: each gets the node, and returns None or the reason against it.
    """
    return Value(name, conditions)


def constant(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for a parameter, buffer or lifted constant that the graph does not write to.

    Args:
        name: what the match calls it; None for nothing.
        conditions: each gets the node, and returns None or the reason against it.
    """
    return Value(name, (_is_same, *conditions), "a constant", lambda found: is_held(found) or is_constant(found))


def _is_same(found: fx.Node) -> str | None:
    return None if is_constant(found) else f"the graph writes to '{found.target}' when it runs"


def anything(name: str | None = None, *conditions: Condition) -> Pattern:
    """Returns a pattern for any operand at all: node, literal, list or None.

    Args:
        name: what the match calls it; None for nothing.
        conditions: each gets what was found, and returns None or the reason against it.
    """
    return Value(name, conditions, "anything", lambda found: True)


def literal(*values: Any, name: str | None = None) -> Pattern:
    """Returns a pattern for a literal operand equal to one of the values (lists compare as tuples).

    Args:
        values: what the operand may be.
        name: what the match calls it; None for nothing.
    """
    return Literal(tuple(plain(v) for v in values), name)


def optional(inner: Pattern) -> Pattern:
    """Returns a pattern for an operand that may be None or absent.

    Args:
        inner: what it is where it is there.
    """
    return Maybe(inner)


def either(*choices: Pattern) -> Pattern:
    """Returns a pattern that holds where one of the choices does; they are tried in order.

    Args:
        choices: the patterns; the first that holds is taken.
    """
    return Either(choices)


def each(inner: Pattern, name: str | None = None) -> Pattern:
    """Returns a pattern for a non-empty list operand whose every element fits; binds the list.

    Args:
        inner: what every element has to be.
        name: what the match calls the list; None for nothing.
    """
    return Each(inner, name)


def single_use(inner: Pattern) -> Pattern:
    """Returns a pattern for a node whose result has exactly one user: a node that may be fused away.

    Args:
        inner: what the node has to be.
    """
    return SingleUse(inner)


def item(source: Pattern, index: int, name: str | None = None) -> Op:
    """Returns a pattern for one result of an operator that yields several.

    Args:
        source: the operator that yields several results.
        index: which of them, from 0.
        name: what the match calls it; None for nothing.
    """
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


def dropouts(source: Pattern, name: str | None = None, names: Iterable[str] = DROPOUTS) -> tuple[Op, Op]:
    """Returns the patterns of dropouts at inference, which call what they read `input`, and in place `self`."""
    names = tuple(names)
    in_place = (f"{dropout}_" for dropout in names)
    return op(*names, name=name, input=source, train=False), op(*in_place, name=name, self=source, train=False)


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
