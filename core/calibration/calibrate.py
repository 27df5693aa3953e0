"""Calibration: a prepared model and a loader -> observers that have seen the data, and a result that says so.

The engine runs batches through any prepared graph module (ours or torchao's) without gradients and
refuses batches that do not fit before an observer has seen them. The whole run is a transaction: when an
error is raised, every observer is as it was before. Buffers that the model writes are given back in any case.
"""

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from quantplug.core.calibration.checkpoint import remove_checkpoint
from quantplug.core.calibration.convergence import Convergence
from quantplug.core.calibration.observed_model import ObservedModel
from quantplug.core.calibration.observer_places import observer_places, require_prepared
from quantplug.core.calibration.options import CalibrationOptions, with_options
from quantplug.core.calibration.other_observers import require_mergeable, undone_on_error
from quantplug.core.calibration.processes import Exchange, is_distributed, telling
from quantplug.core.calibration.progress import batch_total, progress_bar
from quantplug.core.calibration.recording import recording, session_of
from quantplug.core.calibration.result import CalibrationResult, require_findings
from quantplug.core.calibration.run import Run
from quantplug.core.calibration.run_state import RunState
from quantplug.core.files.whole import require_writable


@with_options(CalibrationOptions)
@torch.inference_mode(False)
def calibrate(prepared: fx.GraphModule, loader: Iterable[Any], options: CalibrationOptions) -> CalibrationResult:
    """Runs batches through a prepared model so that its observers see the data.

    In a process of an initialized `torch.distributed` job each rank reads its own shard, and all end
    with the observers' states merged in the order of ranks.

    Args:
        prepared: what `prepare_pt2e` returned, ours or torchao's.
        loader: iterable of batches; a batch is a tensor, a list or tuple (the model's arguments in
            order) or a mapping (by argument name).
        options: by their names, as below; limit and progress also by position.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: the loader is empty, a batch does not fit the model, data is not finite, an
            observer is dead or constant (where that is to raise), a checkpoint is of another model or of
            other batches, another process failed, or there is no such option or value of one.
        ArtefactError: the checkpoint cannot be read or written.
    """
    model = require_prepared(prepared, "calibrate")
    exchange = Exchange(options.timeout) if is_distributed() else None
    given = options.checkpoint
    path = None if given is None else Path(f"{given}.rank{exchange.rank}" if exchange else given)
    try:
        with undone_on_error(observer_places(model)) as places, _seeded(options.seed), torch.no_grad():
            result = _run(ObservedModel(model, places), loader, options, path, exchange)
        if path is not None:
            remove_checkpoint(path)
        return result
    finally:
        if exchange is not None:
            exchange.close()


def _run(
    observed: ObservedModel,
    loader: Iterable[Any],
    options: CalibrationOptions,
    checkpoint: Path | None,
    exchange: Exchange | None,
) -> CalibrationResult:
    started = time.perf_counter()
    with telling(exchange):
        options.check()
        if checkpoint is not None:
            require_writable(checkpoint)
        state = RunState(observed, session_of(observed), Convergence(options.tolerance or 0.0))
        run, total = Run(state, options, checkpoint), batch_total(loader, options.limit)
        with recording(observed, state.session, options.nonfinite), progress_bar(options.progress, total) as advance:
            run.read(loader, advance)
    if exchange is not None:
        _take_from_all(exchange, state)
    found = state.summaries()
    require_findings(found, options.dead, options.constant)
    return CalibrationResult(
        state.batches, state.samples, time.perf_counter() - started, tuple(state.skipped), found,
        state.convergence.reached, state.resumed_at, exchange.size if exchange else 1,
    )  # fmt: skip


def _take_from_all(exchange: Exchange, state: RunState) -> None:
    """Gives this process's run what all have gathered.

    Raises:
        CalibrationError: a process failed, or has another model, or an observer cannot be merged.
    """
    gathered = exchange.gather((state.batches, state.samples, state.observed.own_states()))
    batches, samples, states = zip(*gathered, strict=True)
    state.batches, state.samples = sum(batches), sum(samples)
    require_mergeable(state.observed.others)
    state.observed.take_from_all(states)


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
