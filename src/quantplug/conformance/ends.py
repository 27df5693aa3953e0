"""Rows whose kernels express some ratios of scales only, at the ends of what they declare.

Before: a panel, and the end of a limit. After: its model with outputs of such scales that the ratio of each row lies
just inside of its limit, or beyond it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torchao.quantization.pt2e import FixedQParamsObserver

from quantplug.conformance.flow import Flow, Side
from quantplug.conformance.pieces import Following, Placed
from quantplug.conformance.trial import Panel, Trial
from quantplug.core.graph.facts import observer_of
from quantplug.core.graph.meta import LIMITS
from quantplug.core.pt2e.observed import calls_of_observers, observe_constants
from quantplug.core.specs.limits import Rescale

_NEAR, _FAR = 1 + 2.0**-6, 2.0
# How much louder than the limit inputs are: scales of outputs far below theirs are then no smaller than usual.
_MARGIN = 2.0**8
_INT8 = (torch.int8, torch.uint8)


@dataclass(frozen=True)
class End:
    """A side of one end of a limit.

    Attributes:
        is_low: whether it is the least ratio.
        is_beyond: whether the ratio lies outside.
    """

    is_low: bool
    is_beyond: bool

    def __str__(self) -> str:
        side, end = "beyond" if self.is_beyond else "just inside", "least" if self.is_low else "greatest"
        return f"{side} the {end} ratio of scales"

    def ratio(self, limit: Rescale) -> float:
        """Returns a ratio on this side of the end."""
        factor = _FAR if self.is_beyond else _NEAR
        return (limit.low if self.is_low else limit.high) * (
            factor if self.is_low is not self.is_beyond else 1 / factor
        )


def ends_of(limit: Rescale) -> Iterator[End]:
    """Yields both sides of each end of a limit."""
    finite = {True: limit.low > 0, False: math.isfinite(limit.high)}
    yield from (End(is_low, beyond) for is_low in (True, False) if finite[is_low] for beyond in (False, True))


def is_tried(trial: Trial) -> bool:
    """Tells whether a trial stands for its rule at the ends: the first form that is taken, calibrated."""
    return _is_limited(trial) and trial is next(filter(_is_taken, trial.claim.trials), None)


def _is_limited(trial: Trial) -> bool:
    limit, placed = trial.claim.row.rescale, trial.form.placed
    return limit is not None and trial.claim.mode == "static" and not isinstance(placed, Following)


def _is_taken(trial: Trial) -> bool:
    return trial.form.placed is not None and trial.panel.takes_by_row(trial)


def at_end(panel: Panel, end: End) -> Panel:
    """Returns the trials of a panel that are tried at an end, in a model whose scales lie there."""
    if end not in panel.ends:
        tried = (trial for trial in panel.trials if is_tried(trial))
        panel.ends[end] = EndPanel([t for t in tried if end in ends_of(_limit(t))], end)
    return panel.ends[end]


def _limit(trial: Trial) -> Rescale:
    found = trial.claim.row.rescale
    assert found is not None  # only trials of such rows are tried at their ends
    return found


class EndPanel(Panel):
    """Trials whose scales lie at one end of their rows' limits; there is no training."""

    def __init__(self, trials: list[Trial], end: End) -> None:
        super().__init__(trials)
        self._end = end

    @cached_property
    def ptq(self) -> Flow:
        """The flow with those scales."""
        claim = self.trials[0].claim
        ratios = {trial.placed: self._end.ratio(_limit(trial)) for trial in self.trials}
        loudness = 1.0 if self._end.is_low else _MARGIN * max(1.0, *ratios.values())
        side = Side([trial.placed for trial in self.trials], loudness)
        return EndFlow(claim.backend, claim.backend.config(claim.config_name), side, ratios, self._end)

    @property
    def qat(self) -> None:
        """None, nothing is trained."""


class EndFlow(Flow):
    """The stages of a model whose outputs get the scales that make given ratios."""

    def __init__(self, backend: Any, config: Any, side: Side, ratios: dict[Placed, float], end: End) -> None:
        super().__init__(backend, config, side, is_qat=False)
        self._ratios, self._end = ratios, end

    def prepare(self) -> fx.GraphModule:
        """Returns a new calibrated graph with those scales."""
        prepared = super().prepare()
        observe_constants(prepared.graph, calls_of_observers(prepared.graph))
        for placed, ratio in self._ratios.items():
            output = self.output(prepared, placed)
            observer, found = observer_of(output), self._ratio_to_one(prepared, placed)
            if observer is not None and found is not None:
                prepared.set_submodule(str(output.target), _with_scale(observer, found / ratio))
        return prepared

    def _ratio_to_one(self, prepared: fx.GraphModule, placed: Placed) -> float | None:
        """Returns the ratio of a piece at its limited end if its output had the scale one."""
        own = (node for node in self.operators(prepared, placed) if not self.is_before(node, placed))
        for node in own:
            limits, scales = LIMITS.get(node), _scales_into(node)
            if limits is not None and limits.rescale is not None and scales:
                numbers = scales if limits.rescale.of == "each" else [math.prod(scales)]
                extreme = min if self._end.is_low else max
                return extreme(float(number.min() if self._end.is_low else number.max()) for number in numbers)
        return None


def _scales_into(node: fx.Node) -> list[Any]:
    found: list[Any] = [observer_of(source) for source in node.all_input_nodes]
    return [o.calculate_qparams()[0].double() for o in found if getattr(o, "dtype", None) in _INT8]


def _with_scale(observer: nn.Module, scale: float) -> nn.Module:
    known: Any = observer
    zero_point = int(known.calculate_qparams()[1].reshape(-1)[0])
    limits = {"dtype": known.dtype, "quant_min": known.quant_min, "quant_max": known.quant_max}
    fixed: nn.Module = FixedQParamsObserver(scale, zero_point, **limits)
    return fixed
