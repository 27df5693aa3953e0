"""Latency of x86 engines beside each other: PyTorch in float, torchao, ours, ONNX Runtime, OpenVINO, the fastest.

    python benchmarks/x86.py resnet18 mlp --batch 1 8 --threads 2 --folder /tmp/x86
    python benchmarks/x86.py resnet18 --engines float quantplug --build    # only build the artefacts

Models are quantized once and artefacts built once for each batch into the folder (compiling takes minutes), and found
there again; packages are compiled for all threads of the machine and held to fewer by OMP_THREAD_LIMIT. Every engine
is loaded into a process of its own, and they take turns (A B A B ...), so load on the machine meets all of them alike.
Printed are the ratios to fp32 eager of the medians over the turns, with the quartiles of each round's ratio. Peak is
the rate of one large uint8 product through oneDNN. On one thread, `--clock cpu` counts the time that the process
computed, which other work on the machine changes little. Weights are random: SQNR compares engines, it says nothing
about accuracy.
"""

import argparse
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import stored
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from x86_engines import ENGINES, Engine, Run, build
from x86_models import case

from quantplug.lowering.turns import wait_until_asleep

CALLS = 3  # of an engine in a turn; one more before them is not timed and finds caches and threads
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# Memory that a process gives back after a call comes back as pages to be cleared, which is up to a third of the time at
# batch 8 and depends on what the process allocated before; every engine keeps its memory instead. Read when it starts.
KEEP = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}


@dataclass
class Row:
    """What one way of running one model gave.

    Attributes:
        way: the engine and its way.
        ratio: times faster than fp32 eager.
        low: lower quartile of the rounds' ratios.
        high: upper quartile.
        milliseconds: median.
        sqnr: of the output against the float model's, in dB.
        seconds: from the float model to the quantized one.
        megabytes: size of the artefact's file.
        peak: percent of the machine's integer peak.
    """

    way: str
    ratio: float
    low: float
    high: float
    milliseconds: float
    sqnr: float
    seconds: float
    megabytes: float
    peak: float


