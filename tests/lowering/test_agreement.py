"""A program is held against its q/dq graph, and the graph against itself where one step of an integer changes it."""

import math

import pytest
import torch
from qdq_graphs import Net, decibels, fake, graph_of

from quantplug.core.errors import LoweringError
from quantplug.lowering.agreement import agreement, least_kept
from quantplug.lowering.xnnpack import lower


def test_a_graph_that_one_step_changes_beyond_recognition_is_no_yardstick():
    torch.manual_seed(0)
    chaotic = graph_of(Net(lambda s, x: torch.sin(fake(x) * 1e4)), torch.randn(4, 512))
    x = torch.randn(4, 512)
    expected = chaotic(x)
    few_differ = expected.where(torch.rand(expected.shape) > 0.004, -expected)
    assert decibels(few_differ, expected) < 25
    assert 10 < agreement(few_differ, expected, chaotic, (x,)) < 25
    with pytest.raises(LoweringError, match=r"less than 1\d\.\d dB"):
        agreement(torch.randn(4, 512), expected, chaotic, (x,))
    with pytest.raises(LoweringError, match=r"less than 25\.0 dB"):
        agreement(few_differ, expected, chaotic, (x,), 25.0)


@pytest.mark.slow
def test_a_steady_graph_keeps_its_minimum():
    torch.manual_seed(0)
    steady = graph_of(Net(lambda s, x: fake(fake(x) * 2.0, (0.08, 0))), torch.randn(4, 512))
    x = torch.randn(4, 512)
    expected = steady(x)
    few_differ = expected.where(torch.rand(expected.shape) > 0.004, -expected)
    with pytest.raises(LoweringError, match=r"less than 25\.0 dB"):
        agreement(few_differ, expected, steady, (x,))
    assert agreement(expected, expected, steady, (x,)) == float("inf")
    with pytest.raises(LoweringError, match="keeps nan dB"):
        agreement(expected * float("nan"), expected, steady, (x,))
    assert lower(steady, (x,)).sqnr > 40


def test_an_output_of_few_integers_may_be_one_step_away():
    torch.manual_seed(0)
    x = torch.randn(4, 512)
    coarse = graph_of(Net(lambda s, x: fake(x, (0.5, 0))), x)
    expected = coarse(x)
    moved = torch.rand(expected.shape) < 0.05
    assert decibels(expected + moved * 0.5, expected) < 25
    assert 12 < agreement(expected + moved * 0.5, expected, coarse, (x,)) < 25
    with pytest.raises(LoweringError, match=r"less than 2\d\.\d dB"):
        agreement(expected + moved * 1.0, expected, coarse, (x,))
    with pytest.raises(LoweringError, match=r"less than 25\.0 dB"):
        agreement(expected + moved * 0.5, expected, coarse, (x,), 25.0)
    with pytest.raises(LoweringError, match=r"less than 12\.0 dB"):
        agreement(expected + 0.5, expected, coarse, (x,))


def test_a_program_may_keep_less_than_the_lowest_run_by_what_runs_differ():
    """As that of SmolLM2 does, of which runs keep 28 and 31 dB, and the program 23."""
    assert least_kept((27.9, 31.4, 31.4)) == pytest.approx(21.9)
    assert least_kept((27.9, 140.0, math.inf)) == pytest.approx(21.9)
    assert least_kept((math.inf, math.inf)) == least_kept((60.0, 61.0)) == 25.0


def test_runs_that_move_none_of_few_integers_excuse_nothing():
    """A run in which none moved keeps all but floats' rounding; its distance to the others let any program pass."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    small = graph_of(Net(lambda s, x: fake(x) * 2.0), x)
    expected = small(x) * (1 + 1e-6)
    with pytest.raises(LoweringError, match=r"less than 2[25]\.\d dB"):
        agreement(expected + torch.randn(4, 8) * 3, expected, small, (x,))
