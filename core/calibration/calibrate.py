"""Calibration: a prepared model and a loader -> observers that have seen the data, and a result that says so.

The engine runs batches through any prepared graph module (ours or torchao's) without gradients and
refuses batches that do not fit before an observer has seen them. The whole run is a transaction: when an
error is raised, every observer is as it was before. Buffers that the model writes are given back in any case.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from quantplug.core.calibration.checkpoint import remove_checkpoint
from quantplug.core.calibration.coverage import CalibrationResult
from quantplug.core.calibration.observer_places import ObserverPlace, observer_places, require_prepared
from quantplug.core.calibration.other_observers import undone_on_error
from quantplug.core.calibration.processes import Exchange, is_distributed
from quantplug.core.calibration.progress import batch_total, progress_bar
from quantplug.core.calibration.run import FindingPolicy, MisfitPolicy, NonFinitePolicy, Options, Run
from quantplug.core.errors import CalibrationError
from quantplug.core.files.whole import require_writable


@torch.inference_mode(False)
def calibrate(
    prepared: fx.GraphModule,
    loader: Iterable[Any],
    limit: int | None = None,
    progress: bool = True,
    *,
    inputs: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    seed: int | None = None,
    nonfinite: NonFinitePolicy = "raise",
    misfit: MisfitPolicy = "raise",
    dead: FindingPolicy = "report",
    constant: FindingPolicy = "report",
    tolerance: float | None = None,
    check_every: int = 8,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 16,
    resume: bool = True,
    timeout: float = 1800.0,
) -> CalibrationResult:
    """Runs batches through a prepared model so that its observers see the data.

    In a process of an initialized `torch.distributed` job each rank reads its own shard, and all end
    with the observers' states merged in the order of ranks.

    Args:
        prepared: what `prepare_pt2e` returned, ours or torchao's.
        loader: iterable of batches; a batch is a tensor, a list or tuple (the model's arguments in
            order) or a mapping (by argument name).
        limit: at most so many batches, or None for all; no more are taken from the loader.
        progress: shows a bar with rate and remaining time where the output is a terminal.
        inputs: picks the model's inputs out of a batch, e.g. `lambda batch: batch[0]`.
        device: where batches are moved; None leaves them where they are.
        seed: seeds torch's and Python's random numbers for the run (a shuffling loader, random operators).
        nonfinite: what to do about NaN and infinity in a batch or in a value inside the model: "raise",
            "skip" the batch, or leave the elements out and "report" them.
        misfit: what to do about a batch whose inputs' number, names, shapes or dtypes are not the model's:
            "raise" or "skip" it.
        dead: what to do about observers that no data reached: "raise" or "report".
        constant: the same about observers that saw a single value, and channels that kept one.
        tolerance: ends the run early once no end of a range has moved by more than this share of the
            range over two checks in a row.
        check_every: batches between these checks.
        checkpoint: file to save the run in (with ".rankN" appended where there are several processes).
            Removed when the run is complete.
        checkpoint_every: batches between two saves.
        resume: takes up an existing checkpoint; the loader must then yield the same batches again.
        timeout: seconds to wait for the other processes.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: the loader is empty, a batch does not fit the model, data is not finite, an
            observer is dead or constant (where that is to raise), a checkpoint is of another model or of
            other batches, or another process failed.
        ArtefactError: the checkpoint cannot be read or written.
    """
    model = require_prepared(prepared, "calibrate")
    exchange = Exchange(timeout) if is_distributed() else None
    path = None if checkpoint is None else Path(f"{checkpoint}.rank{exchange.rank}" if exchange else checkpoint)
    options = Options(
        limit, inputs, device, nonfinite, misfit, dead, constant, tolerance, check_every, path, checkpoint_every, resume
    )  # fmt: skip
    try:
        with undone_on_error(observer_places(model)) as sites, _seeded(seed), torch.no_grad():
            result = _calibrated(model, sites, options, loader, progress, exchange)
        if path is not None:
            remove_checkpoint(path)
        return result
    finally:
        if exchange is not None:
            exchange.close()


def _calibrated(
    model: fx.GraphModule,
    sites: list[ObserverPlace],
    options: Options,
    loader: Iterable[Any],
    progress: bool,
    exchange: Exchange | None,
) -> CalibrationResult:
    started = time.perf_counter()
    with _told_to(exchange):
        options.check()
        if options.checkpoint is not None:
            require_writable(options.checkpoint)
        run = Run(model, sites, options)
        with run.recording(), progress_bar(progress, batch_total(loader, options.limit)) as advance:
            run.read(loader, advance)
    counts = (run.batches, run.samples)
    if exchange is not None:
        gathered = exchange.gather((counts, run.states()))
        counts = (sum(c[0] for c, _ in gathered), sum(c[1] for c, _ in gathered))
        run.merge([states for _, states in gathered])
    found = run.summaries()
    run.check_findings(found)
    return CalibrationResult(
        counts[0], counts[1], time.perf_counter() - started, tuple(run.skipped), found, run.converged,
        run.resumed_at, exchange.size if exchange else 1,
    )  # fmt: skip


@contextmanager
def _told_to(exchange: Exchange | None) -> Iterator[None]:
    """Tells the other processes why this one fails, before it does."""
    try:
        yield
    except Exception as error:
        if exchange is None:
            raise
        try:
            exchange.gather(None, str(error) or type(error).__name__)
        except CalibrationError as told:
            raise error from told


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seeds torch's and Python's generators for the block, and restores them after it."""
    if seed is None:
        yield
        return
    state = random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
