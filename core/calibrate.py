"""Calibration: a prepared model and a loader -> observers that have seen the data, and a result that says so.

The engine runs batches through any prepared graph module (ours or torchao's) without gradients and
refuses batches that do not fit before an observer has seen them. A batch is a transaction, and so is
the whole run: when an error is raised, every observer is as it was before.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, fx

from quantplug.core.batches import BatchReader, loader_iterator, nonfinite_input, sample_count
from quantplug.core.checkpoint import read_checkpoint, write_checkpoint
from quantplug.core.coverage import CalibrationResult, SkippedBatch, summarize
from quantplug.core.errors import CalibrationError
from quantplug.core.merge import Exchange, is_distributed
from quantplug.core.observers import DataObserver, NonFiniteError
from quantplug.core.observers.activity import ChannelActivity
from quantplug.core.observers.session import Session, find_ranges
from quantplug.core.sites import Site, channel_axis, observer_sites, require_prepared, twins

NonFinitePolicy = Literal["raise", "skip", "report"]
DeadPolicy = Literal["raise", "report"]
# Checks in a row that must agree before ranges count as settled: one alone may fall between two rare batches.
SETTLED_CHECKS = 2


@dataclass(frozen=True)
class _Options:
    limit: int | None
    inputs: Callable[[Any], Any] | None
    device: torch.device | None
    nonfinite: NonFinitePolicy
    dead: DeadPolicy
    tolerance: float | None
    check_every: int
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool

    def check(self) -> None:
        for name in ("limit", "check_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CalibrationError(f"{name} is {value}; pass a number of batches of at least 1.")
        for name, allowed in (("nonfinite", ("raise", "skip", "report")), ("dead", ("raise", "report"))):
            if getattr(self, name) not in allowed:
                raise CalibrationError(f"{name} is '{getattr(self, name)}'; choose one of {list(allowed)}.")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise CalibrationError(f"tolerance is {self.tolerance}; pass a share of the range between 0 and 1.")


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
    dead: DeadPolicy = "report",
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
        limit: at most so many batches, or None for all.
        progress: shows a bar with rate and remaining time where the output is a terminal.
        inputs: picks the model's inputs out of a batch, e.g. `lambda batch: batch[0]`.
        device: where batches are moved; None leaves them where they are.
        seed: seeds torch's and Python's random numbers for the run (a shuffling loader, random operators).
        nonfinite: what to do about NaN and infinity in a batch or in a value inside the model: "raise",
            "skip" the batch, or leave the elements out and "report" them.
        dead: what to do about observers that no data reached: "raise" or "report".
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
            observer is dead (where that is to raise), a checkpoint is of another model, or another
            process failed.
        ArtefactError: the checkpoint cannot be read or written.
    """
    model = require_prepared(prepared, "calibrate")
    exchange = Exchange(timeout) if is_distributed() else None
    path = None if checkpoint is None else Path(f"{checkpoint}.rank{exchange.rank}" if exchange else checkpoint)
    place = None if device is None else torch.device(device)
    options = _Options(
        limit, inputs, place, nonfinite, dead, tolerance, check_every, path, checkpoint_every, resume
    )  # fmt: skip
    try:
        with _undone_on_error(observer_sites(model)) as sites, _seeded(seed), torch.no_grad():
            result = _calibrated(_Run(model, sites, options), loader, progress, exchange)
        if path is not None:
            path.unlink(missing_ok=True)
        return result
    finally:
        if exchange is not None:
            exchange.close()


def _calibrated(run: "_Run", loader: Iterable[Any], progress: bool, exchange: Exchange | None) -> CalibrationResult:
    """Runs this process's batches, then exchanges with the others; a failure here is told to them first."""
    started = time.perf_counter()
    try:
        run.options.check()
        with run.recording(), _progress_bar(progress, _batch_total(loader, run.options.limit)) as advance:
            run.read(loader, advance)
        failure = ""
    except Exception as error:
        if exchange is None:
            raise
        failure = str(error)
        try:
            exchange.gather(None, failure)
        except CalibrationError as told:
            raise error from told
    counts = (run.batches, run.samples)
    if exchange is not None:
        gathered = exchange.gather((counts, run.states()))
        counts = (sum(c[0] for c, _ in gathered), sum(c[1] for c, _ in gathered))
        run.merge([states for _, states in gathered])
    find_ranges(run.observers)
    run.check_dead()
    return CalibrationResult(
        counts[0], counts[1], time.perf_counter() - started, tuple(run.skipped), run.summaries(), run.converged,
        run.resumed_at, exchange.size if exchange else 1,
    )  # fmt: skip


