"""Single numbers of rows, in another order and with other signs, as products by a constant matrix.

Before: a float graph of open sizes with slices, and what joins them again, as rotary positions do with neighbours of
heads (Su et al., "RoFormer", arXiv:2104.09864). After: products, exact where no number is infinite, since all but one
of the terms of each sum are zeros. XNNPACK moves neighbours together; one number at a time takes it longer than the
product (Cohere of four layers of 512, prefill of 64 and 256 tokens: 1.2 times as long in all).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.graph.operators import JOINS, RESHAPES, SLICES, schema_names
from quantplug.lowering.rewrites.masks import may_be_infinite
from quantplug.lowering.rewrites.writing import Writer, alike, axis_of, done, open_among

_ATEN = torch.ops.aten
_SLICES, _RESHAPES, _JOINS = map(schema_names, (SLICES, RESHAPES, JOINS))
_REPEATS = schema_names(("repeat_interleave.self_int",))
# Numbers of a matrix: that of a head of 256 channels, which costs less than a delegate.
_LARGEST = 2**16
# Neighbours, in the mean, from which on moving them takes less time than a product.
_TOGETHER = 8


def parts_of_open_rows_are_products(model: fx.GraphModule) -> fx.GraphModule:
    """Writes what only picks single numbers of each row of a float32 tensor with open sizes as a product.

    Args:
        model: a graph module; it is changed in place and returned.
    """
    changed = changed_under_other_names(model.graph)  # by way of a slice, as a copy could not
    picked: dict[fx.Node, _Picked] = {}
    for node in model.graph.nodes:
        found = None if node in changed else _picked(node, picked)
        if found is not None:
            picked[node] = found
    for node, found in picked.items():
        if found.are_single and any(user not in picked for user in node.users):
            _write(model, node, found)
    return done(model)


@dataclass(frozen=True)
class _Picked:
    """Numbers of each row of a tensor.

    Attributes:
        source: the tensor; its rows are all dimensions from `lead` on.
        lead: how many dimensions stand before.
        places: which numbers of a row, counted from 1, negative where the sign is another, in the shape of a result's
            row.
    """

    source: fx.Node
    lead: int
    places: Tensor

    @property
    def are_single(self) -> bool:
        """Tells whether few neighbours stay together."""
        flat = self.places.flatten()
        apart = int((flat[1:] != flat[:-1] + flat[:-1].sign()).sum()) + 1
        return len(flat) < apart * _TOGETHER

    def matrix(self) -> Tensor:
        """Returns [numbers of a result's row, numbers of a row]."""
        value = tensor_value(self.source)
        assert value is not None
        length, flat = math.prod(value.shape[self.lead :]), self.places.flatten()
        return torch.zeros(len(flat), length).scatter_(1, flat.abs()[:, None] - 1, flat.sign()[:, None].float())


def _picked(node: fx.Node, picked: dict[fx.Node, _Picked]) -> _Picked | None:
    """Returns which numbers of a tensor a node has, None where it is none of these operators."""
    name = operator_name(node)
    if name in _JOINS:
        return _joined(node, picked)
    source, begins = operands(node).get("self"), name in _SLICES or name in _REPEATS
    if not isinstance(source, fx.Node) or not (begins or name in _RESHAPES or name == "aten::neg"):
        return None
    before = picked.get(source) or (_whole(source, operands(node).get("dim")) if begins else None)
    if before is None:
        return None
    if name == "aten::neg":
        return replace(before, places=-before.places)
    return _sliced(node, before) if begins else _reshaped(node, before)


def _whole(source: fx.Node, axis: int | None) -> _Picked | None:
    """Returns all numbers of the rows from an axis on, None where products do not pick them.

    Infinity times nothing is no number, so that masks are left as they are.
    """
    value = tensor_value(source)
    if axis is None or value is None or value.dtype != torch.float32 or not value.dim():
        return None
    lead = axis_of(axis, value.dim())
    shape: list[Any] = list(value.shape[lead:])
    is_known = all(isinstance(size, int) for size in shape)
    if not lead or not is_known or open_among(value.shape) != 1:
        return None
    if may_be_infinite(source):
        return None
    return _Picked(source, lead, torch.arange(1, math.prod(shape) + 1).reshape(shape))


def _sliced(node: fx.Node, before: _Picked) -> _Picked | None:
    given = operands(node)
    numbers = [number for name, number in given.items() if name not in ("self", "dim") and number is not None]
    axis = axis_of(given["dim"], before.lead + before.places.dim()) - before.lead
    if axis < 0 or not all(isinstance(number, int) for number in numbers):
        return None
    if operator_name(node) in _REPEATS:
        return replace(before, places=before.places.repeat_interleave(given["repeats"], axis))
    if operator_name(node) == "aten::select":
        return replace(before, places=before.places.select(axis, given["index"]))
    if operator_name(node) == "aten::narrow":
        return replace(before, places=before.places.narrow(axis, given["start"], given["length"]))
    chosen = range(before.places.shape[axis])[given["start"] : given["end"] : given["step"]]
    return replace(before, places=before.places.index_select(axis, torch.tensor(chosen, dtype=torch.long)))


def _reshaped(node: fx.Node, before: _Picked) -> _Picked | None:
    """Returns the same numbers in another shape, if the dimensions before them stay."""
    value, source = tensor_value(node), tensor_value(before.source)
    if value is None or source is None or value.dim() < before.lead:
        return None
    shape: list[Any] = list(value.shape[before.lead :])
    stays = alike(value.shape[: before.lead], source.shape[: before.lead])
    return replace(before, places=before.places.reshape(shape)) if stays else None


def _joined(node: fx.Node, picked: dict[fx.Node, _Picked]) -> _Picked | None:
    """Returns numbers of one tensor side by side, which may be all of it."""
    given, value = operands(node), tensor_value(node)
    tensors = given["tensors"]
    first = next((picked[part] for part in tensors if part in picked), None)
    if first is None and len(set(tensors)) == 1:
        first = _whole(tensors[0], -1)
    if first is None or value is None:
        return None
    all_of_it = _whole(first.source, first.lead)
    parts = [picked.get(part) or (all_of_it if part is first.source else None) for part in tensors]
    same = [each for each in parts if each is not None and (each.source, each.lead) == (first.source, first.lead)]
    axis = axis_of(given["dim"], value.dim()) - first.lead
    if len(same) < len(parts) or axis < 0:
        return None
    join = torch.stack if operator_name(node) == "aten::stack" else torch.cat
    return replace(first, places=join([each.places for each in same], axis))


def _write(model: fx.GraphModule, node: fx.Node, found: _Picked) -> None:
    matrix, value, source = found.matrix(), tensor_value(node), tensor_value(found.source)
    assert value is not None
    assert source is not None
    if not 0 < matrix.numel() <= _LARGEST:
        return
    write = Writer(model, node)
    rows = found.source
    if found.lead < source.dim() - 1:
        rows = write.reshape(rows, *source.shape[: found.lead], matrix.shape[1])
    product = write.call(_ATEN.linear.default, rows, write.constant(matrix, "parts"))
    write.replace(product if found.places.dim() == 1 else write.reshape(product, *value.shape))
