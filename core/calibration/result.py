"""What a calibration run did and found: observers that have seen data -> ranges, silent channels, problems."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from quantplug.core.calibration.observer_places import ObserverPlace
from quantplug.core.calibration.options import FindingPolicy
from quantplug.core.errors import CalibrationError
from quantplug.core.observers import DataObserver
from quantplug.core.observers.from_specs import needs_data


@dataclass(frozen=True)
class ObserverSummary:
    """What one observer of activations has seen.

    Attributes:
        name: its module in the prepared graph.
        place: the operator or input whose value it observes.
        kind: class of the observer.
        low: smallest value seen, None if there was none or the observer keeps no ends.
        high: largest value seen.
        channels: channels of the observed value, 0 where none were looked for.
        silent_channels: those that kept one value in all batches.
        nonfinite_elements: NaN and infinite elements that were left out.
        widened_at: batches that had been run when the range grew last, None if not known.
    """

    name: str
    place: str
    kind: str
    low: float | None
    high: float | None
    channels: int = 0
    silent_channels: tuple[int, ...] = ()
    nonfinite_elements: int = 0
    widened_at: int | None = None

    @property
    def dead(self) -> bool:
        """Tells whether no element ever reached the observer."""
        return self.low is None

    @property
    def constant(self) -> bool:
        """Tells whether it saw a single value only."""
        return self.low is not None and self.low == self.high

    @property
    def problem(self) -> str:
        """Returns what is wrong with the observed value, or nothing."""
        if self.dead:
            return "no data reached it"
        if self.constant:
            return f"it saw the single value {self.low:g}"
        if self.silent_channels:
            shown = ", ".join(map(str, self.silent_channels[:8])) + (", ..." if len(self.silent_channels) > 8 else "")
            return f"{len(self.silent_channels)} of {self.channels} channels never changed ({shown})"
        if self.nonfinite_elements:
            return f"{self.nonfinite_elements} NaN or infinite elements were left out"
        return ""


@dataclass(frozen=True)
class SkippedBatch:
    """A batch that was left out: its number and why."""

    index: int
    reason: str


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration run did and found.

    Attributes:
        batches: batches that the observers have seen, those before a resumed run's start included.
        samples: sum of the first dimensions of these batches' first inputs.
        seconds: wall time of this run.
        skipped: batches left out because they held NaN or infinity.
        observers: summary of every observer of activations.
        converged: the run ended early because the ranges had settled.
        resumed_at: number of batches taken over from a checkpoint.
        processes: processes whose data was merged.
    """

    batches: int
    samples: int
    seconds: float
    skipped: tuple[SkippedBatch, ...] = ()
    observers: tuple[ObserverSummary, ...] = ()
    converged: bool = False
    resumed_at: int = 0
    processes: int = 1

    @property
    def problems(self) -> dict[str, str]:
        """Observers with a problem: {place: what}."""
        return {o.place: o.problem for o in self.observers if o.problem}

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.batches} batches, {self.samples} samples in {self.seconds:.2f} s"]
        lines += [f"batch {s.index} skipped: {s.reason}" for s in self.skipped]
        lines += [f"{place}: {problem}" for place, problem in self.problems.items()]
        return "\n".join(lines)


def summarize(
    place: ObserverPlace, channels: int = 0, silent: tuple[int, ...] = (), widened_at: int | None = None
) -> ObserverSummary:
    """Returns what an observer has seen."""
    observer = getattr(place.observer, "activation_post_process", place.observer)
    low, high = (None, None) if needs_data(place.observer) else (_end(observer, "min_val"), _end(observer, "max_val"))
    spoiled = observer.seen.nonfinite_elements if isinstance(observer, DataObserver) else 0
    kind = type(observer).__name__
    return ObserverSummary(place.name, place.text, kind, low, high, channels, silent, spoiled, widened_at)


def _end(observer: Any, name: str) -> float | None:
    value = getattr(observer, name, None)
    if not isinstance(value, Tensor) or value.numel() == 0:
        return None
    return float(value.min() if name == "min_val" else value.max())


def require_findings(found: Iterable[ObserverSummary], dead: FindingPolicy, constant: FindingPolicy) -> None:
    """Refuses observers that no data reached and values that never change, where those are to raise.

    Raises:
        CalibrationError: there are such observers.
    """
    waiting = [s for s in found if not s.dead or not _needs_none(s.kind)]
    unreached = [s.place for s in waiting if s.dead]
    if unreached and dead == "raise":
        raise CalibrationError(
            f"No data reached the observers of {', '.join(unreached)}; check the branch of the model they stand in, or "
            "calibrate with dead='report'."
        )
    still = [f"{s.place} ({s.problem})" for s in waiting if not s.dead and (s.constant or s.silent_channels)]
    if still and constant == "raise":
        raise CalibrationError(
            f"Values never changed at {', '.join(still)}; calibrate on data that exercises the model, or with "
            "constant='report'."
        )


def _needs_none(kind: str) -> bool:
    """Tells whether observers of a class never look at data."""
    return kind.startswith(("FixedQParams", "Derived", "Placeholder", "Noop", "ReuseInput"))
