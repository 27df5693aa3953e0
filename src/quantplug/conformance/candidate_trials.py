"""What a candidate annotates, laid out for the checks.

Before: a candidate. After: for each operator that it annotates, and each form of it, a `CandidateTrial`; forms that it
does not annotate are among them where it annotates another form of the operator. Several share a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from quantplug.conformance.candidate import Candidate
from quantplug.conformance.candidate_flow import CandidateFlow
from quantplug.conformance.corpus import Form, forms_of, rows
from quantplug.conformance.judging import SharedModel, in_panels
from quantplug.conformance.noted import Signature
from quantplug.conformance.pieces import Placed
from quantplug.core.errors import ConfigError, did_you_mean

# Lowering takes as long by the piece in a large model; where it fails for one, the others are lowered again.
_LOWERED = 8


@dataclass(eq=False)
class CandidateTrial:
    """One form of an operator.

    Attributes:
        candidate: the quantizer.
        form: the form.
        placed: its model.
        kin: the forms of the operator.
        signature: what is annotated at it, empty where nothing is or it cannot be annotated.
        operands: how many each of its operators is given.
        verdicts: what was found, by check.
    """

    candidate: Candidate
    form: Form
    placed: Placed
    kin: "list[CandidateTrial]" = field(repr=False)
    signature: Signature = ()
    operands: tuple[int, ...] = ()
    verdicts: dict[str, Any] = field(default_factory=dict, repr=False)
    _panel: "CandidatePanel | None" = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The test name, without the check."""
        return f"{self.candidate.name}-{self.form.name}"

    @property
    def panel(self) -> "CandidatePanel":
        """The trials that share a model with it."""
        assert self._panel is not None
        return self._panel

    @property
    def lowered_as(self) -> "CandidateTrial":
        """The first form with the same operands and annotations: written in another way it is the same q/dq graph."""
        form = self.form
        alike = (o for o in self.kin if (o.form.sample, o.form.context) == (form.sample, form.context))
        known = (self.signature, self.operands)
        return next(other for other in alike if (other.signature, other.operands) == known)

    @property
    def is_annotated(self) -> bool:
        """Whether anything is quantized at it."""
        return any(
            asked is not None and asked[0] is not None
            for _, inputs, output in self.signature
            for asked in (*(asked for _, asked in inputs), output)
        )


class CandidatePanel(SharedModel[CandidateTrial]):
    """Trials of one candidate that share a model."""

    made = ("flow", "_parts")

    @cached_property
    def flow(self) -> CandidateFlow:
        """Its stages."""
        return CandidateFlow(self.trials[0].candidate, self.side)

    def lowered_with(self, trial: CandidateTrial) -> "CandidatePanel":
        """Returns the part of the trials that are lowered together with one; itself where it is lowered as another."""
        return self._parts.get(trial, self)

    @cached_property
    def _parts(self) -> "dict[CandidateTrial, CandidatePanel]":
        tried = [trial for trial in self.trials if trial.is_annotated and trial.lowered_as is trial]
        parts = [self.of(tried[start : start + _LOWERED]) for start in range(0, len(tried), _LOWERED)]
        return {trial: part for part in parts for trial in part.trials}


def all_forms(candidate: Candidate, *wanted: str) -> list[CandidateTrial]:
    """Returns the forms of every operator that the kit knows, in panels, before anything is known of them.

    Args:
        candidate: the quantizer.
        wanted: the operators to try; all of them if none is given.

    Raises:
        ConfigError: the kit does not know one of them.
    """
    known = rows(*wanted)
    if missing := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"The kit knows no operator '{missing[0]}'{did_you_mean(missing[0], rows())}; it knows {', '.join(rows())}."
        )
    found: list[CandidateTrial] = []
    for name, call in known.items():
        kin: list[CandidateTrial] = []
        kin += [CandidateTrial(candidate, form, placed, kin) for form, placed in forms_of(name, call)]
        found += kin
    share_models(found)
    return found


def share_models(trials: Sequence[CandidateTrial]) -> None:
    """Puts trials into panels; the forms of an operator are not torn apart."""
    by_row = (list(kin) for _, kin in groupby(trials, key=lambda trial: trial.form.row))
    for together in in_panels(by_row):
        panel = CandidatePanel(together)
        for trial in together:
            trial._panel = panel
