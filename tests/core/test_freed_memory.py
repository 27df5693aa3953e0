"""Freed tensors: a process gives them back to the system while algorithms run."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from quantplug.core.peers.glibc import freed_at_once

def resident():
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("RssAnon"))
    return int(line.split()[1]) // 1024

torch.ones(2**22)  # freed: from now on glibc keeps pieces of up to 16 MB
with freed_at_once() if sys.argv[1] == "at once" else nullcontext():
    before = resident()
    pairs = [(torch.ones(2**20), torch.ones(2**12)) for _ in range(25)]  # 4 MB each, and what lies between them
    pairs = [small for _, small in pairs]
    print(resident() - before)
"""


def left(how):
    """Returns how many of 100 MB of freed tensors are still this process's."""
    run = [sys.executable, "-c", PROGRAM, how]
    found = subprocess.run(run, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by themselves")
def test_freed_tensors_go_back_to_the_system_at_once():
    assert left("at once") < 20
    assert left("as glibc does") > 80  # or there is nothing to do any more
