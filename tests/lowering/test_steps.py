"""Steps of a lowering: run in order, and checked where that is asked for."""

from typing import Any

import pytest

from quantplug.core.errors import LoweringError
from quantplug.lowering.steps import Step, run


def is_sorted(numbers):
    return None if numbers == sorted(numbers) else f"{numbers} is not sorted"


def is_whole(numbers):
    return None if all(isinstance(number, int) for number in numbers) else f"{numbers} has fractions"


SORT: Step[Any] = Step("sort", list.sort, leaves=(is_sorted,))
HALVE: Step[Any] = Step("halve the last", lambda numbers: numbers.append(numbers.pop() / 2), needs=(is_whole,))


def test_steps_run_in_order_and_unchecked_ones_are_trusted():
    numbers = [3, 1, 2]
    run((SORT, HALVE, HALVE), numbers)
    assert numbers == [1, 2, 0.75]


def test_a_step_that_does_not_leave_what_it_says_is_named():
    faulty: Step[Any] = Step("sort", list.reverse, leaves=(is_sorted,))
    with pytest.raises(LoweringError, match=r"Step 'sort' did not leave what it says: \[2, 1, 3\] is not sorted\."):
        run((faulty,), [3, 1, 2], checked=True)


def test_a_step_that_needs_what_does_not_hold_is_named_before_it_runs():
    numbers = [3, 1, 2]
    with pytest.raises(LoweringError, match=r"Step 'halve the last' needs what does not hold before it: .* fractions"):
        run((SORT, HALVE, HALVE), numbers, checked=True)
    assert numbers == [1, 2, 1.5]
