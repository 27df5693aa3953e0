"""What each recipe keeps of a trained model's accuracy, over our quantizers and the peers', in graphs and in programs.

    python benchmarks/accuracy.py --data PATH [--models resnet20 resnet32 kws_dscnn] [--backends xnnpack x86]
        [--recipes none fast accurate]

PATH is a folder with a `models.py` that has `load(name) -> nn.Module` and `data(name) -> (calibration inputs, test
inputs, labels)`. Each cell has decibels of the logits against float and top-1 of the q/dq graph that
`quantplug.quantize` gives, for int8 also decibels of the saved and loaded program (a `.pte` in ExecuTorch's runtime, a
package of x86), and seconds from float to the graph. XNNPACK and x86 have no convolutions of 4-bit weights, so that
these rows are graphs alone; our XNNPACK quantizer, which leaves such convolutions float, has none. The quantizers are
ours and, through the same call, ExecuTorch's XNNPACKQuantizer and torchao's X86InductorQuantizer. Where NNCF can be
imported, its quantize_pt2e over ExecuTorch's quantizer has rows too.
"""

import argparse
import importlib.util
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import stored
import torch
from data_folder import module_of
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as executorch_quantizer
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, Quantizer
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as torchao_quantizer
from trained import SETTINGS, logits, top1, whole_batches

import quantplug

SIZE, SAMPLES = 32, 128
# How much less than without a recipe is still nothing, in decibels.
SLACK = 0.1


@dataclass(frozen=True)
class Measured:
    """What is left of a model.

    Attributes:
        graph: decibels of the q/dq graph's logits.
        top1: of the graph, in per cent.
        program: decibels of the program's logits, None where no kernels run the setting.
        seconds: from the float model to the graph.
    """

    graph: float
    top1: float
    program: float | None
    seconds: float

    def __str__(self) -> str:
        """The numbers in a table's cell."""
        program = "" if self.program is None else f" ({self.program:.1f})"
        return f"{self.graph:.1f}{program} dB, {self.top1:.1f} %, {self.seconds:.0f} s"

    def record(self) -> stored.Record:
        """The numbers as a file of results has them."""
        program = None if self.program is None else round(self.program, 1)
        numbers = {"dB": round(self.graph, 1), "top-1": round(self.top1, 1), "seconds": round(self.seconds, 1)}
        return {**numbers, "dB of the program": program}


@dataclass(frozen=True)
class Job:
    """A trained model with whole batches of its data, and the float model's logits."""

    model: nn.Module
    calibration: list[Tensor]
    inputs: Tensor
    labels: Tensor
    expected: Tensor

    def measured(self, graph: Any, seconds: float, program: Any = None) -> Measured:
        """Returns what a graph, and a program where there is one, keep."""
        found = logits(graph, self.inputs, SIZE)
        ran = None if program is None else quantplug.sqnr(logits(program, self.inputs, SIZE), self.expected)
        return Measured(quantplug.sqnr(found, self.expected), top1(found, self.labels), ran, seconds)


def job(folder: Any, name: str, count: int) -> Job:
    """Returns a model with at most `count` test inputs."""
    model, (calibration, inputs, labels) = folder.load(name), folder.data(name)
    inputs, labels = whole_batches(inputs[:count], labels[:count], size=SIZE)
    (calibration,) = whole_batches(calibration[:SAMPLES], size=SIZE)
    return Job(model, list(calibration.split(SIZE)), inputs, labels, logits(model, inputs, SIZE))


def ours(backend: str, setting: str) -> quantplug.BackendQuantizer | None:
    """Returns the backend's quantizer in its usual config with other weights, None where it has none such."""
    if backend == "x86":
        return x86(setting)
    low, high, per_channel = SETTINGS[setting]
    if low > -127:
        return None
    config = quantplug.get_symmetric_quantization_config(per_channel, weight_qmin=low, weight_qmax=high)
    return quantplug.get_quantizer(backend).set_global(config)


