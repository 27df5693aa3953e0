"""What a backend has to keep of what it declares, one check for each promise.

Before: a trial. After: a `Verdict`. A check that is about something that an earlier check found missing is skipped,
so that one wrong claim fails one check; what fails among other trials is sought by halves.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e import disable_observer
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.conformance.ends import End, at_end, ends_of, is_tried
from quantplug.conformance.flow import DATA, Flow
from quantplug.conformance.judging import Check, NotClaimedError, Verdict, judged
from quantplug.conformance.pieces import Following
from quantplug.conformance.trial import Panel, Trial
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.annotation.verify import verify_annotations
from quantplug.core.observers.sharing import annotation_of, sharing_groups
from quantplug.core.qdq.format import reference_defects
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS
from quantplug.core.specs.decision import decision
from quantplug.core.specs.levels import Level

# Training sees the ranges of one batch, calibration may clip them: the two q/dq graphs differ by that.
_TRAINING_DECIBELS = 10.0


def judge(trial: Trial, check: str) -> Verdict:
    """Returns whether a form of a rule keeps a promise."""
    if check not in trial.verdicts:
        trial.verdicts[check] = _judge(trial, check)
    verdict: Verdict = trial.verdicts[check]
    return verdict


def _judge(trial: Trial, check: str) -> Verdict:
    reached = all(judge(trial, needed).status == "passed" for needed in CHECKS[check].needs)
    if reached and isinstance(trial.form.placed, Following) and _fails_alone(trial, check):
        return Verdict("skipped", f"not reached: {check} of the row by itself")
    return judged(trial, check, CHECKS, judge, trial.panel)


def _fails_alone(trial: Trial, check: str) -> bool:
    alone = (other for other in trial.claim.trials if not isinstance(other.form.placed, Following))
    return any(judge(other, check).status == "failed" for other in alone)


def _shown(trial: Trial, panel: Panel) -> str | None:
    return trial.form.problem or None


def _limits(trial: Trial, panel: Panel) -> str | None:
    """The backend's own config keeps the limits that its rows declare, before and after calibration."""
    flow = panel.flow(trial)
    names = {node.name for node in flow.operators(flow.annotated, trial.placed)}
    return next((str(broken) for broken in flow.violations if broken.node in names), None)


def _annotated(trial: Trial, panel: Panel) -> str | None:
    """The rule that claims a form takes it."""
    if panel.takes(trial) or panel.rewrites(trial):
        return None
    decided = panel.flow(trial).decided(trial.placed)
    reason = (decided.reason or f"rule '{decided.rule}' took it") if decided else "nothing was decided about it"
    if any(claim.is_taken for claim in trial.claim.kin):
        raise NotClaimedError(f"the rule does not claim it: {reason}")
    return f"no form of rule '{trial.claim.label}' is taken under any config; here: {reason}"


def _output(trial: Trial, panel: Panel) -> str | None:
    """The output's scale comes from where the row says."""
    if not panel.takes(trial):
        raise NotClaimedError("the backend's transforms replaced it by operators of other rows")
    declared = trial.claim.outputs if trial.claim.mode == "static" else ("float",)
    flow = panel.flow(trial)
    found = _kind_of(flow, flow.root(flow.annotated, trial.placed))
    if found in declared:
        return None
    return f"the row declares its output '{' or '.join(declared)}', the annotation makes it '{found}'"


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


def _verified(trial: Trial, panel: Panel) -> str | None:
    """The annotations can be carried out, and the result is a reference quantized model."""
    flow = panel.flow(trial)
    verify_annotations(flow.annotated)
    return next(iter(reference_defects(flow.converted)), None)


