"""Calibration on many processes: each rank's observer states -> the same merged states on every rank.

The exchange runs on `torch.distributed` with a process group of its own on gloo, which works on
tensors of any device's job, notices when a peer's connection closes, and has a deadline; so a rank
that died is an error on the others and never a wait without end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from quantplug.core.errors import CalibrationError, first_line

Item = TypeVar("Item")

# Seconds that ranks wait for the slowest.
TIMEOUT = 1800.0


def is_distributed() -> bool:
    """Tells whether this process is one of several in an initialized `torch.distributed` job."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Alone:
    """What an exchange is for a process that is the only one."""

    rank, size = 0, 1

    def gather(self, value: Any, failure: str = "") -> list[Any]:
        """Returns the value of the only rank, which nobody has to be told of a failure."""
        return [value]


class Exchange:
    """The ranks of a calibration run, created by all of them together.

    Args:
        timeout: seconds to wait for the slowest rank.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
        is_over: whether it failed, which all ranks know or will find out by themselves.

    Raises:
        CalibrationError: a rank does not answer.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self.is_over = timedelta(seconds=timeout), False
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = self._guarded(lambda: dist.new_group(backend="gloo", timeout=self._timeout))

    def gather(self, value: Any, failure: str = "") -> list[Any]:
        """Returns every rank's value, in the order of ranks.

        Args:
            value: this rank's, made of plain values and tensors.
            failure: why this rank has nothing to give; then all ranks raise.

        Raises:
            CalibrationError: a rank failed or does not answer.
        """
        failures: list[str] = [""] * self.size
        self._guarded(lambda: dist.all_gather_object(failures, failure, group=self._group))
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
        if failed:
            self.is_over = True
            raise CalibrationError(f"Calibration failed on other processes ({'; '.join(failed)}); mend them and rerun.")
        values: list[Any] = [None] * self.size
        self._guarded(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def close(self) -> None:
        """Gives the process group back."""
        dist.destroy_process_group(self._group)

    def _guarded(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            self.is_over = True
            raise CalibrationError(
                f"Rank {self.rank} of {self.size} lost another process or waited longer than "
                f"{self._timeout.total_seconds():g} s for it ({first_line(error)}); see that process's own error "
                "and rerun, a checkpoint is taken up again."
            ) from error


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[Exchange | Alone]:
    """Yields the ranks of the job that this process is one of; all have to come here.

    Raises:
        CalibrationError: a rank does not answer.
    """
    if not is_distributed():
        yield Alone()
        return
    exchange = Exchange(timeout)
    try:
        yield exchange
    finally:
        exchange.close()


@contextmanager
def telling(exchange: Exchange | Alone | None) -> Iterator[None]:
    """Tells the other processes why this one fails, before it does; not what they know."""
    try:
        yield
    except Exception as error:
        if not isinstance(exchange, Exchange) or exchange.is_over:
            raise
        try:
            exchange.gather(None, str(error) or type(error).__name__)
        except CalibrationError as told:
            raise error from told


def in_turns(ranks: Exchange | Alone, own: Iterator[Item]) -> Iterator[Item]:
    """Yields what all ranks have: the first of each, then the second of each, and so on; on all of them the same.

    Args:
        ranks: all of them take all.
        own: what this one has, plain values and tensors.
    """
    while turn := [item for item in ranks.gather(next(own, None)) if item is not None]:
        yield from turn
