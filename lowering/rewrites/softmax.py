"""Softmax as operators that integer kernels have each: maxima, differences, a table of exp, sums and reciprocals.

Before: a graph with softmax. After: exp(x - max) times the reciprocal of its sum, which is finite for every row. What a
known mask hides is multiplied by zero instead of being far below: the integers are for the scores that count. Scores
that a mask hides which is known at run time alone keep their softmax.
"""

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.graph.operators import COPIES, RESHAPES, schema_names
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten
# What is added to scores to hide them lies below; hidden ones are put so far below the others to find the largest of
# these, whose rounding may leave it so much below the score that it stands for.
_HIDDEN, _BELOW, _ROUNDED = -1e3, -64.0, 0.25
_PASSED = schema_names((*RESHAPES, *COPIES, "add", "mul", "baddbmm", "expand", "to", "masked_fill", "where"))


def softmax_is_steps(model: fx.GraphModule) -> fx.GraphModule:
    """Writes softmax of float32 over one dimension as its steps."""
    for node, values in matching(model, "softmax", "_softmax"):
        source = tensor_value(values["self"])
        if source is None or source.dtype != torch.float32 or values.get("dtype") or not source.dim():
            continue
        scores, mask = _apart(values["self"])
        if mask is None and _is_hidden_at_run_time(values["self"]):
            continue
        write, along = Writer(model, node), ([values["dim"]], True)
        if mask is None:
            peaks = write.call(_ATEN.amax.default, scores, *along)
            powers = write.call(_ATEN.exp.default, write.call(_ATEN.sub.Tensor, scores, peaks))
        else:
            powers = _of_seen(write, scores, mask, along)
        sums = write.call(_ATEN.sum.dim_IntList, powers, *along)
        write.replace(write.call(_ATEN.mul.Tensor, powers, write.call(_ATEN.reciprocal.default, sums)))
    return done(model)


def _of_seen(write: Writer, scores: fx.Node, mask: Tensor, along: tuple[list[int], bool]) -> fx.Node:
    """Returns exp(x - max) of the scores that a mask shows, and 0 of the others."""
    seen = mask > _HIDDEN
    added = mask.where(seen, 0.0)
    if bool(added.any()):
        scores = write.call(_ATEN.add.Tensor, scores, write.constant(added, "added"))
    below = torch.zeros_like(mask).masked_fill(~seen, _BELOW)
    shown = write.call(_ATEN.add.Tensor, scores, write.constant(below, "below"))
    differences = write.call(_ATEN.sub.Tensor, scores, write.call(_ATEN.amax.default, shown, *along))
    bounded = write.call(_ATEN.clamp_max.default, differences, _ROUNDED)
    powers = write.call(_ATEN.exp.default, bounded)
    return write.call(_ATEN.mul.Tensor, powers, write.constant(seen.to(torch.float32), "seen"))


def _apart(node: fx.Node) -> tuple[fx.Node, Tensor | None]:
    """Returns scores and the known mask that is added to them; the node itself and None where none is."""
    if operator_name(node) != "aten::add":
        return node, None
    given = operands(node)
    for scores, other in ((given["self"], given["other"]), (given["other"], given["self"])):
        mask = constant_operand(other)
        if mask is not None and mask.dtype == torch.float32 and given["alpha"] == 1 and bool((mask <= _HIDDEN).any()):
            return scores, mask.detach()
    return node, None


def _is_hidden_at_run_time(node: fx.Node) -> bool:
    """Tells whether scores may be hidden by what is written into them, or into what is added to them."""
    waiting, seen = [node], {node}
    while waiting:
        found = waiting.pop()
        name, numbers = (
            operator_name(found).removesuffix("_"),
            [*found.args, *map(constant_operand, found.all_input_nodes)],
        )
        if name in ("aten::masked_fill", "aten::where") and any(map(_hides, numbers)):
            return True
        if name in _PASSED:
            waiting += [each for each in found.all_input_nodes if each not in seen]
            seen.update(found.all_input_nodes)
    return False


def _hides(number: object) -> bool:
    if isinstance(number, Tensor):
        return number.is_floating_point() and bool((number <= _HIDDEN).any())
    return isinstance(number, int | float) and number <= _HIDDEN
