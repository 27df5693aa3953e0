"""What a mask hides, hidden by a sum and a product, which have kernels where a choice element by element has none.

Before: a graph with masked_fill, and where between a tensor and a number. After: the tensor times what shows it, plus
what stands where it is hidden. Masks are small, and computed outside of the delegates once for all layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.graph.operators import COPIES, IDENTITIES, PERMUTATIONS, REPEATS, RESHAPES, SLICES, schema_names
from quantplug.lowering.rewrites.writing import Writer, alike, constant_operand, done, matching

_ATEN = torch.ops.aten
_VIEWED = schema_names((*RESHAPES, "expand"))
# Infinite where an operand is.
_PASSED = schema_names(
    (
        *RESHAPES,
        *COPIES,
        *IDENTITIES,
        *PERMUTATIONS,
        *SLICES,
        *REPEATS,
        "add",
        "sub",
        "mul",
        "div",
        "cat",
        "to",
        "where",
    )
) | schema_names(("masked_fill", "maximum", "minimum", "neg"))
# Results that another result may depend on, which is no mask then.
_COSTLY = schema_names(("linear", "matmul", "bmm", "conv1d", "conv2d", "scaled_dot_product_attention", "softmax"))


def hidden_is_summed(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes masked_fill, and where between a float32 tensor and a number, as a product and a sum.

    Only by masks that no layer computes; and where infinity may stand in the tensor, only minus infinity, which is
    added: infinity times zero is no number.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    masks: dict[tuple[Any, ...], tuple[fx.Node | None, fx.Node | None]] = {}
    for node, _ in matching(model, "masked_fill", "where"):
        hidden = _Hidden.of(node)
        if hidden is None or not (taken is None or taken(node)):
            continue
        write, result = Writer(model, node), tensor_value(node)
        assert result is not None
        mask = before_broadcasting(hidden.mask)
        place = (*as_written(mask), hidden.value, hidden.is_shown, result.dim())
        if place not in masks:
            masks[place] = hidden.factor_and_summand(write, mask, result.dim())
        factor, summand = masks[place]
        found = hidden.tensor if factor is None else write.call(_ATEN.mul.Tensor, hidden.tensor, factor)
        write.replace(found if summand is None else write.call(_ATEN.add.Tensor, found, summand))
    return done(model)


def before_broadcasting(mask: fx.Node) -> fx.Node:
    """Returns a mask without dimensions that a sum would broadcast."""
    while operator_name(mask) == "aten::expand" and _rank(operands(mask)["self"]) == _rank(mask):
        mask = operands(mask)["self"]
    return mask


def as_written(node: fx.Node) -> tuple[Any, ...]:
    """Returns what a node is a view of, and how: the same for views that layers write each for itself."""
    views: list[Any] = []
    while operator_name(node) in _VIEWED:
        given = operands(node)
        source = given.pop("self")
        views.append((node.target, str(given)))
        node = source
    return node, *views


def _rank(node: Any) -> int:
    value = tensor_value(node)
    return -1 if value is None else value.dim()


@dataclass(frozen=True)
class _Hidden:
    """A tensor with a number in the place of what a mask hides.

    Attributes:
        tensor: of float32.
        mask: of bool.
        value: the number.
        is_shown: whether the mask is true where the tensor shows, instead of where it is hidden.
    """

    tensor: fx.Node
    mask: fx.Node
    value: float
    is_shown: bool

    @classmethod
    def of(cls, node: fx.Node) -> "_Hidden | None":
        """Returns what a node hides, None where it cannot be summed."""
        values = operands(node)
        if operator_name(node).startswith("aten::masked_fill"):
            found = cls._between(values["self"], values["mask"], values["value"], is_shown=False)
        elif "self" not in values:
            return None
        else:
            shown = cls._between(values["self"], values["condition"], values["other"], is_shown=True)
            found = shown or cls._between(values["other"], values["condition"], values["self"], is_shown=False)
        wide, tensor = tensor_value(node), None if found is None else tensor_value(found.tensor)
        if found is None or wide is None or tensor is None or not alike(wide.shape, tensor.shape):
            return None
        return None if _is_of_layers(found.mask) or found._is_no_sum() else found

    @classmethod
    def _between(cls, tensor: Any, mask: Any, value: Any, *, is_shown: bool) -> "_Hidden | None":
        source, held = tensor_value(tensor), constant_operand(value)
        number = float(held) if held is not None and held.numel() == 1 else value
        if not isinstance(number, int | float) or source is None or source.dtype != torch.float32 or not source.dim():
            return None
        return cls(tensor, mask, float(number), is_shown) if constant_operand(tensor) is None else None

    def _is_no_sum(self) -> bool:
        return (
            math.isnan(self.value)
            or self.value == math.inf
            or (self.value != -math.inf and may_be_infinite(self.tensor))
        )

    def factor_and_summand(self, write: Writer, mask: fx.Node, rank: int) -> tuple[fx.Node | None, fx.Node | None]:
        """Writes by what the tensor is multiplied, and what is added; None for neither."""
        held = constant_operand(mask)
        if held is not None:
            shown = held if self.is_shown else ~held
            shown = shown.reshape([1] * (rank - shown.dim()) + list(shown.shape))
            factor = write.constant(shown.to(torch.float32), "shown")
            summand = write.constant(torch.zeros(shown.shape).masked_fill(~shown, self.value), "hidden")
        else:
            for _ in range(rank - _rank(mask)):
                mask = write.call(_ATEN.unsqueeze.default, mask, 0)
            zero, value = (write.constant(torch.tensor(number), "mask") for number in (0.0, self.value))
            shown_first = (zero, value) if self.is_shown else (value, zero)
            summand = write.call(_ATEN.where.self, mask, *shown_first)
            seen = mask if self.is_shown else write.call(_ATEN.logical_not.default, mask)
            factor = write.call(_ATEN.to.dtype, seen, torch.float32)
        return None if self.value == -math.inf else factor, None if self.value == 0 else summand


def _is_of_layers(mask: fx.Node) -> bool:
    """Tells whether a mask depends on what a layer computes: then what computes it stands between the layers anyway."""
    waiting, seen = [mask], {mask}
    while waiting:
        found = waiting.pop()
        if operator_name(found) in _COSTLY:
            return True
        waiting += [each for each in found.all_input_nodes if each not in seen]
        seen.update(found.all_input_nodes)
    return False


def may_be_infinite(tensor: fx.Node) -> bool:
    """Tells whether infinity is written into a tensor, added to it, or comes from outside."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        found = waiting.pop()
        held = constant_operand(found)
        given = tensor_value(found) if found.op == "placeholder" else None
        if (given is not None and given.is_floating_point()) or (held is not None and not _is_finite(held)):
            return True
        if any(isinstance(number, float) and math.isinf(number) for number in found.args):
            return True
        if operator_name(found) in _PASSED:
            waiting += [each for each in found.all_input_nodes if each not in seen]
            seen.update(found.all_input_nodes)
    return False


def _is_finite(held: Tensor) -> bool:
    return not held.is_floating_point() or bool(held.isfinite().all())
