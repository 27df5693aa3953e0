"""A search for the cheapest config of each operator with which a model keeps its metric.

Before: a float model, calibration batches and a metric. After: a backend's quantizer with scopes, as a person would
write them, under which the model loses no more than is allowed; with every trial that was made. The rank of operators
is that of `sensitivity`, the strategy that of `quantplug.algorithms.search`.
"""

import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from quantplug.algorithms.recipe import Algorithm, recipe_of
from quantplug.algorithms.search import Found, Levels, Outcome, search, upcoming
from quantplug.algorithms.sensitivity import sensitivity
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.calibration.batches import digest
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import (
    ArtefactError,
    CalibrationError,
    ConfigError,
    ModelError,
    QuantplugWarning,
    first_line,
    shown,
)
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import require_writable, write_content
from quantplug.core.peers.torch_names import pytree
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.report.explain import explain
from quantplug.flow import export
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.registry import get_quantizer
from quantplug.trial_processes import Ahead, Executor, Processes
from quantplug.trials import (
    COSTS,
    EVALUATIONS,
    Job,
    Metric,
    Scope,
    Trial,
    calibrated,
    float_trial,
    is_number,
    run_trial,
    scoped,
)

_DEFAULTS = ("int8", "int8_dynamic")
_VERSION = 2
# Times that differ by less than this share are noise.
_NOISE = 0.03


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
    workers: int = 1,
    executor: Executor | None = None,
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
            "int8_dynamic" that it has, and float. A module is offered those that its operators take.
        evaluate: "reference" measures q/dq graphs, "emulation" the backend's kernels in PyTorch, "program" lowered
            programs.
        cost: "multiplications" for the share of them that is not on integer kernels, "size" for the constants' bytes,
            "time" for the time of the lowered program on the example inputs as a share of the float program's.
        log: a file of JSON lines with every trial; a search that finds it there reads them and makes the others. It
            is for one model, data and metric.
        dynamic_shapes: as for `torch.export.export`.
        inputs: picks the model's inputs out of a batch.
        recipe: algorithms that are applied in each trial, or the name of some, as for `quantize`.
        trials: how many are made at most.
        workers: how many are made at once, in processes of their own from 2 on: what is found is the same, and there
            are trials that turn out not to be needed.
        executor: makes them in their place, such as Dask's: `executor.submit(run_trial, job, scopes)`.
        progress: whether a bar shows them.

    Returns:
        The cheapest that keeps the metric; where none does the one with the highest, which a warning says too.

    Raises:
        ConfigError: an option is none, or the metric is no finite number.
        ModelError: the model cannot be exported, or no operator of it can be quantized.
        CalibrationError: the calibration data is empty or does not fit the model.
        ArtefactError: the log is of another search, or cannot be written.
        TrialError: a process that made a trial ended.
    """
    names = _candidates(backend, candidates)
    _require_options(metric, drop, at_least, evaluate, cost, trials, workers)
    data, algorithms = list(calibration), recipe_of(recipe)
    if not data:
        raise CalibrationError(
            "tune takes 1 or more batches, and calibration yielded none (a generator can be read only once); pass more."
        )
    given = Job(model, example_inputs, data, metric, backend, evaluate, cost, dynamic_shapes, inputs, algorithms)
    job = replace(given, model=export(model, example_inputs, dynamic_shapes))
    with _elsewhere(given, workers, executor) as ahead, progress_bar(progress, trials, "tune", "trials") as advance:
        made = _Trials(job, names, None if log is None else Path(log), ahead)
        least = made.least(drop) if at_least is None else at_least
        made.base()
        made.offered = _ranked(job, names)
        found = made.search(least, trials, advance)
    if not found.is_met:
        _tell_of_the_best(found.tried[found.best].metric, least, made.scopes(found.best))
    return made.tuned(found, least)


def _tell_of_the_best(reached: float, least: float, scopes: tuple[Scope, ...]) -> None:
    warnings.warn(
        f"No trial keeps {least:.6g}; the best reaches {reached:.6g} with {_text(scopes)}. Allow more trials, a "
        "larger drop or another candidate.",
        QuantplugWarning,
        stacklevel=4,
    )


@contextmanager
def _elsewhere(job: Job, workers: int, executor: Executor | None) -> Iterator[Ahead | None]:
    """Yields what makes trials elsewhere, None where this process makes them."""
    if executor is not None:
        yield Ahead(lambda scopes: executor.submit(run_trial, job, scopes), workers)
    elif workers == 1:
        yield None
    else:
        with Processes(job, workers) as processes:
            yield Ahead(processes.submit, workers)


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


def _require_options(metric: Any, drop: Any, at_least: Any, evaluate: Any, cost: Any, *counts: Any) -> None:
    if metric is not None and not callable(metric):
        raise ConfigError(f"metric takes a function of the quantized model, found {type(metric).__name__}.")
    if metric is None and at_least is None:
        raise ConfigError("Without a metric decibels are measured; pass at_least=decibels, or a metric.")
    if not is_number(drop) or drop < 0:
        raise ConfigError(f"drop takes a number from 0 on, found {drop!r}; pass by how much the metric may fall.")
    if at_least is not None and not is_number(at_least):
        raise ConfigError(f"at_least takes a finite number, found {at_least!r}.")
    for name, value, known in (
        ("evaluate", evaluate, EVALUATIONS),
        ("cost", cost, COSTS),
    ):
        if value not in known:
            raise ConfigError(f"{name} takes one of {list(known)}, found {value!r}.")
    for name, count in zip(("trials", "workers"), counts, strict=True):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name} takes a number from 1 on, found {count!r}; leave it out.")


def _offered(job: Job, names: Sequence[str | None]) -> dict[str, tuple[str | None, ...]]:
    """Returns by module path the candidates that quantize it, and float where it is one."""
    found: dict[str, list[str | None]] = defaultdict(list)
    for name in filter(None, names):
        prepared = prepare_pt2e(job.exported(), scoped(job.backend, (("*", name),)))
        for path in {row.module_path for row in explain(prepared).rows if row.quantized}:
            found[path].append(name)
    return {path: (*taken, *([None] if None in names else [])) for path, taken in found.items()}


def _ranked(job: Job, names: Sequence[str | None]) -> dict[str, tuple[str | None, ...]]:
    """Returns what each module is offered; those with the most noise first where each has its cheapest."""
    offered = _offered(job, names)
    if not offered:
        raise ModelError(
            f"No operator of the model can be quantized with any of {list(names)}; choose other candidates."
        )
    scopes = written({path: choices[0] for path, choices in offered.items()}, names[0])
    prepared = calibrated(job, job.exported(), scoped(job.backend, scopes))
    noise: dict[str, float] = defaultdict(float)
    for row in sensitivity(prepared, job.calibration, inputs=job.inputs).rows:
        noise[row.module_path] += row.noise
    return {path: offered[path] for path in sorted(noise, key=lambda path: -noise[path])}


class _Trials:
    """The trials of one search, each made once, in memory and in a log.

    Attributes:
        offered: by module path the candidates that it may have, in the order of the levels' items.
    """

    def __init__(
        self, job: Job, candidates: tuple[str | None, ...], log: Path | None, ahead: Ahead | None = None
    ) -> None:
        self.offered: dict[str, tuple[str | None, ...]] = {}
        self._job, self._candidates, self._log, self._ahead = job, candidates, log, ahead
        self._made: dict[tuple[Scope, ...], Trial] = {}
        if log is not None:
            require_writable(log)
            self._read(log)

    def base(self) -> float:
        """Returns the metric of the float model."""
        whole: tuple[Scope, ...] = (("*", None),)
        if whole not in self._made:
            self._add(float_trial(self._job))
        return self._made[whole].metric

    def least(self, drop: float) -> float:
        """Returns the metric that may be reached by a drop.

        Raises:
            ConfigError: the float model's is infinite.
        """
        base = self.base()
        if base == sys.float_info.max:
            raise ConfigError("The metric of the float model is infinite, from which nothing can drop; pass at_least=.")
        return base - drop

    def search(self, least: float, trials: int, advance: Callable[[], object]) -> Found:
        """Makes the trials of a search.

        Args:
            least: the metric that is asked for.
            trials: how many are made at most.
            advance: is called behind each.
        """
        items, levels = len(self.offered), max(map(len, self.offered.values()))
        asked: dict[Levels, Outcome] = {}
        times = self._job.cost == "time"

        def measured(each: Levels) -> Outcome:
            count = 0 if self._ahead is None else 2 * self._ahead.count
            asked[each] = self._outcome(each, upcoming(items, levels, asked, least, trials, count, at_each=times))
            advance()
            return asked[each]

        return search(items, levels, measured, least, trials, alike=_NOISE if times else 0.0, at_each=times)

    def tuned(self, found: Found, least: float) -> Tuned:
        """Returns what a search found, with the plan of its scopes."""
        scopes, exported, backend = self.scopes(found.best), self._job.exported(), self._job.backend
        plan = plan_of(exported if self._is_float(found.best) else prepare_pt2e(exported, scoped(backend, scopes)))
        tried = tuple(self._made[self.scopes(levels)] for levels in found.tried)
        return Tuned(backend, scopes, found.is_met, least, self.base(), self._made[scopes], tried, plan)

    def _outcome(self, levels: Levels, behind: Sequence[Levels]) -> Outcome:
        """Returns what a trial measures; those that may be asked for next are begun where that is elsewhere."""
        scopes = self.scopes(levels)
        if scopes not in self._made:
            self._add(self._trial(scopes, levels, behind))
        return Outcome(self._made[scopes].metric, self._made[scopes].cost)

    def _trial(self, scopes: tuple[Scope, ...], levels: Levels, behind: Sequence[Levels]) -> Trial:
        if self._is_float(levels):  # prepare warns of a model of which it quantizes nothing
            return replace(self._made[(("*", None),)], scopes=scopes)
        if self._ahead is None:
            return run_trial(self._job, scopes)
        others = [self.scopes(each) for each in behind if not self._is_float(each)]
        return self._ahead.trial([scopes, *(each for each in others if each not in self._made)])

    def _is_float(self, levels: Levels) -> bool:
        """Tells whether levels leave every operator float."""
        return all(config is None for config in self._chosen(levels).values())

    def scopes(self, levels: Levels) -> tuple[Scope, ...]:
        """Returns the scopes that say which config each module has."""
        return written(self._chosen(levels), self._candidates[0])

    def _chosen(self, levels: Levels) -> dict[str, str | None]:
        """Returns each module's config; one with fewer candidates has its last for the levels above."""
        pairs = zip(self.offered.items(), levels, strict=True)
        return {path: choices[min(level, len(choices) - 1)] for (path, choices), level in pairs}

    def _add(self, trial: Trial) -> None:
        self._made[trial.scopes] = trial
        if self._log is not None:
            lines = [self._heading, *(json.dumps(asdict(made)) for made in self._made.values())]
            write_content(self._log, "".join(f"{line}\n" for line in lines).encode())

    @cached_property
    def _heading(self) -> str:
        job, exported = self._job, self._job.exported()
        tensors = [leaf for leaf in pytree.tree_leaves(job.calibration) if isinstance(leaf, Tensor)]
        fields = {
            "tune": _VERSION,
            "model": digest((*exported.parameters(), *exported.buffers())),
            "graph": [f"{node.name} {node.target}" for node in exported.graph.nodes if node.op == "call_function"],
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
        found = heading.get("tune")
        if found != _VERSION:
            raise ArtefactError(
                f"The log '{log}' has version {shown(found)}, this release reads {_VERSION}; give another path."
            )
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
