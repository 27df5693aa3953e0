"""What calibration found: observers that have seen data -> ranges, silent channels, use of the integers."""

import io
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from quantplug.core.calibration.observer_places import ObserverPlace, observer_places, require_prepared
from quantplug.core.observers import DataObserver, GridObserver
from quantplug.core.observers.from_specs import needs_data
from quantplug.core.observers.grid import GridHistogram


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

    @property
    def batches_per_second(self) -> float:
        """Rate of this run."""
        return (self.batches - self.resumed_at) / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.batches} batches, {self.samples} samples in {self.seconds:.2f} s"]
        lines += [f"batch {s.index} skipped: {s.reason}" for s in self.skipped]
        lines += [f"{place}: {problem}" for place, problem in self.problems.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Coverage:
    """How well the integers of one observer are used.

    Attributes:
        place: the value that is observed.
        scale: scale that the observer gives.
        zero_point: its zero point.
        levels_used: share of the integers that any observed value is rounded to, 0..1.
        clipped: share of the observed values outside the range, 0..1.
    """

    place: str
    scale: float
    zero_point: int
    levels_used: float
    clipped: float


def coverage(prepared: fx.GraphModule) -> list[Coverage]:
    """Returns how the data of a calibrated model covers its integers, for every per-tensor observer with a histogram.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: an observer has seen no data.
    """
    sites = observer_places(require_prepared(prepared, "coverage"))
    return [
        _covered(site.place, site.observer)
        for site in sites
        if isinstance(site.observer, GridObserver) and not site.observer.per_channel and not site.of_constants
    ]


def coverage_table(rows: list[Coverage]) -> str:
    """Returns coverage as a text table."""
    table = Table("observed value", "scale", "zero point", "levels used", "clipped")
    for row in rows:
        table.add_row(
            row.place, f"{row.scale:.3g}", str(row.zero_point), f"{row.levels_used:.0%}", f"{row.clipped:.3%}"
        )
    text = io.StringIO()
    Console(width=160, file=text).print(table)
    return text.getvalue()


def _covered(place: str, observer: GridObserver) -> Coverage:
    scale, zero = observer.calculate_qparams()
    histogram = observer.histogram
    assert histogram is not None
    level = torch.round(_centres(histogram) / scale.double()) + zero
    filled = histogram.counts[0] > 0
    inside = (level >= observer.quant_min) & (level <= observer.quant_max)
    used = torch.unique(level.clamp(observer.quant_min, observer.quant_max)[filled]).numel()
    total = max(1, int(histogram.counts.sum()))
    clipped = int(histogram.counts[0][~inside].sum()) / total
    return Coverage(place, float(scale), int(zero), used / (observer.scheme.steps + 1), clipped)


def _centres(histogram: GridHistogram) -> Tensor:
    index = torch.arange(histogram.counts.shape[1], device=histogram.counts.device) + histogram.start
    return (index + 0.5) * histogram.width


def summarize(
    site: ObserverPlace, channels: int = 0, silent: tuple[int, ...] = (), widened_at: int | None = None
) -> ObserverSummary:
    """Returns what an observer has seen."""
    observer = getattr(site.observer, "activation_post_process", site.observer)
    low, high = (None, None) if needs_data(site.observer) else (_end(observer, "min_val"), _end(observer, "max_val"))
    spoiled = observer.nonfinite_elements if isinstance(observer, DataObserver) else 0
    kind = type(observer).__name__
    return ObserverSummary(site.name, site.place, kind, low, high, channels, silent, spoiled, widened_at)


def _end(observer: Any, name: str) -> float | None:
    value = getattr(observer, name, None)
    if not isinstance(value, Tensor) or value.numel() == 0:
        return None
    return float(value.min() if name == "min_val" else value.max())
