"""Calibration: a prepared model and a loader -> observers that have seen the data, and a result that says so.

The engine runs batches through any prepared graph module (ours or torchao's) without gradients,
refuses batches that do not fit before an observer has seen them, and reports what happened.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import fx
from torchao.quantization.pt2e import AffineQuantizedObserverBase, FakeQuantizeBase, ObserverBase

from quantplug.core.batches import BatchReader, loader_iterator, nonfinite_input, sample_count
from quantplug.core.errors import CalibrationError, ModelError
from quantplug.core.graph import require_graph_module


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration run did.

    Attributes:
        batches: number of batches that the observers have seen.
        samples: sum of the first dimensions of the batches' first inputs.
        seconds: wall time of the run.
    """

    batches: int
    samples: int
    seconds: float


def calibrate(
    prepared: fx.GraphModule,
    loader: Iterable[Any],
    limit: int | None = None,
    progress: bool = True,
    inputs: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> CalibrationResult:
    """Runs batches through a prepared model so that its observers see the data.

    Args:
        prepared: what `prepare_pt2e` returned, ours or torchao's.
        loader: iterable of batches; a batch is a tensor, a list or tuple (the model's arguments in
            order) or a mapping (by argument name).
        limit: at most so many batches, or None for all.
        progress: shows a bar with rate and remaining time where the output is a terminal.
        inputs: picks the model's inputs out of a batch, e.g. `lambda batch: batch[0]`.
        device: where batches are moved; None leaves them where they are.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: the loader is empty, or a batch does not fit the model or holds NaN or infinity.
    """
    model = require_prepared(prepared)
    if limit is not None and limit < 1:
        raise CalibrationError(f"limit is {limit}; pass a number of batches of at least 1, or None for all of them.")
    reader = BatchReader(model, None if device is None else torch.device(device))
    started, batches, samples = time.perf_counter(), 0, 0
    with torch.no_grad(), progress_bar(progress, batch_total(loader, limit)) as advance:
        for index, batch in enumerate(loader_iterator(loader)):
            if index == limit:
                break
            named = reader.arguments(inputs(batch) if inputs else batch, index)
            culprit = nonfinite_input(named)
            if culprit is not None:
                raise CalibrationError(
                    f"Input '{culprit}' of batch {index} holds NaN or infinity; clean the data before calibrating."
                )
            reader.call(model, named)
            batches, samples = batches + 1, samples + sample_count(named)
            advance()
    if batches == 0:
        raise CalibrationError("The loader yielded no batch; pass at least one (a generator can be read only once).")
    return CalibrationResult(batches, samples, time.perf_counter() - started)


def require_prepared(model: Any) -> fx.GraphModule:
    """Returns the model if it is a graph module with observers.

    Raises:
        ModelError: it is no graph module, or none of its submodules observes.
    """
    graph_module = require_graph_module(model, "calibrate")
    if not any(isinstance(m, ObserverBase | FakeQuantizeBase | AffineQuantizedObserverBase) for m in model.modules()):
        raise ModelError(
            "calibrate takes a prepared model, found a graph module without observers; call "
            "`prepare_pt2e(exported.module(), quantizer)` first and check what the quantizer annotated."
        )
    return graph_module


def batch_total(loader: Any, limit: int | None) -> int | None:
    """Returns the number of batches a run will take, or None where the loader does not know its length."""
    try:
        length = len(loader)
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)


class progress_bar(AbstractContextManager[Callable[[], None]]):  # noqa: N801 - used as a function
    """A bar with count, rate and remaining time on the error stream; silent where that is no terminal."""

    def __init__(self, shown: bool, total: int | None) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("calibrate"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console) if shown and console.is_terminal else None
        self._total = total

    def __enter__(self) -> Callable[[], None]:
        if self._bar is None:
            return lambda: None
        bar = self._bar
        bar.start()
        task = bar.add_task("calibrate", total=self._total, rate="")

        def advance() -> None:
            speed = bar.tasks[0].speed
            bar.update(task, advance=1, rate=f"{speed:.1f} batches/s" if speed else "")

        return advance

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