class Worker:
    """A process of its own for one engine: runtimes that share one disturb each other with threads that spin."""

    def __init__(self, engine: str, folder: Path, threads: int, chosen: argparse.Namespace) -> None:
        os.environ.update(KEEP, OMP_THREAD_LIMIT=str(threads))  # read when the process starts
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        args = (theirs, engine, folder, threads, chosen.compile, chosen.clock)
        self._process = context.Process(target=serve, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self.ways: list[tuple[str, float, Tensor]] = self._answer() or []
        if not self.ways:
            print(f"  {engine}: nothing loaded in {folder}")

    def turn(self, way: int) -> float:
        """Runs one way a few times and returns the median in seconds."""
        self._connection.send(way)
        return float(self._answer())

    def stop(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            return None


def serve(connection: Any, name: str, folder: Path, threads: int, compiles: bool, clock: str) -> None:
    """Loads an engine, answers with (way, megabytes, output) of each of its ways, then runs them as asked."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    inputs = torch.load(folder / "inputs.pt")
    engine = _engine(name)
    with torch.no_grad():
        loaded = list(engine.load(inputs, engine.quantized(folder.parent), folder / name, compiles))
        sizes = [path.stat().st_size / 1e6 if path else 0.0 for _, _, path in loaded]
        connection.send([(way, size, _first(run(*inputs))) for (way, run, _), size in zip(loaded, sizes, strict=True)])
        while True:
            try:
                run = loaded[connection.recv()][1]
            except EOFError:
                return
            run(*inputs)
            found = statistics.median(_timed(run, inputs, clock) for _ in range(CALLS))
            wait_until_asleep()  # threads that spin would take the processor from the next engine
            connection.send(found)


def _engine(name: str) -> Engine:
    return next(each for each in ENGINES if each.name == name)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, list | tuple) else output
    return found.clone()


def _timed(run: Run, inputs: tuple[Any, ...], clock: str) -> float:
    now = CLOCKS[clock]
    started = now()
    run(*inputs)
    return now() - started


def sqnr(reference: Tensor, found: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    return float(10 * torch.log10(reference.pow(2).sum() / (reference - found).pow(2).sum().clamp_min(1e-30)))


def peak(clock: str, size: int = 2048) -> float:
    """Returns multiply-accumulates a second of one uint8 x int8 -> uint8 product of oneDNN."""
    onednn = torch.ops.onednn
    x = torch.randint(0, 256, (size, size), dtype=torch.uint8)
    packed = onednn.qlinear_prepack(torch.randint(-127, 128, (size, size), dtype=torch.int8), None)
    scales, zeros = torch.full((size,), 0.01), torch.zeros(size, dtype=torch.int32)
    args = (x, 0.02, 128, packed, scales, zeros, None, 50.0, 128, torch.uint8, "none", [0.0], "")
    taken = statistics.median(_timed(onednn.qlinear_pointwise, args, clock) for _ in range(9))
    return float(size**3 / taken)


def rounds(workers: list[Worker], seconds: float) -> dict[str, list[float]]:
    """Lets all ways of all engines take turns until the time is over; returns seconds of each turn by way."""
    times: dict[str, list[float]] = {way: [] for worker in workers for way, _, _ in worker.ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for worker in workers:
            for number, (way, _, _) in enumerate(worker.ways):
                times[way].append(worker.turn(number))
    return times


def measure(workers: dict[str, Worker], folder: Path, macs: int, chosen: argparse.Namespace) -> list[Row]:
    """Times everything that was loaded; the first is what the others are compared with."""
    limit, times = peak(chosen.clock), rounds(list(workers.values()), chosen.seconds)
    first, reference = next(iter(times.values())), next(iter(workers.values())).ways[0][2]
    rows = []
    for engine, worker in workers.items():
        spent = float((_engine(engine).quantized(folder.parent) / "seconds").read_text())
        for way, megabytes, output in worker.ways:
            ratios = sorted(a / b for a, b in zip(first, times[way], strict=True))
            quarter, median = len(ratios) // 4, statistics.median(times[way])
            ratio, bounds = statistics.median(first) / median, (ratios[quarter], ratios[-quarter - 1])
            noise, share = sqnr(reference, output), 100 * macs / median / limit
            rows.append(Row(way, ratio, *bounds, median * 1e3, noise, spent, megabytes, share))
    return rows


def table(title: str, rows: list[Row]) -> Table:
    """Returns a printable table."""
    shown = Table(title=title, title_justify="left")
    for heading in ("engine", f"x {rows[0].way}", "quartiles", "ms", "SQNR dB", "quantize s", "MB", "% of peak"):
        shown.add_column(heading, justify="left" if heading == "engine" else "right")
    for row in rows:
        shown.add_row(
            row.way,
            f"{row.ratio:.2f}",
            f"{row.low:.2f} - {row.high:.2f}",
            f"{row.milliseconds:.2f}",
            f"{row.sqnr:.1f}" if row.sqnr < 100 else "",
            f"{row.seconds:.1f}" if row.seconds else "",
            f"{row.megabytes:.1f}" if row.megabytes else "",
            f"{row.peak:.0f}",
        )
    return shown


def rounded(row: Row) -> stored.Record:
    """Returns a row as a file of results has it."""
    numbers = {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(row).items()}
    return {"engine": numbers.pop("way"), **numbers}


def prepare(name: str, batch: int, folder: Path, engines: list[Engine]) -> int:
    """Builds what is missing for one model and batch; returns its multiply-accumulates."""
    given = case(name, batch)
    for engine in engines:
        started = time.perf_counter()
        try:
            build(engine, given, engine.quantized(folder.parent), folder / engine.name)
        except Exception:
            print(f"  {engine.name} on {name}: not built\n{traceback.format_exc(limit=-2)}")
        print(f"  {engine.name} of {name}: {time.perf_counter() - started:.0f} s", flush=True)
    torch.save(given.inputs, folder / "inputs.pt")
    return given.macs()


def compare(name: str, batch: int, chosen: argparse.Namespace) -> None:
    """Builds what is missing for one model and batch, and prints one table."""
    threads = torch.get_num_threads()
    folder = chosen.folder / name / f"batch{batch}"
    wanted = [e for e in ENGINES if e.is_there and e.name in chosen.engines and e.name not in chosen.without]
    torch.set_num_threads(multiprocessing.cpu_count())  # which packages are compiled for
    macs = prepare(name, batch, folder, wanted)
    torch.set_num_threads(threads)
    if chosen.build:
        return
    workers = {engine.name: Worker(engine.name, folder, threads, chosen) for engine in wanted}
    rows = measure({name: each for name, each in workers.items() if each.ways}, folder, macs, chosen)
    for worker in workers.values():
        worker.stop()
    title = f"{name}, batch {batch}, {threads} threads, {chosen.clock} time, {torch.backends.cpu.get_cpu_capability()}"
    Console(width=120).print(table(title, rows))
    of = {"model": name, "batch": batch, "threads": threads, "clock": chosen.clock}
    stored.store(chosen.store, [{**of, **rounded(row)} for row in rows], (*of, "engine"))


def main() -> None:
    """Reads the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="+", help="mlp, residual_mlp, encoder, bert, or a classifier of torchvision.models"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--seconds", type=float, default=15, help="of timing for each model")
    parser.add_argument("--folder", type=Path, default=Path("out/x86"), help="where artefacts are kept")
    parser.add_argument("--engines", nargs="+", default=[engine.name for engine in ENGINES])
    parser.add_argument("--without", nargs="+", default=[], help="engines to leave out")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which compiles when it is loaded")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--build", action="store_true", help="only build the artefacts")
    stored.add_option(parser)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    for threads in chosen.threads:
        torch.set_num_threads(threads)
        for name in chosen.models:
            for batch in chosen.batch:
                compare(name, batch, chosen)


if __name__ == "__main__":
    main()
