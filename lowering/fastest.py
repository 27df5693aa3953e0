"""The fastest of several engines for one q/dq graph, on this machine and the example inputs.

Before: a q/dq graph and candidates that may lower it. After: the program of the fastest, which has computed what the
graph computes, with the times of all. A candidate that refuses the graph, cannot run it or computes something else is a
row with its reason. What was chosen is remembered, so that the next call lowers the chosen one alone.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError, QuantplugError, first_line
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.report.engines import EngineTime, EngineTimes
from quantplug.lowering import remembered
from quantplug.lowering.program import Program
from quantplug.lowering.turns import Timed, best, in_turns, ratio
from quantplug.lowering.yardstick import Yardstick

WHOLE = "float32"
_MICRO = 1e6


@dataclass(frozen=True)
class Candidate:
    """One way to run a graph.

    Attributes:
        engine: the name of the engine.
        lower: gives the program for the graph and the example inputs.
        float_dtype: what products that stay float compute in.
        packages: the distributions whose versions count.
        is_for_products: whether it is the same program as the engine's own in float32 where no product stays float.
    """

    engine: str
    lower: Callable[[], Program]
    float_dtype: str = WHOLE
    packages: tuple[str, ...] = ()
    is_for_products: bool = False


def fastest(
    converted: fx.GraphModule,
    inputs: tuple[Any, ...],
    candidates: Sequence[Candidate],
    asked: Mapping[str, Any],
    *,
    remember: bool = True,
    time_anew: bool = False,
) -> Program:
    """Returns the program of the fastest candidate, with `engines` filled.

    Args:
        converted: the q/dq graph.
        inputs: example inputs, by position.
        candidates: the preferred one first, which is chosen where others are as good as equal.
        asked: options that the candidates were made of, which a remembered choice depends on.
        remember: whether to look for a choice of an earlier call, and to keep this one.
        time_anew: whether to time all even if a choice is remembered.

    Raises:
        LoweringError: no candidate runs the graph; the message has the reason of each.
    """
    yardstick = Yardstick(require_graph_module(converted, "lower"), inputs)
    names = [f"{each.engine} {each.float_dtype}" for each in candidates]
    packages = {package for each in candidates for package in each.packages}
    key = remembered.key_of(converted, inputs, packages, {**asked, "candidates": names}) if remember else ""
    kept = remembered.recall(key) if remember and not time_anew else None
    program = None if kept is None else _again(kept, candidates, yardstick)
    if program is None:
        program = _timed(candidates, yardstick)
        if remember and program.engines is not None:
            remembered.keep(key, program.engines)
    return program


def _again(kept: EngineTimes, candidates: Sequence[Candidate], yardstick: Yardstick) -> Program | None:
    """Returns the program of a remembered choice; None where it is none any more."""
    chosen = (kept.winner.engine, kept.winner.float_dtype)
    candidate = next((each for each in candidates if (each.engine, each.float_dtype) == chosen), None)
    program = None if candidate is None else _lowered(candidate, yardstick)[1]
    if program is not None:
        program.engines = kept
    return program


def _timed(candidates: Sequence[Candidate], yardstick: Yardstick) -> Program:
    """Lowers all candidates and returns the fastest."""
    made: list[tuple[EngineTime, Program | None]] = []
    for candidate in candidates:
        if _is_worth_it(candidate, made, yardstick):
            made.append(_lowered(candidate, yardstick))
    ready = [(row, program) for row, program in made if program is not None]
    if not ready:
        told = "; ".join(f"'{row.engine}': {row.reason.rstrip('.')}" for row, _ in made)
        raise LoweringError(
            f"No engine runs the q/dq graph ({told}); choose another config or keep what they name float."
        )
    found = _turns([program for _, program in ready], yardstick)
    chosen = best(found)
    timed = {row: _row(row, each, found[chosen]) for (row, _), each in zip(ready, found, strict=True)}
    rows = tuple(timed.get(row, row) for row, _ in made)
    row, program = ready[chosen]
    place = [row for row, _ in made].index(row)
    program.engines = EngineTimes(rows, place, yardstick.described(), torch.get_num_threads())
    return program


def _is_worth_it(candidate: Candidate, made: Sequence[tuple[EngineTime, Program | None]], yardstick: Yardstick) -> bool:
    """Tells whether a candidate may run, and be another program than the engine's own in float32."""
    whole = [p for row, p in made if (row.engine, row.float_dtype) == (candidate.engine, WHOLE)]
    if candidate.float_dtype == WHOLE or not whole:
        return True
    if not candidate.is_for_products:
        return any(program is not None for program in whole)
    floats = (op.node for program in whole if program is not None for op in program.ops if op.placement == "float")
    return any(node in yardstick.products for node in floats)


def _lowered(candidate: Candidate, yardstick: Yardstick) -> tuple[EngineTime, Program | None]:
    """Returns a candidate's row, with its program where it computes what the graph computes."""
    row = EngineTime(candidate.engine, candidate.float_dtype)
    try:
        program = candidate.lower()
        return replace(row, decibels=yardstick.decibels(program)), program
    except QuantplugError as error:
        return replace(row, reason=str(error)), None
    except Exception as error:  # of the engine's own, whatever it raises
        return replace(row, reason=f"it fails: {first_line(error)}"), None


def _turns(programs: Sequence[Program], yardstick: Yardstick) -> list[Timed]:
    runs = [partial(program, *yardstick.inputs) for program in programs]
    found = in_turns(runs, [program.restart for program in programs] if yardstick.has_state else None)
    for program in programs:
        program.restart()
    return found


def _row(row: EngineTime, timed: Timed, chosen: Timed) -> EngineTime:
    low, middle, high = (_MICRO * each for each in statistics.quantiles(timed.seconds, n=4))
    found = replace(row, microseconds=middle, low=low, high=high, rounds=len(timed.seconds))
    reason = "far behind, timed no further" if timed.is_far_behind else ""
    return replace(found, ratio=ratio(timed, chosen), reason=reason)
