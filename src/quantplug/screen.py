"""What a command shows: text for people, one JSON document for programs, or nothing but errors.

Before: a function that is a command. After: the same with `--json`, `--quiet` and `--verbose`, in which `current()`
tells where to print. What the imported libraries tell their own developers stays off the screen, unless `--verbose`
asks for it.
"""

import functools
import inspect
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TextIO

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from quantplug.core.errors import QuantplugError, QuantplugWarning

# A pipe has no width: lines are as long as what they say.
_UNBOUNDED = 10_000

_OPTIONS = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")],
    "verbose": Annotated[
        bool,
        typer.Option("--verbose", envvar="QUANTPLUG_VERBOSE", help="Show what torch and others log, and tracebacks."),
    ],
}


@dataclass(frozen=True)
class Screen:
    """Where a command prints.

    Attributes:
        as_json: whether a program reads: one JSON document and no text.
        quiet: whether nothing is printed at all.
    """

    as_json: bool = False
    quiet: bool = False

    @cached_property
    def console(self) -> Console:
        """Prints text for people; nothing where nobody reads it. In a pipe no line is broken or cut."""
        console = Console(quiet=self.quiet or self.as_json)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _UNBOUNDED
        return console

    @property
    def is_read(self) -> bool:
        """Whether a person reads along."""
        return not (self.quiet or self.as_json)

    def document(self, value: Any) -> None:
        """Prints the command's result where it is asked for as JSON: once, at the end. What is not finite is null."""
        if self.as_json and not self.quiet:
            sys.stdout.write(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")
            sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_CURRENT: ContextVar[Screen] = ContextVar("the screen of the command that runs")


def current() -> Screen:
    """Returns the screen of the command that runs."""
    return _CURRENT.get(Screen())


def listed(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """Returns rows as a table, or one below the other where the console is too narrow for a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    if Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum <= console.width:
        return table
    return Group(*(_record(headings, row) for row in rows))


def _record(headings: Sequence[str], row: Sequence[str]) -> RenderableType:
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="dim")
    lines.add_column(overflow="fold")
    for heading, cell in zip(headings[1:], row[1:], strict=True):
        lines.add_row(f"  {heading}", escape(cell))
    return Group(f"[bold]{escape(row[0])}[/]", lines)


def with_screen(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options `--json`, `--quiet` and `--verbose`, and the screen that they make."""

    @functools.wraps(command)
    def shown(*args: Any, as_json: bool, quiet: bool, verbose: bool, **kwargs: Any) -> None:
        screen = Screen(as_json, quiet)
        token = _CURRENT.set(screen)
        try:
            with nullcontext() if verbose else hushed(quiet), _bars(screen):
                command(*args, **kwargs)
        except QuantplugError:
            if verbose:
                traceback.print_exc()
            raise
        finally:
            _CURRENT.reset(token)

    added = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=a) for n, a in _OPTIONS.items()
    ]
    declared = inspect.signature(command)
    shown.__signature__ = declared.replace(parameters=[*declared.parameters.values(), *added])  # type: ignore[attr-defined]
    shown.__annotations__ = {**command.__annotations__, **_OPTIONS}
    return shown


@contextmanager
def _bars(screen: Screen) -> Iterator[None]:
    if screen.is_read:
        yield
        return
    from quantplug.core.calibration.progress import bars

    with bars(shown=False):
        yield


@contextmanager
def hushed(quiet: bool = False) -> Iterator[None]:
    """Within it the imported libraries' warnings and logs below errors are not shown; ours are one sentence each.

    What the environment asks for (`python -W`, PYTHONWARNINGS, TORCH_CPP_LOG_LEVEL) holds.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        warnings.filterwarnings("ignore" if quiet else "default", category=QuantplugWarning)
        warnings.showwarning = _show
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, QuantplugWarning):
        say("warning", str(message), "yellow")
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def say(kind: str, sentence: str, color: str = "red") -> None:
    """Prints one sentence on the error stream, in one line."""
    Console(stderr=True).print(f"[bold {color}]{kind}:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
