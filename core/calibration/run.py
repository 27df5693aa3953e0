"""One calibration run: batches one by one -> observers' states, and everything a checkpoint needs.

A batch is a transaction: what observers saw of it stays, or is as if the batch had not been.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx

from quantplug.core.calibration.batches import (
    BatchReader,
    batch_digest,
    loader_iterator,
    nonfinite_input,
    picked,
    sample_count,
)
from quantplug.core.calibration.checkpoint import read_checkpoint, write_checkpoint
from quantplug.core.calibration.convergence import Convergence
from quantplug.core.calibration.coverage import ObserverSummary, SkippedBatch, summarize
from quantplug.core.calibration.observer_places import ObserverPlace, channel_axis, fingerprint, twins
from quantplug.core.calibration.other_observers import (
    places_of_others,
    require_finite,
    require_mergeable,
    restore_others,
    states_of_others,
)
from quantplug.core.errors import ArtefactError, CalibrationError, first_line, shown
from quantplug.core.files.typed import typed
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import attribute, constant_value
from quantplug.core.observers import DataObserver, NonFiniteError
from quantplug.core.observers.activity import ChannelActivity
from quantplug.core.observers.from_specs import unchanged
from quantplug.core.observers.session import Session

NonFinitePolicy = Literal["raise", "skip", "report"]
MisfitPolicy = Literal["raise", "skip"]
FindingPolicy = Literal["raise", "report"]
_CHOICES = {
    "nonfinite": ("raise", "skip", "report"),
    "misfit": ("raise", "skip"),
    "dead": ("raise", "report"),
    "constant": ("raise", "report"),
}


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds."""

    format: int
    fingerprint: tuple[str, ...]
    states: dict[str, Any]
    foreign: dict[str, Any]
    model: dict[str, Tensor]
    activity: dict[str, Any]
    widened: dict[str, int | None]
    counts: tuple[int, ...]
    skipped: tuple[Any, ...]
    settled: tuple[Any, ...]
    random: tuple[Any, ...]
    last: str


@contextmanager
def _told_as_broken(path: Path | None) -> Iterator[None]:
    """Makes a sentence of whatever a file causes that holds something else than a run saves."""
    try:
        yield
    except Exception as error:
        raise ArtefactError(
            f"'{path}' is no calibration checkpoint of this release ({first_line(error)}); delete it."
        ) from error


def _require_like(state: Any, observer: DataObserver) -> None:
    """Raises ValueError where an observer could not have saved a state."""
    fields = () if state is None else tuple(state)
    if not all(isinstance(field, Tensor) and field.dim() for field in fields) or len(set(map(len, fields))) > 1:
        raise ValueError(f"the state of '{type(observer).__name__}' consists of other tensors")
    if not observer.per_channel and fields and len(fields[0]) != 1:
        raise ValueError(f"the state of '{type(observer).__name__}' has {len(fields[0])} ranges")


