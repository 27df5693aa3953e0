"""One process of the tests of GPTQ on many processes and through kill -9: python gptq_worker.py MODE FOLDER [SCENARIO].

rank    one rank under torch.distributed (RANK, WORLD_SIZE and MASTER_* are set)
slow    rounds with a checkpoint, and takes its time for each weight
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quantplug
from quantplug.algorithms.gptq import GPTQ


class Net(nn.Module):
    """A weight of several pieces, a grouped one, one of more groups than a piece has, and one that is read twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.depthwise = nn.Conv2d(4, 260, 1), nn.Conv2d(260, 260, 3, padding=1, groups=260)
        self.grouped = nn.Conv2d(260, 32, 3, groups=4)
        self.wide, self.twice = nn.Linear(32, 520), nn.Linear(520, 520)

    def forward(self, x):
        x = self.grouped(torch.relu(self.depthwise(torch.relu(self.first(x))))).mean((2, 3))
        x = self.twice(torch.relu(self.wide(x)))
        return self.twice(torch.relu_(x)[:, :])


def data(count=5):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 4, 6, 6, generator=generator) for _ in range(count)]


def prepared():
    exported = torch.export.export(Net().eval(), (data(1)[0],)).module()
    model = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack").set_global("int8"))
    quantplug.calibrate(model, data(1) if dist.is_initialized() else data(1) * 2, progress=False)
    return model


def bits(model):
    """Returns the parameters of a model, and what convert makes of them."""
    held = {**dict(model.named_parameters()), **quantplug.convert_pt2e(model).state_dict()}
    return {name: value.detach().clone() for name, value in held.items()}


def rank_main(folder, scenario):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = prepared()
    before = bits(model)

    def shard():
        for index, batch in enumerate(data()[rank::size]):
            if rank == 1 and index == 1 and scenario == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            spoiled = rank == 1 and index == 1 and scenario == "spoiled"
            yield batch[:, :2] if spoiled else batch * (float("nan") if scenario == "nan" and rank == 1 else 1)

    found: dict[str, Any] = {"error": ""}
    try:
        GPTQ(checkpoint=folder / "run").apply(model, shard())
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["clean"] = all(torch.equal(value, before[name]) for name, value in bits(model).items())
    torch.save(found | {"bits": bits(model)}, folder / f"rank{rank}.pt")
    os._exit(0)  # a process group with a dead member cannot be shut down in order


def slow_main(folder):
    rounded = GPTQ._round

    def slowly(*given):
        time.sleep(0.3)
        return rounded(*given)

    GPTQ._round = slowly  # type: ignore[method-assign]
    GPTQ(checkpoint=folder / "run").apply(prepared(), data())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "rank":
        rank_main(Path(sys.argv[2]), sys.argv[3])
    else:
        slow_main(Path(sys.argv[2]))
