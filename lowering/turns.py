"""Which of several programs is the fastest, timed in turns (A B C A B C ...).

Before: things that run. After: their times of each round, in which load on the machine meets all of them alike, so that
what counts is the ratio within a round. One that is far behind is timed no further, and all rest once one is clearly
the fastest.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[], Any]

# Threads of a runtime spin for a while when its call is over (ONNX Runtime's for 40 ms), and would take the processor
# from who comes next. They are asleep where the process computes less than this share of so many seconds; threads that
# are not the runtime's may go on.
_LOOK, _ASLEEP, _PATIENCE = 0.02, 0.1, 0.2
# Calls of a turn: as many as take so many seconds, at least three unless they take longer. One before them finds
# caches, which hold what the program before it left there.
_CALLS, _TURN, _LONG = (3, 20), 0.01, 0.3
# So many rounds at least, at most, and none is begun after so many seconds.
_ROUNDS, _SECONDS = (7, 41), 20.0
# Times the fastest: up to here as good as equal, and surely beyond there far behind.
_EQUAL, _FAR = 1.03, 1.3
_SURE = 0.025


@dataclass
class Timed:
    """What was found of one program.

    Attributes:
        seconds: the median of a call in each round.
        is_far_behind: whether it was timed no further.
    """

    seconds: list[float] = field(default_factory=list)
    is_far_behind: bool = False


def in_turns(runs: Sequence[Run], prepare: Sequence[Run] | None = None) -> list[Timed]:
    """Times programs in turns.

    Args:
        runs: one call of each.
        prepare: what to do before each call, such as to put a state back; it is not timed.
    """
    found, begun = [Timed() for _ in runs], time.perf_counter()
    before: Sequence[Run | None] = prepare or [None] * len(runs)
    for done in range(_ROUNDS[1]):
        if done >= _ROUNDS[0] and (_is_decided(found) or time.perf_counter() - begun > _SECONDS):
            break
        for timed, run, first in zip(found, runs, before, strict=True):
            if not timed.is_far_behind:
                timed.seconds.append(_turn(run, first))
        if done + 1 >= _ROUNDS[0]:
            _leave_behind(found)
    return found


def best(found: Sequence[Timed]) -> int:
    """Returns the place of the fastest; of several that are as good as equal that of the first."""
    fastest = found[_fastest(found)]
    left = (place for place, timed in enumerate(found) if not timed.is_far_behind)
    return next(place for place in left if ratio(found[place], fastest) <= _EQUAL)


def ratio(one: Timed, other: Timed) -> float:
    """Returns how many times as long as another a program takes: the median over the rounds that both took part in."""
    return statistics.median(_ratios(one, other))


def wait_until_asleep() -> None:
    """Waits until the threads of the process compute nothing, 0.2 seconds at most."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < _PATIENCE:
        computed = time.process_time()
        time.sleep(_LOOK)
        if time.process_time() - computed < _ASLEEP * _LOOK:
            break


def _turn(run: Run, first: Run | None) -> float:
    wait_until_asleep()
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < 2 or _goes_on(len(taken) - 1, time.perf_counter() - begun):
        if first is not None:
            first()
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _goes_on(calls: int, seconds: float) -> bool:
    return seconds < _LONG if calls < _CALLS[0] else calls < _CALLS[1] and seconds < _TURN


def _fastest(found: Sequence[Timed]) -> int:
    return min(
        (place for place, timed in enumerate(found) if not timed.is_far_behind),
        key=lambda place: statistics.median(found[place].seconds),
    )


def _is_decided(found: Sequence[Timed]) -> bool:
    fastest = _fastest(found)
    others = (timed for place, timed in enumerate(found) if place != fastest and not timed.is_far_behind)
    return all(_surely(timed, found[fastest]) > 1 for timed in others)


def _leave_behind(found: Sequence[Timed]) -> None:
    fastest = found[_fastest(found)]
    for timed in found:
        timed.is_far_behind |= _surely(timed, fastest) > _FAR


def _ratios(one: Timed, other: Timed) -> list[float]:
    return sorted(a / b for a, b in zip(one.seconds, other.seconds, strict=False))


def _surely(one: Timed, other: Timed) -> float:
    """Returns how many times as long one takes at the least: the lower end of the median's interval of 95 %."""
    ratios = _ratios(one, other)
    below, place = 0.0, 0
    while place < len(ratios) // 2:
        below += math.comb(len(ratios), place) / 2 ** len(ratios)
        if below > _SURE:
            break
        place += 1
    return ratios[max(place - 1, 0)]
