"""What every test starts from: the same random numbers, and threads that leave the machine to others."""

import os
import random
import sys
from collections import defaultdict

import pytest
import torch

# ONNX Runtime has no build for Python 3.10 any more.
_NEED_IT = ["lowering/test_engines.py", "lowering/test_onnx.py", "lowering/test_tensorrt.py"]
collect_ignore = _NEED_IT if sys.version_info < (3, 11) else []


def pytest_collectstart():
    """Models that a module of tests builds as it is imported have the same weights whatever is collected beside it."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `few(n)` the default run has n cases, the same ones each time; the others are slow."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        (number,) = found[0].get_closest_marker("few").args
        kept = random.Random(name).sample(range(len(found)), min(number, len(found)))
        for index in set(range(len(found))) - set(kept):
            found[index].add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _threads():
    # Where tests run side by side (`pytest -n 2`), each process has one core, and so has what it starts.
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(2 if alone else 1)
    if not alone:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
