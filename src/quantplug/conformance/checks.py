"""What a backend has to keep of what it declares, one check for each promise.

Before: a trial and the index of one of its forms. After: a `Verdict`. A check that is about something that an
earlier check found missing is skipped, so that one wrong claim fails one check.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e import disable_observer
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.conformance.trial import Flow, Trial
from quantplug.core.decision import decision
from quantplug.core.errors import QuantplugError, first_line
from quantplug.core.graph import module_path
from quantplug.core.levels import Level
from quantplug.core.plan import Plan, plan_of
from quantplug.core.qdq import DEQUANTIZE_OPS
from quantplug.core.reference import reference_defects
from quantplug.core.sharing import annotation_of, sharing_groups
from quantplug.core.verify import verify_annotations

# Training sees the ranges of one batch, calibration may clip them: the two q/dq graphs differ by that.
_TRAINING_DECIBELS = 10.0


class NotClaimedError(Exception):
    """The backend does not claim what a check is about; the sentence says why."""


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        status: "passed", "failed" or "skipped".
        reason: why it failed or was skipped.
    """

    status: str = "passed"
    reason: str = ""


Objection: TypeAlias = Callable[[Trial, int], str | None]


@dataclass(frozen=True)
class Check:
    """One promise.

    Attributes:
        objection: returns what is wrong with a form, or None.
        needs: the checks that have to hold before.
    """

    objection: Objection
    needs: tuple[str, ...] = ()


def judge(trial: Trial, index: int, check: str) -> Verdict:
    """Returns whether a form keeps a promise; what fails among other forms is judged again by itself."""
    key = ("verdict", index, check)
    known: dict[tuple[str, int, str], Verdict] = trial.__dict__.setdefault("verdicts", {})
    if key not in known:
        known[key] = _judge(trial, index, check)
    return known[key]


def _judge(trial: Trial, index: int, check: str) -> Verdict:
    for needed in CHECKS[check].needs:
        before = judge(trial, index, needed)
        if before.status != "passed":
            return Verdict("skipped", before.reason if before.status == "skipped" else f"not reached: {needed}")
    verdict = _attempt(trial, index, check)
    if verdict.status == "failed" and len(trial.forms) > 1:
        return _attempt(trial.alone[index], 0, check)
    return verdict


def _attempt(trial: Trial, index: int, check: str) -> Verdict:
    try:
        reason = CHECKS[check].objection(trial, index)
    except NotClaimedError as skipped:
        return Verdict("skipped", str(skipped))
    except QuantplugError as error:
        return Verdict("failed", str(error))
    except Exception as error:  # a plugin may fail in any way; that is a finding, not the end of the kit
        return Verdict("failed", first_line(error))
    return Verdict("failed", reason) if reason else Verdict()


def _shown(trial: Trial, index: int) -> str | None:
    return trial.forms[index].problem or None


def _limits(trial: Trial, index: int) -> str | None:
    """The backend's own config keeps the limits that its rows declare, before and after calibration."""
    flow = trial.flow
    names = {node.name for node in flow.operators(flow.annotated, index)}
    return next((str(broken) for broken in flow.violations if broken.node in names), None)


def _annotated(trial: Trial, index: int) -> str | None:
    """The rule that claims a form takes it."""
    flow = trial.flow
    if flow.takes(index) or flow.is_rewritten(index):
        return None
    decided = flow.decided(index)
    reason = (decided.reason or f"rule '{decided.rule}' took it") if decided else "nothing was decided about it"
    if _is_taken_elsewhere(trial):
        raise NotClaimedError(f"the rule does not claim it: {reason}")
    return f"no form of rule '{trial.label}' is taken under any config; here: {reason}"


def _is_taken_elsewhere(trial: Trial) -> bool:
    kin = [t for t in trial.kin if t.forms[0].placed is not None]
    return any(t.flow.takes(i) or t.flow.is_rewritten(i) for t in kin for i in range(len(t.forms)))


def _output(trial: Trial, index: int) -> str | None:
    """The output's scale comes from where the row says."""
    flow = trial.flow
    if not flow.takes(index):
        raise NotClaimedError("the backend's transforms replaced it by operators of other rows")
    declared = trial.row.output if trial.mode == "static" else "float"
    found = _kind_of(flow, flow.root(flow.annotated, index))
    return None if found == declared else f"the row declares its output '{declared}', the annotation makes it '{found}'"


def _kind_of(flow: Flow, root: fx.Node) -> str:
    annotation = annotation_of(root)
    spec = annotation.output_qspec if annotation else None
    if isinstance(spec, SharedQuantizationSpec):
        return "shared" if _shares_with_input(flow.annotated, root) else "shared, but not with an input"
    kinds: list[tuple[type[QuantizationSpecBase], str]] = [
        (FixedQParamsQuantizationSpec, "fixed"),
        (QuantizationSpec, "own"),
    ]
    return next((name for kind, name in kinds if isinstance(spec, kind)), "float")


def _shares_with_input(model: fx.GraphModule, root: fx.Node) -> bool:
    sharing = sharing_groups(model.graph)
    members = sharing.groups[sharing.group_of[root]].members
    return any(isinstance(point, tuple) for point in members)


def _verified(trial: Trial, index: int) -> str | None:
    """The annotations can be carried out, and the result is a reference quantized model."""
    verify_annotations(trial.flow.annotated)
    return next(iter(reference_defects(trial.flow.converted)), None)


