"""How a run listens: stand-ins in the places of our observers, which hand what reaches them to a session."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from quantplug.core.calibration.observed_model import ObservedModel
from quantplug.core.calibration.observer_places import ObserverPlace, channel_axis
from quantplug.core.calibration.options import NonFinitePolicy
from quantplug.core.observers import DataObserver
from quantplug.core.observers.activity import ChannelActivity
from quantplug.core.observers.from_specs import unchanged
from quantplug.core.observers.session import Session


def session_of(observed: ObservedModel) -> Session:
    """Returns a session for a model's observers that has seen nothing."""
    return Session(
        {observer: place.repeats for place, observer in observed.own if not all(place.repeats)},
        {observer: ChannelActivity(axis) for observer, axis in _watched(observed)},
    )


def _watched(observed: ObservedModel) -> Iterator[tuple[DataObserver, int]]:
    """Yields the observers whose tensors' channels can be watched, with the channel axis."""
    for place, observer in observed.own:
        if not place.of_constants and len(place.producers) == 1 and observer not in observed.twins:
            axis = channel_axis(place.producers[0])
            if axis is not None:
                yield observer, axis


@contextmanager
def recording(observed: ObservedModel, session: Session, nonfinite: NonFinitePolicy) -> Iterator[None]:
    """Puts stand-ins into the places where the graphs' code finds our observers.

    A call of one costs a fifth of that of a module, which is most of what a tiny layer's observer costs; hooks
    of observers rest. At the end, buffers that the model writes have their values back.
    """
    begun = observed.buffers()
    policies = [observer.nonfinite for _, observer in observed.own]
    policy = "report" if nonfinite == "report" else "raise"
    try:
        for place, observer in observed.own:
            _set(observer, place=place.text, nonfinite=policy)
            stand_in = unchanged if observer in observed.twins else _stand_in(place, observer, session)
            for owner, name in place.slots:
                owner.__dict__[name] = stand_in
        yield
        session.flush()
    finally:
        for (place, observer), former in zip(observed.own, policies, strict=True):
            _set(observer, nonfinite=former)
            for owner, name in place.slots:
                owner.__dict__.pop(name, None)
        observed.restore_buffers(begun)
    for observer, twin in observed.twins.items():
        observer.seen = twin.seen


def _stand_in(place: ObserverPlace, observer: DataObserver, session: Session) -> Callable[[Tensor], Any]:
    if not place.of_constants:
        return session.stand_in(observer)
    # A computed constant is another tensor in each batch, and may reach the observer beside others.
    return _shown_once(observer) if all(node.op == "get_attr" for node in place.producers) else observer


def _shown_once(observer: DataObserver) -> Callable[[Tensor], Tensor]:
    """Returns what stands in for an observer of parameters and buffers: it is shown each of them once."""
    known: set[int] = set()

    def shown(value: Tensor) -> Tensor:
        if id(value) not in known:
            known.add(id(value))
            observer(value)
        return value

    return shown


def _set(observer: DataObserver, **attributes: Any) -> None:
    """Sets plain attributes; nn.Module's own way costs more than an observer's share of a batch."""
    observer.__dict__.update(attributes)
