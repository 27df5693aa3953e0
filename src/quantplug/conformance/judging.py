"""How trials are judged: several share a model, and what fails there is sought by halves.

Before: a trial, the name of a check and the checks. After: a `Verdict`. A check that is about something that an
earlier check found missing is skipped, so that one wrong claim fails one check.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from typing_extensions import Self

from quantplug.conformance.flow import Side
from quantplug.core.errors import QuantplugError, first_line

# Pieces in one model: above it a model gains little, and one piece that fails is sought among more.
_PANEL = 32


class NotClaimedError(Exception):
    """Nobody claims what a check is about; the sentence says why."""


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        status: "passed", "failed" or "skipped".
        reason: why it failed or was skipped.
    """

    status: str = "passed"
    reason: str = ""


Tried = TypeVar("Tried")
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class Check(Generic[Tried, Shared]):
    """One promise.

    Attributes:
        objection: returns what is wrong with a trial among the others of a panel, or None.
        needs: the checks that have to hold before.
    """

    objection: Callable[[Tried, Shared], str | None]
    needs: tuple[str, ...] = ()


class SharedModel(Generic[Tried]):
    """Trials that share a model, because exporting and lowering cost more by the model than by the piece.

    Attributes:
        trials: the trials; each has its piece as `placed`.
    """

    # What `release` forgets of a class's own, beside what stands here.
    made: tuple[str, ...] = ()

    def __init__(self, trials: Sequence[Tried]) -> None:
        self.trials = tuple(trials)
        self._alone: dict[Tried, Self] = {}

    def __len__(self) -> int:
        return len(self.trials)

    def of(self, trials: Sequence[Tried]) -> Self:
        """Returns a model of other trials, tried in the same way."""
        return type(self)(trials)

    @cached_property
    def side(self) -> Side:
        """The pieces."""
        trials: Any = self.trials
        return Side([trial.placed for trial in trials])

    def half_with(self, trial: Tried) -> Self:
        """Returns the half of the trials that one is in, to find out which one a failure of all is about."""
        return self._halves[trial not in self._halves[0].trials]

    def alone(self, trial: Tried) -> Self:
        """Returns the model of a trial without the others."""
        if trial not in self._alone:
            self._alone[trial] = self.of([trial])
        return self._alone[trial]

    @cached_property
    def _halves(self) -> tuple[Self, Self]:
        middle = len(self) // 2
        return self.of(self.trials[:middle]), self.of(self.trials[middle:])

    def release(self) -> None:
        """Forgets the stages: a hundred exported models at once would slow everything down."""
        for name in ("side", "_halves", *self.made):
            self.__dict__.pop(name, None)
        self._alone.clear()


def in_panels(groups: Iterable[Sequence[Tried]]) -> Iterator[list[Tried]]:
    """Yields the trials that are to share a model; a group is not torn apart."""
    waiting: list[Tried] = []
    for group in groups:
        waiting += group
        if len(waiting) >= _PANEL:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def judged(
    trial: Any, check: str, checks: Mapping[str, Check[Any, Any]], judge: Callable[[Any, str], Verdict], panel: Any
) -> Verdict:
    """Returns whether a trial keeps a promise, in its panel or without those for which a stage fails there.

    Args:
        trial: one of the panel's.
        check: its name.
        checks: all of them.
        judge: how the verdict of another check is found, which may be known.
        panel: the trials that share a model with it.
    """
    for needed in checks[check].needs:
        before = judge(trial, needed)
        if before.status != "passed":
            return Verdict("skipped", before.reason if before.status == "skipped" else f"not reached: {needed}")
    while True:
        verdict, is_about_panel = _attempt(trial, panel, checks[check])
        if verdict.status != "failed" or len(panel) == 1:
            return verdict
        panel = panel.half_with(trial) if is_about_panel else panel.alone(trial)


def _attempt(trial: Any, panel: Any, check: Check[Any, Any]) -> tuple[Verdict, bool]:
    """Returns what a check finds, and whether a stage of the whole panel failed instead of the trial in it."""
    try:
        reason = check.objection(trial, panel)
    except NotClaimedError as skipped:
        return Verdict("skipped", str(skipped)), False
    except QuantplugError as error:
        return Verdict("failed", str(error)), True
    except Exception as error:  # a plugin may fail in any way; that is a finding, not the end of the kit
        return Verdict("failed", first_line(error)), True
    return Verdict("failed", reason) if reason else Verdict(), False
