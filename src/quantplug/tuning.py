"""A search for the cheapest config of each operator with which a model keeps its metric.

Before: a float model, calibration batches and a metric. After: a backend's quantizer with scopes, as a person would
write them, under which the model loses no more than is allowed; with every trial that was made. The rank of operators
is that of `sensitivity`, the strategy that of `quantplug.algorithms.search`.
"""

import json
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, fx, nn

from quantplug.algorithms.recipe import Algorithm, apply, by_stage, recipe_of
from quantplug.algorithms.search import Levels, Outcome, search
from quantplug.algorithms.sensitivity import sensitivity
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.calibration.batches import BatchReader, digest, picked
from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import ArtefactError, ConfigError, first_line
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import require_writable, write_content
from quantplug.core.graph.multiplications import multiplications
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.peers.torch_names import pytree
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.report.explain import explain
from quantplug.core.specs.levels import sqnr
from quantplug.flow import export, waits_for_data
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.registry import get_quantizer

Metric: TypeAlias = Callable[[Callable[..., Any]], float]
"""Takes what is called as the model is, and returns a number, the higher the better."""

Scope: TypeAlias = tuple[str, str | None]
"""A module path, or a pattern of paths, and the name of a config; None for float."""

_DEFAULTS = ("int8", "int8_dynamic")
_VERSION = 1


@dataclass(frozen=True)
class Trial:
    """One quantized model that was measured.

    Attributes:
        scopes: what was set, "*" for the whole model first.
        metric: the higher the better.
        cost: share of multiplications that are not on integer kernels, or bytes of the constants.
    """

    scopes: tuple[Scope, ...]
    metric: float
    cost: float


