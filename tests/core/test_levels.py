"""A kernel's output against its reference at a declared level: kept or not, and the reason in words."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import Deviation, Level

Q = torch.tensor([-128, -3, 0, 5, 127], dtype=torch.int8)


def test_r08_exact_takes_equal_integers_only():
    off = Q + torch.tensor([0, 0, 1, 0, 0], dtype=torch.int8)
    assert Level.EXACT.objection(Q, Q) is None
    assert Level.EXACT.objection(off, Q) == (
        "1 of 5 elements differ, by 1 steps at most, 82.1 dB; declared: exact".replace("82.1", f"{_db(off, Q):.1f}")
    )


def _db(found, expected):
    found, expected = found.double(), expected.double()
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


def test_r08_one_step_takes_one_step_and_refuses_two():
    one, two = Q.short() + torch.tensor([1, -1, 0, 0, -1]), Q.short() + torch.tensor([0, 0, 0, 2, 0])
    assert Level.ONE_STEP.objection(one.short(), Q.short()) is None
    assert "by 2 steps at most" in Level.ONE_STEP.objection(two.short(), Q.short())
    assert Level.ONE_STEP.objection(Q, Q) is None


@example(scale=1.1754943508222875e-06, zero_point=-128, q=2**16 - 2, off=1)
@given(st.floats(1e-6, 1e3), st.integers(-128, 127), st.integers(0, 2**16 - 1), st.sampled_from([0, 1, 2]))
def test_r08_steps_of_dequantized_integers_are_counted_past_their_rounding(scale, zero_point, q, off):
    found, expected = ((torch.tensor([float(v - zero_point)]) * torch.tensor(scale)) for v in (q + off, q))
    step = float(torch.tensor(scale))
    assert (Level.ONE_STEP.objection(found, expected, step=step) is None) == (off < 2)
    assert (Level.EXACT.objection(found, expected, step=step) is None) == (off == 0)


def test_r08_approximate_takes_a_floor_in_decibels():
    expected = torch.linspace(-1, 1, 100)
    found = expected + 0.01
    assert Level.APPROXIMATE.objection(found, expected, decibels=30) is None
    assert Level.APPROXIMATE.objection(found, expected, decibels=40).endswith("approximate, at least 40.0 dB")
    assert Level.APPROXIMATE.objection(torch.full((3,), math.nan), torch.ones(3)) is not None


def test_r08_nan_equals_nan_and_differs_from_everything_else():
    expected = torch.tensor([1.0, math.nan])
    assert Level.EXACT.objection(expected.clone(), expected) is None
    assert Level.EXACT.objection(torch.tensor([1.0, 2.0]), expected) is not None
    assert Level.ONE_STEP.objection(torch.tensor([math.nan, math.nan]), expected, step=10.0) is not None


def test_r08_other_shapes_and_dtypes_are_named():
    assert Level.EXACT.objection(Q[:2], Q) == "The output has shape (2,), the reference has (5,)."
    assert Level.EXACT.objection(Q.int(), Q) == "The output is torch.int32, the reference is torch.int8."


def test_r08_a_step_of_floats_needs_a_size():
    with pytest.raises(ConfigError, match="pass step=scale"):
        Level.ONE_STEP.objection(Q.float(), Q.float())
    with pytest.raises(ConfigError, match=r"The step is 0\.0"):
        Deviation.between(Q.float(), Q.float(), 0.0)
    with pytest.raises(ConfigError, match="has shape"):
        Deviation.between(Q.float(), Q.float()[:1])


def test_r08_deviations_name_the_tightest_level_they_keep():
    assert Deviation.between(Q, Q).level is Level.EXACT
    assert Deviation.between(Q.short() + 1, Q.short()).level is Level.ONE_STEP
    assert Deviation.between(Q.short() + 2, Q.short()).level is Level.APPROXIMATE
    assert Deviation.between(Q[:0], Q[:0]).share == 0.0
