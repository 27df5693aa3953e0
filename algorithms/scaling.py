"""Scales of channels, moved out of the layers that read a value into the operators that produce it.

Before: an exported float graph whose channels are followed. After: the same graph with other parameters, that computes
the same: a producer's weight and bias are divided by a scale for each channel, and the columns of its readers' weights
multiplied by it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.algorithms.changes import require_in_range
from quantplug.algorithms.channels import Channels, Reader, Source
from quantplug.algorithms.layers import Layer, layer_of
from quantplug.core.calibration.node_by_node import Batches, batches_of
from quantplug.core.calibration.parking import Parking
from quantplug.core.errors import CalibrationError, ModelError
from quantplug.core.graph.facts import (
    attribute,
    constant_value,
    is_constant,
    is_observer,
    operands,
    operator_name,
    require_graph_module,
    sole_user,
)
from quantplug.core.graph.union_find import UnionFind

# Beyond these a channel is as good as dead, and what is next to it may leave the range of its type.
_LARGEST, _LARGEST_OF_HALF = 2.0**20, 2.0**6


@dataclass(frozen=True)
class Group:
    """Producers and readers whose channels have to be scaled together.

    Attributes:
        sources: the producers; their channels are numbered from 1 to `count`, 0 are those that keep their scale.
        readers: the layers that read them, numbered likewise.
        count: how many scales there are to choose.
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    count: int

    def largest(self, parts: Iterable[tuple[Source | Reader, Tensor]]) -> Tensor:
        """Returns the largest number by scale, [1 + count], of numbers that parts have by channel."""
        found = torch.zeros(1 + self.count, dtype=torch.float64)
        for part, numbers in parts:
            found.scatter_reduce_(0, part.channels.reshape(-1), numbers.reshape(-1).double(), "amax")
        return found


def groups_of(channels: Channels) -> list[Group]:
    """Returns what has to be scaled together, in the order of the first readers."""
    parts: list[Source | Reader] = [*channels.readers, *channels.sources]
    union, holders = UnionFind(range(len(parts))), dict[int, int]()
    for index, part in enumerate(parts):
        for number in set(part.channels.tolist()) - {0}:
            union.join(holders.setdefault(number, index), index)
    return [
        _group([parts[index] for index in members]) for members in union.groups() if members[0] < len(channels.readers)
    ]


def _group(parts: list[Source | Reader]) -> Group:
    every = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.channels.reshape(-1) for part in parts)])
    numbers = torch.unique(every)
    renumbered = [replace(part, channels=torch.searchsorted(numbers, part.channels)) for part in parts]
    sources = tuple(part for part in renumbered if isinstance(part, Source))
    readers = tuple(part for part in renumbered if isinstance(part, Reader))
    return Group(sources, readers, len(numbers) - 1)


class Scales:
    """The scales of all groups of a model, and its parameters under them; the model is only read."""

    def __init__(self, model: fx.GraphModule, groups: list[Group]) -> None:
        self.model = model
        self.groups = groups
        self.by_group = [torch.ones(1 + group.count, dtype=torch.float64) for group in groups]
        self._factors: dict[fx.Node, list[tuple[int, Callable[[Tensor, Tensor], Tensor]]]] = defaultdict(list)
        for index, group in enumerate(groups):
            for source in group.sources:
                for parameter in source.parameters:
                    self._factors[parameter].append((index, _divided(source)))
            for reader in group.readers:
                self._factors[reader.layer.weight].append((index, _multiplied(reader)))

    @property
    def parameters(self) -> Collection[fx.Node]:
        """The nodes of the parameters that have scales."""
        return self._factors.keys()

    def original(self, parameter: fx.Node) -> Tensor:
        """Returns a parameter as the model has it."""
        value: Tensor = attribute(self.model, str(parameter.target)).detach()
        return value

    def value(self, parameter: fx.Node) -> Tensor:
        """Returns a parameter as it is under the scales, float32, or float64 where it is that."""
        original = self.original(parameter)
        value = original.to(torch.promote_types(original.dtype, torch.float32))
        for index, factor in self._factors.get(parameter, ()):
            value = value * factor(self.by_group[index].to(value.device), value).to(value.dtype)
        return value

    def folded(self, layer: Layer) -> Tensor:
        """Returns a layer's weight by rows, with the batch norm that alone reads the layer folded into it."""
        weight, norm = layer.by_rows(self.value(layer.weight)), sole_user(layer.node)
        found = None if norm is None else self.slope(norm)
        return weight if found is None else weight * found.to(weight.dtype).reshape(-1, *[1] * (weight.dim() - 1))

    def slope(self, node: fx.Node) -> Tensor | None:
        """Returns by what a batch norm in evaluation multiplies each channel under the scales, None for all else."""
        given = operands(node) if is_batch_norm(node) else {}
        variance = constant_value(given["running_var"]) if is_constant(given.get("running_var")) else None
        if variance is None or given.get("training") is True:
            return None
        slope: Tensor = 1 / (variance.float() + given["eps"]).sqrt()
        return slope * self.value(given["weight"]) if is_constant(given["weight"]) else slope

    def multiply(self, index: int, scale: Tensor) -> None:
        """Multiplies the scales of a group, [1 + count], within what its parameters bear; the first of them stays 1."""
        group = self.groups[index]
        held = [self.original(each) for source in group.sources for each in source.parameters]
        held += [self.original(reader.layer.weight) for reader in group.readers]
        is_half = any(each.dtype.itemsize < torch.float32.itemsize for each in held)
        most = _LARGEST_OF_HALF if is_half else _LARGEST
        total = (self.by_group[index] * scale).clamp(1 / most, most)
        # Halves have 8 or 11 bits: any factor but a power of two would round each number again.
        total = torch.exp2(total.log2().round()) if is_half else total
        total[0] = 1.0
        self.by_group[index] = total

    def changed(self) -> dict[str, Tensor]:
        """Returns by name the parameters that are not what they were.

        Raises:
            ModelError: a number leaves the range of its type.
        """
        return {
            str(parameter.target): self._fitting(parameter)
            for parameter, factors in self._factors.items()
            if any(bool((self.by_group[index] != 1).any()) for index, _ in factors)
        }

    def _fitting(self, parameter: fx.Node) -> Tensor:
        original = self.original(parameter)
        value = self.value(parameter).to(original.dtype)
        require_in_range(value, original, parameter, "Scaled")
        return value


