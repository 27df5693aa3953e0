"""Compares our XNNPACK backend with ExecuTorch's own quantizer and partitioner, in one process.

Prints, for each model and both flows: kernel calls inside the delegates (int8, f32, converts), delegates,
portable operators, float islands of the q/dq graph; signal to noise of the program against the q/dq graph, of
that graph in float32 against itself in float64 (more no program can keep of it), and of the q/dq graph against float
(all seeds of weights and inputs together); size of the `.pte`, seconds of
lowering, and medians of the latency (one thread: processor time) with the ratio theirs / ours, interleaved A B A B;
behind them the signal that ends a process which releases the program, if one does. Where their program does not load,
their q/dq graph is lowered by us as well, and that is what ours is compared with.
Below the table stand the float kernels of our programs by kind.

    python benchmarks/xnnpack.py                             # the table of the documentation
    python benchmarks/xnnpack.py mobilenet_v3_small LSTM     # some of it, or any model of torchvision
    python benchmarks/xnnpack.py --size 224 --rounds 30 --threads 1 2 resnet18
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import stored
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as torchao_convert
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare
from xnnpack_models import TABLE, Inputs, Sample, make

import quantplug
from quantplug.lowering.xnnpack import KernelCounts, lower
from quantplug.lowering.xnnpack.placement import count
from quantplug.lowering.xnnpack.runtime import Method, quiet
from quantplug.lowering.xnnpack.serializer.records import recorded_kernel_calls

# A program may corrupt memory when it is released (ExecuTorch's of a vision transformer does): none is, so that it
# can be measured all the same.
KEPT: list[Method] = []
# Seeds of the inputs that both flows are calibrated with, and of those that they are compared on.
CALIBRATION, TESTS = range(8), range(50, 53)


@dataclass
class Outcome:
    """What one flow made of one model."""

    buffer: bytes
    counts: KernelCounts
    islands: int
    seconds: float
    to_reference: float
    to_itself: float
    to_float: float = float("nan")
    floats: dict[str, int] = field(default_factory=dict)
    ends: str = ""


def reference(model: nn.Module, sample: Sample, ours: bool, dynamic: bool) -> fx.GraphModule:
    """Returns the calibrated q/dq graph of one flow."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer as TheirQuantizer,
    )
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import get_symmetric_quantization_config

    graph = torch.export.export(model, sample(0)).module()
    if ours:
        quantizer = quantplug.get_quantizer("xnnpack").set_global("int8_dynamic" if dynamic else "int8")
        prepared = quantplug.prepare_pt2e(graph, quantizer)
    else:
        config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
        prepared = torchao_prepare(graph, TheirQuantizer().set_global(config))
    with torch.no_grad():
        for seed in CALIBRATION:
            prepared(*sample(seed))
    return quantplug.convert_pt2e(prepared) if ours else torchao_convert(prepared)


def lowered_by_them(graph: fx.GraphModule, inputs: Inputs, dynamic: bool) -> tuple[bytes, KernelCounts]:
    """Lowers with ExecuTorch's stock partitioners."""
    import executorch.kernels.quantized  # noqa: F401
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import to_edge_transform_and_lower

    stock = [XnnpackDynamicallyQuantizedPartitioner()] if dynamic else []
    with quiet(), torch.no_grad(), recorded_kernel_calls() as calls:
        exported = torch.export.export(graph, inputs)
        edge = to_edge_transform_and_lower(exported, partitioner=[*stock, XnnpackPartitioner()])
        buffer = edge.to_executorch().buffer
    return buffer, count(edge.exported_program(), calls)


