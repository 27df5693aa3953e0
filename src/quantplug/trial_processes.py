"""Trials in processes of their own.

Before: a job, pickled once, and scopes. After: futures of trials. Each process has the job and its share of the
threads. One that dies is an error of its trial. A process ends with the search however that ends, and with the one
that started it: it watches that.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import fields, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol

import torch
from typing_extensions import Self

from quantplug.core.errors import ConfigError, QuantplugError, TrialError, first_line
from quantplug.trials import Job, Scope, Trial, run_trial


class Pending(Protocol):
    """A trial that is made elsewhere."""

    def done(self) -> bool:
        """Tells whether it is made."""

    def result(self) -> Any:
        """Waits for it."""


class Executor(Protocol):
    """What runs functions elsewhere: one of `concurrent.futures`, of Dask, of a cluster's scheduler."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Returns what has `done()`, and `result()` for what the function returns."""


class Ahead:
    """Makes trials elsewhere, those too that may be asked for next.

    Args:
        submit: begins a trial.
        count: how many are made at once.
    """

    def __init__(self, submit: Callable[[Sequence[Scope]], Pending], count: int) -> None:
        self.count = count
        self._submit = submit
        self._pending: dict[tuple[Scope, ...], Pending] = {}

    def trial(self, wanted: Sequence[tuple[Scope, ...]]) -> Trial:
        """Returns the first trial, and begins those behind it while there is room.

        Raises:
            TrialError: what makes trials is broken.
        """
        for place, scopes in enumerate(wanted):
            running = sum(not pending.done() for pending in self._pending.values())
            if scopes not in self._pending and (place == 0 or running < self.count):
                self._pending[scopes] = self._submit(scopes)
        try:
            found: Trial = self._pending.pop(wanted[0]).result()
        except BrokenExecutor as error:
            raise TrialError(f"The executor of the trials is broken ({first_line(error)}); start another.") from error
        return found


class Processes:
    """Some processes that make trials of one job.

    Args:
        job: what they have in common.
        count: how many there are.

    Raises:
        ConfigError: a part of the job cannot be pickled.
    """

    def __init__(self, job: Job, count: int) -> None:
        sent = pickled(job)
        self._free: SimpleQueue[_Process] = SimpleQueue()
        self._all = [_Process(sent, max(1, torch.get_num_threads() // count)) for _ in range(count)]
        for process in self._all:
            self._free.put(process)
        self._waiting = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.end()
        self._waiting.shutdown()

    def submit(self, scopes: Sequence[Scope]) -> "Future[Trial]":
        """Returns the future of a trial."""
        return self._waiting.submit(self._made, tuple(scopes))

    def _made(self, scopes: tuple[Scope, ...]) -> Trial:
        process = self._free.get()
        try:
            return process.trial(scopes)
        finally:
            self._free.put(process)


def pickled(job: Job) -> bytes:
    """Returns a job as bytes.

    Raises:
        ConfigError: a part of it cannot be pickled.
    """
    try:
        return pickle.dumps(job)
    except QuantplugError:
        raise
    except Exception as error:
        part = next((field.name for field in fields(job) if not _is_pickled(getattr(job, field.name))), "model")
        raise ConfigError(
            f"The {part} of the trials cannot be sent to another process ({first_line(error)}); define it at the top "
            "of a module, or leave workers out."
        ) from error


def _is_pickled(value: Any) -> bool:
    try:
        return isinstance(value, torch.export.ExportedProgram) or bool(pickle.dumps(value))
    except Exception:
        return False


class _Process:
    """One process, and this side's end of the pipe to it."""

    def __init__(self, job: bytes, threads: int) -> None:
        context = get_context("spawn")  # torch's threads do not survive a fork
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, threads))
        self._process.start()
        other.close()
        self._job: bytes | None = job

    def trial(self, scopes: tuple[Scope, ...]) -> Trial:
        """Returns a trial that the process makes; what it raises is raised here."""
        try:
            if self._job is not None:
                self._pipe.send_bytes(self._job)
                self._job = None
            self._pipe.send(scopes)
            found = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            raise TrialError(
                f"A process that made a trial ended with code {self._process.exitcode}; run fewer workers if memory "
                "was short, begin a script with `if __name__ == '__main__':`, and run again: a log is taken up."
            ) from error
        if isinstance(found, BaseException):
            raise found
        made: Trial = found
        return made

    def end(self) -> None:
        """Ends the process at once."""
        self._process.terminate()
        self._process.join(5)
        self._process.kill()


def _serve(pipe: Connection, threads: int) -> None:
    """Makes trials of the job that comes first, until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    job: Any = None
    while True:
        try:
            job = job or _read(pipe.recv_bytes())
            scopes = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(job if isinstance(job, Exception) else _answer(job, scopes))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _read(content: bytes) -> Any:
    """Returns the job, its model exported once for all trials, or why it cannot be read here."""
    try:
        job: Job = pickle.loads(content)
        return replace(job, model=job.exported())
    except Exception as error:
        return TrialError(
            f"A process cannot read the trials' job ({first_line(error)}); let model, data and metric be of modules "
            "that it can import."
        )


def _answer(job: Job, scopes: tuple[Scope, ...]) -> Any:
    try:
        return run_trial(job, scopes)
    except Exception as error:
        return _sent(error)


def _sent(error: Exception) -> Exception:
    """Returns an error as it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return TrialError(f"A trial failed in its process ({first_line(error)}); run it with one worker to see where.")