@dataclass
class _Run:
    """The state of one run: what has been read, and everything a checkpoint needs."""

    model: fx.GraphModule
    sites: list[Site]
    options: _Options
    batches: int = 0
    samples: int = 0
    position: int = 0
    resumed_at: int = 0
    converged: bool = False
    skipped: list[SkippedBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observers = [s.observer for s in self.sites if isinstance(s.observer, DataObserver)]
        self.foreign = [s for s in self.sites if not isinstance(s.observer, DataObserver)]
        self.twins = twins(self.sites)
        self.session = Session(
            {s.observer: s.repeats for s in self.sites if isinstance(s.observer, DataObserver) and not all(s.repeats)},
            {observer: ChannelActivity(axis) for observer, axis in _watched(self.sites) if observer not in self.twins},
        )
        self.reader = BatchReader(self.model, self.options.device)
        self._ends: Tensor | None = None
        self._settled = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Lets the session record what reaches our observers; twins of another observer rest."""
        policies = [observer.nonfinite for observer in self.observers]
        policy = "report" if self.options.nonfinite == "report" else "raise"
        for site in self.sites:
            if isinstance(site.observer, DataObserver):
                resting = _RESTING if site.observer in self.twins else self.session
                recorder = None if site.of_constants else resting
                _set(site.observer, site=site.place, recorder=recorder, nonfinite=policy)
        try:
            yield
            self.session.flush()
        finally:
            for observer, former in zip(self.observers, policies, strict=True):
                _set(observer, recorder=None, nonfinite=former)
        for observer, twin in self.twins.items():
            observer.data = twin.data

    def read(self, loader: Iterable[Any], advance: Callable[[], None]) -> None:
        """Reads the loader to its end, the limit, or until ranges have settled."""
        iterator = loader_iterator(loader)
        self._take_up()
        for index, batch in enumerate(iterator):
            if index == self.options.limit or self.converged:
                break
            if index >= self.position:
                self._take(index, batch)
            elif index == self.position - 1:
                self._restore_random()
            advance()
        if self.batches == 0:
            why = f"all {len(self.skipped)} batches were skipped" if self.skipped else "the loader yielded no batch"
            raise CalibrationError(
                f"Nothing was calibrated: {why}; pass at least one good batch (a generator can be read only once)."
            )
        self._check_foreign()

    def _take(self, index: int, batch: Any) -> None:
        named = self.reader.arguments(self.options.inputs(batch) if self.options.inputs else batch, index)
        foreign = _foreign_states(self.foreign) if self.options.nonfinite == "skip" else {}
        try:
            self._check_finite(named, index)
            self.reader.call(self.model, named)
            self.session.commit()
            if self.options.nonfinite == "skip":
                self._check_foreign()
        except NonFiniteError as error:
            self.session.rollback()
            if self.options.nonfinite != "skip":
                raise NonFiniteError(f"Batch {index}: {error}") from error
            _restore_foreign(self.foreign, foreign)
            self.skipped.append(SkippedBatch(index, str(error)))
        else:
            self.batches, self.samples = self.batches + 1, self.samples + sample_count(named)
        self.position = index + 1
        if self.options.tolerance is not None and self.position % self.options.check_every == 0:
            self._check_settled(self.options.tolerance)
        if self.options.checkpoint is not None and self.position % self.options.checkpoint_every == 0:
            self._save(self.options.checkpoint)

    def _check_finite(self, named: dict[str, Any], index: int) -> None:
        culprit = None if self.options.nonfinite == "report" else nonfinite_input(named)
        if culprit is not None:
            raise NonFiniteError(
                f"Input '{culprit}' of batch {index} holds NaN or infinity; clean the data, or calibrate with "
                "nonfinite='skip' or 'report'."
            )

    def _check_foreign(self) -> None:
        """Finds NaN and infinity in the ranges of observers that do not look for them themselves."""
        for site in self.foreign:
            summary = summarize(site)
            ends = torch.tensor([end for end in (summary.low, summary.high) if end is not None])
            if not bool(torch.isfinite(ends).all()):
                raise NonFiniteError(
                    f"{summary.kind} of {site.place} has the range [{summary.low}, {summary.high}]; find the operator "
                    "that makes NaN or infinity, or calibrate with nonfinite='skip'."
                )

    # --- convergence

    def _check_settled(self, tolerance: float) -> None:
        """Compares the ranges with those of the last check."""
        self.session.flush()
        known = [o for o in self.observers if o.has_data and o.constant is None]
        find_ranges(known)
        ends = [torch.stack(o.ranges()).flatten().double() for o in known]
        width = torch.cat([(e.view(2, -1)[1] - e.view(2, -1)[0]).repeat(2) for e in ends]) if ends else torch.ones(0)
        now = torch.cat(ends) if ends else torch.zeros(0)
        last = self._ends
        still = last is not None and last.shape == now.shape and bool(((now - last).abs() <= tolerance * width).all())
        self._ends, self._settled = now, self._settled + 1 if still else 0
        self.converged = self._settled >= SETTLED_CHECKS

    # --- checkpoints

    def _fingerprint(self) -> list[str]:
        return [f"{s.name}: {type(s.observer).__name__} of {s.place}" for s in self.sites]

    def states(self) -> dict[str, Any]:
        """Returns every observer's data by the observer's name; constants are left out, they are in the model."""
        return {
            site.name: (_plain(site.observer.state), site.observer.nonfinite_elements)
            for site in self.sites
            if isinstance(site.observer, DataObserver) and site.observer.constant is None
        }

    def _save(self, path: Path) -> None:
        self.session.flush()
        content = {
            "fingerprint": self._fingerprint(),
            "states": self.states(),
            "foreign": _foreign_states(self.foreign),
            "activity": {s.name: self.session.activity[s.observer].saved() for s in self.sites
                         if s.observer in self.session.activity},
            "widened": {s.name: self.session.widened.get(s.observer) for s in self.sites},
            "counts": (self.batches, self.samples, self.position),
            "skipped": [(s.index, s.reason) for s in self.skipped],
            "settled": (self._settled, self._ends, self.converged),
            "random": (torch.get_rng_state(), random.getstate()),
        }  # fmt: skip
        write_checkpoint(path, content)

    def _take_up(self) -> None:
        """Continues where a checkpoint was written, if there is one."""
        path = self.options.checkpoint
        content = read_checkpoint(path, self._fingerprint()) if path is not None and self.options.resume else None
        self._random = None if content is None else content["random"]
        if content is None:
            return
        for site in self.sites:
            observer = site.observer
            if isinstance(observer, DataObserver) and site.name in content["states"]:
                state, observer.nonfinite_elements = content["states"][site.name]
                observer.state = None if state is None else observer.restored(state)
            if observer in self.session.activity:
                self.session.activity[observer].restore(content["activity"][site.name])
            if content["widened"][site.name] is not None:
                self.session.widened[observer] = content["widened"][site.name]
        _restore_foreign(self.foreign, content["foreign"])
        self.batches, self.samples, self.position = content["counts"]
        self.session.batch, self.resumed_at = self.position, self.batches
        self.skipped = [SkippedBatch(*pair) for pair in content["skipped"]]
        self._settled, self._ends, self.converged = content["settled"]
        self._observe_constants()

    def _restore_random(self) -> None:
        if self._random is not None:
            torch.set_rng_state(self._random[0])
            random.setstate(self._random[1])

    def _observe_constants(self) -> None:
        """Shows weights to their observers, in case no batch is left that would."""
        for site in self.sites:
            for node in site.producers:
                if site.of_constants and node.op == "get_attr" and isinstance(site.observer, DataObserver):
                    site.observer(self.model.get_parameter(str(node.target)))

    # --- many processes

    def merge(self, gathered: list[dict[str, Any]]) -> None:
        """Gives every observer the states of all processes, merged in the order of ranks.

        Raises:
            CalibrationError: an observer of another library cannot be merged.
        """
        for site in self.foreign:
            if not site.of_constants and summarize(site).low is not None:
                raise CalibrationError(
                    f"{type(site.observer).__name__} of {site.place} cannot be merged across processes; use an "
                    "observer of quantplug.core.observers."
                )
        for site in self.sites:
            observer = site.observer
            if isinstance(observer, DataObserver) and observer.constant is None:
                states = [observer.restored(g[site.name][0]) for g in gathered if g[site.name][0] is not None]
                observer.nonfinite_elements = sum(g[site.name][1] for g in gathered)
                merged = states[0] if states else None
                for state in states[1:]:
                    merged = observer.merged(merged, state) if merged is not None else state
                observer.state = merged

    # --- results

    def summaries(self) -> tuple[Any, ...]:
        """Returns a summary of every observer of activations."""
        found = []
        for site in self.sites:
            if not site.of_constants:
                seen = self.session.activity.get(site.observer)
                channels, silent = (seen.channels, seen.silent_channels) if seen is not None else (0, ())
                found.append(summarize(site, channels, silent, self.session.widened.get(site.observer)))
        return tuple(found)

    def check_dead(self) -> None:
        """Refuses observers that no data reached, where that is to raise.

        Raises:
            CalibrationError: there are such observers.
        """
        if self.options.dead == "report":
            return
        names = [s.place for s in self.summaries() if s.dead and not _needs_none(s.kind)]
        if names:
            raise CalibrationError(
                f"No data reached the observers of {', '.join(names)}; check the branch of the model they stand in, or "
                "calibrate with dead='report'."
            )


class _Resting:
    """Recorder of an observer whose twin sees the same tensors."""

    def record(self, observer: DataObserver, value: Tensor) -> None:
        """Takes nothing."""


_RESTING = _Resting()


def _set(observer: DataObserver, **attributes: Any) -> None:
    """Sets the attributes that differ; setting one of a module costs more than an observer's share of a batch."""
    for name, value in attributes.items():
        if getattr(observer, name) != value:
            setattr(observer, name, value)


def _needs_none(kind: str) -> bool:
    """Tells whether observers of a class never look at data."""
    return kind.startswith(("FixedQParams", "Derived", "Placeholder", "Noop", "ReuseInput"))


def _plain(state: Any) -> tuple[Tensor, ...] | None:
    return None if state is None else tuple(t.cpu() for t in state)


def _watched(sites: list[Site]) -> Iterator[tuple[DataObserver, int]]:
    """Yields the observers whose tensors' channels can be watched, with the channel axis."""
    for site in sites:
        if isinstance(site.observer, DataObserver) and not site.of_constants and len(site.producers) == 1:
            axis = channel_axis(site.producers[0])
            if axis is not None:
                yield site.observer, axis


def _foreign_states(sites: list[Site]) -> dict[str, dict[str, Tensor]]:
    return {s.name: {k: v.clone() for k, v in s.observer.state_dict().items()} for s in sites}


def _restore_foreign(sites: list[Site], states: dict[str, dict[str, Tensor]]) -> None:
    for site in sites:
        if site.name in states:
            site.observer.load_state_dict(states[site.name])


@contextmanager
def _undone_on_error(sites: list[Site]) -> Iterator[list[Site]]:
    """Gives all observers their former data back if the block raises."""
    ours = [s.observer for s in sites if isinstance(s.observer, DataObserver)]
    before = [(observer, observer.data) for observer in ours]
    foreign = [s for s in sites if not isinstance(s.observer, DataObserver)]
    states = _foreign_states(foreign)
    try:
        yield sites
    except BaseException:
        for observer, data in before:
            observer.data = data
        _restore_foreign(foreign, states)
        raise


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


def _batch_total(loader: Any, limit: int | None) -> int | None:
    """Returns the number of batches a run will take, or None where the loader does not know its length."""
    try:
        length = len(loader)
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)


@contextmanager
def _progress_bar(shown: bool, total: int | None) -> Iterator[Callable[[], None]]:
    """Shows a bar with count, rate and remaining time on the error stream; silent where that is no terminal."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    text = (TextColumn("calibrate"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*text, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("calibrate", total=total, rate="")

        def advance() -> None:
            speed = bar.tasks[0].speed
            bar.update(task, advance=1, rate=f"{speed:.1f} batches/s" if speed else "")

        yield advance
