"""What the errors of others become in one sentence of ours."""

import pytest
import torch
from torch import nn

from quantplug.core.errors import first_line


def _missing_weights():
    try:
        nn.Linear(2, 2).load_state_dict({"bias": torch.zeros(2)})
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("One thing.\nAnother."), "ValueError: One thing"),
        (ValueError("It fails:\n\n  the reason is this.\nA trace."), "ValueError: It fails: the reason is this"),
        (ValueError("It fails:"), "ValueError: It fails"),
        (ValueError(" \n"), "ValueError"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_line_that_announces_the_next_is_told_with_it(error, said):
    assert first_line(error) == said


def test_an_error_of_torch_that_begins_with_a_title_says_its_reason():
    told = first_line(_missing_weights())
    assert told == 'RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: "weight"'