@dataclass(frozen=True)
class Job:
    """What all trials have in common; a scheduler may pickle it where model, data and metric can be.

    Attributes:
        model: an `nn.Module`, or the graph module that it was exported to.
        example_inputs: one batch of positional inputs.
        calibration: batches that can be read again.
        metric: takes the quantized model; None for decibels against float on the calibration batches.
        backend: its name.
        evaluate: "reference" measures the q/dq graph, "program" the lowered program.
        cost: "multiplications" or "size".
        dynamic_shapes: as for `torch.export.export`.
        inputs: picks the model's inputs out of a batch.
        recipe: algorithms that are applied to it.
    """

    model: nn.Module
    example_inputs: tuple[Any, ...]
    calibration: Sequence[Any]
    metric: Metric | None
    backend: str = "xnnpack"
    evaluate: str = "reference"
    cost: str = "multiplications"
    dynamic_shapes: Any = None
    inputs: Callable[[Any], Any] | None = None
    recipe: Sequence[Algorithm] = ()


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
    exported = export(job.model, job.example_inputs, job.dynamic_shapes)
    quantizer = scoped(job.backend, scopes)
    reference = convert_pt2e(_calibrated(job, exported, quantizer))
    run: Callable[..., Any] = reference
    if job.evaluate == "program":
        run = quantizer.backend.lower(reference, job.example_inputs, dynamic_shapes=job.dynamic_shapes)
    return Trial(tuple(scopes), _measured(job, exported, run), _cost(job, reference))


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


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        backend: the name of the backend.
        scopes: the chosen ones, "*" for the whole model first.
        is_met: whether the metric is as high as was asked for.
        least: the metric that was asked for.
        base: the metric of the float model.
        best: the trial of these scopes.
        trials: all of them, in the order in which they were made.
        plan: what the quantizer decided about each node, to be saved, compared and replayed.
    """

    backend: str
    scopes: tuple[Scope, ...]
    is_met: bool
    least: float
    base: float
    best: Trial
    trials: tuple[Trial, ...]
    plan: Plan

    @property
    def quantizer(self) -> BackendQuantizer:
        """A new quantizer with the scopes, for `quantize(..., quantizer=tuned.quantizer)`."""
        return scoped(self.backend, self.scopes)

    def pareto(self) -> list[Trial]:
        """Returns the trials that no other one beats in both metric and cost, the cheapest first."""
        found: list[Trial] = []
        for trial in sorted(self.trials, key=lambda trial: (trial.cost, -trial.metric)):
            if not found or trial.metric > found[-1].metric:
                found.append(trial)
        return found

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading, justify in (("metric", "right"), ("cost", "right"), ("scopes", "left")):
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for trial in self.pareto():
            table.add_row(_number(trial.metric), f"{trial.cost:.4g}", escape(_text(trial.scopes)))
        out = StringIO()
        Console(file=out, width=160, no_color=True).print(table)
        verb = "keeps" if self.is_met else "does not keep"
        return (
            f"{out.getvalue()}{_text(self.scopes)} {verb} {self.least:.6g}: {_number(self.best.metric)} at cost "
            f"{self.best.cost:.4g}, float {_number(self.base)}; {len(self.trials)} trials."
        )

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        return json.dumps({**asdict(replace(self, plan=None)), "plan": json.loads(self.plan.json())}, indent=1)  # type: ignore[arg-type]


@torch.inference_mode(False)
def tune(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: tuple[Any, ...],
    calibration: Iterable[Any],
    metric: Metric | None = None,
    *,
    backend: str = "xnnpack",
    drop: float = 0.01,
    at_least: float | None = None,
    candidates: Sequence[str | None] | None = None,
    evaluate: str = "reference",
    cost: str = "multiplications",
    log: str | Path | None = None,
    dynamic_shapes: Any = None,
    inputs: Callable[[Any], Any] | None = None,
    recipe: str | Sequence[Algorithm] = (),
    trials: int = 64,
    progress: bool = True,
) -> Tuned:
    """Searches for each module's config, so that the model keeps its metric at the least cost.

    Args:
        model: as for `quantize`; it is not changed.
        example_inputs: one batch of positional inputs.
        calibration: batches as for `calibrate`; they are kept in memory.
        metric: takes the quantized model and returns a number, the higher the better; None for decibels against float
            on the calibration batches.
        backend: its name.
        drop: by how much the metric may be below that of the float model.
        at_least: how high it has to be, in place of `drop`; decibels where there is no metric.
        candidates: names of the backend's configs, the cheapest first, None for float; by default those of "int8" and
            "int8_dynamic" that it has, and float.
        evaluate: "reference" measures q/dq graphs, "program" lowered programs.
        cost: "multiplications" for the share of them that is not on integer kernels, "size" for the constants' bytes.
        log: a file of JSON lines with every trial; a search that finds it there reads them and makes the others. It
            is for one model, data and metric.
        dynamic_shapes: as for `torch.export.export`.
        inputs: picks the model's inputs out of a batch.
        recipe: algorithms that are applied in each trial, or the name of some, as for `quantize`.
        trials: how many are made at most.
        progress: whether a bar shows them.

    Returns:
        The cheapest that keeps the metric; where none does the one with the highest, which a warning says too.

    Raises:
        ConfigError: an option is none, or the metric is no finite number.
        ModelError: the model cannot be exported, or no operator of it can be quantized.
        CalibrationError: the calibration data is empty or does not fit the model.
        ArtefactError: the log is of another search, or cannot be written.
    """
    names = _candidates(backend, candidates)
    _require_options(metric, drop, at_least, evaluate, cost, trials)
    exported = export(model, example_inputs, dynamic_shapes)
    data = list(calibration)
    job = Job(
        exported, example_inputs, data, metric, backend, evaluate, cost, dynamic_shapes, inputs, recipe_of(recipe)
    )
    made = _Trials(job, names, None if log is None else Path(log))
    base = made.base()
    if base == sys.float_info.max and at_least is None:
        raise ConfigError("The metric of the float model is infinite, from which nothing can drop; pass at_least=.")
    least = base - drop if at_least is None else at_least
    ranked = _ranked(job, names[0])
    with progress_bar(progress, trials, "tune", "trials") as advance:

        def measured(levels: Levels) -> Outcome:
            outcome = made.outcome(ranked, levels)
            advance()
            return outcome

        found = search(len(ranked), len(names), measured, least, trials)
    scopes = made.scopes(ranked, found.best)
    if not found.is_met:
        reached = found.tried[found.best].metric
        warnings.warn(
            f"No trial keeps {least:.6g}; the best reaches {reached:.6g} with {_text(scopes)}. Allow more trials, a "
            "larger drop or another candidate.",
            stacklevel=3,
        )
    plan = plan_of(exported if made.is_float(found.best) else prepare_pt2e(exported, scoped(backend, scopes)))
    tried = tuple(made.trial(made.scopes(ranked, levels)) for levels in found.tried)
    return Tuned(backend, scopes, found.is_met, least, base, made.trial(scopes), tried, plan)


def _candidates(backend: str, candidates: Sequence[str | None] | None) -> tuple[str | None, ...]:
    declared = get_quantizer(backend).backend
    if candidates is None:
        return (*(name for name in _DEFAULTS if name in declared.configs), None)
    found = tuple(candidates) if not isinstance(candidates, str) else (candidates,)
    if not found or found[0] is None or len(set(found)) < len(found):
        raise ConfigError(
            f"candidates takes different names of configs, the cheapest first, found {list(found)}; begin with one of "
            f"{list(declared.configs)}."
        )
    for name in found:
        if name is not None:
            declared.config(name)
    return found


def _require_options(metric: Any, drop: Any, at_least: Any, evaluate: Any, cost: Any, trials: Any) -> None:
    if metric is not None and not callable(metric):
        raise ConfigError(f"metric takes a function of the quantized model, found {type(metric).__name__}.")
    if metric is None and at_least is None:
        raise ConfigError("Without a metric decibels are measured; pass at_least=decibels, or a metric.")
    if not _is_number(drop) or drop < 0:
        raise ConfigError(f"drop takes a number from 0 on, found {drop!r}; pass by how much the metric may fall.")
    if at_least is not None and not _is_number(at_least):
        raise ConfigError(f"at_least takes a finite number, found {at_least!r}.")
    for name, value, known in (
        ("evaluate", evaluate, ("reference", "program")),
        ("cost", cost, ("multiplications", "size")),
    ):
        if value not in known:
            raise ConfigError(f"{name} takes one of {list(known)}, found {value!r}.")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ConfigError(f"trials takes a number from 1 on, found {trials!r}; leave it out for 64.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _calibrated(job: Job, exported: fx.GraphModule, quantizer: BackendQuantizer) -> fx.GraphModule:
    floats, others = by_stage(job.recipe)
    exported = working_copy(exported) if floats else exported
    apply(floats, exported, job.calibration, job.inputs, progress=False)
    prepared = prepare_pt2e(exported, quantizer)
    if waits_for_data(prepared):
        calibrate(prepared, job.calibration, progress=False, inputs=job.inputs)
    apply(others, prepared, job.calibration, job.inputs, progress=False)
    return prepared


def _ranked(job: Job, cheapest: str | None) -> tuple[str, ...]:
    """Returns the paths of modules with quantized operators, those with the most noise first."""
    exported = export(job.model, job.example_inputs, job.dynamic_shapes)
    prepared = _calibrated(job, exported, scoped(job.backend, (("*", cheapest),)))
    noise: dict[str, float] = defaultdict(float)
    for row in sensitivity(prepared, job.calibration, inputs=job.inputs).rows:
        noise[row.module_path] += row.noise
    return tuple(sorted(noise, key=lambda path: -noise[path]))


@torch.no_grad()
def _measured(job: Job, exported: fx.GraphModule, run: Callable[..., Any]) -> float:
    found: Any = _decibels(job, exported, run) if job.metric is None else job.metric(run)
    number = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if number == math.inf:  # nothing is lost, as of float against itself; JSON has no infinity
        return sys.float_info.max
    if isinstance(number, bool) or not _is_number(number):
        raise ConfigError(f"The metric returned {found!r}; let it return one finite number, the higher the better.")
    return float(number)


def _decibels(job: Job, exported: fx.GraphModule, run: Callable[..., Any]) -> float:
    reader = BatchReader(exported)
    named = [reader.arguments(picked(batch, job.inputs), place) for place, batch in enumerate(job.calibration)]
    batches = [tuple(arguments.values()) for arguments in named]
    found, wanted = (torch.cat([_flat(model(*batch)) for batch in batches]) for model in (run, exported))
    return sqnr(found, wanted)


def _flat(result: Any) -> Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
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


class _Trials:
    """The trials of one search, each made once, in memory and in a log."""

    def __init__(self, job: Job, candidates: tuple[str | None, ...], log: Path | None) -> None:
        self._job, self._candidates, self._log = job, candidates, log
        self._exported = export(job.model, job.example_inputs, job.dynamic_shapes)
        self._made: dict[tuple[Scope, ...], Trial] = {}
        if log is not None:
            require_writable(log)
            self._read(log)

    def base(self) -> float:
        """Returns the metric of the float model."""
        whole: tuple[Scope, ...] = (("*", None),)
        if whole not in self._made:
            metric = _measured(self._job, self._exported, self._exported)
            self._add(Trial(whole, metric, _cost(self._job, self._exported)))
        return self._made[whole].metric

    def outcome(self, ranked: tuple[str, ...], levels: Levels) -> Outcome:
        """Returns what a trial measures."""
        scopes = self.scopes(ranked, levels)
        if scopes not in self._made and self.is_float(levels):  # prepare refuses a model of which it quantizes nothing
            self._add(Trial(scopes, self.base(), _cost(self._job, self._exported)))
        elif scopes not in self._made:
            self._add(run_trial(self._job, scopes))
        return Outcome(self._made[scopes].metric, self._made[scopes].cost)

    def is_float(self, levels: Levels) -> bool:
        """Tells whether levels leave every operator float."""
        return all(self._candidates[level] is None for level in levels)

    def trial(self, scopes: tuple[Scope, ...]) -> Trial:
        """Returns a trial that was made."""
        return self._made[scopes]

    def scopes(self, ranked: tuple[str, ...], levels: Levels) -> tuple[Scope, ...]:
        """Returns the scopes that say which config each module has."""
        chosen = {path: self._candidates[level] for path, level in zip(ranked, levels, strict=True)}
        return written(chosen, self._candidates[0])

    def _add(self, trial: Trial) -> None:
        self._made[trial.scopes] = trial
        if self._log is not None:
            lines = [self._heading, *(json.dumps(asdict(made)) for made in self._made.values())]
            write_content(self._log, "".join(f"{line}\n" for line in lines).encode())

    @cached_property
    def _heading(self) -> str:
        job, tensors = (
            self._job,
            [leaf for leaf in pytree.tree_leaves(self._job.calibration) if isinstance(leaf, Tensor)],
        )
        graph: Any = job.model.graph
        fields = {
            "tune": _VERSION,
            "model": digest((*job.model.parameters(), *job.model.buffers())),
            "graph": [f"{node.name} {node.target}" for node in graph.nodes if node.op == "call_function"],
            "calibration": digest(tensors),
            "backend": job.backend,
            "candidates": self._candidates,
            "evaluate": job.evaluate,
            "cost": job.cost,
            "recipe": [repr(algorithm) for algorithm in job.recipe],
            "metric": getattr(job.metric, "__qualname__", type(job.metric).__name__),
        }
        return json.dumps(fields)

    def _read(self, log: Path) -> None:
        if not log.exists():
            return
        try:
            first, *lines = log.read_text().splitlines()
            heading, own = typed(json.loads(first), dict[str, Any], "its first line"), json.loads(self._heading)
            trials = [_trial(json.loads(line)) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise ArtefactError(f"'{log}' is no log of a search ({first_line(error)}); give another path.") from error
        other = next((name for name in own if heading.get(name) != own[name]), None)
        if other is not None:
            raise ArtefactError(f"The log '{log}' is of a search with another {other}; give another path.")
        self._made = {trial.scopes: trial for trial in trials}


def _trial(line: Any) -> Trial:
    read = typed(line, dict[str, Any], "a line")
    scopes = typed(read.get("scopes"), tuple[Any, ...], "'scopes'")
    pairs = [typed(scope, tuple[Any, ...], "a scope") for scope in scopes]
    if any(len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError("a scope is no pair of a path and a config")
    trial: Trial = typed({**read, "scopes": ()}, _Numbers, "a line")
    return Trial(tuple((path, config) for path, config in pairs), trial.metric, trial.cost)


@dataclass(frozen=True)
class _Numbers:
    scopes: tuple[Any, ...]
    metric: float
    cost: float


def written(chosen: Mapping[str, str | None], otherwise: str | None) -> tuple[Scope, ...]:
    """Returns scopes that give each module its config, as few as a person would write.

    Numbers in paths become "*" where all modules of that pattern agree; a module that has the config of the one around
    it is left out.

    Args:
        chosen: config by module path.
        otherwise: the config of the whole model.
    """
    needed = [path for path in sorted(chosen, key=_depth) if chosen[path] != _inherited(path, chosen, otherwise)]
    found: dict[str, str | None] = {"*": otherwise}
    for path in needed:
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        alike = [other for other in chosen if fnmatchcase(other, pattern)]
        agree = len(alike) > 1 and all(other in needed and chosen[other] == chosen[path] for other in alike)
        found[pattern if agree and pattern.strip("*.") else re.sub(r"([\[?*])", r"[\1]", path)] = chosen[path]
    return tuple(found.items())


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _inherited(path: str, chosen: Mapping[str, str | None], otherwise: str | None) -> str | None:
    """Returns the config of the nearest module around a module."""
    while path:
        path = path.rpartition(".")[0]
        if path in chosen:
            return chosen[path]
    return otherwise


def _number(metric: float) -> str:
    return "inf" if metric == sys.float_info.max else f"{metric:.6g}"


def _text(scopes: Sequence[Scope]) -> str:
    return ", ".join(f"{pattern}: {config or 'float'}" for pattern, config in scopes)
