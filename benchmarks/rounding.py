"""Which rounding of weights keeps most: to nearest, GPTQ, GPTQ with scales and descent, AdaRound.

    python benchmarks/rounding.py --data PATH [--models kws_dscnn resnet20] [--iterations 1000]

All of them round on the same sums of products, so that they have the same aim: the squared error of each layer's result
on the calibration inputs, with the layers before it rounded. AdaRound is Nagel et al., "Up or Down? Adaptive Rounding
for Post-Training Quantization", arXiv:2004.10568, section 3.3: integers below or above each number, by a rectified
sigmoid that a regularizer drives to 0 or 1 (lambda 0.01, beta from 20 to 2 behind the first fifth of the steps, Adam);
it is given the observers' scales and, in the last row, the scales that GPTQ's search and descent ended with. Printed
are the layers' decibels in the mean, those of the q/dq graph's logits on test inputs, and seconds.
"""

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stored
import torch
from accuracy import SIZE, Job, job, x86
from data_folder import module_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from trained import SETTINGS, logits

import quantplug
from quantplug.algorithms.pieces import Piece
from quantplug.algorithms.rounding import Tried, errors_of

# Of the rectified sigmoid: how far it reaches beyond 0 and 1.
LOW, HIGH = -0.1, 1.1


@dataclass(frozen=True)
class AdaRound(quantplug.GPTQ):
    """AdaRound in the place of GPTQ's rounding, on the same pieces of weights."""

    iterations: int = 1000
    rate: float = 1e-2
    searched: bool = False

    def _best_and_nearest(self, piece: Piece, *, searches: bool) -> tuple[Tried, float]:
        best, nearest = super()._best_and_nearest(piece, searches=searches and self.searched)
        scale = best.scale if self.searched else piece.grid.scale
        piece = dataclasses.replace(piece, grid=dataclasses.replace(piece.grid, scale=scale))
        with torch.enable_grad():
            values = adaround(piece, self.iterations, self.rate)
        return Tried(values, scale, errors_of(piece.matrix - values, piece.hessian)), nearest


def adaround(piece: Piece, iterations: int, rate: float) -> Tensor:
    """Returns the values that AdaRound chooses."""
    grid, matrix = piece.grid, piece.matrix
    scale, zero_point = (grid.spread(part, matrix) for part in (grid.scale, grid.zero_point))
    below = torch.floor(matrix / scale)
    rest = (matrix / scale - below - LOW) / (HIGH - LOW)
    chosen = torch.log(rest / (1 - rest)).requires_grad_()
    # As if each input were a sample of the paper's mean: the sums are of all.
    hessian = piece.hessian / piece.hessian.diagonal(dim1=1, dim2=2).mean().clamp(min=1e-30) / matrix.shape[2]
    optimizer = torch.optim.Adam([chosen], rate)
    unit = scale.square().mean()

    def value(part: Tensor) -> Tensor:
        return ((below + part + zero_point).clamp(grid.low, grid.high) - zero_point) * scale

    for step in range(iterations):
        part = (chosen.sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)
        loss = errors_of(value(part) - matrix, hessian).sum() / unit
        progress = (step / iterations - 0.2) / 0.8
        if progress >= 0:
            beta = 20 - 18 * progress
            loss = loss + 0.01 * (1 - (2 * part - 1).abs() ** beta).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return value((chosen.detach() >= 0).float())


def candidates(iterations: int) -> dict[str, Callable[[Any, Any], Any]]:
    """Returns by name what rounds a calibrated model."""
    gptq = quantplug.GPTQ
    found = {
        "GPTQ": gptq(scales=False, sweeps=0),
        "GPTQ, scales searched": gptq(sweeps=0),
        "GPTQ, scales and descent": gptq(),
        "AdaRound": AdaRound(scales=False, sweeps=0, iterations=iterations),
        "AdaRound, those scales": AdaRound(iterations=iterations, searched=True),
    }
    return {"nearest": lambda prepared, data: {}, **{name: each.apply for name, each in found.items()}}


def add_rows(table: Table, work: Job, setting: str, iterations: int) -> None:
    """Adds a row for each way to round."""
    exported = torch.export.export(work.model, (work.calibration[0],)).module()
    for name, rounded in candidates(iterations).items():
        prepared = quantplug.prepare_pt2e(exported, x86(setting))
        quantplug.calibrate(prepared, work.calibration, progress=False)
        begin = time.perf_counter()
        layers = rounded(prepared, work.calibration)
        seconds = time.perf_counter() - begin
        mean = f"{sum(layer.after for layer in layers.values()) / len(layers):.1f}" if layers else ""
        mean = f"{sum(layer.after for layer in layers.values()) / len(layers):.1f}" if layers else ""
        output = quantplug.sqnr(logits(quantplug.convert_pt2e(prepared), work.inputs, SIZE), work.expected)
        table.add_row(setting, name, mean, f"{output:.1f}", f"{seconds:.1f}")


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["kws_dscnn", "resnet20"])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--inputs", type=int, default=400, help="at most so many test inputs")
    stored.add_option(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    folder = module_of(arguments.data, "models")
    for name in arguments.models:
        table = Table("weights", "rounding", "layers, dB", "logits, dB", "seconds", title=name)
        work = job(folder, name, arguments.inputs)
        for setting in list(SETTINGS)[2:]:
            add_rows(table, work, setting, arguments.iterations)
        Console(width=120).print(table)
        stored.store(arguments.store, stored.rows_of(table, model=name), ("model", "weights", "rounding"))


if __name__ == "__main__":
    main()
