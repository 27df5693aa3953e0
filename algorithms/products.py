"""What layers multiply their weights by, as sums of products over batches.

Before: runs of batches, one behind rounded layers and one in float of each, that stand in front of a layer. After: the
sums of products of the columns that its weight multiplies, the same bits however many processes share the batches:
they are added batch by batch, in the order of the batches.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from quantplug.algorithms.weights import Layer, Weight
from quantplug.core.calibration.node_by_node import SideBySide
from quantplug.core.calibration.processes import Alone, Exchange, in_turns
from quantplug.core.errors import CalibrationError
from quantplug.core.graph.facts import describe, operands

# Numbers of the columns of a part of a batch, whose products are added before those of the next.
_AT_ONCE = 2**23


class Sums:
    """Sums of products of what layers read; layers that read the same tensor share them.

    Args:
        runs: of this process's batches, behind rounded layers.
        floats: the same in the float model.
        ranks: who has the other batches, in turns.
        count: how many batches all have.
    """

    def __init__(self, runs: SideBySide, floats: SideBySide, ranks: Exchange | Alone, count: int) -> None:
        self._runs, self._floats, self._ranks, self._count = runs, floats, ranks, count
        self._totals: dict[int, Tensor] = {}
        self._last: tuple[Any, Tensor] | None = None

    def added(self, weight: Weight, layer: Layer) -> Tensor:
        """Returns sums over what the weight's layers up to this one read, [2, 2, groups, columns, columns].

        Of the first half of the batches, and of the rest: what they read behind rounded layers with itself, and what
        they read in the float model with it.

        Raises:
            CalibrationError: the layer reads NaN or infinity.
        """
        own = self._of(layer, weight.by_rows.shape)
        before = self._totals.pop(id(weight), None)
        total = own if before is None else before + own
        if layer is not weight.layers[-1]:
            self._totals[id(weight)] = total
        return total

    def _of(self, layer: Layer, shape: torch.Size) -> Tensor:
        key = (layer.operator.input, layer.node.target, tuple(shape[1:]), str(_settings(layer)))
        if self._last is None or self._last[0] != key:
            self._last = None  # before there are two of them
            total = torch.stack(self._summed(layer, shape))
            if not bool(torch.isfinite(total).all()):
                raise CalibrationError(
                    f"GPTQ found NaN or infinity in what {describe(layer.node)} reads; take the batch out that makes "
                    "them, or leave the layer float."
                )
            self._last = (key, total)
        return self._last[1]

    def _summed(self, layer: Layer, shape: torch.Size) -> list[Tensor]:
        """Returns the sums over the first half of all batches, and over the rest."""
        totals: list[Tensor] = []
        for place, part in enumerate(in_turns(self._ranks, self._each(layer, shape))):
            totals = totals or [torch.zeros_like(part) for _ in range(2)]
            totals[2 * place // self._count] += part
        return totals

    def _each(self, layer: Layer, shape: torch.Size) -> Iterator[Tensor]:
        """Yields sums of products of each batch, float32 [2, groups, columns, columns]."""
        source = layer.operator.input
        for run, other in zip(self._runs.visits(), self._floats.visits(), strict=True):
            parts = zip(*(_parts(layer, each.env[source], shape) for each in (run, other)), strict=True)
            yield torch.stack(list(_total(_products(layer, value, wanted, shape) for value, wanted in parts)))


def _products(layer: Layer, value: Tensor, wanted: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    columns, others = (_columns(layer, each.float(), shape) for each in (value, wanted))
    return columns @ columns.transpose(1, 2), others @ columns.transpose(1, 2)


def _total(products: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, second = next(products)
    for one, other in products:
        first += one
        second += other
    return first, second


def _parts(layer: Layer, value: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Returns what a layer reads in parts of a few rows or samples, whose columns need little memory."""
    if layer.operator.spatial == 0:
        value = value.reshape(-1, value.shape[-1])
    elif value.dim() < len(shape):  # one sample, without an axis for more
        return (value,)
    numbers = _columns(layer, value[:1].to("meta"), shape).numel()
    return torch.split(value, max(1, _AT_ONCE // max(1, numbers)))


def _columns(layer: Layer, value: Tensor, shape: torch.Size) -> Tensor:
    """Returns what a layer multiplies its weight by, [groups, columns, outputs]."""
    if layer.operator.spatial == 0:
        return value.reshape(1, -1, value.shape[-1]).transpose(1, 2)
    return _patches(layer, value, shape)


def _patches(layer: Layer, value: Tensor, shape: torch.Size) -> Tensor:
    """Returns what a convolution multiplies its weight by, [groups, columns, outputs].

    It is the convolution itself that picks them, transposed or not, with one weight of 1 for each: so stride and every
    padding are its own.
    """
    places, operator = math.prod(shape[2:]), layer.operator
    channels = int(shape[1]) * operator.groups
    one = one_hot(torch.arange(places)).to(value).reshape(places, 1, *shape[2:])
    picks = replace(operator, groups=channels).as_held(one.repeat(channels, *[1] * (len(shape) - 1)))
    target: Any = layer.node.target
    given = {**_settings(layer), "input": value, "weight": picks, "bias": None, "groups": channels}
    picked: Tensor = target(**given)
    return picked.movedim(-1 - operator.spatial, 0).reshape(operator.groups, int(shape[1]) * places, -1)


def _settings(layer: Layer) -> dict[str, Any]:
    """Returns by name what says how a layer multiplies: its operands without tensors."""
    return {name: found for name, found in operands(layer.node).items() if name not in ("input", "weight", "bias")}
