"""The search for cheapest levels, against all levels that there are."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from quantplug.algorithms.search import Outcome, search


def measured(noise):
    """Returns a trial of items whose noises add up, less at each higher level, and whose costs are their levels'."""

    def measure(levels):
        lost = sum(each / 10**level for each, level in zip(noise, levels, strict=True))
        return Outcome(-lost, float(sum(levels)))

    return measure


@settings(max_examples=200, deadline=None)
@given(
    noise=st.lists(st.floats(0, 100), min_size=1, max_size=5).map(lambda each: sorted(each, reverse=True)),
    least=st.floats(-300, 0),
)
def test_what_is_found_is_enough_where_anything_is_and_nothing_in_it_is_moved_needlessly(noise, least):
    measure = measured(noise)
    found = search(len(noise), 3, measure, least, 1000)
    every = [measure(levels) for levels in itertools.product(range(3), repeat=len(noise))]
    assert found.is_met == any(outcome.metric >= least for outcome in every)
    if not found.is_met:
        assert found.tried[found.best].metric == max(outcome.metric for outcome in found.tried.values())
        return
    assert measure(found.best).metric >= least
    for item, level in enumerate(found.best):
        lower = tuple(0 if place == item else each for place, each in enumerate(found.best))
        assert level == 0 or measure(lower).metric < least


def test_one_culprit_among_many_takes_few_trials():
    noise = [100.0] + [0.01] * 200
    found = search(len(noise), 3, measured(noise), -20.0, 1000)
    assert found.best == (1, *[0] * 200)
    assert len(found.tried) == 2


@given(trials=st.integers(1, 8), items=st.integers(1, 20))
def test_trials_are_bounded_and_each_is_made_once(trials, items):
    calls = []

    def measure(levels):
        calls.append(levels)
        return Outcome(float(sum(levels)), float(sum(levels)))

    found = search(items, 3, measure, 1e9, trials)
    assert not found.is_met
    assert len(calls) == len(set(calls)) == len(found.tried) <= trials
