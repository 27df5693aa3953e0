"""What every test starts from: the same random numbers, and threads that leave the machine to others."""

import os

import pytest
import torch


def pytest_collectstart():
    """Models that a module of tests builds as it is imported have the same weights whatever is collected beside it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _threads():
    # Where tests run side by side (`pytest -n 2`), each process has one core.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
