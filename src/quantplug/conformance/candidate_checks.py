"""What holds for any quantizer and any lowering, one check for each promise.

Before: a trial of a candidate. After: a `Verdict`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx

from quantplug.conformance.candidate import Candidate
from quantplug.conformance.candidate_flow import CandidateFlow, NotExportedError
from quantplug.conformance.candidate_operands import OUTPUT_CHANNELS, biases_of_sums, pairs, quantized_together
from quantplug.conformance.candidate_trials import CandidatePanel, CandidateTrial, all_forms, share_models
from quantplug.conformance.corpus import BEHIND
from quantplug.conformance.flow import DATA
from quantplug.conformance.judging import Check, NotClaimedError, Verdict, judged
from quantplug.conformance.noted import Notes, Operator, flat, numbers_of, signature
from quantplug.core.errors import ConfigError
from quantplug.core.graph.operators import JOINS, MAXIMA, MOVES
from quantplug.core.qdq.format import reference_defects
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS, is_dequantize, is_qdq
from quantplug.core.qdq.qparams import qparams
from quantplug.core.specs.levels import Level, sqnr

# A float graph that was only written in another way: its decibels are those of float32's own roundings.
_SAME_FUNCTION = 80.0
# What rounding to so many bits leaves of a signal that fills the range, less what ranges of calibration do not fill.
_DECIBELS_OF_A_BIT, _SPARE = 6.02, 28.0
_WORSE_THAN_OURS = 6.0
_OF_PROGRAMS = ("lowered", "delegated", "level")
_KEEPERS = {name.partition(".")[0] for name in (*MOVES, *JOINS, *MAXIMA)}


def judge_candidate(trial: CandidateTrial, check: str) -> Verdict:
    """Returns whether a form keeps a promise."""
    if check not in trial.verdicts:
        panel = trial.panel.lowered_with(trial) if check in _OF_PROGRAMS else trial.panel
        trial.verdicts[check] = judged(trial, check, CANDIDATE_CHECKS, judge_candidate, panel)
    verdict: Verdict = trial.verdicts[check]
    return verdict


def candidate_trials(candidate: Candidate, *wanted: str) -> list[CandidateTrial]:
    """Returns the forms of the operators that a candidate annotates, or cannot annotate; those of one model in a row.

    Args:
        candidate: the quantizer.
        wanted: operators to try, such as "conv2d" and "conv2d-relu"; all that the kit knows if none is given.

    Raises:
        ConfigError: it annotates none of them, or the kit does not know one.
    """
    tried = all_forms(candidate, *wanted)
    panels = dict.fromkeys(trial.panel for trial in tried)
    for panel in panels:
        for trial in panel.trials:
            judge_candidate(trial, "annotated")
        panel.release()
    found = [trial for trial in tried if any(_is_row(other) for other in trial.kin)]
    if not found:
        raise ConfigError(
            f"Quantizer '{candidate.name}' annotates none of the {len(tried)} forms that the kit tried; "
            "name a factory that returns it configured."
        )
    share_models(found)
    return found


def _is_row(trial: CandidateTrial) -> bool:
    return trial.is_annotated or judge_candidate(trial, "annotated").status == "failed"


def _annotated(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """The quantizer annotates the graph, and that can be carried out."""
    own = panel.flow.own(trial.placed)
    trial.signature, trial.operands = signature(own), tuple(one.operands for one in own)
    if not trial.is_annotated:
        raise NotClaimedError("nothing is annotated at it")
    return None


def _untouched(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Annotating leaves the graph as it is; rewriting it before leaves what it computes."""
    flow = panel.flow
    if flow.notes.changed:
        return "annotate() changes the graph; rewrite it in transform_for_annotation()"
    found, expected = flow.of(flow.notes.result, trial.placed), flow.result("exported", trial.placed)
    if found.shape != expected.shape:
        return f"the annotated graph yields {tuple(found.shape)}, not {tuple(expected.shape)}"
    kept = sqnr(found, expected)
    return None if kept >= _SAME_FUNCTION else f"the annotated graph, still in float, is {kept:.1f} dB from the model"


