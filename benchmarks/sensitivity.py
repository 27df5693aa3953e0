"""What sensitivity on programs takes and says beside that on q/dq graphs, and what tune finds of times.

    python benchmarks/sensitivity.py --data PATH [--models kws_dscnn] [--backends xnnpack x86]

PATH is a folder as for `accuracy.py`. Printed are, for each model and backend, the operators, the seconds of both,
and the largest difference between their rows in decibels; then the time of two linear layers in int8 on x86 as a share
of float.
"""

import argparse
import time
from pathlib import Path

import torch
from data_folder import module_of
from torch import Tensor, nn

import quantplug

SAMPLES, BATCH = 96, 32


def compared(model: nn.Module, loader: list[Tensor], backend: str) -> str:
    """Returns what both say and take, in a line."""
    quantizer = quantplug.get_quantizer(backend)
    exported = torch.export.export(model, (loader[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    quantplug.calibrate(prepared, loader, progress=False)
    began = time.perf_counter()
    graph = quantplug.sensitivity(prepared, loader)
    between = time.perf_counter()
    program = quantplug.sensitivity(prepared, loader, run=lambda made: quantizer.backend.lower(made, (loader[0],)))
    took = between - began, time.perf_counter() - between
    apart = max(abs(graph.row(row.node).decibels - row.decibels) for row in program.rows)
    return f"{len(graph.rows)} operators; graph {took[0]:.1f} s, program {took[1]:.1f} s; {apart:.2g} dB apart"


def share_of_time(backend: str) -> float:
    """Returns the time of two linear layers in int8 as a share of the float program's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).eval()
    data = [torch.randn(128, 512) for _ in range(2)]
    found = quantplug.tune(model, (data[0],), data, backend=backend, candidates=["int8"], at_least=0.0, cost="time")
    return found.best.cost


def main() -> None:
    """Prints a line for each model and backend, and the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["kws_dscnn"])
    parser.add_argument("--backends", nargs="+", default=["xnnpack", "x86"])
    given = parser.parse_args()
    models = module_of(given.data, "models")
    for name in given.models:
        loader = list(models.data(name)[0][:SAMPLES].split(BATCH))
        for backend in given.backends:
            print(f"{name}, {backend}: {compared(models.load(name).eval(), loader, backend)}")
    print(f"two linear layers in int8 on x86: {share_of_time('x86'):.2f} of float's time")


if __name__ == "__main__":
    main()
