"""Trials of a search for configs: scopes in, the metric and the cost of one quantized model out.

Before: what all trials have in common, as a job that can be pickled. After: numbers. A trial depends on nothing but its
job and its scopes, so that any process on any machine can make it.
"""

import io
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from quantplug.algorithms.recipe import Algorithm, apply, by_stage
from quantplug.core.calibration.batches import BatchReader, picked
from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.observer_places import waits_for_data
from quantplug.core.calibration.outputs import floats_of
from quantplug.core.errors import ConfigError
from quantplug.core.graph.multiplications import multiplications
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.report.explain import explain
from quantplug.core.specs.levels import sqnr
from quantplug.flow import export
from quantplug.lowering.program import Program
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.registry import get_quantizer

Metric: TypeAlias = Callable[[Callable[..., Any]], float]
"""Takes what is called as the model is, and returns a number, the higher the better."""

Scope: TypeAlias = tuple[str, str | None]
"""A module path, or a pattern of paths, and the name of a config; None for float."""

EVALUATIONS = ("reference", "emulation", "program")
COSTS = ("multiplications", "size", "time")
# Calls that are timed: so many at least, and more as long as they take less than so many seconds together.
_CALLS, _SECONDS = (11, 201), 1.0


@dataclass(frozen=True)
class Trial:
    """One quantized model that was measured.

    Attributes:
        scopes: what was set, "*" for the whole model first.
        metric: the higher the better.
        cost: share of multiplications that are not on integer kernels, bytes of the constants, or the program's time
            as a share of the float program's.
    """

    scopes: tuple[Scope, ...]
    metric: float
    cost: float


@dataclass(frozen=True)
class Job:
    """What all trials have in common; it can be pickled where data and metric can be, and the model is no graph module.

    Attributes:
        model: an `nn.Module`, an exported program, or the graph module of one, which cannot be sent.
        example_inputs: one batch of positional inputs.
        calibration: batches that can be read again.
        metric: takes the quantized model; None for decibels against float on the calibration batches.
        backend: its name.
        evaluate: "reference" measures the q/dq graph, "emulation" the backend's kernels in PyTorch, "program" the
            lowered program.
        cost: "multiplications", "size" or "time".
        dynamic_shapes: as for `torch.export.export`.
        inputs: picks the model's inputs out of a batch.
        recipe: algorithms that are applied to it.
    """

    model: nn.Module | torch.export.ExportedProgram
    example_inputs: tuple[Any, ...]
    calibration: Sequence[Any]
    metric: Metric | None
    backend: str = "xnnpack"
    evaluate: str = "reference"
    cost: str = "multiplications"
    dynamic_shapes: Any = None
    inputs: Callable[[Any], Any] | None = None
    recipe: Sequence[Algorithm] = ()

    def exported(self) -> fx.GraphModule:
        """Returns the float graph."""
        return export(self.model, self.example_inputs, self.dynamic_shapes)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: an exported program as its file.

        Raises:
            ConfigError: the model is a graph module, which forgets its modules' paths.
        """
        if isinstance(self.model, fx.GraphModule):
            raise ConfigError(
                "A graph module forgets in a pickle which modules its operators come from; pass the model as nn.Module "
                "or as what torch.export.export returned."
            )
        if not isinstance(self.model, torch.export.ExportedProgram):
            return vars(self)
        file = io.BytesIO()
        torch.export.save(self.model, file)
        return {**vars(self), "model": file.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["model"]
        read = torch.export.load(io.BytesIO(model)) if isinstance(model, bytes) else model
        vars(self).update({**state, "model": read})


def run_trial(job: Job, scopes: Sequence[Scope]) -> Trial:
    """Quantizes the model of a job with scopes and measures it: scopes in, numbers out, nothing else changed.

    Args:
        job: what all trials have in common.
        scopes: see `scoped`.

    Raises:
        ConfigError: the metric is no finite number.
        CalibrationError: the calibration data does not fit the model.
        LoweringError: the program of a trial cannot be made.
    """
    exported = job.exported()
    reference = convert_pt2e(calibrated(job, exported, scoped(job.backend, scopes)))
    program = _lowered(job, reference) if job.evaluate == "program" or job.cost == "time" else None
    metric = measured(job, exported, _evaluated(job, reference, program))
    if program is None or job.cost != "time":
        return Trial(tuple(scopes), metric, _cost(job, reference))
    return Trial(tuple(scopes), metric, time_ratio(program, _lowered(job, exported), job.example_inputs))


def float_trial(job: Job) -> Trial:
    """Measures the float model of a job as a trial.

    Raises:
        ConfigError: the metric is no number, or the backend has no kernels whose time could be a cost.
    """
    exported = job.exported()
    if job.cost == "time" and not _lowered(job, exported).has_kernels:
        raise ConfigError(
            f"cost is 'time', and backend '{job.backend}' has no kernels here whose time could be taken; choose "
            "'multiplications' or 'size'."
        )
    cost = 1.0 if job.cost == "time" else _cost(job, exported)
    return Trial((("*", None),), measured(job, exported, exported), cost)


def scoped(backend: str, scopes: Sequence[Scope]) -> BackendQuantizer:
    """Returns a backend's quantizer with scopes of modules; "*" names the config of all others.

    Raises:
        ConfigError: there is no such backend or config.
    """
    quantizer = get_quantizer(backend)
    for pattern, config in scopes:
        if pattern == "*":
            quantizer.set_global(config)
        else:
            quantizer.set_module_name(pattern, config)
    return quantizer


def calibrated(job: Job, exported: fx.GraphModule, quantizer: BackendQuantizer) -> fx.GraphModule:
    """Returns a prepared model that has seen the calibration batches, with the job's recipe applied."""
    floats, others = by_stage(job.recipe)
    exported = working_copy(exported) if floats else exported
    apply(floats, exported, job.calibration, job.inputs, quantizer, progress=False)
    prepared = prepare_pt2e(exported, quantizer)
    if waits_for_data(prepared):
        calibrate(prepared, job.calibration, progress=False, inputs=job.inputs)
    apply(others, prepared, job.calibration, job.inputs, quantizer, progress=False)
    return prepared


