"""What a backend claims, laid out for the checks.

Before: a backend's declaration. After: for each rule, config and form of the rule a `Trial`. Trials of one config
stand side by side in one model, a `Panel`, because exporting and lowering cost more by the model than by the piece.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from quantplug.conformance.flow import Flow
from quantplug.conformance.following import Followers, plain_label
from quantplug.conformance.forms import Form, Neighbours, Turn, forms_of
from quantplug.conformance.judging import SharedModel, in_panels
from quantplug.conformance.pieces import Placed
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.errors import ConfigError
from quantplug.core.patterns.language import Pattern, Value
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.capabilities import configs_of


@dataclass(eq=False)
class Claim:
    """A rule under a config.

    Attributes:
        backend: the declaration.
        row: the annotator.
        label: the rule.
        config_name: the config.
        kin: the claims of the same rule under every config under which it differs.
        trials: the forms of the rule.
    """

    backend: Backend
    row: Annotator
    label: str
    config_name: str
    kin: list["Claim"] = field(repr=False)
    trials: list["Trial"] = field(default_factory=list, repr=False)

    @cached_property
    def mode(self) -> str:
        """What the config is for: "static", "dynamic" or "weight_only"."""
        activation = self.backend.config(self.config_name).input_activation
        if activation is None:
            return "weight_only"
        return "dynamic" if activation.is_dynamic else "static"

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Where the rule's output has its scale from; a union may have rows of several backends with the rule."""
        return tuple(dict.fromkeys(row.output for row in _rows_of(self.backend, self.label)))

    @property
    def is_taken(self) -> bool:
        """Whether the backend takes any form of the rule, in training or after it."""
        trials = (trial for trial in self.trials if trial.form.placed is not None)
        return any(trial.panel.takes(trial) or trial.panel.rewrites(trial) for trial in trials)


@dataclass(eq=False)
class Trial:
    """One form of a rule under a config.

    Attributes:
        claim: the rule under the config.
        form: the form.
        verdicts: what was found, by check.
    """

    claim: Claim
    form: Form
    verdicts: dict[str, Any] = field(default_factory=dict, repr=False)
    _panel: "Panel | None" = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The test name, without the check."""
        claim = self.claim
        return "-".join((claim.backend.name, claim.config_name, claim.label, self.form.name, claim.mode))

    @property
    def placed(self) -> Placed:
        """The piece; only a trial that has one is in a panel."""
        assert self.form.placed is not None
        return self.form.placed

    @property
    def panel(self) -> "Panel":
        """The trials that share a model with it; itself alone where the kit could make no piece."""
        if self._panel is None:
            self._panel = Panel([self])
        return self._panel

    @panel.setter
    def panel(self, panel: "Panel") -> None:
        self._panel = panel


class Panel(SharedModel[Trial]):
    """Trials of one config that share a model.

    Attributes:
        ends: the same trials where their rows' limits end, see `conformance/ends.py`.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        super().__init__(trials)
        self.ends: dict[Any, Panel] = {}
        self._fates: dict[tuple[Trial, bool], str] = {}
        self._by_row: dict[Trial, bool] = {}

    def of(self, trials: Sequence[Trial]) -> "Panel":
        """Returns a panel of other trials."""
        return Panel(trials)

    made = ("ptq", "qat", "_by_training")

    @cached_property
    def ptq(self) -> Flow:
        """The flow after training."""
        claim = self.trials[0].claim
        return Flow(claim.backend, claim.backend.config(claim.config_name), self.side, is_qat=False)

    @cached_property
    def qat(self) -> Flow | None:
        """The flow of quantization-aware training, None where the config has none."""
        claim = self.trials[0].claim
        try:
            config = claim.backend.config(claim.config_name, is_qat=True)
        except ConfigError:
            return None
        return Flow(claim.backend, config, self.side, is_qat=True)

    def flow(self, trial: Trial) -> Flow:
        """Returns the flow in which a trial's rule applies, with the trials of the panel of which that is true as well.

        The others stay out of it: lowering costs by the operator, and each form is lowered once.
        """
        is_qat = self.is_qat(trial)
        panel = self._by_training[is_qat]
        return panel.qat if is_qat and panel.qat is not None else panel.ptq

    @cached_property
    def _by_training(self) -> "dict[bool, Panel]":
        parts = {is_qat: [t for t in self.trials if self.is_qat(t) is is_qat] for is_qat in (False, True)}
        return {is_qat: self if len(part) == len(self) else Panel(part) for is_qat, part in parts.items()}

    def is_qat(self, trial: Trial) -> bool:
        """Tells whether a trial's rule is for training: nothing comes of it without, and something with it."""
        kin = [other for other in self.trials if other.claim is trial.claim]
        claimed = (any(self._fate(other, is_qat) for other in kin) for is_qat in (False, True))
        return not next(claimed) and next(claimed)

    def takes(self, trial: Trial, *, is_qat: bool | None = None) -> bool:
        """Tells whether the rule takes its form, in training, after it, or by default where the rule applies."""
        return self._fate(trial, self.is_qat(trial) if is_qat is None else is_qat) == "taken"

    def takes_by_row(self, trial: Trial) -> bool:
        """Tells whether the trial's own row takes it after training: in a union another may have the same rule."""
        if trial not in self._by_row:
            taken = self.takes(trial, is_qat=False)
            alone = len(_rows_of(trial.claim.backend, trial.claim.label)) == 1
            self._by_row[trial] = taken and (alone or self.ptq.is_limited(trial.placed, trial.claim.row.rescale))
        return self._by_row[trial]

    def rewrites(self, trial: Trial) -> bool:
        """Tells whether the backend's transforms replace a form by operators of other rows."""
        return self._fate(trial, self.is_qat(trial)) == "rewritten"

    def _fate(self, trial: Trial, is_qat: bool) -> str:
        if (trial, is_qat) not in self._fates:
            flow = self.qat if is_qat else self.ptq
            self._fates[trial, is_qat] = _fate(flow, trial) if flow else ""
        return self._fates[trial, is_qat]

    def release(self) -> None:
        """Forgets the stages, not what was taken."""
        super().release()
        self.ends.clear()


