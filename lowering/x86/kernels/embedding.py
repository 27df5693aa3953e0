"""Embeddings that look rows of integers up.

Before: `dequantize(table) -> embedding`, a float table of four times the memory. After: the rows are looked up
as integers, and only they are dequantized; the same numbers.
"""

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call, constant
from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.patterns.language import Match, op, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import dequantize

aten = torch.ops.aten


def _scale_by_row(match: Match) -> fx.Node | str:
    """Each row has a scale, and perhaps a zero point, of its own: they are looked up like the row."""
    node, given = match.root, operands(match["table"])
    values, scales, zeros = (constant_value(given[name]) for name in ("input", "scales", "zero_points"))
    if values is None or scales is None or given["axis"] != 0:
        return "its table is no constant with one scale for each row"
    rows = _look_up(match, "table", values)
    step = call(node, aten.to.dtype, (rows, torch.float32), node)
    if zeros is not None and bool(zeros.any()):
        step = call(node, aten.sub.Tensor, (step, _look_up(match, "zero_points", _column(zeros))), node)
    return call(node, aten.mul.Tensor, (step, _look_up(match, "scales", _column(scales))), node)


def _scale_at_once(match: Match) -> fx.Node | str:
    node, table = match.root, match["table"]
    values = constant_value(operands(table)["input"])
    if values is None:
        return "its table is no constant"
    rows = _look_up(match, "table", values)
    return call(node, table.target, (rows, *table.args[1:]), node)


def _column(numbers: Tensor) -> Tensor:
    return numbers.detach().to(torch.float32)[:, None]


def _look_up(match: Match, name: str, values: Tensor) -> fx.Node:
    table = constant(match.root, f"{match.root.name}_{name}", values.detach())
    rows = call(match.root, aten.embedding.default, (table, match["indices"]), match.root, values.dtype)
    rows.meta["val"] = rows.meta["val"][..., : values.shape[1]]
    return rows


_BY_ROW = op("quantized_decomposed::dequantize_per_channel", name="table")
EMBEDDINGS = (
    Rule(op("embedding", weight=_BY_ROW, indices=value("indices")), _scale_by_row),
    Rule(op("embedding", weight=dequantize(name="table"), indices=value("indices")), _scale_at_once),
)
