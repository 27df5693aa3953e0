"""One calibration run: batches one by one -> observers' states.

A batch is a transaction: what observers saw of it stays, or is as if the batch had not been.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from quantplug.core.calibration.batches import (
    BatchReader,
    loader_iterator,
    nonfinite_input,
    picked,
    sample_count,
)
from quantplug.core.calibration.options import CalibrationOptions
from quantplug.core.calibration.other_observers import require_finite, restore_others, states_of_others
from quantplug.core.calibration.result import SkippedBatch
from quantplug.core.calibration.resuming import Interruption, save_run, take_up
from quantplug.core.calibration.run_state import RunState
from quantplug.core.errors import CalibrationError
from quantplug.core.observers import NonFiniteError


class Run:
    """The loop over batches: each is checked, run, and kept or left out.

    Args:
        state: of a run that has read nothing; the run writes to it.
        options: checked ones.
        checkpoint: the file to save the run in, if any.
    """

    def __init__(self, state: RunState, options: CalibrationOptions, checkpoint: Path | None) -> None:
        self.state, self.options, self.checkpoint = state, options, checkpoint
        self._reader = BatchReader(state.observed.model, options.target())
        self._interruption: Interruption | None = None

    def read(self, loader: Iterable[Any], advance: Callable[[], None]) -> None:
        """Reads the loader to its end, the limit, or until ranges have come to rest.

        Raises:
            CalibrationError: nothing was read, or not what was read before a checkpoint.
        """
        iterator, read, state = loader_iterator(loader), 0, self.state
        if self.checkpoint is not None and self.options.resume:
            self._interruption = take_up(self.checkpoint, state)
        for read, batch in enumerate(islice(iterator, 0 if state.convergence.reached else self.options.limit), 1):
            if read > state.position:
                self._take(read - 1, batch)
            elif read == state.position and self._interruption is not None:
                self._interruption.rejoin(picked(batch, self.options.inputs), read - 1)
            advance()
            if state.convergence.reached:
                break
        self._check_read(read)
        require_finite(state.observed.others)

    def _check_read(self, read: int) -> None:
        state = self.state
        if state.batches == 0:
            why = f"all {len(state.skipped)} batches were skipped" if state.skipped else "the loader yielded no batch"
            raise CalibrationError(
                f"Nothing was calibrated: {why}; pass at least one good batch (a generator can be read only once)."
            )
        if read < state.position and not state.convergence.reached:
            raise CalibrationError(
                f"The checkpoint '{self.checkpoint}' has seen {state.position} batches and this run stopped at "
                f"{read}; pass the same loader and limit, or resume=False."
            )

    def _take(self, index: int, batch: Any) -> None:
        state, options = self.state, self.options
        state.position, taken = index + 1, picked(batch, options.inputs)
        try:
            named = self._reader.arguments(taken, index)
        except CalibrationError as error:
            if options.misfit != "skip":
                raise
            state.skipped.append(SkippedBatch(index, str(error)))
        else:
            self._run_batch(named, index)
        if options.tolerance is not None and state.position % options.check_every == 0:
            state.session.flush()
            state.convergence.check(state.observed.places)
        if self.checkpoint is not None and state.position % options.checkpoint_every == 0:
            save_run(self.checkpoint, state, taken)

    def _run_batch(self, named: dict[str, Any], index: int) -> None:
        state, observed, skips = self.state, self.state.observed, self.options.nonfinite == "skip"
        others = states_of_others(observed.others) if skips else {}
        buffers = observed.buffers()
        try:
            self._check_finite(named, index)
            self._reader.call(observed.model, named, index)
            state.session.commit()
            if skips:
                require_finite(observed.others)
        except NonFiniteError as error:
            state.session.rollback()
            if not skips:
                raise NonFiniteError(f"Batch {index}: {error}") from error
            restore_others(observed.others, others)
            observed.restore_buffers(buffers)
            state.skipped.append(SkippedBatch(index, str(error)))
        else:
            state.batches, state.samples = state.batches + 1, state.samples + sample_count(named)

    def _check_finite(self, named: dict[str, Any], index: int) -> None:
        culprit = None if self.options.nonfinite == "report" else nonfinite_input(named)
        if culprit is not None:
            raise NonFiniteError(
                f"Input '{culprit}' of batch {index} holds NaN or infinity; clean the data, or calibrate with "
                "nonfinite='skip' or 'report'."
            )