def _parity(trial: Trial, index: int) -> str | None:
    """Training quantizes the same operators, computes what its q/dq graph computes, and ends where PTQ does."""
    flow = trial.qat
    if flow is None:
        raise NotClaimedError(f"config '{trial.config_name}' has no form for training (is_qat)")
    flow.prepared.apply(disable_observer)
    simulated, expected = flow.results("prepared")[index], flow.results("converted")[index]
    reason = _at_level(flow, index, Level.ONE_STEP, simulated, expected)
    if reason or trial.is_qat:
        return f"fake quantization against the q/dq graph: {reason}" if reason else None
    if trial.ptq.takes(index) != flow.takes(index):
        return f"the rule takes it {'after' if trial.ptq.takes(index) else 'in'} training only"
    theirs = trial.ptq.results("converted")[index]
    reason = Level.APPROXIMATE.objection(expected, theirs, decibels=_TRAINING_DECIBELS)
    return f"trained against calibrated: {reason}" if reason else None


def _serialised(trial: Trial, index: int) -> str | None:
    """The q/dq graph and the plan survive being written and read."""
    flow = trial.flow
    plan = plan_of(flow.annotated)
    again = Plan.from_json(plan.json())
    if again != plan:
        return f"the plan read from JSON is another one: {plan.differences(again)[0]}"
    same = torch.equal(flow.results("reloaded")[index], flow.results("converted")[index])
    return None if same else "the q/dq graph that was saved and loaded yields other numbers"


def _deterministic(trial: Trial, index: int) -> str | None:
    """Two runs over one model give one plan, one q/dq graph and one result."""
    flow = trial.flow
    if flow.again:
        return f"a second run differs: {flow.again[0]}"
    same = torch.equal(flow.results("converted", run=1)[index], flow.results("converted")[index])
    return None if same else "run twice, two results"


def _lowered(trial: Trial, index: int) -> str | None:
    """The lowering gives a program that runs, saves itself, and yields what the model's shape says."""
    flow = trial.flow
    found, expected = flow.results("program")[index], flow.results("converted")[index]
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"the program yields {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not torch.equal(flow.results("program", run=1)[index], found):
        return "the program yields other numbers when it runs again"
    return None if flow.artefact_bytes else "the program wrote an empty file"


def _delegated(trial: Trial, index: int) -> str | None:
    """What is claimed runs on integer kernels, and nothing else does."""
    if trial.mode == "weight_only":
        raise NotClaimedError("with integer weights only, the arithmetic is that of floats")
    flow = trial.flow
    placed = {op.node: op for op in flow.program.ops}
    own = (n for n in flow.operators(flow.converted, index) if module_path(n) != f"branches.{index}.before")
    for node in own:
        decided, op = decision(node), placed.get(node.name)
        claimed = decided is not None and decided.quantized
        if claimed and trial.mode == "dynamic" and not _reads_integers(node):
            continue  # what follows the product is computed on its float result
        if op is None or claimed != (op.placement == "int8"):
            where = f"runs {op.placement}: {op.reason}" if op else "is not among the program's operators"
            return f"'{node.name}' is {'claimed' if claimed else 'not claimed'} and {where}"
    return None


def _reads_integers(node: fx.Node) -> bool:
    return any(source.target in DEQUANTIZE_OPS for source in node.all_input_nodes)


def _level(trial: Trial, index: int) -> str | None:
    """The kernels agree with the q/dq graph as closely as the row says, also beyond the calibrated range."""
    flow = trial.flow
    for beyond in (False, True):
        found, expected = (flow.results(stage, beyond=beyond)[index] for stage in ("program", "converted"))
        reason = _at_level(flow, index, _declared(flow, index), found, expected)
        if reason:
            return reason
    return None


_LOOSENESS = (Level.EXACT, Level.ONE_STEP, Level.APPROXIMATE)


def _declared(flow: Flow, index: int) -> Level:
    """The loosest level of the rules that take part: a producer's step is a step of what shares its scale."""
    rules = {d.rule for node in flow.operators(flow.annotated, index) if (d := decision(node))}
    rows = [row for row in flow.trial.backend.rows for label, _ in row.patterns if label in rules]
    return max((row.level for row in rows), key=_LOOSENESS.index)


def _at_level(flow: Flow, index: int, level: Level, found: Tensor, expected: Tensor) -> str | None:
    """Compares at a level; a result that stays float has no step, so that one step is then approximate."""
    output = flow.output(flow.converted, index)
    scale = output.args[1] if output.target in DEQUANTIZE_OPS else None
    if isinstance(scale, float):
        return level.objection(found, expected, step=scale)
    return (Level.APPROXIMATE if level is Level.ONE_STEP else level).objection(found, expected)


CHECKS: Mapping[str, Check] = {
    "shown": Check(_shown),
    "limits": Check(_limits, ("shown",)),
    "annotated": Check(_annotated, ("shown", "limits")),
    "output": Check(_output, ("annotated",)),
    "verified": Check(_verified, ("annotated",)),
    "deterministic": Check(_deterministic, ("verified",)),
    "parity": Check(_parity, ("verified",)),
    "serialised": Check(_serialised, ("verified",)),
    "lowered": Check(_lowered, ("verified",)),
    "delegated": Check(_delegated, ("lowered",)),
    "level": Check(_level, ("lowered",)),
}
