"""The progress bar of a loop over batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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

    Yields:
        What is to be called after each unit.
    """
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    text = (TextColumn(step), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*text, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(step, total=total, rate="")

        def advance() -> None:
            speed = bar.tasks[0].speed
            bar.update(task, advance=1, rate=f"{speed:.1f} {unit}/s" if speed else "")

        yield advance
