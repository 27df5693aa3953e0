"""The limits of a backend's kernels against calibrated numbers: the third phase of constraints.

Before: a q/dq graph, by whichever core, whose nodes still carry the `Limits` of the rules that took them.
After: a `Violation` for each scale, zero point, ratio of scales or integer bias that a kernel cannot hold.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import CalibrationError
from quantplug.core.graph.facts import attribute, constant_value, operands
from quantplug.core.graph.meta import DECISION, LIMITS, VIOLATIONS
from quantplug.core.graph.submodels import submodel_targets
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS, QUANTIZE_OPS, is_dequantize
from quantplug.core.specs.decision import decision
from quantplug.core.specs.dtypes import Refusal
from quantplug.core.specs.limits import Limits, Rescale, Violation, highest_from_zero, violation

# Port, scale, zero point, and the stored integers where the tensor is a constant.
_Numbers: TypeAlias = tuple[str, Any, Any, Tensor | None]
_REMEDY = "calibrate on data of the range that the model will see, or set the operator to float."


def enforce_limits(converted: fx.GraphModule) -> None:
    """Holds the numbers of a converted graph against the limits of the rules that quantized it.

    What breaks a limit that is not strict is kept in the graph's `meta` for the report. Pieces that the lowering
    computes in float for their numbers are decided to be float from here on, between the conversions that they have.

    Raises:
        CalibrationError: a number breaks a strict limit.
    """
    _leave_float(converted)
    found = list(qparam_violations(converted))
    strict = [broken for broken, limits in found if limits.strict]
    if strict:
        more = f" ({len(strict) - 1} more like it.)" if len(strict) > 1 else ""
        raise CalibrationError(f"{strict[0]}{more}")
    if found:
        VIOLATIONS.put(converted, VIOLATIONS.get(converted, ()) + tuple(broken for broken, _ in found))


def qparam_violations(converted: fx.GraphModule) -> Iterator[tuple[Violation, Limits]]:
    """Yields what the numbers of a converted graph and its control flow break, each with the limits it breaks."""
    for target in submodel_targets(converted):
        yield from qparam_violations(attribute(converted, target))
    limited = {node.name: (node, limits) for node in converted.graph.nodes if (limits := LIMITS.get(node)) is not None}
    for node, limits in limited.values():
        decided = decision(node)
        root = limited.get(decided.root, (node, limits))[0] if decided else node
        numbers = [found for _, found in _entering(converted, node)]
        output = _output_numbers(converted, root)
        own = [*numbers, *(output if root is node else ())]
        for port, refusal in (
            *_dtypes(limits, own),
            *_rescale(limits.rescale, _scales(converted, node), output),
            *_biases(numbers),
        ):
            yield violation(node, limits.owner, port, refusal, _REMEDY), limits


def _dtypes(limits: Limits, numbers: list[_Numbers]) -> Iterator[tuple[str, Refusal]]:
    for port, scale, zero_point, _ in numbers:
        taken = limits.dtypes.at(port) if limits.dtypes and port != "bias" else None
        for refusal in taken.refuses_qparams(scale, zero_point) if taken else ():
            yield port, refusal


def _leave_float(model: fx.GraphModule) -> None:
    """Decides that pieces are float whose ratios of scales or products their kernels do not express."""
    for target in submodel_targets(model):
        _leave_float(attribute(model, target))
    pieces: dict[str, list[fx.Node]] = defaultdict(list)
    for node in model.graph.nodes:
        if (decided := decision(node)) is not None and decided.quantized:
            pieces[decided.root].append(node)
    for piece in pieces.values():
        reason = next(filter(None, (_out_of_range(model, node, piece) for node in piece)), None)
        for node in piece if reason else ():
            decided = decision(node)
            assert decided is not None  # it is of the piece by its decision
            DECISION.put(node, replace(decided, rule="", root=node.name, nearest=decided.rule, reason=reason or ""))
            node.meta.pop(Q_ANNOTATION_KEY, None)


def _out_of_range(model: fx.GraphModule, node: fx.Node, piece: Sequence[fx.Node]) -> str | None:
    limits = LIMITS.get(node)
    if limits is None:
        return None
    if limits.pairs is not None and (reason := limits.pairs.objection(_largest_pair(node))):
        return reason
    if limits.rescale is None or not limits.rescale.or_float:
        return None
    output = next((found for last in piece for found in _output_numbers(model, last)), None)
    scales = _scales(model, node)
    return limits.rescale.objection(scales, output[1]) if output and scales else None


def _largest_pair(node: fx.Node) -> int:
    """Returns how large the sum of two neighbouring products of a node gets; 0 where it multiplies no integers."""
    highest, weight = 0, None
    for source in filter(is_dequantize, node.all_input_nodes):
        given, stored = operands(source), constant_value(source.all_input_nodes[0])
        if stored is not None:
            weight = stored if stored.dtype == torch.int8 else weight
        elif "quant_max" in given:
            highest = highest_from_zero(given["quant_min"], given["quant_max"])
    return 0 if weight is None else largest_pair(highest, weight)


def largest_pair(highest: int, weight: Tensor) -> int:
    """Returns how large the sum of two neighbouring products can get, of integers up to `highest` as uint8."""
    return 2 * highest * int(weight.to(torch.int32).abs().max()) if weight.numel() else 0


def _scales(model: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Returns the scales of the operands of a node, of one that is read twice both."""
    known = {source: numbers[1] for source, numbers in _entering(model, node) if numbers[0] != "bias"}
    return [known[source] for source in pytree.tree_leaves((node.args, node.kwargs)) if source in known]