def _divided(source: Source) -> Callable[[Tensor, Tensor], Tensor]:
    layer = layer_of(source.node)

    def factor(scale: Tensor, value: Tensor) -> Tensor:
        by_channel = 1 / scale[source.channels.to(scale.device)]
        if by_channel.numel() == value.numel():
            return by_channel.reshape(value.shape)
        rows = by_channel.reshape(-1, *[1] * (value.dim() - 1))
        return rows if layer is None else layer.as_held(rows.expand_as(layer.by_rows(value)))

    return factor


def _multiplied(reader: Reader) -> Callable[[Tensor, Tensor], Tensor]:
    def factor(scale: Tensor, value: Tensor) -> Tensor:
        by_channel = scale[reader.channels.to(scale.device)]
        return reader.layer.as_held(columns(reader, by_channel, reader.layer.by_rows(value)))

    return factor


def is_batch_norm(node: fx.Node) -> bool:
    """Tells whether a node is a batch norm, decomposed or not."""
    return "batch_norm" in operator_name(node)


def columns(reader: Reader, numbers: Tensor, weight: Tensor) -> Tensor:
    """Returns numbers by the channels that a layer reads, in a shape that its weight [out, in / groups, ...] fits."""
    rows = weight.shape[0] // reader.layer.groups
    spread = numbers.reshape(reader.layer.groups, 1, -1).expand(-1, rows, -1)
    return spread.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))


def column_ranges(reader: Reader, weight: Tensor) -> Tensor:
    """Returns the largest magnitude in a weight by the channels that its layer reads, [channels]."""
    by_group = weight.detach().abs().reshape(reader.layer.groups, -1, weight.shape[1], math.prod(weight.shape[2:]))
    return by_group.amax((1, 3)).reshape(-1)


@contextmanager
def numbers_of(
    model: fx.GraphModule, loader: Iterable[Any] | None, samples: int, inputs: Callable[[Any], Any] | None, step: str
) -> Iterator[Batches]:
    """Yields batches without NaN, until they hold so many samples, and none of no loader; infinity may be a mask.

    Raises:
        CalibrationError: there is no batch, one does not fit the model, or one has NaN.
    """
    if loader is None:
        with Parking() as parking:
            yield Batches(parking, ())
        return
    names = [node.name for node in model.graph.find_nodes(op="placeholder")]
    with batches_of(model, loader, samples, inputs, least=1, step=step) as found:
        for index, batch in enumerate(found):
            for name, value in zip(names, batch, strict=False):
                if isinstance(value, Tensor) and bool(value.isnan().any()):
                    raise CalibrationError(f"{step} found NaN in '{name}' of batch {index}; take the batch out.")
        yield found


def require_float_graph(model: Any, function: str) -> fx.GraphModule:
    """Returns the model if it is an exported graph module without observers.

    Raises:
        ModelError: it is something else, or prepared already.
    """
    graph = require_graph_module(model, function)
    found = next((name for name, module in graph.named_modules() if is_observer(module)), None)
    if found is not None:
        raise ModelError(
            f"{function} takes a float graph, found one that is prepared (it has the observer '{found}'); apply it to "
            "`torch.export.export(model, example_inputs).module()`, before prepare_pt2e."
        )
    return graph
