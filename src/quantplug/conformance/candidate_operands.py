"""What the operands of an operator have to do with each other: kernels read them together.

Before: a trial of a candidate. After: why what it annotates cannot be a kernel's, or None.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from quantplug.conformance.candidate_flow import CandidateFlow
from quantplug.conformance.candidate_trials import CandidatePanel, CandidateTrial
from quantplug.conformance.corpus import TWICE
from quantplug.conformance.noted import Operator, flat
from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.graph.operators import JOINS
from quantplug.core.qdq.nodes import is_dequantize, is_qdq

# The operand that holds the weight, and its axis of output channels.
OUTPUT_CHANNELS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), (1, 0)),
    **{f"conv_transpose{dims}d": (1, 1) for dims in (1, 2, 3)},
    "addmm": (2, 1),
    "mm": (1, 1),
}
# Operators whose operands have one place in a kernel.
_ALIKE = {*(name.partition(".")[0] for name in JOINS), "add", "sub", "mul", "maximum", "minimum", "matmul", "bmm"}


def pairs(flow: CandidateFlow, trial: CandidateTrial) -> Iterator[tuple[Operator, fx.Node]]:
    """Yields the annotated operators of a piece with their nodes in the q/dq graph."""
    nodes = {node.name: node for node in flow.own_nodes(flow.converted, trial.placed)}
    yield from ((one, nodes[one.name]) for one in flow.own(trial.placed) if one.name in nodes)


def biases_of_sums(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """Integer biases have the scale of the sum that they are added to: the input's times the weight's."""
    for one, node in pairs(panel.flow, trial):
        if one.kind not in OUTPUT_CHANNELS or one.kind == "mm":
            continue
        place = OUTPUT_CHANNELS[one.kind][0]
        first, bias = (1, 0) if one.kind == "addmm" else (0, 2)
        given = [*flat(node), None, None]
        scales = [_scales(given[each]) for each in (first, place, bias)]
        if any(scale is None for scale in scales):
            continue
        source, weight, found = (scale.double().flatten() for scale in scales if scale is not None)
        wanted = source * weight
        if bool(((found - wanted).abs() > 1e-3 * wanted).any()):
            return (
                f"the bias of '{one.name}' has scale {float(found[0]):.3g}, and is added to a sum of scale "
                f"{float(wanted[0]):.3g}, the input's {float(source[0]):.3g} times the weight's {float(weight[0]):.3g}"
            )
    return None


def _scales(node: object) -> Tensor | None:
    """Returns the scales of a dequantize node, None where they are of run time or there is no such node."""
    if not isinstance(node, fx.Node) or not is_dequantize(node):
        return None
    given = operands(node)
    scale = given.get("scale", given.get("scales"))
    return constant_value(scale) if isinstance(scale, fx.Node) else torch.tensor([scale])


def quantized_together(trial: CandidateTrial, panel: CandidatePanel) -> str | None:
    """What a kernel reads together is quantized together, and alike at each call of one layer."""
    if trial.form.context == TWICE:
        kinds = Counter(kind for kind, *_ in trial.signature)
        left = Counter(kind for kind, inputs, output in trial.signature if not inputs and output is None)
        half = next((kind for kind in left if kinds[kind] > left[kind]), None)
        if half is not None:
            return f"of {kinds[half]} calls of '{half}' with the same parameters {left[half]} are not annotated"
    for one, node in pairs(panel.flow, trial):
        if reason := _half(panel.flow, one, node):
            return reason
    return None


def _half(flow: CandidateFlow, one: Operator, node: fx.Node) -> str | None:
    """Returns why an operator reads integers beside floats, None where it does not."""
    given = flat(node)
    if one.kind in OUTPUT_CHANNELS:
        place = OUTPUT_CHANNELS[one.kind][0]
        pair = {"input": given[1 if one.kind == "addmm" else 0], "weight": given[place]}
        is_whole = one.output is not None and one.output.numbers is not None
    else:
        pair = {f"operand {place}": each for place, each in enumerate(given)} if one.kind in _ALIKE else {}
        is_whole = True
    floats = [name for name, source in pair.items() if _is_left_float(flow, source)]
    integers = [name for name, source in pair.items() if is_dequantize(source)]
    if not is_whole or not floats or not integers:
        return None
    return f"'{one.name}' reads its {integers[0]} in integers and its {floats[0]} in float; annotate both, or neither"


def _is_left_float(flow: CandidateFlow, source: object) -> bool:
    """Tells whether an operand is a float tensor that no operator yields which a kernel takes in with its reader."""
    if not isinstance(source, fx.Node) or is_qdq(source):
        return False
    made, value = flow.notes.operators.get(source.name), source.meta.get("val")
    is_float = source.op == "get_attr" or (isinstance(value, Tensor) and value.is_floating_point())
    return is_float and (made is None or not made.inputs)
