"""What the operator of a node does to the numbers that it reads, by the table of `operators`."""

from typing import Any, TypeAlias

from torch import fx

from quantplug.core.graph.facts import operands, operator_name
from quantplug.core.graph.operators import (
    CLAMPS,
    IDENTITIES,
    MOVES,
    REPEATS,
    TRANSPOSES,
    overloads_of,
)

Bounds: TypeAlias = tuple[float | None, float | None]

_MOVES = overloads_of(MOVES)
_REPEATS = overloads_of(REPEATS)
_TRANSPOSES = overloads_of(TRANSPOSES)
_IDENTITIES = overloads_of(IDENTITIES)


def moves(node: fx.Node) -> bool:
    """Tells whether an operator only puts numbers elsewhere."""
    return node.target in _MOVES


def repeats(node: fx.Node) -> bool:
    """Tells whether an operator only puts numbers elsewhere, and each several times."""
    return node.target in _REPEATS


def transposes(node: fx.Node) -> bool:
    """Tells whether an operator puts the two dimensions of a matrix elsewhere."""
    return node.target in _TRANSPOSES


def is_identity(node: fx.Node) -> bool:
    """Tells whether an operator computes nothing at inference."""
    return node.target in _IDENTITIES


def clamp_bounds(node: Any) -> Bounds | None:
    """Returns the lower and the upper bound of a clamp by numbers, each None where it has none; None for all else."""
    row = CLAMPS.get(operator_name(node).removeprefix("aten::").removesuffix("_"))
    if row is None:
        return None
    given = operands(node)
    low, high = (given.get(bound) if isinstance(bound, str) else bound for bound in row)
    return None if isinstance(low, fx.Node) or isinstance(high, fx.Node) else (low, high)


def per_dimension(value: Any, dimensions: int = 2) -> list[Any]:
    """Returns a number for each dimension where an operand may be one number for all of them; an empty one stays."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * dimensions if len(values) == 1 else values
