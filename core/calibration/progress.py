"""Progress bars of loops over batches, layers or trials, one at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SHOWN = ContextVar("bars are shown", default=True)


@contextmanager
def bars(*, shown: bool) -> Iterator[None]:
    """Within it no bar is shown unless `shown`, and nothing around it says otherwise."""
    before = _SHOWN.set(_SHOWN.get() and shown)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def batch_total(loader: Any, limit: int | None) -> int | None:
    """Returns the number of batches a loop will take, or None where the loader does not know its length."""
    try:
        length = len(loader)
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)


@contextmanager
def progress_bar(
    shown: bool, total: int | None, step: str = "calibrate", unit: str = "batches"
) -> Iterator[Callable[[], None]]:
    """Shows a bar with count, rate and remaining time on the error stream; silent where that is no terminal.

    Whatever is inside shows no bar of its own.

    Yields:
        What is to be called after each unit.
    """
    console = Console(stderr=True)
    if not (shown and _SHOWN.get() and console.is_terminal):
        with bars(shown=shown):
            yield lambda: None
        return
    text = (TextColumn(step), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with bars(shown=False), Progress(*text, *times, console=console) as bar:
        task = bar.add_task(step, total=total, rate="")

        def advance() -> None:
            speed = bar.tasks[0].speed
            bar.update(task, advance=1, rate=f"{speed:.1f} {unit}/s" if speed else "")

        yield advance
