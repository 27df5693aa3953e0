"""What recipes keep of trained models' accuracy, over our quantizers and over the peers', in graphs and in programs.

    python benchmarks/accuracy.py --data PATH [--models kws_dscnn resnet20 resnet32] [--backends x86 xnnpack]

PATH is a folder with a `models.py` that has `load(name) -> nn.Module` and `data(name) -> (calibration inputs, test
inputs, labels)`. Each model is quantized by `quantplug.quantize` with no recipe, with "fast" and with "accurate", by
our quantizer and by torchao's (x86) or ExecuTorch's (XNNPACK), with weights of 8 and of 4 bits, per channel and per
tensor. Printed are decibels of the logits against float of the q/dq graph and of the program that is lowered from it
(oneDNN's kernels; a `.pte` in ExecuTorch's runtime), top-1 of the program, and the seconds of all steps. Weights of 4
bits are integers from -8 to 7 in 8 bits here: convolutions have no kernels for less. At the end stands where a recipe
loses more than 0.1 dB against none.
"""

import argparse
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from data_folder import module_of
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import quantplug

BATCH, CALIBRATION = 32, 128
RECIPES = ("none", "fast", "accurate")
MOST_LOST = 0.1


@dataclass(frozen=True)
class Setting:
    """How weights are quantized."""

    bits: int
    per_channel: bool

    def __str__(self) -> str:
        return f"{self.bits} bits per {'channel' if self.per_channel else 'tensor'}"

    def bounded(self, weight: QuantizationSpec) -> QuantizationSpec:
        """Returns a spec of weights with the least and greatest integer of the setting."""
        return weight if self.bits == 8 else dataclasses.replace(weight, quant_min=-8, quant_max=7)


SETTINGS = tuple(Setting(bits, per_channel) for bits in (8, 4) for per_channel in (True, False))


def ours(backend: str, setting: Setting) -> Quantizer:
    """Returns our quantizer for a backend."""
    quantizer = quantplug.get_quantizer(backend)
    config = quantizer.backend.config("int8" if setting.per_channel else "int8_per_tensor")
    return quantizer.set_global(dataclasses.replace(config, weight=setting.bounded(config.weight)))


def torchao_x86(setting: Setting) -> Quantizer:
    """Returns torchao's quantizer."""
    config: QuantizationConfig = get_default_x86_inductor_quantization_config()
    weight = setting.bounded(config.weight)
    if not setting.per_channel:
        scheme, observer = torch.per_tensor_symmetric, MinMaxObserver
        weight = dataclasses.replace(weight, qscheme=scheme, ch_axis=None, observer_or_fake_quant_ctr=observer)
    return X86InductorQuantizer().set_global(dataclasses.replace(config, weight=weight))


def executorch_xnnpack(setting: Setting) -> Quantizer:
    """Returns ExecuTorch's quantizer."""
    low, high = (-127, 127) if setting.bits == 8 else (-8, 7)
    config = get_symmetric_quantization_config(setting.per_channel, weight_qmin=low, weight_qmax=high)
    return XNNPACKQuantizer().set_global(config)


PEERS: dict[str, tuple[str, Callable[[Setting], Quantizer]]] = {
    "x86": ("torchao", torchao_x86),
    "xnnpack": ("ExecuTorch", executorch_xnnpack),
}


@dataclass(frozen=True)
class Measured:
    """What one artefact keeps: decibels of graph and program, top-1 of the program in percent, seconds to make it."""

    graph: float
    program: float
    top1: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.graph:5.1f} {self.program:5.1f} {self.top1:5.1f}"


def logits(run: Callable[[Tensor], Any], inputs: Tensor) -> Tensor:
    """Returns outputs for inputs whose number is a multiple of the batch, also of programs that return a list."""
    with torch.no_grad():
        found = [run(batch) for batch in inputs.split(BATCH)]
    return torch.cat([each[0] if isinstance(each, (list, tuple)) else each for each in found])


@dataclass(frozen=True)
class Case:
    """A model with its data, cut to whole batches."""

    model: nn.Module
    calibration: list[Tensor]
    inputs: Tensor
    labels: Tensor
    expected: Tensor

    @classmethod
    def of(cls, folder: Any, name: str, count: int) -> "Case":
        """Loads a model, with at most so many test inputs."""
        model, (calibration, inputs, labels) = folder.load(name), folder.data(name)
        whole = min(count, len(inputs)) // BATCH * BATCH
        batches = list(calibration[: min(CALIBRATION, len(calibration)) // BATCH * BATCH].split(BATCH))
        return cls(model, batches, inputs[:whole], labels[:whole], logits(model, inputs[:whole]))

    def measured(self, backend: str, quantizer: Quantizer, recipe: str) -> Measured:
        """Quantizes the model as a user does, and measures what it keeps."""
        begin = time.perf_counter()
        artefact = quantplug.quantize(
            self.model, (self.calibration[0],), backend, self.calibration, quantizer=quantizer, progress=False,
            recipe=() if recipe == "none" else recipe,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        graph, program = (logits(run, self.inputs) for run in (artefact.reference, artefact))
        top1 = float((program.argmax(1) == self.labels).float().mean()) * 100
        of_graph, of_program = (quantplug.sqnr(found, self.expected) for found in (graph, program))
        return Measured(of_graph, of_program, top1, seconds)


def rows(case: Case, backend: str, table: Table, progress: Console) -> list[str]:
    """Adds a row for each setting and quantizer, and returns those in which a recipe loses."""
    losses = []
    for setting in SETTINGS:
        for name, quantizer in (("ours", partial(ours, backend)), PEERS[backend]):
            found = [case.measured(backend, quantizer(setting), recipe) for recipe in RECIPES]
            cells = [str(setting), name, *map(str, found), " ".join(f"{each.seconds:.0f}" for each in found)]
            table.add_row(*cells)
            progress.print(backend, *cells)
            losses += [
                f"{backend}, {setting}, {name}: {recipe} has {each.program:.1f} dB, none {found[0].program:.1f}"
                for recipe, each in zip(RECIPES[1:], found[1:], strict=True)
                if each.program < found[0].program - MOST_LOST
            ]
    return losses


def main() -> None:
    """Prints a table for each model and backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["kws_dscnn", "resnet20", "resnet32"])
    parser.add_argument("--backends", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--inputs", type=int, default=400, help="at most so many test inputs")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder, console, progress = module_of(arguments.data, "models"), Console(width=120), Console(stderr=True, width=160)
    losses = []
    for name in arguments.models:
        case = Case.of(folder, name, arguments.inputs)
        top1 = float((case.expected.argmax(1) == case.labels).float().mean()) * 100
        for backend in arguments.backends:
            title = f"{name}, {backend}: dB of graph and of program, top-1 (float {top1:.1f})"
            table = Table("weights", "quantizer", *RECIPES, "seconds", title=title)
            losses += [f"{name}, {loss}" for loss in rows(case, backend, table, progress)]
            console.print(table)
    console.print(f"Lost more than {MOST_LOST} dB by a recipe: {'; '.join(losses) or 'nowhere'}.")


if __name__ == "__main__":
    main()