def _rescale(limit: Rescale | None, scales: Sequence[Any], output: list[_Numbers]) -> Iterator[tuple[str, Refusal]]:
    """Holds s_in * s_w / s_out, or each s_in / s_out, against what a requantization can express."""
    if limit is None or limit.or_float or not scales or not output:
        return
    for worst in limit.outside(scales, output[0][1]):
        allowed = f"{limit.low:g} to {limit.high:g}"
        yield "output", Refusal(f"the ratio of scales ({limit.of} / output)", worst, allowed)


def _biases(numbers: list[_Numbers]) -> Iterator[tuple[str, Refusal]]:
    """An integer bias at the end of its range was cut there: its scale is too small for it."""
    ends = torch.iinfo(torch.int32)
    for port, _, _, stored in numbers:
        if port == "bias" and stored is not None:
            cut = int(((stored == ends.max) | (stored == ends.min)).sum())
            if cut:
                yield port, Refusal("the int32 range", f"{cut} values beyond it", f"{ends.min}..{ends.max}")


def _entering(model: fx.GraphModule, node: fx.Node) -> Iterator[tuple[fx.Node, _Numbers]]:
    for source in node.all_input_nodes:
        qparams = _qparams(model, source) if source.target in DEQUANTIZE_OPS else None
        if qparams is not None:
            stored = source.all_input_nodes[0]
            value = constant_value(stored)
            port = "input" if value is None else "bias" if value.dtype == torch.int32 else "weight"
            yield source, (port, *qparams, value)


def _output_numbers(model: fx.GraphModule, node: fx.Node) -> list[_Numbers]:
    quantize = next((user for user in node.users if user.target in QUANTIZE_OPS), None)
    qparams = _qparams(model, quantize) if quantize is not None else None
    return [("output", *qparams, None)] if qparams is not None else []


def _qparams(model: fx.GraphModule, node: fx.Node) -> tuple[Any, Any] | None:
    """Returns scale and zero point of a q or dq node, None where they are computed at run time."""
    numbers = node.args[1:3]
    scale, zero_point = (constant_value(n) if isinstance(n, fx.Node) else n for n in numbers)
    return None if scale is None or zero_point is None else (scale, zero_point)