@dataclass(frozen=True)
class Options:
    """What `calibrate` was asked for; see there."""

    limit: int | None
    inputs: Callable[[Any], Any] | None
    device: torch.device | str | None
    nonfinite: NonFinitePolicy
    misfit: MisfitPolicy
    dead: FindingPolicy
    constant: FindingPolicy
    tolerance: float | None
    check_every: int
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool

    def check(self) -> None:
        """Refuses values out of their domains.

        Raises:
            CalibrationError: there is one.
        """
        for name in ("limit", "check_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise CalibrationError(f"{name} is {shown(repr(value))}; pass a number of batches of at least 1.")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise CalibrationError(f"{name} is '{getattr(self, name)}'; choose one of {list(allowed)}.")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise CalibrationError(f"tolerance is {self.tolerance}; pass a share of the range between 0 and 1.")

    @property
    def place(self) -> torch.device | None:
        """Where batches are moved, None to leave them.

        Raises:
            CalibrationError: there is no such device.
        """
        try:
            return None if self.device is None else torch.device(self.device)
        except RuntimeError as error:
            raise CalibrationError(f"device is '{self.device}'; pass one that torch.device takes, as 'cpu'.") from error


class Run:
    """What has been read so far, and what observers saw of it.

    Args:
        model: the prepared model.
        sites: its observers.
        options: checked ones.

    Attributes:
        batches: batches that observers have seen.
        samples: sum of the first dimensions of these batches' first inputs.
        resumed_at: batches taken over from a checkpoint.
        converged: the run ended early because ranges had settled.
        skipped: batches that were left out.
    """

    def __init__(self, model: fx.GraphModule, sites: list[ObserverPlace], options: Options) -> None:
        self.model, self.sites, self.options = model, sites, options
        self.batches = self.samples = self.resumed_at = self._position = 0
        self.converged = False
        self.skipped: list[SkippedBatch] = []
        self._ours = [(site, site.observer) for site in sites if isinstance(site.observer, DataObserver)]
        self._foreign = places_of_others(sites)
        self._twins = twins(sites)
        self._session = Session(
            {observer: site.repeats for site, observer in self._ours if not all(site.repeats)},
            {observer: ChannelActivity(axis) for observer, axis in self._watched()},
        )
        self._buffers = {name: attribute(model, name) for name in sorted(written_buffers(model.graph))}
        self._reader = BatchReader(model, options.place)
        self._settling = Convergence(options.tolerance or 0.0)
        self._taken_up: dict[str, Any] = {}

    @property
    def observers(self) -> list[DataObserver]:
        """The observers of ours."""
        return [observer for _, observer in self._ours]

    def _watched(self) -> Iterator[tuple[DataObserver, int]]:
        """Yields the observers whose tensors' channels can be watched, with the channel axis."""
        for site, observer in self._ours:
            if not site.of_constants and len(site.producers) == 1 and observer not in self._twins:
                axis = channel_axis(site.producers[0])
                if axis is not None:
                    yield observer, axis

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Puts stand-ins into the places where the graphs' code finds our observers.

        A call of one costs a fifth of that of a module, which is most of what a tiny layer's observer costs; hooks
        of observers rest. At the end, buffers that the model writes (a cache, a counter) have their values back.
        """
        begun = self._model_state()
        policies = [observer.nonfinite for observer in self.observers]
        policy = "report" if self.options.nonfinite == "report" else "raise"
        try:
            for site, observer in self._ours:
                _set(observer, site=site.place, nonfinite=policy)
                stand_in = self._stand_in(site, observer)
                for owner, name in site.slots:
                    owner.__dict__[name] = stand_in
            yield
            self._session.flush()
        finally:
            for (site, observer), former in zip(self._ours, policies, strict=True):
                _set(observer, nonfinite=former)
                for owner, name in site.slots:
                    owner.__dict__.pop(name, None)
            self._restore_model(begun)
        for observer, twin in self._twins.items():
            observer.data = twin.data

    def _stand_in(self, site: ObserverPlace, observer: DataObserver) -> Callable[[Tensor], Tensor]:
        if observer in self._twins:
            return unchanged
        if not site.of_constants:
            return self._session.stand_in(observer)
        # A computed constant is another tensor in each batch, and may reach the observer beside others.
        return _shown_once(observer) if all(node.op == "get_attr" for node in site.producers) else observer

    # --- batches

    def read(self, loader: Iterable[Any], advance: Callable[[], None]) -> None:
        """Reads the loader to its end, the limit, or until ranges have settled.

        Raises:
            CalibrationError: nothing was read, or not what was read before a checkpoint.
        """
        iterator, read = loader_iterator(loader), 0
        self._take_up()
        for read, batch in enumerate(islice(iterator, 0 if self.converged else self.options.limit), 1):
            if read > self._position:
                self._take(read - 1, batch)
            elif read == self._position:
                self._rejoin(batch)
            advance()
            if self.converged:
                break
        self._check_read(read)
        require_finite(self._foreign)

    def _check_read(self, read: int) -> None:
        if self.batches == 0:
            why = f"all {len(self.skipped)} batches were skipped" if self.skipped else "the loader yielded no batch"
            raise CalibrationError(
                f"Nothing was calibrated: {why}; pass at least one good batch (a generator can be read only once)."
            )
        if read < self._position and not self.converged:
            raise CalibrationError(
                f"The checkpoint '{self.options.checkpoint}' has seen {self._position} batches and this run stopped at "
                f"{read}; pass the same loader and limit, or resume=False."
            )

    def _take(self, index: int, batch: Any) -> None:
        self._position, taken = index + 1, picked(batch, self.options.inputs)
        try:
            named = self._reader.arguments(taken, index)
        except CalibrationError as error:
            if self.options.misfit != "skip":
                raise
            self.skipped.append(SkippedBatch(index, str(error)))
        else:
            self._run_batch(named, index)
        if self.options.tolerance is not None and self._position % self.options.check_every == 0:
            self._session.flush()
            self._settling.check(self.sites)
            self.converged = self._settling.settled
        if self.options.checkpoint is not None and self._position % self.options.checkpoint_every == 0:
            self._save(self.options.checkpoint, taken)

    def _run_batch(self, named: dict[str, Any], index: int) -> None:
        skips = self.options.nonfinite == "skip"
        foreign = states_of_others(self._foreign) if skips else {}
        model_state = self._model_state()
        try:
            self._check_finite(named, index)
            self._reader.call(self.model, named, index)
            self._session.commit()
            if skips:
                require_finite(self._foreign)
        except NonFiniteError as error:
            self._session.rollback()
            if not skips:
                raise NonFiniteError(f"Batch {index}: {error}") from error
            restore_others(self._foreign, foreign)
            self._restore_model(model_state)
            self.skipped.append(SkippedBatch(index, str(error)))
        else:
            self.batches, self.samples = self.batches + 1, self.samples + sample_count(named)

    def _model_state(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def _restore_model(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self._buffers[name].copy_(value)

    def _check_finite(self, named: dict[str, Any], index: int) -> None:
        culprit = None if self.options.nonfinite == "report" else nonfinite_input(named)
        if culprit is not None:
            raise NonFiniteError(
                f"Input '{culprit}' of batch {index} holds NaN or infinity; clean the data, or calibrate with "
                "nonfinite='skip' or 'report'."
            )

    # --- checkpoints

    @cached_property
    def _fingerprint(self) -> list[str]:
        return fingerprint(self.model, self.sites)

    def states(self) -> dict[str, Any]:
        """Returns every observer's data by the observer's name; constants are left out, they are in the model."""
        return {
            site.name: (_plain(observer.state), observer.nonfinite_elements)
            for site, observer in self._ours
            if observer.constant is None
        }

    def _save(self, path: Path, last: Any) -> None:
        self._session.flush()
        activity, widened = self._session.activity, self._session.widened
        content = {
            "fingerprint": self._fingerprint,
            "states": self.states(),
            "foreign": states_of_others(self._foreign),
            "model": self._model_state(),
            "activity": {s.name: activity[s.observer].saved() for s in self.sites if s.observer in activity},
            "widened": {s.name: widened.get(s.observer) for s in self.sites},
            "counts": (self.batches, self.samples, self._position),
            "skipped": [(s.index, s.reason) for s in self.skipped],
            "settled": (self._settling.saved(), self.converged),
            "random": (torch.get_rng_state(), random.getstate()),
            "last": batch_digest(last),
        }
        write_checkpoint(path, content)

    def _take_up(self) -> None:
        """Continues where a checkpoint was written, if there is one."""
        path = self.options.checkpoint if self.options.resume else None
        content = read_checkpoint(path, self._fingerprint) if path is not None else None
        if content is None:
            return
        with _told_as_broken(path):
            self._restore(content)

    def _restore(self, content: dict[str, Any]) -> None:
        typed(content, _Saved, "it")
        self._taken_up = content
        self._restore_observers(content)
        restore_others(self._foreign, content["foreign"])
        self._restore_model(content["model"])
        self.batches, self.samples, self._position = content["counts"]
        self._session.batch, self.resumed_at = self._position, self.batches
        self.skipped = [SkippedBatch(*pair) for pair in content["skipped"]]
        settling, converged = content["settled"]
        self.converged = typed(converged, bool, "'settled'")
        self._settling.restore(settling)
        self._observe_constants()

    def _restore_observers(self, content: dict[str, Any]) -> None:
        activity = self._session.activity
        for site, observer in self._ours:
            if site.name in content["states"]:
                state, observer.nonfinite_elements = content["states"][site.name]
                _require_like(state, observer)
                observer.state = None if state is None else observer.restored(state)
            if observer in activity:
                activity[observer].restore(content["activity"][site.name])
            if content["widened"][site.name] is not None:
                self._session.widened[observer] = content["widened"][site.name]

    def _rejoin(self, last: Any) -> None:
        """Goes on behind the last batch that the checkpoint has seen.

        Raises:
            CalibrationError: the loader yields another one in its place.
        """
        if batch_digest(picked(last, self.options.inputs)) != self._taken_up["last"]:
            raise CalibrationError(
                f"Batch {self._position - 1} is not the one that the checkpoint '{self.options.checkpoint}' has seen; "
                "let the loader yield the same batches again (a shuffling one: pass seed=), or pass resume=False."
            )
        with _told_as_broken(self.options.checkpoint):
            torch.set_rng_state(self._taken_up["random"][0])
            random.setstate(self._taken_up["random"][1])

    def _observe_constants(self) -> None:
        """Shows weights to observers without data, in case no batch is left that would."""
        for site, observer in self._ours:
            if site.of_constants and not observer.has_data:
                for node in site.producers:
                    value = constant_value(node) if node.op == "get_attr" else None
                    if value is not None:
                        observer(value)

    # --- many processes

    def merge(self, gathered: list[dict[str, Any]]) -> None:
        """Gives every observer the states of all processes, merged in the order of ranks.

        Raises:
            CalibrationError: the processes have different models, or an observer cannot be merged.
        """
        require_mergeable(self._foreign)
        if any(states.keys() != gathered[0].keys() for states in gathered):
            raise CalibrationError("The processes have models with different observers; prepare the same on all.")
        for site, observer in self._ours:
            if observer.constant is None:
                found = [states[site.name] for states in gathered]
                observer.nonfinite_elements = sum(spoiled for _, spoiled in found)
                _merge(observer, [state for state, _ in found if state is not None])

    # --- results

    def summaries(self) -> tuple[ObserverSummary, ...]:
        """Returns a summary of every observer of activations."""
        found = []
        for site in self.sites:
            if not site.of_constants:
                seen = self._session.activity.get(site.observer)
                channels, silent = (seen.channels, seen.silent_channels) if seen is not None else (0, ())
                found.append(summarize(site, channels, silent, self._session.widened.get(site.observer)))
        return tuple(found)

    def check_findings(self, found: Iterable[ObserverSummary]) -> None:
        """Refuses observers that no data reached and values that never change, where those are to raise.

        Raises:
            CalibrationError: there are such observers.
        """
        waiting = [s for s in found if not s.dead or not _needs_none(s.kind)]
        dead = [s.place for s in waiting if s.dead]
        if dead and self.options.dead == "raise":
            raise CalibrationError(
                f"No data reached the observers of {', '.join(dead)}; check the branch of the model they stand in, or "
                "calibrate with dead='report'."
            )
        still = [f"{s.place} ({s.problem})" for s in waiting if not s.dead and (s.constant or s.silent_channels)]
        if still and self.options.constant == "raise":
            raise CalibrationError(
                f"Values never changed at {', '.join(still)}; calibrate on data that exercises the model, or with "
                "constant='report'."
            )


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


def _needs_none(kind: str) -> bool:
    """Tells whether observers of a class never look at data."""
    return kind.startswith(("FixedQParams", "Derived", "Placeholder", "Noop", "ReuseInput"))


def _plain(state: Any) -> tuple[Tensor, ...] | None:
    return None if state is None else tuple(t.cpu() for t in state)


def _merge(observer: DataObserver, states: list[Any]) -> None:
    merged = None
    for state in map(observer.restored, states):
        merged = state if merged is None else observer.merged(merged, state)
    observer.state = merged