def _parity(trial: Trial, panel: Panel) -> str | None:
    """Training quantizes the same operators, computes what its q/dq graph computes, and ends where PTQ does."""
    flow = panel.qat
    if flow is None:
        raise NotClaimedError(f"config '{trial.claim.config_name}' has no form for training (is_qat)")
    flow.prepared.apply(disable_observer)
    simulated, expected = (flow.result(stage, trial.placed) for stage in ("prepared", "converted"))
    level = Level.APPROXIMATE if isinstance(trial.placed, Following) else Level.ONE_STEP
    reason = _at_level(flow, trial, level, simulated, expected)
    if reason or panel.is_qat(trial) or isinstance(trial.placed, Following):
        return f"fake quantization against the q/dq graph: {reason}" if reason else None
    after, within = (panel.takes(trial, is_qat=is_qat) for is_qat in (False, True))
    if after != within:
        return f"the rule takes it {'after' if after else 'in'} training only"
    calibrated = panel.ptq.result("converted", trial.placed)
    reason = Level.APPROXIMATE.objection(expected, calibrated, decibels=_TRAINING_DECIBELS)
    return f"trained against calibrated: {reason}" if reason else None


def _serialised(trial: Trial, panel: Panel) -> str | None:
    """The q/dq graph and the plan survive being written and read."""
    flow = panel.flow(trial)
    plan = plan_of(flow.annotated)
    again = Plan.from_json(plan.json())
    if again != plan:
        return f"the plan read from JSON is another one: {plan.differences(again)[0]}"
    same = torch.equal(flow.result("reloaded", trial.placed), flow.result("converted", trial.placed))
    return None if same else "the q/dq graph that was saved and loaded yields other numbers"


def _deterministic(trial: Trial, panel: Panel) -> str | None:
    """Two runs over one model give one plan, one q/dq graph and one result."""
    flow = panel.flow(trial)
    if flow.again:
        return f"a second run differs: {flow.again[0]}"
    same = torch.equal(flow.result("converted", trial.placed, run=1), flow.result("converted", trial.placed))
    return None if same else "run twice, two results"


def _lowered(trial: Trial, panel: Panel) -> str | None:
    """The lowering gives a program that runs, saves itself, and yields what the model's shape says."""
    flow = panel.flow(trial)
    found, expected = flow.result("program", trial.placed), flow.result("converted", trial.placed)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"the program yields {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not torch.equal(flow.result("program", trial.placed, run=1), found):
        return "the program yields other numbers when it runs again"
    return None if flow.artefact_bytes else "the program wrote an empty file"


def _delegated(trial: Trial, panel: Panel) -> str | None:
    """What is claimed runs on integer kernels, or is told to in a file for an engine, and nothing else does."""
    if trial.claim.mode == "weight_only":
        raise NotClaimedError("with integer weights only, the arithmetic is that of floats")
    flow = panel.flow(trial)
    placed = {op.node: op for op in flow.program.ops}
    if not flow.program.has_kernels and not any(op.placement == "int8" for op in placed.values()):
        raise NotClaimedError("the artefact is the q/dq graph; which kernels run is up to the engine that reads it")
    own = (n for n in flow.operators(flow.converted, trial.placed) if not flow.is_before(n, trial.placed))
    for node in own:
        decided, op = decision(node), placed.get(node.name)
        claimed = decided is not None and decided.quantized
        if claimed and trial.claim.mode == "dynamic" and not _reads_integers(node):
            continue  # what follows the product is computed on its float result
        if op is None or claimed != (op.placement == "int8"):
            where = f"runs {op.placement}: {op.reason}".rstrip(": ") if op else "is not among the program's operators"
            if claimed:
                return f"'{node.name}' is claimed and {where}; lower it, or let the row refuse it with where(...)"
            return f"'{node.name}' is not claimed and {where}; claim it by a row"
    return None


def _reads_integers(node: fx.Node) -> bool:
    return any(source.target in DEQUANTIZE_OPS for source in node.all_input_nodes)


def _level(trial: Trial, panel: Panel) -> str | None:
    """The kernels agree with the q/dq graph as closely as the row says, also beyond the calibrated range."""
    flow = panel.flow(trial)
    return _compared(flow, trial, "converted", _declared(flow, trial))


