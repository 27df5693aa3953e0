"""Everything that a calibration run has gathered, as it goes into a checkpoint and comes out of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantplug.core.calibration.convergence import Convergence
from quantplug.core.calibration.observed_model import ObservedModel
from quantplug.core.calibration.other_observers import restore_others, states_of_others
from quantplug.core.calibration.result import ObserverSummary, SkippedBatch, summarize
from quantplug.core.observers.session import Session


@dataclass
class RunState:
    """How far a run has come, and with what.

    Attributes:
        observed: the model with its observers.
        session: what reached them.
        convergence: how far their ranges have come to rest.
        batches: batches that observers have seen.
        samples: sum of the first dimensions of these batches' first inputs.
        position: batches read, those that were left out included.
        resumed_at: batches taken over from a checkpoint.
        skipped: batches that were left out.
    """

    observed: ObservedModel
    session: Session
    convergence: Convergence
    batches: int = 0
    samples: int = 0
    position: int = 0
    resumed_at: int = 0
    skipped: list[SkippedBatch] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """Returns what `restore` needs to go on from here, as plain values and tensors."""
        self.session.flush()
        observed, activity = self.observed, self.session.watch.activity
        return {
            "states": observed.own_states(),
            "others": states_of_others(observed.others),
            "buffers": observed.buffers(),
            "activity": {p.name: activity[p.observer].saved() for p in observed.places if p.observer in activity},
            "widened": {p.name: self.session.widened.get(p.observer) for p in observed.places},
            "counts": (self.batches, self.samples, self.position),
            "skipped": [(s.index, s.reason) for s in self.skipped],
            "convergence": self.convergence.saved(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `saved` returned.

        Raises:
            Exception: it is something else.
        """
        self.observed.restore_own(saved["states"])
        restore_others(self.observed.others, saved["others"])
        self.observed.restore_buffers(saved["buffers"])
        self._restore_session(saved)
        self.batches, self.samples, self.position = saved["counts"]
        self.session.batch, self.resumed_at = self.position, self.batches
        self.skipped = [SkippedBatch(*pair) for pair in saved["skipped"]]
        self.convergence.restore(saved["convergence"])
        self.observed.observe_constants()

    def _restore_session(self, saved: Mapping[str, Any]) -> None:
        for place, observer in self.observed.own:
            if observer in self.session.watch.activity:
                self.session.watch.activity[observer].restore(saved["activity"][place.name])
            if saved["widened"][place.name] is not None:
                self.session.widened[observer] = saved["widened"][place.name]

    def summaries(self) -> tuple[ObserverSummary, ...]:
        """Returns a summary of every observer of activations."""
        found = []
        for place in self.observed.places:
            if not place.of_constants:
                seen = self.session.watch.activity.get(place.observer)
                channels, silent = (seen.channels, seen.silent_channels) if seen is not None else (0, ())
                found.append(summarize(place, channels, silent, self.session.widened.get(place.observer)))
        return tuple(found)
