"""A prepared model as a calibration run sees it: observers with what they have seen, and buffers with their values."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from quantplug.core.calibration.observer_places import ObserverPlace, fingerprint, twins
from quantplug.core.calibration.other_observers import places_of_others
from quantplug.core.errors import CalibrationError
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import attribute, constant_value
from quantplug.core.observers import DataObserver
from quantplug.core.observers.seen import Seen

OwnStates = dict[str, tuple[tuple[Tensor, ...] | None, int]]
"""By an observer's name its state, on the host, and how many elements it left out."""


class ObservedModel:
    """The model, where its observers stand, and how what a run changes is read and given back.

    Args:
        model: the prepared model.
        places: its observers.

    Attributes:
        model: the same.
        places: the same.
        own: the places of our observers, each with the observer.
        others: the places of other libraries' observers.
        twins: observers of ours that would see just what another one does, each with that other one.
    """

    def __init__(self, model: fx.GraphModule, places: Sequence[ObserverPlace]) -> None:
        self.model, self.places = model, places
        self.own = [(place, place.observer) for place in places if isinstance(place.observer, DataObserver)]
        self.others = places_of_others(places)
        self.twins = twins(places)
        self._buffers = {name: attribute(model, name) for name in sorted(written_buffers(model.graph))}

    @cached_property
    def fingerprint(self) -> list[str]:
        """Lines that differ where weights, observers or their options do."""
        return fingerprint(self.model, self.places)

    def buffers(self) -> dict[str, Tensor]:
        """Returns copies of the buffers that the model writes (a cache, a counter)."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def restore_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Gives buffers back what `buffers` returned."""
        for name, value in values.items():
            self._buffers[name].copy_(value)

    def own_states(self) -> OwnStates:
        """Returns what our observers have seen; constants are left out, they are in the model."""
        return {
            place.name: (_on_host(observer.state), observer.seen.nonfinite_elements)
            for place, observer in self.own
            if observer.seen.constant is None
        }

    def restore_own(self, states: Mapping[str, Any]) -> None:
        """Gives our observers back what `own_states` returned.

        Raises:
            ValueError: an observer could not have had such a state.
        """
        for place, observer in self.own:
            if place.name in states:
                state, spoiled = states[place.name]
                _require_like(state, observer)
                _show(observer, [] if state is None else [state], spoiled)

    def take_from_all(self, gathered: Sequence[OwnStates]) -> None:
        """Gives our observers what they have seen in all processes, merged in the order of ranks.

        Raises:
            CalibrationError: the processes have different models.
        """
        if any(states.keys() != gathered[0].keys() for states in gathered):
            raise CalibrationError("The processes have models with different observers; prepare the same on all.")
        for place, observer in self.own:
            if observer.seen.constant is None:
                found = [states[place.name] for states in gathered]
                spoiled = sum(spoiled for _, spoiled in found)
                _show(observer, [state for state, _ in found if state is not None], spoiled)

    def observe_constants(self) -> None:
        """Shows weights to our observers without data, in case no batch is left that would."""
        for place, observer in self.own:
            if place.of_constants and not observer.has_data:
                for node in place.producers:
                    value = constant_value(node) if node.op == "get_attr" else None
                    if value is not None:
                        observer(value)


def _on_host(state: Sequence[Tensor] | None) -> tuple[Tensor, ...] | None:
    return None if state is None else tuple(tensor.cpu() for tensor in state)


def _show(observer: DataObserver, states: Sequence[Sequence[Tensor]], spoiled: int) -> None:
    """Replaces what an observer has seen by states, merged in their order."""
    whole = None
    for state in states:
        own = observer.form(*state)
        whole = own if whole is None else observer.merged(whole, own)
    observer.seen = Seen(whole, nonfinite_elements=spoiled)


def _require_like(state: Any, observer: DataObserver) -> None:
    """Raises ValueError where an observer could not have saved a state."""
    fields = () if state is None else tuple(state)
    if not all(isinstance(field, Tensor) and field.dim() for field in fields) or len(set(map(len, fields))) > 1:
        raise ValueError(f"the state of '{type(observer).__name__}' consists of other tensors")
    if not observer.per_channel and fields and len(fields[0]) != 1:
        raise ValueError(f"the state of '{type(observer).__name__}' has {len(fields[0])} ranges")