def x86(setting: str) -> quantplug.BackendQuantizer:
    """Returns our x86 quantizer in its usual config with other weights."""
    low, high, per_channel = SETTINGS[setting]
    config = with_bounds(quantplug.get_x86_quantization_config(per_channel=per_channel), low, high)
    return quantplug.get_quantizer("x86").set_global(config)


def peers(backend: str, setting: str) -> Quantizer:
    """Returns ExecuTorch's or torchao's quantizer in its usual config with other weights."""
    low, high, per_channel = SETTINGS[setting]
    if backend == "xnnpack":
        made = executorch_quantizer.get_symmetric_quantization_config(per_channel, weight_qmin=low, weight_qmax=high)
        return executorch_quantizer.XNNPACKQuantizer().set_global(made)
    config = with_bounds(torchao_quantizer.get_default_x86_inductor_quantization_config(), low, high)
    if not per_channel:
        scheme, observer = torch.per_tensor_symmetric, MinMaxObserver.with_args(eps=2**-12)
        weight = replace(config.weight, qscheme=scheme, ch_axis=None, observer_or_fake_quant_ctr=observer)
        config = replace(config, weight=weight)
    return torchao_quantizer.X86InductorQuantizer().set_global(config)


def with_bounds(config: QuantizationConfig, low: int, high: int) -> QuantizationConfig:
    """Returns a config whose weights have other integers; those of 8 bits stay as they are."""
    if low == -127:
        return config
    return replace(config, weight=replace(config.weight, quant_min=low, quant_max=high))


OWNERS = {("x86", "peer's"): "torchao's", ("xnnpack", "peer's"): "ExecuTorch's"}
QUANTIZERS: dict[str, Callable[[str, str], Quantizer | None]] = {"ours": ours, "peer's": peers}


def graphs(backend: str) -> quantplug.BackendQuantizer:
    """Returns a quantizer of the backend without its lowering."""
    base = quantplug.get_quantizer(backend).backend
    kind = type(
        "Graphs",
        (quantplug.BackendQuantizer,),
        {"backend": quantplug.derive(base, f"{backend}-graphs", lowering=as_it_is)},
    )
    made: quantplug.BackendQuantizer = kind()
    return made


def as_it_is(model: fx.GraphModule, inputs: tuple[Any, ...], dynamic_shapes: Any = None) -> fx.GraphModule:
    """Lowers a graph to itself."""
    return model


