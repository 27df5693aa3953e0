"""Lowerings as steps: each changes a graph, and says what it needs before and what holds after it.

Before: a value that steps change in place, such as a graph module. After: the same, changed. A run that is checked asks
every condition of every step, as the tests do over whole models; another run trusts them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import describe

T = TypeVar("T")
Condition = Callable[[T], str | None]


@dataclass(frozen=True)
class Step(Generic[T]):
    """One step of a lowering.

    Attributes:
        name: what it does, in words.
        change: changes the value in place.
        needs: conditions that hold before it, each None or what breaks it.
        leaves: conditions that hold after it.
    """

    name: str
    change: Callable[[T], object]
    needs: tuple[Condition[T], ...] = ()
    leaves: tuple[Condition[T], ...] = ()


def run(steps: Iterable[Step[T]], value: T, *, checked: bool = False) -> None:
    """Runs steps one after the other.

    Args:
        steps: in their order.
        value: what they change.
        checked: whether to ask what each needs and leaves.

    Raises:
        LoweringError: a condition does not hold; the message names the step.
    """
    for step in steps:
        _require(step.needs if checked else (), value, f"Step '{step.name}' needs what does not hold before it")
        step.change(value)
        _require(step.leaves if checked else (), value, f"Step '{step.name}' did not leave what it says")


def every_node(condition: Callable[[fx.Node], str | None]) -> Condition[fx.GraphModule]:
    """Returns the condition that something holds of every node of a graph module.

    Args:
        condition: returns None for a node, or what is wrong with it.
    """

    def broken(module: fx.GraphModule) -> str | None:
        found = ((node, condition(node)) for node in module.graph.nodes)
        return next((f"{describe(node)} {wrong}" for node, wrong in found if wrong), None)

    return broken


def _require(conditions: Iterable[Condition[T]], value: T, what: str) -> None:
    for condition in conditions:
        broken = condition(value)
        if broken is not None:
            raise LoweringError(f"{what}: {broken}.")
