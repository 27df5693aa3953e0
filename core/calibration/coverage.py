"""How well a calibrated model uses its integers: histograms -> shares of integers used and of values clipped."""

import io
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from quantplug.core.calibration.observer_places import observer_places, require_prepared
from quantplug.core.observers import GridObserver
from quantplug.core.observers.grid import GridHistogram


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

    Args:
        prepared: a calibrated graph, from our prepare.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: an observer has seen no data.
    """
    return [
        _covered(place.text, place.observer)
        for place in observer_places(require_prepared(prepared, "coverage"))
        if isinstance(place.observer, GridObserver) and not place.observer.per_channel and not place.of_constants
    ]


def coverage_table(rows: list[Coverage]) -> str:
    """Returns coverage as a text table.

    Args:
        rows: what `coverage` returned.
    """
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