def _evaluated(job: Job, reference: fx.GraphModule, program: Program | None) -> Callable[..., Any]:
    if job.evaluate == "emulation":
        backend = get_quantizer(job.backend).backend
        return backend.emulate(reference, job.example_inputs, dynamic_shapes=job.dynamic_shapes)
    return program if job.evaluate == "program" and program is not None else reference


def _lowered(job: Job, reference: fx.GraphModule) -> Program:
    backend = get_quantizer(job.backend).backend
    return backend.lower(reference, job.example_inputs, dynamic_shapes=job.dynamic_shapes)


def time_ratio(program: Program, other: Program, inputs: tuple[Any, ...]) -> float:
    """Returns the time of a program as a share of another's, on inputs of both.

    They are called in turn, and the median is that of the turns' ratios, so that what else the machine does cancels.

    Args:
        program: what is timed.
        other: what it is compared with.
        inputs: one batch of positional inputs.
    """
    ratios: list[float] = []
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(3):
            _seconds(program, inputs), _seconds(other, inputs)
        while len(ratios) < _CALLS[0] or (len(ratios) < _CALLS[1] and time.perf_counter() - began < _SECONDS):
            ratios.append(_seconds(program, inputs) / _seconds(other, inputs))
    return statistics.median(ratios)


def _seconds(program: Program, inputs: tuple[Any, ...]) -> float:
    program.restart()
    began = time.perf_counter()
    program(*inputs)
    return time.perf_counter() - began


@torch.no_grad()
def measured(job: Job, exported: fx.GraphModule, run: Callable[..., Any]) -> float:
    """Returns the metric of what runs; the largest number where it is infinite, which JSON has not.

    Raises:
        ConfigError: the metric is no number.
    """
    found: Any = _decibels(job, exported, run) if job.metric is None else job.metric(run)
    number = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if number == math.inf:  # nothing is lost, as of float against itself
        return sys.float_info.max
    if not is_number(number):
        raise ConfigError(f"The metric returned {found!r}; let it return one finite number, the higher the better.")
    return float(number)


def is_number(value: Any) -> bool:
    """Tells whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _decibels(job: Job, exported: fx.GraphModule, run: Callable[..., Any]) -> float:
    reader = BatchReader(exported)
    named = [reader.arguments(picked(batch, job.inputs), place) for place, batch in enumerate(job.calibration)]
    batches = [tuple(arguments.values()) for arguments in named]
    found, wanted = (torch.cat([_flat(model(*batch)) for batch in batches]) for model in (run, exported))
    return sqnr(found, wanted)


def _flat(result: Any) -> Tensor:
    tensors = floats_of(result)
    if not tensors:
        raise ConfigError("The model returns no tensor of floating point to measure decibels of; pass a metric.")
    return torch.cat([tensor.flatten() for tensor in tensors])


def _cost(job: Job, reference: fx.GraphModule) -> float:
    if job.cost == "size":
        held = (*reference.parameters(), *reference.buffers())
        return float(sum(tensor.numel() * tensor.itemsize for tensor in held))
    quantized = {row.node for row in explain(reference).rows if row.quantized}
    counts = {node.name: multiplications(node) for node in reference.graph.nodes}
    floats = sum(count for name, count in counts.items() if name not in quantized)
    return floats / max(sum(counts.values()), 1)
