"""What every test starts from: the same random numbers, and threads that leave the machine to others."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _two_threads():
    torch.set_num_threads(2)
