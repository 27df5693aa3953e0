"""Biases absorbed: what all values of a channel have in common moves into the bias of the layers that read it.

Before: an exported float graph and batches. After: the channels that layers read lie around zero, or begin there, so
that one range for the whole tensor is narrower; the readers' biases have what was taken away.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.2.
Where nothing clips on the way a channel is moved by the middle of what batches show, and the graph computes the same.
Behind a relu (there: c = beta - 3 gamma of a batch norm) a channel is moved by what it always exceeds on the batches,
less a margin, and the function is the same as long as inputs do not go beyond that.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from quantplug.algorithms.changes import Change, Changes
from quantplug.algorithms.channels import MOVING, Channels, Reader, Source, Walk
from quantplug.algorithms.layers import Layer, layer_of
from quantplug.algorithms.numbering import Value, distinct
from quantplug.algorithms.scaling import Group, groups_of
from quantplug.core.calibration.node_by_node import Batches, BatchRun
from quantplug.core.graph.facts import likely_sizes, operands, operator_name
from quantplug.core.graph.operators import CLAMPS, COPIES, IDENTITIES, MAXIMA, overloads_of
from quantplug.core.graph.traits import clamp_bounds

# Of the range of a channel before a relu: so much further down it may go than batches showed.
_MARGIN = 0.25


def absorbed(model: fx.GraphModule, batches: Batches, *, behind_relu: bool) -> tuple[list[Change], dict[str, float]]:
    """Returns other biases for a float graph, and by the name of what gave its bias away by how much at most.

    Args:
        model: the graph; it is only read.
        batches: inputs that show where channels lie.
        behind_relu: whether channels that a relu clips are moved too.
    """
    walk = _ShiftWalk(model, behind_relu=behind_relu)
    groups = groups_of(walk.found())
    ends = _ends(model, batches, groups)
    shifts = [_shift(group, ends, walk.clipped) for group in groups]
    told: dict[str, float] = {}
    changes = _Biases(model)
    for group, shift in zip(groups, shifts, strict=True):
        for source in group.sources:
            changes.take(source, shift)
            told[source.node.name] = max(told.get(source.node.name, 0.0), float(shift[source.channels].abs().max()))
        for reader in group.readers:
            changes.give(reader, shift)
    return changes.found("With biases absorbed"), {name: most for name, most in told.items() if most}


class _ShiftWalk(Walk):
    """Follows channels through operators under which f(x + c) = f(x) + c."""

    refusal = "'{0}' ({1}) does not pass on what is added to a channel"

    def __init__(self, model: fx.GraphModule, *, behind_relu: bool) -> None:
        self._behind_relu, self._clipped = behind_relu, set[int]()
        self.clipped = set[fx.Node]()
        super().__init__(model)

    def found(self) -> Channels:
        """Returns the channels, and notes which sources a relu clips."""
        standing, _ = self.numbering.settled()
        clipped = {int(standing[number]) for number in self._clipped if number > 0}
        channels = super().found()
        for source in channels.sources:
            if not clipped.isdisjoint(source.channels.tolist()):
                self.clipped.add(source.node)
        return channels

    def rule_of(self, node: fx.Node) -> Callable[[fx.Node], Value] | None:
        """Returns what finds the numbers of an operator's result, None where nothing passes it."""
        rule = _RULES.get(node.target, MOVING.get(node.target))
        return None if rule is None else partial(rule, self)

    def source(self, node: fx.Node, parameters: Iterable[Any], axis: int, sizes: tuple[int, ...]) -> Value:
        """What has a bias gives it away."""
        held = tuple(parameters)
        if len(held) < 2 or held[1] is None:
            return f"'{node.name}' has no bias"
        return super().source(node, held, axis, sizes)

    def objection_to_reading(self, layer: Layer) -> str | None:
        """Returns why a layer's bias takes nothing: where it pads, zeros stand for the channel."""
        given = operands(layer.node)
        if layer.is_transposed:
            return f"'{layer.node.name}' is transposed, and reads a channel not everywhere"
        if layer.spatial and given["padding"] not in ("valid", 0) and any(given["padding"]):
            return f"'{layer.node.name}' pads with zeros"
        if layer.bias is not None:
            return self.parameters.objection(layer.bias, layer.node, "bias")
        return None if "bias" in given else f"'{layer.node.name}' has no bias"

    def clamp(self, node: fx.Node) -> Value:
        """A relu passes on what stays above it."""
        value = self.of(node.args[0])
        if not self._behind_relu or clamp_bounds(node) != (0, None) or not isinstance(value, Tensor):
            return self.stop(node)
        self._clipped.update(distinct(value))
        return value