def _fate(flow: Flow, trial: Trial) -> str:
    """Returns "taken" by the trial's rule, "rewritten" to operators that others take, or nothing."""
    decided = flow.decided(trial.placed)
    if decided is not None and decided.rule == trial.claim.label:
        return "taken"
    return "rewritten" if flow.is_rewritten(trial.placed) else ""


def trials(backend: Backend, *labels: str) -> list[Trial]:
    """Returns the trials of a backend's rules, or of those named; those that share a model follow each other."""
    found = list(_claims(backend, labels))
    order = list(backend.configs)
    for name in order:
        _share_models([claim for claim in found if claim.config_name == name])
    return [trial for claim in sorted(found, key=lambda c: order.index(c.config_name)) for trial in claim.trials]


def _claims(backend: Backend, labels: Sequence[str]) -> Iterator[Claim]:
    choose, followers = Neighbours(backend), dict[str, Followers]()
    for row in backend.rows:
        number = itertools.count()
        for label in dict.fromkeys(label for label, _ in row.patterns if not labels or label in labels):
            kin: list[Claim] = []
            asking = _asking_for_all(row, _rows_of(backend, label))
            for name in _different_configs(backend, row, label):
                claim, turn = Claim(backend, row, label, name, kin), Turn(next(number), not kin)
                claim.trials = [Trial(claim, form) for form in forms_of(asking, label, name, turn, choose)]
                kin.append(claim)
            first = next((claim for claim in kin if claim.mode == "static"), None)
            if first is not None and label == plain_label(row):
                name = first.config_name
                if name not in followers:
                    followers[name] = Followers(backend, name, choose)
                first.trials += [Trial(first, form) for form in followers[name].forms(asking)]
            yield from kin


def _rows_of(backend: Backend, label: str) -> list[Annotator]:
    return [row for row in backend.rows if any(name == label for name, _ in row.patterns)]


def _asking_for_all(row: Annotator, kin: Sequence[Annotator]) -> Annotator:
    """Returns a row with the neighbours that any row of its rule asks for; in a union an earlier one takes forms."""
    follows = tuple(dict.fromkeys(name for other in kin for name in other.follows))
    return replace(row, follows=follows, writes_float=any(other.writes_float for other in kin))


def _different_configs(backend: Backend, row: Annotator, label: str) -> Iterator[str]:
    seen: list[Any] = []
    for name in configs_of(backend, row):
        config = backend.config(name)
        # A rule without constants gives the same annotations for any weight spec.
        weight = (config.weight, config.bias) if _is_weighted(row, label) else ()
        asked = (config.input_activation, config.output_activation, *weight)
        if asked not in seen:
            seen.append(asked)
            yield name


def _is_weighted(row: Annotator, label: str) -> bool:
    return any(_has_constant(pattern) for name, pattern in row.patterns if name == label)


def _has_constant(pattern: Pattern) -> bool:
    own = isinstance(pattern, Value) and pattern.kind == "a constant"
    return own or any(_has_constant(part) for part in pattern.parts)


def _share_models(claims: Iterable[Claim]) -> None:
    """Puts the trials of claims of one config into panels; a rule is not torn apart."""
    for together in in_panels([t for t in claim.trials if t.form.placed is not None] for claim in claims):
        panel = Panel(together)
        for trial in together:
            trial.panel = panel
