"""From a pattern to the calls that it describes.

Before: a pattern. After: concrete ways to write it down, such that every overload, every alternative, every
optional operand and every literal of the pattern occurs in one of them ("each-choice coverage", Ammann and
Offutt, Introduction to Software Testing, 2016): as many as the longest list of choices, not their product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quantplug.core.graph.operators import Target
from quantplug.core.patterns.language import AnyOp, Each, Either, Literal, Maybe, Op, Pattern, SingleUse, Value
from quantplug.core.peers.torch_names import OpOverload, schema_of


@dataclass(frozen=True)
class Operand:
    """A tensor, a constant or any operand that the recipe of its operator chooses.

    Attributes:
        kind: "a tensor", "a constant" or "anything", as in the pattern.
        name: what the pattern binds it to; the same name is the same tensor.
    """

    kind: str
    name: str | None = None


@dataclass(frozen=True)
class Given:
    """A literal operand."""

    value: Any


@dataclass(frozen=True)
class Many:
    """A list operand."""

    elements: tuple["Spelling", ...]


@dataclass(frozen=True)
class Call:
    """A call of one overload.

    Attributes:
        target: the overload.
        operands: (schema operand name, spelling) pairs; None for an optional operand that is absent.
        name: what the pattern binds the call to.
    """

    target: Target
    operands: tuple[tuple[str, "Spelling | None"], ...]
    name: str | None = None


Spelling: TypeAlias = Operand | Given | Many | Call


def spellings(pattern: Pattern) -> list[Spelling | None]:
    """Returns concrete ways to write a pattern down; None stands for an operand that is absent."""
    if isinstance(pattern, Op):
        return list(_calls(pattern))
    if isinstance(pattern, Value):
        return [Operand(pattern.kind, pattern.name)]
    if isinstance(pattern, AnyOp):
        return []  # an author shows what it is about
    if isinstance(pattern, Literal):
        return [None if value is None else Given(value) for value in pattern.values]
    if isinstance(pattern, Maybe):
        return [*spellings(pattern.inner), None]
    if isinstance(pattern, Each):
        one = spellings(pattern.inner)[0]
        return [] if one is None else [Many((one, one))]
    assert isinstance(pattern, Either | SingleUse)
    return [spelling for part in pattern.parts for spelling in spellings(part)]


def _calls(pattern: Op) -> list[Spelling | None]:
    """Turns the lists of choices against each other, so that two optional operands are not absent together."""
    places = [spellings(operand) for _, operand in pattern.inputs]
    overloads = [target for target in sorted(pattern.targets, key=_plainest_first) if _takes(target, pattern)]
    if not overloads:
        return []
    optional = [isinstance(operand, Maybe) for _, operand in pattern.inputs]
    turns = [sum(optional[:place]) for place in range(len(places))]
    rounds = max(len(overloads), *map(len, places), 1)
    found = [_call(pattern, overloads[0], [place[0] for place in places])]
    for number in range(1, rounds + (1 if any(optional) else 0)):
        chosen = [place[(number + turn) % len(place)] for place, turn in zip(places, turns, strict=True)]
        found.append(_call(pattern, overloads[number % len(overloads)], chosen))
    return list(dict.fromkeys(found))


def _call(pattern: Op, target: Target, chosen: Sequence[Spelling | None]) -> Call:
    names = [name for name, _ in pattern.inputs]
    return Call(target, tuple(zip(names, chosen, strict=True)), pattern.name)


def _plainest_first(target: Target) -> tuple[bool, bool, str]:
    packet, _, overload = str(target).rpartition(".")
    return packet.endswith("_"), overload != "default", str(target)


def _takes(target: Target, pattern: Op) -> bool:
    """Tells whether an overload takes tensors where the pattern has them: `add.Scalar` does not."""
    if not isinstance(target, OpOverload):
        return True
    types = {argument.name: str(argument.type) for argument in schema_of(target).arguments}
    tensors = (name for name, operand in pattern.inputs if isinstance(operand, Value) and operand.kind != "anything")
    return all("Tensor" in types[name] for name in tensors)
