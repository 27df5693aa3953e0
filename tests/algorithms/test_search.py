"""The search for cheapest levels, against all levels that there are."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quantplug.algorithms.search import Levels, Outcome, search, upcoming


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


@settings(max_examples=200, deadline=None)
@given(
    noise=st.lists(st.floats(0, 100), min_size=1, max_size=6).map(lambda each: sorted(each, reverse=True)),
    least=st.floats(-300, 0),
    levels=st.integers(2, 3),
    trials=st.integers(1, 20),
)
def test_what_is_upcoming_is_what_the_search_asks_for_next_and_behind_that(noise, least, levels, trials):
    asked: dict[Levels, Outcome] = {}
    behind = []
    measure = measured(noise)

    def measure_and_look_ahead(each):
        next_ones = upcoming(len(noise), levels, asked, least, trials, 3)
        assert next_ones[0] == each
        assert len(set(next_ones)) == len(next_ones) <= 3
        behind.append(next_ones[1:])
        asked[each] = measure(each)
        return asked[each]

    search(len(noise), levels, measure_and_look_ahead, least, trials)
    assert upcoming(len(noise), levels, asked, least, trials, 3) == ()
    if levels == 2:  # where there are more, the best of those that are not enough is not known ahead
        assert all(each in told for each, told in zip(list(asked)[1:], behind, strict=False))


@settings(max_examples=100, deadline=None)
@given(
    noise=st.lists(st.floats(0, 100), min_size=1, max_size=5).map(lambda each: sorted(each, reverse=True)),
    least=st.floats(-300, 0),
    seed=st.integers(0, 1000),
)
def test_costs_with_noise_change_neither_what_is_tried_nor_what_is_best_beyond_that_noise(noise, least, seed):
    measure, chance = measured(noise), random.Random(seed)

    def noisy(levels):
        exact = measure(levels)
        return Outcome(exact.metric, (1 + exact.cost) * (1 + 0.01 * chance.random()))

    exact = search(len(noise), 3, measure, least, 1000)
    found = search(len(noise), 3, noisy, least, 1000, alike=0.02)
    assert list(found.tried) == list(exact.tried)
    assert found.is_met == exact.is_met
    if found.is_met:
        assert measure(found.best).cost == measure(exact.best).cost


def test_where_higher_levels_may_be_cheaper_all_items_are_measured_at_each():
    def measure(levels):
        return Outcome(0.0, 1.0 - sum(levels) / 10)

    assert search(2, 3, measure, -1.0, 10).best == (0, 0)
    found = search(2, 3, measure, -1.0, 10, at_each=True)
    assert list(found.tried) == [(0, 0), (1, 1), (2, 2)]
    assert found.best == (2, 2)
    assert upcoming(2, 3, {(0, 0): measure((0, 0))}, -1.0, 10, 2, at_each=True) == ((1, 1), (2, 2))
