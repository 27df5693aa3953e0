"""A search for the cheapest levels with which a measurement is good enough.

Before: items, the ones that hurt most first, the number of levels that each may have, the cheapest first, and a way to
measure all of them together. After: what was tried, the best of it named. All items begin at the cheapest level. Those
that hurt most go one level up, twice as many each time, until the measurement is good enough, then as few as bisection
finds enough; where all of them are not, the same is done with the next level on top of the best. At last items that
were moved come back one by one, those that hurt least first, where the measurement stays good enough. What is tried
depends on what is good enough alone, and costs choose among that: costs with noise make no search longer or worse.

That layers stay float in the order of their measured sensitivity is "partial quantization" of Wu et al., "Integer
Quantization for Deep Learning Inference: Principles and Empirical Evaluation", arXiv:2004.09602, who add one after the
other; here they are doubled and bisected, and have levels between integers and float.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Levels: TypeAlias = tuple[int, ...]
"""The level of each item."""


@dataclass(frozen=True)
class Outcome:
    """What a trial measured.

    Attributes:
        metric: the higher the better.
        cost: the lower the better.
    """

    metric: float
    cost: float


@dataclass(frozen=True)
class Found:
    """What a search tried.

    Attributes:
        tried: outcomes by levels, in the order of the trials.
        best: the cheapest levels that are good enough; where none are, those with the highest metric.
        is_met: whether they are good enough.
    """

    tried: dict[Levels, Outcome]
    best: Levels
    is_met: bool


def search(
    items: int,
    levels: int,
    measure: Callable[[Levels], Outcome],
    least: float,
    trials: int,
    *,
    alike: float = 0.0,
    at_each: bool = False,
) -> Found:
    """Returns the cheapest levels with which the metric is at least so high.

    Args:
        items: how many there are, ranked by what they do to the metric at level 0, the most first.
        levels: how many an item may have.
        measure: one trial; it is called once for the same levels.
        least: the metric that is good enough.
        trials: how often it is called at most, from 1 on.
        alike: share of a cost by which others count as the same; among these the one with the fewest items moved up is
            best, then the one with the higher metric.
        at_each: whether a higher level may be the cheaper one, so that at last all items are measured at each level.
    """
    found = _Search(items, levels, measure, least, trials, alike, at_each)
    found.run()
    return found.result()


def upcoming(
    items: int,
    levels: int,
    known: Mapping[Levels, Outcome],
    least: float,
    trials: int,
    count: int,
    *,
    at_each: bool = False,
) -> tuple[Levels, ...]:
    """Returns what a search asks for next, and then whichever way that turns out; none where it is at its end.

    Args:
        items: as for `search`.
        levels: as for `search`.
        known: what was measured.
        least: as for `search`.
        trials: as for `search`.
        count: of how many trials at most.
        at_each: as for `search`.
    """
    found: list[Levels] = []
    waiting = deque([dict(known)])
    while waiting and len(found) < count:
        supposed = waiting.popleft()
        asked = _first_unknown(_Search(items, levels, supposed.__getitem__, least, trials, at_each=at_each))
        if asked is not None:
            found += [asked] if asked not in found else []
            waiting.extend({**supposed, asked: Outcome(metric, 0.0)} for metric in (-math.inf, math.inf))
    return tuple(found)


def _first_unknown(found: "_Search") -> Levels | None:
    try:
        found.run()
    except KeyError as asked:
        levels: Levels = asked.args[0]
        return levels
    return None


@dataclass
class _Search:
    items: int
    levels: int
    measure: Callable[[Levels], Outcome]
    least: float
    trials: int
    alike: float = 0.0
    at_each: bool = False
    tried: dict[Levels, Outcome] = field(default_factory=dict)

    def run(self) -> None:
        self._move()
        for level in range(1, self.levels if self.at_each else 0):
            self._is_enough((level,) * self.items)

    def _move(self) -> None:
        base: Levels = (0,) * self.items
        if self._is_enough(base):
            return
        for level in range(1, self.levels):
            enough = self._fewest(base, level)
            if enough is not None:
                self._bring_back(enough)
                return
            base = max(self.tried, key=lambda tried: self.tried[tried].metric)

    def result(self) -> Found:
        enough = [tried for tried, outcome in self.tried.items() if outcome.metric >= self.least]
        if enough:
            limit = min(self.tried[tried].cost for tried in enough) * (1 + self.alike)
            cheap = [tried for tried in enough if self.tried[tried].cost <= limit]
            return Found(self.tried, min(cheap, key=lambda tried: (sum(tried), -self.tried[tried].metric)), True)
        return Found(self.tried, max(self.tried, key=lambda tried: self.tried[tried].metric), False)

    def _is_enough(self, levels: Levels) -> bool:
        """Measures levels; where no trial is left, they count as not enough."""
        if levels not in self.tried:
            if len(self.tried) >= self.trials:
                return False
            self.tried[levels] = self.measure(levels)
        return self.tried[levels].metric >= self.least

    def _fewest(self, base: Levels, level: int) -> Levels | None:
        """Returns the levels with the fewest items moved up that are enough, or None where all are not."""
        low, high = 0, 1
        while high < self.items and not self._is_enough(_moved(base, high, level)):
            low, high = high, 2 * high
        high = min(high, self.items)
        if not self._is_enough(_moved(base, high, level)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_enough(_moved(base, middle, level)) else (middle, high)
        return _moved(base, high, level)

    def _bring_back(self, levels: Levels) -> None:
        for item in reversed(range(self.items)):
            for level in range(levels[item]):
                lower = (*levels[:item], level, *levels[item + 1 :])
                if self._is_enough(lower):
                    levels = lower
                    break


def _moved(base: Levels, count: int, level: int) -> Levels:
    """Returns levels of which the first ones are raised to one level at least."""
    return tuple(max(before, level) if place < count else before for place, before in enumerate(base))