_Rule: TypeAlias = Callable[[_ShiftWalk, fx.Node], Value]
_RULES: dict[Any, _Rule] = {
    overload: rule
    for rule, names in (
        (_ShiftWalk.same, (*IDENTITIES, *COPIES)),
        (_ShiftWalk.clamp, tuple(CLAMPS)),
        (_ShiftWalk.reduced, ("mean.dim", "amax", "amin")),
        (_ShiftWalk.pooled, (*MAXIMA, "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")),
        (_ShiftWalk.norm, ("batch_norm", "layer_norm", "group_norm")),
    )
    for overload in overloads_of(names)
}


def _ends(model: fx.GraphModule, batches: Batches, groups: list[Group]) -> dict[fx.Node, tuple[Tensor, Tensor]]:
    """Returns the least and the greatest value of each channel of what gives biases away."""
    sources = {source.node for group in groups for source in group.sources}
    runs, found = batches.runs(partial(BatchRun, model)), {}
    for node in runs.behind(sources):
        rows = [run.env[node].movedim(_axis(node), 0).flatten(1) for run in runs.visits()]
        least, most = (torch.stack([end(each, 1) for each in rows]) for end in (torch.amin, torch.amax))
        found[node] = (least.amin(0), most.amax(0))
    return found


def _axis(node: fx.Node) -> int:
    """Returns along which dimension a node has the channels of its bias."""
    layer = layer_of(node)
    if layer is None:
        return -1 if "layer_norm" in operator_name(node) else 1
    return len(likely_sizes(node)) - layer.spatial - 1


def _shift(group: Group, ends: dict[fx.Node, tuple[Tensor, Tensor]], clipped: set[fx.Node]) -> Tensor:
    """Returns by what to move each channel of a group, [1 + count]."""
    low, high = (torch.full((1 + group.count,), end, dtype=torch.float64) for end in (math.inf, -math.inf))
    for source in group.sources:
        least, most = ends[source.node]
        low.scatter_reduce_(0, source.channels, least.double().cpu(), "amin")
        high.scatter_reduce_(0, source.channels, most.double().cpu(), "amax")
    shift = (low + high) / 2
    if any(source.node in clipped for source in group.sources):
        shift = (low - _MARGIN * (high - low)).clamp(min=0)
    shift[0] = 0.0
    return torch.where(torch.isfinite(shift), shift, 0.0)


class _Biases(Changes):
    """Biases that are being moved."""

    def take(self, source: Source, shift: Tensor) -> None:
        """Takes what is moved from a bias."""
        change = self.of_bias(source.node, source.parameters[0], source.parameters[1])
        change.value = change.value - shift[source.channels].to(change.value)

    def give(self, reader: Reader, shift: Tensor) -> None:
        """Adds what a layer makes of what was moved to its bias."""
        layer = reader.layer
        change, weight = self.of_bias(layer.node, layer.weight, layer.bias), self.held(layer.weight)
        sums = weight.flatten(2).sum(-1) if layer.spatial else weight
        by_group = sums.reshape(layer.groups, -1, *sums.shape[1:])
        moved = shift[reader.channels].to(by_group).reshape(layer.groups, -1, 1)
        change.value = change.value + (by_group @ moved).flatten()
