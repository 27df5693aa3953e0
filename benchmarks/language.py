"""What a sentence encoder and a language model keep when they are quantized: graphs, programs, and peers' graphs.

    python benchmarks/language.py --data PATH [--models minilm smollm2] [--backends xnnpack x86]
        [--recipe accurate --rotate --samples 64] [--search]

PATH is a folder with a `language.py` that has `load(name) -> nn.Module`, `sentences(part) -> [ids]`,
`spearman(encode)`, `chunks(part) -> [ids]` and `perplexity(run)`. Printed are the signal to quantization noise of the
q/dq graph and of the lowered program against the float model, of the program against its own graph, and the model's
score (rank correlation x 100, perplexity) by both. torchao's x86 quantizer and ExecuTorch's XNNPACK quantizer go
through torchao's prepare and convert on the same calibration data, and are not lowered.
"""

import argparse
import copy
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stored
import torch
from data_folder import module_of
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.nn.functional import cross_entropy
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from vision import torchvision_models

import quantplug
from quantplug.algorithms.recipe import apply, by_stage, recipe_of
from quantplug.core.graph.working_copy import working_copy

CONFIGS = {
    "xnnpack": ("int8", "int8_dynamic", "int4_dynamic_groups"),
    "x86": ("int8", "int8_dynamic", "int4_weight_only"),
}
COLUMNS = ("backend", "config", "graph", "its score", "program", "from its graph", "the program's score", "lowered s")
PEERS = {"x86": "torchao's", "xnnpack": "ExecuTorch's"}
SHOWN = {"minilm": "MiniLM-L6", "smollm2": "SmolLM2-135M"}  # in the documents
Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Job:
    """A trained model with its data.

    Attributes:
        exported: the model, exported for inputs like `example`.
        score: the score of what gives the model's output of one input.
        search: what `tune` takes to search scopes: batches, metric, and how far it may fall.
    """

    model: torch.nn.Module
    exported: fx.GraphModule
    example: tuple[Tensor, ...]
    calibration: Sequence[Tensor]
    test: Sequence[Tensor]
    score: Callable[[Run], float]
    search: dict[str, Any]


def minilm(folder: Any, samples: int = 128) -> Job:
    """Returns the sentence encoder, one sentence of any length at a time."""
    model, calibration = folder.load("minilm"), folder.sentences("calibration")[:samples]
    length = torch.export.Dim("length", min=3, max=128)
    exported = torch.export.export(model, (calibration[0],), dynamic_shapes=({1: length},)).module()
    search = {"calibration": folder.sentences("calibration")[:12], "at_least": 18.0}
    search["dynamic_shapes"] = ({1: length},)
    return Job(model, exported, (calibration[0],), calibration, folder.sentences("eval")[:200], folder.spearman, search)


def smollm2(folder: Any, samples: int = 8) -> Job:
    """Returns the language model on pieces of 128 tokens."""
    torchvision_models()  # transformers imports torchvision, which needs its operators
    model, test = folder.load("smollm2"), folder.chunks("eval")[:16]
    calibration = folder.chunks("calibration")[:samples]
    exported = torch.export.export(model, (test[0],)).module()
    pieces = folder.chunks("calibration")[:16]

    @torch.no_grad()
    def metric(run: Run) -> float:
        losses = [cross_entropy(first(run)(ids)[0, :-1].float(), ids[0, 1:]) for ids in pieces[4:]]
        return -float(sum(losses, torch.zeros(())) / len(losses))

    search = {"calibration": pieces[:4], "metric": metric, "drop": math.log(1.085)}
    return Job(model, exported, (test[0],), calibration, test, folder.perplexity, search)


MODELS: dict[str, Callable[..., Job]] = {"minilm": minilm, "smollm2": smollm2}


def first(run: Run) -> Callable[[Tensor], Tensor]:
    """Returns what gives a model's only output, also of programs that return a tuple."""

    def output(ids: Tensor) -> Tensor:
        found = run(ids)
        tensor: Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return tensor

    return output


def outputs(run: Run, inputs: Iterable[Tensor]) -> Tensor:
    """Returns a model's outputs, flat."""
    with torch.no_grad():
        return torch.cat([first(run)(ids).flatten() for ids in inputs])


def decibels(expected: Tensor, found: Tensor) -> str:
    """Returns the signal to noise ratio as text."""
    return f"{20 * math.log10(float(expected.norm() / (expected - found).norm())):.1f}"


