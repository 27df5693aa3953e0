"""Where observers stand in a prepared graph: modules and nodes -> names, repeated calls, channel axes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx, nn
from torchao.quantization.pt2e import FakeQuantizeBase

from quantplug.core.calibration.batches import digest
from quantplug.core.errors import ModelError
from quantplug.core.graph.constants import constant_nodes
from quantplug.core.graph.facts import describe, is_constant, is_observer, operands, rank, require_graph_module
from quantplug.core.observers import DataObserver
from quantplug.core.observers.base import search_key
from quantplug.core.observers.from_specs import needs_data

_CHANNELS_FIRST = ("conv", "batch_norm", "instance_norm", "group_norm")
_CHANNELS_LAST = ("linear", "addmm", "aten.mm.", "matmul", "layer_norm", "rms_norm", "embedding")
# A channel axis is looked for through operators that keep it; more of them in a row do not occur.
_WALK = 16


@dataclass(frozen=True)
class ObserverPlace:
    """One observer of a prepared graph.

    Attributes:
        name: its module's name in the graph module.
        observer: the module.
        calls: the nodes that call it.
        of_constants: only values that are the same at every call reach it.
        slots: the modules, each with the attribute, where the graphs' code finds it.
    """

    name: str
    observer: nn.Module
    calls: tuple[fx.Node, ...]
    of_constants: bool
    slots: tuple[tuple[nn.Module, str], ...]

    @cached_property
    def producers(self) -> tuple[fx.Node, ...]:
        """The nodes whose values reach it, in the order of the calls."""
        return tuple(call.args[0] for call in self.calls if isinstance(call.args[0], fx.Node))

    @cached_property
    def text(self) -> str:
        """How errors and reports say where it stands."""
        said = " and ".join(_said(node) for node in dict.fromkeys(self.producers)) or f"module '{self.name}'"
        body = self.name.rpartition(".")[0]
        return f"{said} in '{body}'" if body else said

    @property
    def repeats(self) -> tuple[bool, ...]:
        """For each call whether it is the first behind its tensor."""
        return tuple(node not in self.producers[:i] for i, node in enumerate(self.producers))


def observer_places(prepared: fx.GraphModule) -> list[ObserverPlace]:
    """Returns the observers and fake quantizers that the graph and the bodies of its control flow call.

    They come in the order of their first calls, those of bodies last.
    """
    calls: dict[nn.Module, list[fx.Node]] = {}
    slots: dict[nn.Module, dict[tuple[nn.Module, str], str]] = {}
    constant: set[fx.Node] = set()
    for path, body in list(prepared.named_modules()):
        if isinstance(body, fx.GraphModule):
            constant |= constant_nodes(body.graph)
            for node in body.graph.find_nodes(op="call_module"):
                owner, _, attribute = str(node.target).rpartition(".")
                module = body.get_submodule(str(node.target))
                if is_observer(module):
                    calls.setdefault(module, []).append(node)
                    slot = (body.get_submodule(owner), attribute)
                    slots.setdefault(module, {}).setdefault(slot, f"{path}.{node.target}".lstrip("."))
    return [
        ObserverPlace(
            next(iter(slots[module].values())), module, tuple(nodes), constant.issuperset(nodes), tuple(slots[module])
        )
        for module, nodes in calls.items()
    ]


def require_prepared(model: Any, step: str) -> fx.GraphModule:
    """Returns the model if it is a graph module with observers.

    Raises:
        ModelError: it is no graph module, or none of its submodules observes.
    """
    graph_module = require_graph_module(model, step)
    if not any(is_observer(module) for module in model.modules()):
        raise ModelError(
            f"{step} takes a prepared model, found a graph module without observers; call "
            "`prepare_pt2e(exported.module(), quantizer)` first and check what the quantizer annotated."
        )
    return graph_module


def require_observers(model: Any, step: str) -> fx.GraphModule:
    """Returns the model if it is prepared for calibration.

    Raises:
        ModelError: it is not prepared, or is prepared for training, which moves weights and biases by itself.
    """
    graph_module = require_prepared(model, step)
    trained = next((name for name, part in model.named_modules() if isinstance(part, FakeQuantizeBase)), None)
    if trained is not None:
        raise ModelError(
            f"{step} takes a model for calibration, found the fake quantize '{trained}', with which weights and biases "
            "train by themselves; leave it out, or prepare the model with prepare_pt2e."
        )
    return graph_module


def twins(places: Sequence[ObserverPlace]) -> dict[DataObserver, DataObserver]:
    """Returns observers that would see and find just what another one does, each with that other one.

    They stand behind the same tensors, are of one class and have equal options, so that one of them
    can be run for all.
    """
    together: dict[Any, list[DataObserver]] = defaultdict(list)
    for place in places:
        if isinstance(place.observer, DataObserver):
            together[frozenset(place.producers)].append(place.observer)
    found: dict[DataObserver, DataObserver] = {}
    for group in together.values():
        first: dict[Any, DataObserver] = {}
        for observer in group if len(group) > 1 else ():
            other = first.setdefault((search_key(observer), observer.nonfinite, observer.ch_axis), observer)
            if other is not observer:
                found[observer] = other
    return found


def fingerprint(prepared: fx.GraphModule, places: Sequence[ObserverPlace]) -> list[str]:
    """Returns lines that differ where a model's weights, observers or their options do."""
    lines = [f"weights {digest(prepared.parameters())}"]
    for place in places:
        options = f" with {search_key(place.observer)[1:]}" if isinstance(place.observer, DataObserver) else ""
        lines.append(f"{place.name}: {type(place.observer).__name__} of {place.text}{options}")
    return lines


def channel_axis(node: fx.Node) -> int | None:
    """Returns the axis of a value that an operator with channels gave it, or None where none did.

    Looked for at the node and, through operators of one tensor that keep its rank, at its producers.
    """
    for _ in range(_WALK):
        name = str(node.target).lower()
        if any(kind in name for kind in _CHANNELS_FIRST):
            return 1
        if any(kind in name for kind in _CHANNELS_LAST):
            return -1
        inputs = [_observed(v) for v in operands(node).values() if isinstance(v, fx.Node) and not is_constant(v)]
        if node.op != "call_function" or len(inputs) != 1 or rank(inputs[0]) != rank(node):
            return None
        node = inputs[0]
    return None


def _observed(node: fx.Node) -> fx.Node:
    """Returns the node whose value a call of an observer passes on."""
    while node.op == "call_module" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _said(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"input '{node.target}'"
    if node.op == "get_attr":
        return f"constant '{node.target}'"
    return describe(node)


def waits_for_data(prepared: fx.GraphModule) -> bool:
    """Tells whether observers of activations need calibration data."""
    return any(needs_data(place.observer) and not place.of_constants for place in observer_places(prepared))
