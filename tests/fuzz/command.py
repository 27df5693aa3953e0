"""The command: `python tests/fuzz --backend x86 --models 1000 --seed 7`."""

import argparse
import collections
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

CONFIGS = {
    "x86": ("int8", "int8_dynamic", "int8_weight_only"),
    "xnnpack": ("int8", "int8_per_tensor", "int8_dynamic", "int8_weight_only", "int4_dynamic", "int4_weight_only"),
    "openvino": ("int8", "int8_weight_only"),
    "cortex_m": ("int8",),
}
FIXED = ("cortex_m",)  # backends whose programs have one size
_PIECE = 25
_SECONDS = 180.0


def main(arguments: list[str] | None = None) -> int:
    """Runs the fuzzer; returns the number of suspects, at most 99."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description="Random models against their own graphs.")
    parser.add_argument("--backend", default="x86", choices=tuple(CONFIGS))
    parser.add_argument("--models", type=int, default=100, help="how many models")
    parser.add_argument("--seed", type=int, default=7, help="seed of the first model")
    parser.add_argument("--only", type=int, help="run one seed here, and tell where its numbers part")
    parser.add_argument("--configs", help="configs of the backend, with commas")
    parser.add_argument("--without", default="", help="operators that are not drawn, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--shrink", type=Path, help="folder for a test of each suspect, made as small as it gets")
    parser.add_argument("--log", type=Path, help="file for one line of JSON a model")
    parser.add_argument("--worker", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        return _work(options)
    if options.only is not None:
        return _one(options)
    return _many(options)


def _drawn(options: argparse.Namespace, seed: int) -> Any:
    from fuzz.generate import generated

    configs = tuple(options.configs.split(",")) if options.configs else CONFIGS[options.backend]
    model = generated(seed, configs, frozenset(options.without.split(",")) - {""})
    return replace(model, is_dynamic=False) if options.backend in FIXED else model


def _work(options: argparse.Namespace) -> int:
    """Judges some seeds, one line each before and after, so that whoever kills this process is known."""
    from fuzz.check import judged

    for seed in options.worker:
        print(f"begin {seed}", flush=True)
        if os.environ.get("FUZZ_DIES_AT") == str(seed):
            os._exit(70)  # as a runtime does that aborts
        verdict = judged(_drawn(options, seed), options.backend, saves=seed % 4 == 0)
        print("end " + json.dumps({**verdict.fields(), "kind": verdict.kind}), flush=True)
    return 0


def _one(options: argparse.Namespace) -> int:
    from fuzz.check import judged, parting
    from fuzz.shrink import shrunk, written

    model = _drawn(options, options.only)
    verdict = judged(model, options.backend)
    if verdict.outcome == "suspect" and options.shrink:
        model = shrunk(model, options.backend)
        print(written(model, options.backend, verdict.told, options.shrink))
    print(model.source())
    print(model.inputs, f"config={model.config}, strict={model.strict}, open batch={model.is_dynamic}")
    try:
        print("\n".join(parting(model, options.backend)))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    print(judged(model, options.backend))
    return int(verdict.outcome == "suspect")


def _many(options: argparse.Namespace) -> int:
    began, found = time.time(), []
    log = options.log.open("w") if options.log else None
    for result in _verdicts(options):
        found.append(result)
        if log:
            log.write(json.dumps(result) + "\n")
            log.flush()
        if result["outcome"] == "suspect":
            print(f"suspect {result['seed']}: {result['told'].splitlines()[0][:400]}", flush=True)
    suspects = [each for each in found if each["outcome"] == "suspect"]
    print("\n".join(_summary(found)), f"\n{time.time() - began:.0f} s")
    for each in suspects if options.shrink else ():
        command = [*_command(options), "--only", str(each["seed"]), "--shrink", str(options.shrink)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, env=_environment())
    return min(len(suspects), 99)


def _summary(found: list[dict[str, Any]]) -> Iterator[str]:
    outcomes = collections.Counter(each["outcome"] for each in found)
    yield f"{len(found)} models: " + ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    for outcome in ("refused", "unfit", "suspect"):
        kinds = collections.Counter(each["kind"] for each in found if each["outcome"] == outcome)
        for kind, number in kinds.most_common():
            seed = next(each["seed"] for each in found if each["outcome"] == outcome and each["kind"] == kind)
            yield f"  {outcome} {number:4}  {kind}  (seed {seed})"


def _command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(Path(__file__).parent), "--backend", options.backend]
    if options.configs:
        command += ["--configs", options.configs]
    return [*command, "--without", options.without]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class _Worker:
    """A process that judges seeds; where it dies or hangs, its seed is a suspect and another takes the rest."""

    def __init__(self, options: argparse.Namespace, seeds: list[int]) -> None:
        self.options, self.left, self.at = options, seeds, -1
        self._start()

    def _start(self) -> None:
        command = [*_command(self.options), "--worker", *map(str, self.left)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_environment(), bufsize=1
        )
        self.since = time.time()

    def results(self) -> Iterator[dict[str, Any]]:
        """Yields what has been judged since the last call."""
        out = self.process.stdout
        if out is None or not select.select([out], [], [], 0.2)[0]:
            if time.time() - self.since > _SECONDS:
                self.process.kill()
                yield self._lost(f"still running after {_SECONDS:.0f} s")
            return
        line = out.readline()
        self.since = time.time()
        if line.startswith("begin "):
            self.at = int(line.split()[1])
        elif line.startswith("end "):
            self.left.remove(self.at)
            yield json.loads(line[4:])
        elif not line and self.left:
            yield self._lost(f"the process ended with {self.process.wait()}")

    def _lost(self, told: str) -> dict[str, Any]:
        seed = self.at if self.at in self.left else self.left[0]
        self.left.remove(seed)
        if self.left:
            self._start()
        return {"seed": seed, "outcome": "suspect", "told": told, "kind": told}


def _verdicts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    seeds = list(range(options.seed, options.seed + options.models))
    pieces = [seeds[i : i + _PIECE] for i in range(0, len(seeds), _PIECE)]
    workers: list[_Worker] = []
    while pieces or workers:
        while pieces and len(workers) < options.jobs:
            workers.append(_Worker(options, pieces.pop(0)))
        for worker in list(workers):
            yield from worker.results()
            if not worker.left:
                worker.process.wait()
                workers.remove(worker)