def quantized(work: Job, backend: str, quantizer: Quantizer, recipe: str) -> tuple[fx.GraphModule, float]:
    """Returns the graph of a recipe and the seconds it took."""
    begin = time.perf_counter()
    artefact = quantplug.quantize(
        work.model, (work.calibration[0],), graphs(backend), work.calibration,
        quantizer=quantizer, recipe=() if recipe == "none" else recipe, progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    Console(stderr=True, width=160).print(*map(str, artefact.applied), f"{seconds:.0f} s")
    return artefact.reference, seconds


def loaded(backend: str, graph: fx.GraphModule, example: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns what runs the program of a graph from its file."""
    program = quantplug.get_quantizer(backend).backend.lower(graph, (example,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pte" if backend == "xnnpack" else "model.pt2")
        program.save(path)
        if backend == "x86":
            return quantplug.X86Program.load(path)
        import executorch.kernels.quantized  # noqa: F401  what runs outside of delegates
        from executorch.runtime import Runtime

        content = path.read_bytes()
    method: Any = Runtime.get().load_program(content).load_method("forward")

    def run(inputs: Tensor, kept: bytes = content) -> Tensor:  # the method points into the file's bytes
        found: Tensor = method.execute((inputs.contiguous(),))[0]
        return found

    return run


def nncf_graph(work: Job, smooth: bool) -> tuple[fx.GraphModule, float]:
    """Returns the graph of NNCF's quantize_pt2e over ExecuTorch's quantizer, with fast bias correction."""
    import nncf
    from nncf.experimental.torch.fx import quantize_pt2e

    begin = time.perf_counter()
    exported = torch.export.export(work.model, (work.calibration[0],)).module()
    graph: fx.GraphModule = quantize_pt2e(
        exported, peers("xnnpack", next(iter(SETTINGS))), nncf.Dataset(work.calibration),
        subset_size=len(work.calibration), fast_bias_correction=True, smooth_quant=smooth,
    )  # fmt: skip
    return graph, time.perf_counter() - begin


def nncf_cell(work: Job, smooth: bool) -> str:
    """Returns what NNCF keeps; a peer may fail in any way, which is a result."""
    try:
        return str(work.measured(*nncf_graph(work, smooth)))
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0]}"


def row(work: Job, backend: str, setting: str, kind: str, recipes: Sequence[str]) -> dict[str, Measured]:
    """Returns what each recipe keeps, with one setting over one quantizer; nothing where it has no such setting."""
    found: dict[str, Measured] = {}
    quantizer = QUANTIZERS[kind](backend, setting)
    if quantizer is None:
        return found
    for recipe in recipes:
        graph, seconds = quantized(work, backend, quantizer, recipe)
        program = loaded(backend, graph, work.calibration[0]) if setting.startswith("int8") else None
        found[recipe] = work.measured(graph, seconds, program)
        Console(stderr=True, width=160).print(backend, setting, kind, recipe, str(found[recipe]))
    return found


def verdict(found: dict[str, Measured]) -> str:
    """Returns whether the last recipe loses anything against the first."""
    measured = list(found.values())
    first, last = measured[0], measured[-1]
    gains = [last.graph - first.graph]
    if last.program is not None and first.program is not None:
        gains.append(last.program - first.program)
    said = "keeps" if min(gains) >= -SLACK else "LOSES"
    return f"{said}: " + ", ".join(f"{gain:+.1f}" for gain in gains) + " dB"


def show(
    work: Job, name: str, backends: Sequence[str], settings: Sequence[str], recipes: Sequence[str]
) -> tuple[list[str], list[stored.Record]]:
    """Prints the table of a model and returns a line for each of its rows, and what was measured."""
    float_top1 = top1(work.expected, work.labels)
    title = (
        f"{name}: float top-1 {float_top1:.1f} % of {len(work.labels)}; graph (program) dB, top-1, time to the graph"
    )
    table, lines, records = Table("backend", "weights", "quantizer", *recipes, title=title), [], []
    for backend in backends:
        for setting in settings:
            for kind in QUANTIZERS:
                found = row(work, backend, setting, kind, recipes)
                if not found:
                    continue
                table.add_row(backend, setting, kind, *map(str, found.values()))
                lines.append(f"{name}, {backend}, {setting}, {kind}: {verdict(found)}")
                of = {"model": name, "backend": backend, "weights": setting}
                of["quantizer"] = OWNERS.get((backend, kind), kind)
                records += [{**of, "recipe": recipe, **each.record()} for recipe, each in found.items()]
    if "xnnpack" in backends and importlib.util.find_spec("nncf") is not None:
        for kind, smooth in (("NNCF", False), ("NNCF, smooth", True)):
            table.add_row("xnnpack", next(iter(SETTINGS)), kind, nncf_cell(work, smooth))
    Console(width=170).print(table)
    return lines, records


def main() -> None:
    """Prints the tables, and which rows the last recipe makes worse than the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["kws_dscnn", "resnet20", "resnet32"])
    parser.add_argument("--backends", nargs="*", default=["xnnpack", "x86"], choices=["xnnpack", "x86"])
    parser.add_argument("--recipes", nargs="*", default=["none", "fast", "accurate"])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--inputs", type=int, default=400, help="at most so many test inputs")
    stored.add_option(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder = module_of(arguments.data, "models")
    for name in arguments.models:
        work = job(folder, name, arguments.inputs)
        lines, records = show(work, name, arguments.backends, arguments.settings, arguments.recipes)
        print(*lines, sep="\n")
        stored.store(arguments.store, records, ("model", "backend", "weights", "quantizer", "recipe"))


if __name__ == "__main__":
    main()