def peer(job: Job, backend: str) -> fx.GraphModule:
    """Returns the reference graph of the backend's quantizer in torchao or ExecuTorch, with its default config."""
    if backend == "x86":
        quantizer: Any = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    else:
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(copy.deepcopy(job.exported), quantizer)
    for ids in job.calibration:
        prepared(ids)
    graph: fx.GraphModule = convert_pt2e(prepared)
    return graph


def quantized(job: Job, quantizer: quantplug.BackendQuantizer, recipe: str | None) -> fx.GraphModule:
    """Returns the reference graph of a quantizer of ours, with what a recipe does; it prints how long that took."""
    floats, others = by_stage(recipe_of(recipe or ()))
    graph, begin = working_copy(job.exported), time.perf_counter()
    done = apply(floats, graph, job.calibration, None, quantizer, progress=False)
    prepared = quantplug.prepare_pt2e(graph, quantizer)
    quantplug.calibrate(prepared, job.calibration, progress=False)
    done += apply(others, prepared, job.calibration, None, quantizer, progress=False)
    Console(stderr=True, width=160).print(*map(str, done), f"{time.perf_counter() - begin:.0f} s")
    return quantplug.convert_pt2e(prepared)


def add_peer(table: Table, job: Job, backend: str) -> None:
    """Adds a row of the backend's quantizer in torchao or ExecuTorch."""
    try:
        graph = peer(job, backend)
        cells = [decibels(outputs(job.model, job.test), outputs(graph, job.test)), f"{job.score(first(graph)):.2f}"]
    except Exception as error:  # a peer may fail in any way, which is a result
        cells = [f"fails: {type(error).__name__}"]
    table.add_row(backend, PEERS[backend], *cells)
    Console(stderr=True, width=160).print(backend, PEERS[backend], *cells)


def searched(job: Job, backend: str) -> quantplug.BackendQuantizer:
    """Returns the quantizer of the scopes that `tune` finds; it prints them."""
    begin = time.perf_counter()
    tuned = quantplug.tune(job.model, job.example, backend=backend, **job.search)
    Console(stderr=True, width=160).print(tuned, tuned.scopes, f"{time.perf_counter() - begin:.0f} s")
    return tuned.quantizer


def add_rows(
    table: Table,
    job: Job,
    backend: str,
    quantizers: dict[str, quantplug.BackendQuantizer],
    lowers: bool,
    recipe: str | None = None,
) -> None:
    """Adds a row for each of a backend's quantizers, by what they are called."""
    expected = outputs(job.model, job.test)
    for name, quantizer in quantizers.items():
        graph = quantized(job, quantizer, recipe)
        found = outputs(graph, job.test)
        cells = [decibels(expected, found), f"{job.score(first(graph)):.2f}"]
        if lowers:
            begin = time.perf_counter()
            program = quantizer.backend.lower(graph, job.example)
            seconds = time.perf_counter() - begin
            ran = outputs(program, job.test)
            cells += [
                decibels(expected, ran),
                decibels(found, ran),
                f"{job.score(first(program)):.2f}",
                f"{seconds:.0f}",
            ]
        table.add_row(backend, name, *cells)
        Console(stderr=True, width=160).print(backend, name, *cells)


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--backends", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--configs", nargs="*", help="of the backends, instead of those of the docs' tables")
    parser.add_argument("--recipe", help="what is applied before and after calibration, such as accurate")
    parser.add_argument(
        "--rotate", action="store_true", help="rotate streams first, whether batches tell a gain or not"
    )
    parser.add_argument("--search", action="store_true", help="a row of the scopes that tune finds")
    parser.add_argument("--samples", type=int, help="how many sentences or pieces calibrate")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-lowering", action="store_true", help="the graphs only")
    stored.add_option(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder = module_of(arguments.data, "language")
    for name in arguments.models:
        job = MODELS[name](folder, **({"samples": arguments.samples} if arguments.samples else {}))
        if arguments.rotate:
            Console(stderr=True, width=160).print(quantplug.Rotate().apply(job.exported))
        table = Table(*COLUMNS, title=f"{name}: float's score {job.score(first(job.model)):.2f}")
        for backend in arguments.backends:
            configs = CONFIGS[backend] if arguments.configs is None else arguments.configs
            if not arguments.no_peers:
                add_peer(table, job, backend)
            quantizers = {config: quantplug.get_quantizer(backend).set_global(config) for config in configs}
            if arguments.search:
                quantizers["search"] = searched(job, backend)
            add_rows(table, job, backend, quantizers, not arguments.no_lowering, arguments.recipe)
        Console(width=160).print(table)
        stored.store(arguments.store, stored.rows_of(table, model=SHOWN[name]), ("model", "backend", "config"))


if __name__ == "__main__":
    main()
