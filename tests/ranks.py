"""Starts the ranks of a `torch.distributed` job for tests, each a process of its own."""

import os
import socket
import subprocess
import sys


def run_ranks(count, worker, *arguments, timeout):
    """Runs one process of a worker's file for each rank, and waits for all.

    Args:
        count: how many.
        worker: path of the file.
        arguments: of its command line.
        timeout: seconds to wait.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            [sys.executable, str(worker), *map(str, arguments)],
            env=common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    for process in started:
        process.communicate(timeout=timeout)
