"""How an interrupted run goes on: a run's state <-> a checkpoint, and the same batches behind the last one seen."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantplug.core.calibration.batches import batch_digest
from quantplug.core.calibration.checkpoint import read_checkpoint, write_checkpoint
from quantplug.core.calibration.run_state import RunState
from quantplug.core.errors import ArtefactError, CalibrationError, first_line
from quantplug.core.files.typed import typed


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds."""

    format: int
    fingerprint: tuple[str, ...]
    states: dict[str, Any]
    others: dict[str, Any]
    buffers: dict[str, Tensor]
    activity: dict[str, Any]
    widened: dict[str, int | None]
    counts: tuple[int, ...]
    skipped: tuple[Any, ...]
    convergence: tuple[Any, ...]
    random: tuple[Any, ...]
    last: str


@dataclass(frozen=True)
class Interruption:
    """Where a checkpoint was written.

    Attributes:
        path: the checkpoint.
        last: digest of the last batch that was seen.
        random: states of torch's and Python's generators behind it.
    """

    path: Path
    last: str
    random: tuple[Any, ...]

    def rejoin(self, batch: Any, index: int) -> None:
        """Goes on behind the last batch that was seen.

        Args:
            batch: the model's inputs of the batch in its place.
            index: its number.

        Raises:
            CalibrationError: it is another batch.
        """
        if batch_digest(batch) != self.last:
            raise CalibrationError(
                f"Batch {index} is not the one that the checkpoint '{self.path}' has seen; let the loader yield the "
                "same batches again (a shuffling one: pass seed=), or pass resume=False."
            )
        with _told_as_broken(self.path):
            torch.set_rng_state(self.random[0])
            random.setstate(self.random[1])


def save_run(path: Path, state: RunState, last: Any) -> None:
    """Writes a checkpoint of a run.

    Args:
        path: the file.
        state: everything that the run has gathered.
        last: the model's inputs of the last batch that was seen.

    Raises:
        ArtefactError: the file cannot be written.
    """
    content = {
        "fingerprint": state.observed.fingerprint,
        **state.saved(),
        "random": (torch.get_rng_state(), random.getstate()),
        "last": batch_digest(last),
    }
    write_checkpoint(path, content)


def take_up(path: Path, state: RunState) -> Interruption | None:
    """Makes a new run's state that of a checkpoint, if there is one.

    Raises:
        ArtefactError: the file is no checkpoint.
        CalibrationError: it was written for other weights or observers.
    """
    content = read_checkpoint(path, state.observed.fingerprint)
    if content is None:
        return None
    with _told_as_broken(path):
        typed(content, _Saved, "it")
        state.restore(content)
    return Interruption(path, content["last"], content["random"])


@contextmanager
def _told_as_broken(path: Path) -> Iterator[None]:
    """Makes a sentence of whatever a file causes that holds something else than a run saves."""
    try:
        yield
    except Exception as error:
        raise ArtefactError(
            f"'{path}' is no calibration checkpoint of this release ({first_line(error)}); delete it."
        ) from error