def _emulated(trial: Trial, panel: Panel) -> str | None:
    """The kernels agree with their emulation as closely as the kernel set says, also beyond the calibrated range."""
    if trial.claim.backend.kernels is None:
        raise NotClaimedError("the backend names no kernels to emulate")
    flow = panel.flow(trial)
    placed = {op.node: op for op in flow.emulated.ops}
    found = [placed[node.name] for node in flow.operators(flow.converted, trial.placed) if _is_quantized(node)]
    if missing := next((op for op in found if op.placement == "float"), None):
        raise NotClaimedError(f"'{missing.node}' is not emulated: {missing.reason}")
    return _compared(flow, trial, "emulated", _loosest(flow.emulated.levels[op.node] for op in found))


def _rescaled(trial: Trial, panel: Panel) -> str | None:
    """Inside the ratios of scales that a row declares its kernel is right, beyond them the report says what it does."""
    limit = trial.claim.row.rescale
    if limit is None:
        raise NotClaimedError("the row declares no limit on ratios of scales")
    if not is_tried(trial):
        raise NotClaimedError("another form of the rule is tried at the ends of its limit")
    for end in ends_of(limit):
        reason = _at_end(trial, at_end(panel, end), end)
        if reason:
            return f"{end}, at {end.ratio(limit):.3g}: {reason}"
    return None


def _at_end(trial: Trial, panel: Panel, end: End) -> str | None:
    flow, limit = panel.flow(trial), trial.claim.row.rescale
    told = _told_ratio(flow, trial)
    if (told is not None) is not end.is_beyond:
        return f"the report says {told or 'nothing of it'}"
    if told is not None and limit is not None and not limit.or_float:
        return None
    with suppress(NotClaimedError):
        if reason := _delegated(trial, panel):
            return reason
    return _compared(flow, trial, "converted", _declared(flow, trial))


def _told_ratio(flow: Flow, trial: Trial) -> str | None:
    """Returns what the report of a converted model says against the ratio of scales of a piece."""
    decided = decision(flow.root(flow.converted, trial.placed))
    if decided is not None and not decided.quantized:
        return decided.reason
    names = {node.name for node in flow.operators(flow.converted, trial.placed)}
    about = (broken for broken in flow.violations if broken.node in names and "ratio of scales" in broken.constraint)
    return next(map(str, about), None)


def _is_quantized(node: fx.Node) -> bool:
    decided = decision(node)
    return decided is not None and decided.quantized


def _compared(flow: Flow, trial: Trial, stage: str, level: Level) -> str | None:
    """Compares the program with another stage, on data after data, inside and outside of the calibrated range."""
    if level is Level.ONE_STEP and isinstance(trial.placed, Following):
        level = Level.APPROXIMATE  # one step of the row before can be several of the row behind
    for data in DATA:
        found, expected = (flow.result(name, trial.placed, data=data) for name in ("program", stage))
        if reason := _at_level(flow, trial, level, found, expected):
            reference = "emulation" if stage == "emulated" else "q/dq graph"
            return f"the program against the {reference}, {data}: {reason}"
    return None


def _declared(flow: Flow, trial: Trial) -> Level:
    """The loosest level of the rules that take part: a producer's step is a step of what shares its scale."""
    rules = {d.rule for node in flow.operators(flow.annotated, trial.placed) if (d := decision(node))}
    return _loosest(row.level for row in flow.backend.rows for label, _ in row.patterns if label in rules)


def _loosest(levels: Iterable[Level]) -> Level:
    return max(levels, key=tuple(Level).index)  # declared from the tightest on


def _at_level(flow: Flow, trial: Trial, level: Level, found: Tensor, expected: Tensor) -> str | None:
    """Compares at a level; a result that stays float has no step, so that one step is then approximate."""
    output = flow.output(flow.converted, trial.placed)
    scale = output.args[1] if output.target in DEQUANTIZE_OPS else None
    if isinstance(scale, float):
        return level.objection(found, expected, step=scale)
    return (Level.APPROXIMATE if level is Level.ONE_STEP else level).objection(found, expected)


CHECKS: Mapping[str, Check[Trial, Panel]] = {
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
    "emulated": Check(_emulated, ("lowered",)),
    "rescaled": Check(_rescaled, ("level",)),
}
