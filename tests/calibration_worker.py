"""One process of the distributed and kill tests: python calibration_worker.py MODE ...

rank SCENARIO FOLDER     one rank under torch.distributed (RANK, WORLD_SIZE and MASTER_* are set)
kills COUNT SEED FOLDER  COUNT forked children killed at random moments and resumed
"""

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from calibration_models import batches, prepared, qparams

from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.observers import DataObserver


def rank_main(scenario, folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = prepared("minmax" if scenario == "minmax" else "mse")
    mine = batches(9)[rank::size]  # shards of unequal lengths

    def shard():
        for i, batch in enumerate(mine):
            if rank == 1 and i == 1 and scenario == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and i == 1 and scenario == "spoiled":
                yield batch / 0
            if rank == 1 and i == 1 and scenario == "slow":
                time.sleep(8)
            yield batch

    started = time.perf_counter()
    timeout = 2.0 if scenario == "slow" else 30.0
    found: dict[str, Any] = {"rank": rank}
    try:
        result = calibrate(model, shard(), checkpoint=folder / "run", checkpoint_every=1, timeout=timeout)
        found |= {"batches": result.batches, "processes": result.processes, "qparams": qparams(model)}
    except Exception as error:
        found |= {"error": f"{type(error).__name__}: {error}", "clean": not model.activation_post_process_0.has_data}
    found["seconds"] = time.perf_counter() - started
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a process group with a dead member cannot be shut down in order


def killed_child(model, data, path):
    """Runs calibration in a forked child that the parent may kill at any moment."""
    child = os.fork()
    if child == 0:
        try:
            calibrate(model, data, checkpoint=path, checkpoint_every=1)
        finally:
            os._exit(0)
    return child


def kills_main(count, seed, folder):
    torch.set_num_threads(1)
    chance, data, model = random.Random(seed), batches(12), prepared("mse")
    whole = prepared("mse")
    started = time.perf_counter()
    calibrate(whole, data, checkpoint=folder / "whole", checkpoint_every=1)
    length, expected, interrupted = time.perf_counter() - started, qparams(whole), 0
    blank = {n: m.seen for n, m in model.named_modules() if isinstance(m, DataObserver)}
    for trial in range(count):
        path = folder / f"trial{trial}"
        while True:
            child = killed_child(model, data, path)
            time.sleep(chance.random() * 1.2 * length)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            interrupted += path.exists()
            if chance.random() < 0.7:
                break
        result = calibrate(model, data, checkpoint=path, checkpoint_every=1)
        assert result.batches == 12, (trial, result)
        assert qparams(model) == expected, trial
        assert not path.exists()
        for name, value in blank.items():
            model.get_submodule(name).seen = value
    print(json.dumps({"trials": count, "resumed": interrupted}))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_main(sys.argv[2], Path(sys.argv[3]))
    else:
        kills_main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
