"""A model with a culprit, data and a metric, of a module that other processes can import."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from quantplug.core.specs.levels import sqnr

WIDTH = 16


class Block(nn.Module):
    """A layer behind a norm with a channel of numbers that are much larger than the others."""

    def __init__(self, outlier):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.norm.weight[0] *= outlier
            self.layer.weight[:, 0] /= outlier

    def forward(self, x):
        return torch.tanh(self.layer(self.norm(x)))


class Planted(nn.Module):
    """Blocks of which one is the culprit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(outlier) for outlier in (1.0, 300.0, 1.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batches(count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, WIDTH, generator=generator) for _ in range(count)]


MODEL, DATA = Planted().eval(), batches()
FRESH = batches(4, seed=5)


class Agreement:
    """A metric of a user's: decibels on fresh data; counts its calls and breaks off after some."""

    def __init__(self, breaks_after=1000):
        self.calls, self.breaks_after = 0, breaks_after

    def __call__(self, run):
        if self.calls == self.breaks_after:
            raise KeyboardInterrupt
        self.calls += 1
        with torch.no_grad():
            found = [run(x) for x in FRESH]
            found = [value[0] if isinstance(value, (tuple, list)) else value for value in found]
            return min(60.0, sqnr(torch.cat(found), torch.cat([MODEL(x) for x in FRESH])))


class Deadly(Agreement):
    """A metric whose process is killed, as one that runs out of memory is, anywhere but here."""

    def __init__(self):
        super().__init__()
        self.home = os.getpid()

    def __call__(self, run):
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(run)


class Endless(Agreement):
    """A metric that leaves a sign and does not end, anywhere but in the process that made it."""

    def __init__(self):
        super().__init__()
        self.home = os.getpid()

    def __call__(self, run):
        if os.getpid() == self.home:
            return super().__call__(run)
        (Path(sys.argv[0]).parent / "endless").touch()
        time.sleep(1000)
        return 0.0