class Noise:
    """Sums the signal and the noise of many results."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, found: Any, expected: Any) -> "Noise":
        """Adds all tensors of a result; each result counts alike, whatever its size."""
        pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
        values = [(a.double(), b.double()) for a, b in pairs if isinstance(b, Tensor)]
        power = sum(float(b.square().sum()) for _, b in values)
        self.signal += 1.0
        self.noise += sum(float((a - b).square().sum()) for a, b in values) / power
        return self

    @property
    def decibels(self) -> float:
        """The signal-to-noise ratio."""
        ratio = torch.tensor(self.signal / self.noise) if self.noise else torch.tensor(float("inf"))
        return float(10 * ratio.log10())


class Exact(fx.Interpreter):
    """Runs a q/dq graph in float64: integers of static scales come from sums that nearly nothing is rounded in.

    Only what float32 tensors an operator reads are widened, so that a dequantize node, whose result has a dtype of its
    own, is computed here.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on float64."""
        name = getattr(getattr(target, "_schema", None), "name", "")
        if name == "quantized_decomposed::dequantize_per_tensor":
            return (args[0].double() - args[2]) * args[1]
        if name == "quantized_decomposed::quantize_per_tensor":
            return (torch.round(args[0].double() / args[1]) + args[2]).clamp(args[3], args[4]).to(args[5])
        if name == "quantized_decomposed::dequantize_per_channel":
            integers, scales, zeros, axis = args[:4]
            shape = [-1 if i == axis else 1 for i in range(integers.dim())]
            return (integers.double() - (0 if zeros is None else zeros.reshape(shape))) * scales.double().reshape(shape)
        if name.startswith("quantized_decomposed::choose_qparams"):
            return super().call_function(target, (args[0].float(), *args[1:]), kwargs)
        wide = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, args)
        kept = {name: value for name, value in kwargs.items() if value is not torch.float32}
        return super().call_function(target, wide, kept)


def outcome(graph: fx.GraphModule, sample: Sample, ours: bool, dynamic: bool) -> Outcome:
    """Lowers a q/dq graph with one flow and compares the program with it."""
    floats: dict[str, int] = {}
    start = time.perf_counter()
    if ours:
        program = lower(graph, sample(0))
        buffer, counts = program.buffer, program.counts
        floats = Counter(op.target.removesuffix(".default") for op in program.ops if op.placement != "int8")
    else:
        buffer, counts = lowered_by_them(graph, sample(0), dynamic)
    seconds = time.perf_counter() - start
    ends = how_its_process_ends(buffer, sample(0))
    method, exact, noise, own = Method(buffer), Exact(graph), Noise(), Noise()
    KEPT.append(method)
    for seed in TESTS:
        with torch.no_grad():
            expected = graph(*sample(seed))
            noise.add(method(list(sample(seed))), expected)
            own.add(expected, exact.run(*sample(seed)))
    islands = len(quantplug.explain(graph).islands)
    return Outcome(buffer, counts, islands, seconds, noise.decibels, own.decibels, floats=floats, ends=ends)


def how_its_process_ends(buffer: bytes, inputs: Inputs) -> str:
    """Runs a program in a process of its own and lets it go; returns how that ended, "" if well.

    Raises:
        RuntimeError: the program does not load or run. Memory may be corrupt where that was tried.
    """
    child = multiprocessing.get_context("fork").Process(target=load_and_run, args=(buffer, inputs))
    child.start()
    child.join()
    if child.exitcode is None or child.exitcode > 0:
        raise RuntimeError("does not load or run")
    return f"signal {-child.exitcode}" if child.exitcode else ""


def load_and_run(buffer: bytes, inputs: Inputs) -> None:
    """Loads a program, runs it twice and lets it go."""
    method = Method(buffer)
    for _ in range(2):
        method(list(inputs))


def to_float(models: Iterable[tuple[nn.Module, Sample]], ours: bool, dynamic: bool) -> float:
    """Returns decibels of one flow's q/dq graphs against float models, over all weights and inputs."""
    noise = Noise()
    for model, sample in models:
        graph = reference(model, sample, ours, dynamic)
        with torch.no_grad():
            for seed in TESTS:
                noise.add(graph(*sample(seed)), model(*sample(seed)))
    return noise.decibels


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Returns both medians in milliseconds of runs that take turns, so that other load strikes both."""
    times: tuple[list[float], list[float]] = ([], [])
    for function in (first, second) * 3:
        function()
    for _ in range(rounds):
        for function, kept in zip((first, second), times, strict=True):
            start = clock()
            function()
            kept.append((clock() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def latencies(theirs: Outcome, ours: Outcome, inputs: Inputs, threads: int, rounds: int) -> tuple[float, float]:
    """Returns the milliseconds of both programs on a number of threads.

    Both run as bare methods: the checks of our own program's inputs are no part of the kernels' time. On one thread
    processor time is counted, which other work on the machine changes little.
    """
    slow, fast = Method(theirs.buffer, threads), Method(ours.buffer, threads)
    KEPT.extend((slow, fast))
    flat = list(inputs)
    clock = time.process_time if threads == 1 else time.perf_counter
    return interleaved(lambda: slow(flat), lambda: fast(flat), rounds, clock)


def attempt(name: str, options: argparse.Namespace, ours: bool, lowered_by_us: bool) -> Outcome | str:
    """Returns the outcome of a flow, or what it failed with; their q/dq graph can be lowered by us."""
    dynamic = name.endswith("_dynamic")
    models = [make(name, options.size, seed) for seed in range(options.seeds)]
    model, sample = models[0]
    try:
        graph = reference(model, sample, ours, dynamic)
        found = outcome(graph, sample, lowered_by_us, dynamic)
        found.to_float = to_float(models, ours, dynamic)
    except Exception as error:  # a peer may fail in any way; the table says so
        traceback.print_exc(limit=3, file=sys.stderr)
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:60]
    return found


def row(name: str, flow: str, found: Outcome | str, times: list[str]) -> tuple[str, ...]:
    """Returns one line of the table."""
    if isinstance(found, str):
        return (name, flow, found)
    c = found.counts
    counts = (c.int8, c.f32, c.converts, c.delegates, c.portable, found.islands)
    noises = (f"{value:.1f}" for value in (found.to_reference, found.to_itself, found.to_float))
    cost = (f"{len(found.buffer) / 1e6:.2f}", f"{found.seconds:.0f}", " ".join([*times, found.ends]))
    return (name, flow, *map(str, counts), *noises, *cost)


def paired(name: str, theirs: Outcome | str, ours: Outcome | str, times: list[float]) -> stored.Record:
    """Returns both flows side by side, as a file of results has them; where one failed, what it said."""
    if isinstance(theirs, str) or isinstance(ours, str):
        return {"model": name, "fails": theirs if isinstance(theirs, str) else ours}

    def both(count: Callable[[Outcome], object]) -> str:
        return f"{count(theirs)} / {count(ours)}"

    return {
        "model": name,
        "int8 kernels": both(lambda each: each.counts.int8),
        "float kernels": both(lambda each: each.counts.f32),
        "converts": both(lambda each: each.counts.converts),
        "delegates": both(lambda each: each.counts.delegates),
        "portable": both(lambda each: each.counts.portable),
        "dB from q/dq": both(lambda each: f"{each.to_reference:.1f}"),
        "dB from float": both(lambda each: f"{each.to_float:.1f}"),
        "faster": " ".join(f"{ratio:.2f}" if not i else f"({ratio:.2f})" for i, ratio in enumerate(times)),
    }


def compared(name: str, options: argparse.Namespace, ratios: list[float]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of one model, keeps its ratios of latencies, and stores both flows."""
    theirs, ours = (attempt(name, options, ours=own, lowered_by_us=own) for own in (False, True))
    flow = "theirs"
    if isinstance(theirs, str):
        yield row(name, flow, theirs, [])
        flow = "theirs, lowered by us"
        theirs = attempt(name, options, ours=False, lowered_by_us=True)
    slow, fast, before = list[str](), list[str](), len(ratios)
    if isinstance(theirs, Outcome) and isinstance(ours, Outcome) and options.rounds:
        inputs = make(name, options.size, 0)[1](0)
        for threads in options.threads:
            times = latencies(theirs, ours, inputs, threads, options.rounds)
            ratios.append(times[0] / times[1])
            slow.append(f"{times[0]:.2f}")
            fast.append(f"{times[1]:.2f} ({ratios[-1]:.2f}x)")
    yield row(name, flow, theirs, slow)
    yield row(name, "ours", ours, fast)
    stored.store(options.store, [paired(name, theirs, ours, ratios[before:])], ("model",))
    if isinstance(ours, Outcome):
        print(name, "float:", ", ".join(f"{kind} {count}" for kind, count in ours.floats.items()) or "none", flush=True)


def main() -> None:
    """Runs the comparison for the models on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--size", type=int, default=96, help="height and width of images")
    parser.add_argument("--rounds", type=int, default=20, help="of the latencies; 0 for none")
    parser.add_argument("--seeds", type=int, default=3, help="of random weights, for the comparison with float")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    stored.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["model", "flow", "int8", "f32", "conv", "deleg", "portable", "islands"]
    columns += ["dB(q/dq)", "of itself", "dB(float)", "MB"]
    table = Table(*columns, "s", "ms", title="XNNPACK: ExecuTorch's flow and ours")
    ratios: list[float] = []
    for name in options.models or TABLE:
        for line in compared(name, options, ratios):
            table.add_row(*line)
    console = Console(width=140)
    console.print(table)
    if ratios:
        console.print(f"theirs / ours, geometric mean of the latencies: {statistics.geometric_mean(ratios):.2f}")
    sys.stdout.flush()
    os._exit(0)  # without releasing any program


if __name__ == "__main__":
    main()