def _spelled(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """An operator is annotated alike however it is written."""
    if judge_candidate(trial, "annotated").status == "failed":
        raise NotClaimedError("not reached: annotated")
    form = trial.form
    alike = [o for o in trial.kin if (o.form.sample, o.form.context) == (form.sample, form.context)]
    alike = [o for o in alike if _kinds(o) == _kinds(trial)]
    ways = Counter(o.signature for o in alike if o.is_annotated)
    if not ways:
        raise NotClaimedError("nothing is annotated at it")
    if len(alike) == 1:
        raise NotClaimedError("it is written in one way")
    usual = ways.most_common(1)[0][0]
    if trial.signature == usual:
        return None
    other = next(o for o in alike if o.signature == usual)
    if not trial.is_annotated:
        return f"written as {form.way} it is not annotated, as {other.form.way} it is"
    return f"written as {form.way} it is annotated in another way than as {other.form.way}: {_difference(trial, other)}"


def _kinds(trial: CandidateTrial) -> tuple[str, ...]:
    return tuple(kind for kind, *_ in trial.signature)


def _difference(one: CandidateTrial, other: CandidateTrial) -> str:
    pairs = zip(one.signature, other.signature, strict=True)
    (kind, inputs, output), (_, others, other_output) = next(pair for pair in pairs if pair[0] != pair[1])
    if output != other_output:
        return f"the output of {kind} {_shown(output)}, not {_shown(other_output)}"
    mine, theirs = dict(inputs), dict(others)
    place = next(i for i in {**theirs, **mine} if mine.get(i) != theirs.get(i))
    return f"operand {place} of {kind} {_shown(mine.get(place))}, not {_shown(theirs.get(place))}"


def _shown(asked: object) -> str:
    numbers, group, observer = asked if isinstance(asked, tuple) else (None, None, "")
    return "float" if numbers is None else f"{numbers} (group {group}, {observer[:60]})"


def _strict(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """A graph from strict export is annotated as one from non-strict export."""
    return _as_exported(trial, panel, "strict", "from strict export")


def _training(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """A graph of the model in training mode is annotated as one in evaluation mode."""
    if "batch_norm" in trial.form.row:
        raise NotClaimedError("in training batch norms are not folded")
    return _as_exported(trial, panel, "training", "in training mode")


def _as_exported(trial: CandidateTrial, panel: CandidatePanel, stage: str, how: str) -> str | None:
    try:
        notes: Notes = getattr(panel.flow, stage)
    except NotExportedError as error:
        if len(panel) == 1:
            raise NotClaimedError(f"torch.export refuses it: {error}") from error
        raise
    return _noted_alike(trial, notes, how)


def _noted_alike(trial: CandidateTrial, notes: Notes, how: str) -> str | None:
    found = notes.pieces[trial.placed]
    if tuple(one.kind for one in found) != _kinds(trial):
        raise NotClaimedError(f"{how} it consists of other operators")
    if signature(found) == trial.signature:
        return None
    other = CandidateTrial(trial.candidate, trial.form, trial.placed, [], signature(found))
    return f"{how} it is annotated in another way: {_difference(other, trial)}"


def _dynamic(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """With an open first dimension it is annotated alike, and takes twice as many samples."""
    try:
        notes, found, expected = panel.flow.open
    except NotExportedError as error:
        if len(panel) == 1:
            raise NotClaimedError(f"torch.export refuses it: {error}") from error
        raise
    if reason := _noted_alike(trial, notes, "with an open first dimension"):
        return reason
    flow = panel.flow
    return _far(flow.of(found, trial.placed), flow.of(expected, trial.placed), _bits(flow.own(trial.placed)))


def _deterministic(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """The same quantizer again, and a new one, give the same annotations and the same q/dq graph."""
    flow = panel.flow
    if flow.again:
        return f"a second run differs: {flow.again[0]}"
    same = torch.equal(flow.result("converted", trial.placed, run=1), flow.result("converted", trial.placed))
    return None if same else "run twice, two results"


def _prepared(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Torchao's prepare_pt2e takes the annotations, and the prepared model runs."""
    panel.flow.require_prepared()
    return None


def _converted(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Torchao's convert_pt2e gives a graph that runs."""
    found, expected = (panel.flow.result(stage, trial.placed) for stage in ("converted", "exported"))
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"the q/dq graph yields {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    return None if bool(found.isfinite().all()) else "the q/dq graph yields numbers that are not finite"


def _carried_out(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """What is annotated is what stands in the q/dq graph."""
    for one, node in pairs(panel.flow, trial):
        given = flat(node)
        for place, asked in one.inputs.items():
            if asked.numbers is not None and (reason := _unlike(given[place], asked.numbers)):
                return f"operand {place} of '{one.name}' is annotated {asked.numbers}, {reason}"
        if one.output is not None and one.output.numbers is not None:
            read = [user for user in node.users if is_qdq(user)]
            if len(read) < len(node.users) and not _is_several(node):
                return f"the output of '{one.name}' is annotated {one.output.numbers}, and read in float"
    return None


def _is_several(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), Tensor)


def _unlike(source: object, numbers: object) -> str | None:
    if not is_dequantize(source):
        return "and read in float"
    found = numbers_of(source)
    return None if found is None or found == numbers else f"the q/dq graph has {found}"


def _unasked(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Nothing is quantized that nobody annotated."""
    flow = panel.flow
    for one, node in pairs(flow, trial):
        for place, source in enumerate(flat(node)):
            asked = one.inputs.get(place)
            if is_dequantize(source) and (asked is None or asked.numbers is None):
                producer = _producer(source)
                made = flow.notes.operators.get(producer.name)
                if made is None or made.output is None:
                    return f"operand {place} of '{one.name}' is quantized, which nobody annotated"
    return None


def _producer(node: fx.Node) -> fx.Node:
    while is_qdq(node):
        node = node.all_input_nodes[0]
    return node


def _channels(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Weights have their scales along the channels of the output: others cannot be taken out of the sum."""
    for one in panel.flow.own(trial.placed):
        place, axis = OUTPUT_CHANNELS.get(one.kind, (0, None))
        asked = one.inputs.get(place)
        if axis is not None and asked is not None and asked.numbers is not None:
            found = asked.numbers.axis
            if found not in (None, axis):
                return (
                    f"the weight of '{one.name}' has its scales along axis {found}; its outputs are along axis {axis}"
                )
    return None


def _numbers(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Scales are finite and positive, zero points in range, and pairs have the same numbers."""
    flow = panel.flow
    defects = reference_defects(flow.converted)
    if not defects:
        return None
    around = {n.name for node in flow.own_nodes(flow.converted, trial.placed) for n in _conversions(node)}
    return next((defect for defect in defects if any(f"'{name}'" in defect for name in around)), None)


def _conversions(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        found = source
        while is_qdq(found):
            yield found
            found = found.all_input_nodes[0]
    pending = [user for user in node.users if is_qdq(user)]
    while pending:
        yield pending[0]
        pending = [*pending[1:], *(user for user in pending[0].users if is_qdq(user))]


def _shared(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """What only moves, joins or compares numbers has one scale at all its ends."""
    for one, node in pairs(panel.flow, trial):
        if one.kind in _KEEPERS and one.output is not None and one.inputs:
            ends = [x for x in (*node.all_input_nodes, *node.users) if is_qdq(x)]
            found = {(p.scale, p.zero_point) for p in map(qparams, ends) if isinstance(p.scale, float)}
            if len(found) > 1:
                shown = ", ".join(f"{scale:.3g} and {zero}" for scale, zero in sorted(found)[:3])
                return f"'{one.name}' changes no number, and its ends have several scales and zero points: {shown}"
    return None


def _bits(operators: tuple[Operator, ...]) -> int:
    return min((a.numbers.bits for one in operators for a in one.asked if a.numbers is not None), default=8)


def _far(found: Tensor, expected: Tensor, bits: int) -> str | None:
    least, kept = _DECIBELS_OF_A_BIT * bits - _SPARE, sqnr(found, expected)
    return (
        None if kept >= least else f"the q/dq graph is {kept:.1f} dB from float; at {bits} bits {least:.1f} are usual"
    )


def _close(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """The q/dq graph is as close to the float model as its bits allow, and as our core gets with the same specs."""
    flow = panel.flow
    expected = flow.result("exported", trial.placed)
    found = flow.result("converted", trial.placed)
    if reason := _far(found, expected, _bits(flow.own(trial.placed))):
        return reason
    kept, by_ours = sqnr(found, expected), sqnr(flow.result("by_ours", trial.placed), expected)
    if by_ours - kept <= _WORSE_THAN_OURS:
        return None
    return f"the q/dq graph is {kept:.1f} dB from float, {by_ours:.1f} with the same annotations in quantplug's core"


def _lowered(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """The lowering gives a program that runs, twice with the same result."""
    if trial.candidate.lowering is None:
        raise NotClaimedError("there is no lowering")
    if trial.lowered_as is not trial:
        raise NotClaimedError(f"it is lowered as {trial.lowered_as.form.name}")
    flow = panel.flow
    found, expected = flow.result("program", trial.placed), flow.result("converted", trial.placed)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"the program yields {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    same = torch.equal(flow.result("program", trial.placed, run=1), found)
    return None if same else "the program yields other numbers when it runs again"


def _delegated(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """What is quantized is in a delegate."""
    flow = panel.flow
    left: Mapping[str, str] | None = getattr(flow.program, "left", None)
    if left is None:
        raise NotClaimedError("the lowering does not tell what it delegates")
    for one, node in pairs(flow, trial):
        if one.name in left and any(asked.numbers is not None for asked in one.asked):
            return f"'{node.name}' is quantized, and left to the portable operator {left[one.name]}"
    return None


def _level(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """The program computes what the q/dq graph computes, on data after data."""
    flow = panel.flow
    for data in DATA:
        found, expected = (flow.result(stage, trial.placed, data=data) for stage in ("program", "converted"))
        if reason := _off(flow, trial, found, expected):
            return f"the program against the q/dq graph, {data}: {reason}"
    return None


def _off(flow: CandidateFlow, trial: CandidateTrial, found: Tensor, expected: Tensor) -> str | None:
    output = flow.output(flow.converted, trial.placed)
    scale = output.args[1] if output.target in DEQUANTIZE_OPS else None
    pieces = [one for one in flow.own(trial.placed) if one.output is not None]
    # One step of an operator can be several of the one behind it.
    if not isinstance(scale, float) or len(pieces) > 1 or trial.form.context == BEHIND:
        return Level.APPROXIMATE.objection(found, expected)
    off = round(float((found - expected).abs().max()) / scale) if found.numel() else 0
    return None if off <= trial.candidate.steps else f"{off} steps off, {trial.candidate.steps} allowed"


CANDIDATE_CHECKS: Mapping[str, Check[CandidateTrial, CandidatePanel]] = {
    "annotated": Check(_annotated),
    "spelled": Check(_spelled),
    "untouched": Check(_untouched, ("annotated",)),
    "strict": Check(_strict, ("annotated",)),
    "training": Check(_training, ("annotated",)),
    "prepared": Check(_prepared, ("annotated",)),
    "converted": Check(_converted, ("prepared",)),
    "deterministic": Check(_deterministic, ("converted",)),
    "carried_out": Check(_carried_out, ("converted",)),
    "unasked": Check(_unasked, ("converted",)),
    "channels": Check(_channels, ("annotated",)),
    "numbers": Check(_numbers, ("converted",)),
    "biases": Check(biases_of_sums, ("converted",)),
    "together": Check(quantized_together, ("converted",)),
    "shared": Check(_shared, ("converted",)),
    "close": Check(_close, ("converted",)),
    "dynamic": Check(_dynamic, ("close",)),
    "lowered": Check(_lowered, ("converted",)),
    "delegated": Check(_delegated, ("lowered",)),
    "level": Check(_level, ("lowered",)),
}
