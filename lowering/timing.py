"""How long calls and the operators of a graph take, with how far the figure can be trusted.

Before: something that runs. After: quartiles of its time: half of all calls lie between the lower and the upper bound.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# Calls that are timed: so many at least, and more as long as they take less than so many seconds together.
_CALLS, _SECONDS = (21, 201), 0.3


@dataclass(frozen=True)
class Taken:
    """How long something takes, in microseconds a call.

    Attributes:
        low: a lower bound.
        middle: the median.
        high: an upper bound.
    """

    low: float
    middle: float
    high: float


def timed(run: Callable[[], Any]) -> Taken:
    """Returns the quartiles of a call's time, of calls one behind the other."""
    found: list[float] = []
    for _ in range(3):
        run()
    began = time.perf_counter()
    while len(found) < _CALLS[0] or (len(found) < _CALLS[1] and time.perf_counter() - began < _SECONDS):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e6)
    low, middle, high = statistics.quantiles(found, n=4)
    return Taken(low, middle, high)


@dataclass(frozen=True)
class KernelTime:
    """One call of a program.

    Attributes:
        kernel: what is called, such as "onednn.qconv_pointwise.default".
        operators: names of the q/dq graph's operators that it carries out; none for what comes between them.
        taken: how long it takes.
    """

    kernel: str
    operators: frozenset[str]
    taken: Taken


def total(times: Iterable[Taken]) -> Taken:
    """Returns the times of calls that follow one another; the bounds are those of all at their bounds."""
    found = list(times)
    return Taken(sum(t.low for t in found), sum(t.middle for t in found), sum(t.high for t in found))


class TimedRun(fx.Interpreter):
    """Runs a lowered graph and notes how long each operator takes.

    Attributes:
        seconds: by node, one number a run.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, list[float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; operands are fetched before the clock runs."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        start = time.perf_counter()
        value = target(*args, **kwargs)
        self.seconds.setdefault(n, []).append(time.perf_counter() - start)
        return value


def node_times(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Taken]:
    """Returns the quartiles of each operator's time of a graph that runs by itself, in microseconds a call.

    Args:
        module: the graph of kernels.
        inputs: flat.
    """
    run = TimedRun(module)
    with torch.inference_mode():
        for _ in range(3):
            run.run(*inputs, enable_io_processing=False)
        run.seconds.clear()
        began, calls = time.perf_counter(), 0
        while calls < _CALLS[0] or (calls < _CALLS[1] and time.perf_counter() - began < 3 * _SECONDS):
            run.run(*inputs, enable_io_processing=False)
            calls += 1
    quartiles = {node: statistics.quantiles(found, n=4) for node, found in run.seconds.items()}
    return {node: Taken(*(1e6 * each for each in found)) for node, found in quartiles.items()}
