"""The calls of observers in a prepared graph: what they see, and whether they have seen it.

Before: a prepared graph after calibration. After: its observers of constants have seen them too, and an error names
those that lack data.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, fx, nn

from quantplug.core.errors import CalibrationError, ConvertError, QuantplugError, first_line
from quantplug.core.graph.constants import constant_nodes, evaluate_constants
from quantplug.core.graph.facts import observer_of
from quantplug.core.observers.from_specs import needs_data, observe_constant, waits_for_constants
from quantplug.core.peers.linux import let_go
from quantplug.core.pt2e.quantization import kind_of

Calls: TypeAlias = dict[fx.Node, nn.Module]


def calls_of_observers(graph: fx.Graph) -> Calls:
    """Returns the nodes that call an observer, each with it, in graph order."""
    return {node: found for node in graph.nodes if (found := observer_of(node)) is not None}


def origin(call: fx.Node) -> fx.Node:
    """Returns the node whose tensor an observer's call sees, through other observers."""
    node = call.all_input_nodes[0]
    while observer_of(node) is not None:
        node = node.all_input_nodes[0]
    return node


def observe_constants(graph: fx.Graph, observers: Calls) -> dict[fx.Node, Tensor]:
    """Lets observers of constants see them, and returns the constants that calls are given.

    Raises:
        CalibrationError: an observer cannot observe a constant.
    """
    constant = constant_nodes(graph)
    calls = [call for call in observers if call in constant]
    inputs = {call.all_input_nodes[0] for call in calls}
    values = evaluate_constants([n for n in graph.nodes if n in constant], inputs)
    waiting = {observers[c] for c in calls if waits_for_constants(observers[c])}
    seen: set[tuple[nn.Module, int]] = set()
    for call in calls:
        observer, value = observers[call], values[call.all_input_nodes[0]]
        if observer in waiting and (observer, id(value)) not in seen:
            seen.add((observer, id(value)))
            _observe(call, observer, value)
            let_go(value)
    return {call: values[call.all_input_nodes[0]] for call in calls}


def _observe(call: fx.Node, observer: nn.Module, value: Tensor) -> None:
    try:
        observe_constant(observer, value)
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"The observer '{call.target}' cannot observe the constant '{origin(call).name}' of shape "
            f"{tuple(value.shape)} and {value.dtype}: {' '.join(str(error).split())}; annotate it with another one."
        ) from error


def require_data(observers: Mapping[fx.Node, nn.Module]) -> None:
    """Requires that every observer that calibration serves has seen data.

    Raises:
        CalibrationError: some have not.
    """
    missing = [
        f"'{call.target}' (of '{origin(call).name}')"
        for call, observer in observers.items()
        if kind_of(observer) in ("static", "own") and needs_data(observer)
    ]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CalibrationError(
            f"{len(missing)} observers have seen no data: {shown}; run the prepared model on calibration "
            "data before convert_pt2e."
        )


@contextmanager
def in_words(call: fx.Node, observer: nn.Module) -> Iterator[None]:
    """Says of which observer an error is that its own code, or a function that derives its numbers, raises.

    Raises:
        ConvertError: in place of any error that is not ours.
    """
    try:
        yield
    except QuantplugError:
        raise
    except Exception as error:
        raise ConvertError(
            f"The {type(observer).__name__} '{call.target}' of '{origin(call).name}' gives no quantization "
            f"({first_line(error)}); change its spec or its observer."
        ) from error
