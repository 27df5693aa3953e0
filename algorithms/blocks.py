"""Blocks of channels that an orthogonal matrix may turn: written into what produces them and into what reads them.

Before: an exported float graph. After: its *bases*, each with the parameters that write channels (rows of layers,
tables of embeddings, positions), the layers that read them, and the norms between, whose weights the readers have to
take first. One basis is a residual stream, another the values of an attention, whose blocks are heads.

Channels are followed as for scales. An operator between must do the same to all channels of a block: move them, add
blocks to each other, weigh tokens, multiply by one number for the whole block. How large blocks are is what all that
reads and writes them agrees on.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from quantplug.algorithms.channels import MOVING, Reader, Source, Walk
from quantplug.algorithms.layers import Layer
from quantplug.algorithms.numbering import Value, along, distinct
from quantplug.core.graph.facts import is_held, likely_sizes, operands, operator_name
from quantplug.core.graph.operators import COPIES, IDENTITIES, PADS, overloads_of
from quantplug.core.graph.union_find import UnionFind


@dataclass(frozen=True)
class Norm:
    """A weight, and a bias, for each channel of a block, which layers that read the result can take.

    Attributes:
        node: the operator.
        weight: the node of its weight, or None.
        bias: the node of its bias, or None.
        channels: numbers of what it reads and of what it yields, [2, channels].
    """

    node: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    channels: Tensor

    @property
    def parameters(self) -> tuple[fx.Node, ...]:
        """The nodes of its weight and its bias, where it has them."""
        return tuple(each for each in (self.weight, self.bias) if each is not None)


@dataclass(frozen=True)
class Use:
    """Channels whose blocks stay whole: an operator does something else to each row.

    Attributes:
        channels: their numbers, [rows, channels].
        keeps_mean: whether the operator needs their mean, or adds a number to all.
    """

    channels: Tensor
    keeps_mean: bool


Part: TypeAlias = Source | Reader | Norm | Use


@dataclass(frozen=True)
class Basis:
    """What has to be turned together.

    Attributes:
        sources: what writes the channels; those of number 0 keep their basis.
        readers: the layers that read them.
        norms: the norms between.
        size: how many channels a block has.
        keeps_mean: whether a block of equal numbers has to stay as it is.
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    norms: tuple[Norm, ...]
    size: int
    keeps_mean: bool


def bases_of(model: fx.GraphModule) -> tuple[list[Basis], dict[str, str]]:
    """Returns what may be turned in an exported float graph, and by layer name why another layer reads what it read."""
    return _BlockWalk(model).bases()


class _BlockWalk(Walk):
    """Follows channels, and notes where they stand in blocks."""

    refusal = "'{0}' ({1}) is not the same in another basis"

    def __init__(self, model: fx.GraphModule) -> None:
        self._norms, self._uses = list[Norm](), list[Use]()
        self._weighed_by_norms, self._biased = set[int](), set[int]()
        super().__init__(model)

    def rule_of(self, node: fx.Node) -> Callable[[fx.Node], Value] | None:
        """Returns what finds the numbers of an operator's result, None where it mixes channels of a block."""
        if node.op == "get_attr":
            return self.held
        rule = _RULES.get(node.target, MOVING.get(node.target))
        return None if rule is None else partial(rule, self)

    def bases(self) -> tuple[list[Basis], dict[str, str]]:
        """Returns what may be turned, and why another layer reads what it read."""
        self._settle_norms()
        channels = self.found()
        standing, _ = self.numbering.settled()
        norms = [replace(each, channels=standing[each.channels]) for each in self._norms]
        uses = [replace(each, channels=standing[each.channels.clamp(min=0)]) for each in self._uses]
        left, found = dict(channels.left), list[Basis]()
        for parts in _joined([*channels.readers, *channels.sources, *norms, *uses]):
            basis = _basis(parts)
            if isinstance(basis, Basis):
                found.append(basis)
            else:
                left |= {part.layer.node.name: basis for part in parts if isinstance(part, Reader)}
        return found, left

    def _settle_norms(self) -> None:
        """Lets norms keep their basis that others than layers read, and what norms yield that keep it."""
        standing, _ = self.numbering.settled()
        often = torch.bincount(standing, minlength=len(standing))
        for norm in self._norms:
            written = norm.channels[1]
            if not bool(((standing[written] == written) & (often[written] == 1)).all()):
                reason = f"'{norm.node.name}' has a weight, and not only layers read what it yields"
                self.numbering.keep(norm.channels, reason)
        standing, reasons = self.numbering.settled()
        for norm in self._norms:
            told = [reasons[number] for number in norm.channels[0].tolist() if number in reasons]
            if not standing[norm.channels[0]].all():
                self.numbering.keep(norm.channels, told[0] if told else "a channel of its block keeps its basis")

    def objection_to_reading(self, layer: Layer) -> str | None:
        """Returns why a layer's columns cannot be turned, or take no bias of a norm, None where they do."""
        reason = self._objection_to_turning(layer.weight, layer.node, "weight")
        if reason is not None or (layer.groups == 1 and not layer.is_transposed):
            return reason or self._objection_to_bias(layer)
        return f"'{layer.node.name}' is transposed or reads its channels in groups"

    def _objection_to_bias(self, layer: Layer) -> str | None:
        if not self._is_biased(self.of(layer.input)):
            return None
        if layer.spatial:
            return f"'{layer.node.name}' may pad the bias of a norm with zeros"
        if layer.bias is None:
            can_have = "bias" in operands(layer.node)
            return None if can_have else f"'{layer.node.name}' has no bias to take that of a norm"
        return self.parameters.objection(layer.bias, layer.node, "bias")

    def layer(self, layer: Layer) -> Value:
        """As for scales; rows of transposed convolutions are not turned."""
        found = super().layer(layer)
        if layer.is_transposed:
            self.numbering.keep(found, f"'{layer.node.name}' is a transposed convolution")
        return found

    def source(self, node: fx.Node, parameters: Iterable[Any], axis: int, sizes: tuple[int, ...]) -> Value:
        """What has a weight, and a bias or none, for each channel along an axis writes them in any basis."""
        held = tuple(each for each in parameters if each is not None)
        pairs = zip(held, ("weight", "bias"), strict=False)
        reason = next(filter(None, (self._objection_to_turning(each, node, called) for each, called in pairs)), None)
        if reason is not None or not sizes:
            return reason or f"the shape of '{node.name}' is not known"
        channels = self.numbering.fresh(sizes[axis])
        self.sources.append(Source(node, held, channels))
        return along(channels, axis, sizes)

    def _objection_to_turning(self, parameter: Any, reader: fx.Node, called: str) -> str | None:
        """As for scales; but an embedding's table that is the weight of layers too can become several."""
        others = self.parameters.of(parameter) if is_held(parameter) else []
        names = [operator_name(other) for other in others]
        heads = sum(names.count(name) for name in ("aten::linear", "aten::mm"))
        if names.count("aten::embedding") == 1 and heads == len(names) - 1:
            return None
        return self.parameters.objection(parameter, reader, called)

    def stop(self, node: fx.Node, reason: str | None = None) -> str:
        """As for scales; an operator that reads no channels says why there are none."""
        values = [self.of(read) for read in node.all_input_nodes if not is_held(read)]
        told = next((value for value in values if isinstance(value, str)), None)
        if told is not None and not any(isinstance(value, Tensor) for value in values):
            self.kept(node.all_input_nodes, told)
            return told
        return super().stop(node, reason)

    def held(self, node: fx.Node) -> Value:
        """A parameter that an operator adds, such as positions, can be written in any basis."""
        readers, sizes = self.parameters.of(node), likely_sizes(node)
        if len(readers) != 1 or not sizes or self.parameters.objection(node, readers[0], "table") is not None:
            return self.stop(node)
        channels = self.numbering.fresh(sizes[-1])
        self.sources.append(Source(node, (node,), channels))
        return along(channels, -1, sizes)

    def embedding(self, node: fx.Node) -> Value:
        """An embedding writes what its table has."""
        return self.source(node, (operands(node)["weight"],), -1, likely_sizes(node))

    def unchanged(self, node: fx.Node) -> Value:
        """Operators that do the same to each channel, and keep zeros."""
        self._unbiased(self.of(node.args[0]), node)
        return self.same(node)

    def padded(self, node: fx.Node) -> Value:
        """Padding by zero belongs to any block."""
        self._unbiased(self.of(node.args[0]), node)
        return super().padded(node)

    def norm(self, node: fx.Node) -> Value:
        """A norm over the channels of a token is the same in any basis; one that subtracts the mean, in some."""
        given, value = operands(node), self._in_basis(node.args[0])
        sizes = likely_sizes(node.args[0])
        if value is None or len(given["normalized_shape"]) != 1:
            return self.stop(node, "'{0}' reads what the weight of another norm stands before")
        self._use(value, keeps_mean="layer_norm" in operator_name(node))
        return self._weighed(node, value, given.get("weight"), given.get("bias"), sizes)

    def norm_of_several(self, node: fx.Node) -> Value:
        """As `norm`, for decomposed norms; what they computed on the way has no channels."""
        return (self.norm(node), f"'{node.name}' yields no channels", f"'{node.name}' yields no channels")

    def _weighed(self, node: fx.Node, value: Tensor, weight: Any, bias: Any, sizes: tuple[int, ...]) -> Value:
        if weight is None and bias is None:
            return value
        pairs = [(each, called) for each, called in ((weight, "weight"), (bias, "bias")) if each is not None]
        reason = next(filter(None, (self.parameters.objection(each, node, called) for each, called in pairs)), None)
        if reason is not None or not self._weighed_by_norms.isdisjoint(distinct(value)):
            return self.stop(node, reason)
        written = self.numbering.fresh(value.shape[-1])
        self._norms.append(Norm(node, weight, bias, torch.stack([self.along(value, -1).reshape(-1), written])))
        self._weighed_by_norms.update(written.tolist())
        self._biased.update(written.tolist() if bias is not None else ())
        return along(written, -1, sizes)

    def sum(self, node: fx.Node) -> Value:
        """Terms are in one basis; a number added to all channels of a block needs one that keeps the mean."""
        terms = [operands(node)[name] for name in ("self", "other")]
        for term, other in (terms, terms[::-1]):
            value = self._in_basis(term)
            if value is not None and not isinstance(self.of(other), Tensor) and _is_one_a_block(other):
                self._use(value, keeps_mean=True)
                return value.expand(likely_sizes(node))
        told = next((value for value in map(self.of, terms) if isinstance(value, str)), None)
        return super().sum(node) if told is None else self.stop(node, told)

    def product(self, node: fx.Node) -> Value:
        """One factor for a block is the same in any basis; one for each channel is a weight, as of a norm."""
        factors = [operands(node)[name] for name in ("self", "other")]
        if factors[0] is factors[1]:
            return self.squared(node)
        for factor, other in (factors, factors[::-1]):
            value = self.of(other)
            if isinstance(value, Tensor) and _is_one_a_block(factor):
                return self._times(node, value, factor)
            if isinstance(value, Tensor) and is_held(factor) and _is_vector(factor, value):
                return self._weighed(node, value, factor, None, likely_sizes(node))
        return self.stop(node)

    def quotient(self, node: fx.Node) -> Value:
        """As `product`, by one number for a block."""
        given = operands(node)
        value = self.of(given["self"])
        if not isinstance(value, Tensor) or not _is_one_a_block(given["other"]) or given.get("rounding_mode"):
            return self.stop(node)
        return self._times(node, value, given["other"])

    def _times(self, node: fx.Node, value: Tensor, factor: Any) -> Value:
        self._unbiased(value, node)
        if isinstance(factor, fx.Node):
            self.kept([factor], f"'{node.name}' multiplies by it")
            self._use(value)
        return value.expand(likely_sizes(node))

    def squared(self, node: fx.Node) -> Value:
        """The sum of a block's squares is the same in any basis."""
        value, power = self._in_basis(node.args[0]), operands(node).get("exponent", 2)
        if value is None or power != 2 or not all(_sums_last(user) for user in node.users):
            return self.stop(node)
        self._use(value)
        return f"'{node.name}' yields squares"

    def reduced(self, node: fx.Node) -> Value:
        """The mean over tokens is in the same basis; the mean over a block is the same in those that keep it."""
        if operator_name(node) != "aten::mean":
            self._unbiased(self.of(node.args[0]), node)
        value = self._in_basis(node.args[0])
        if value is None or not _sums_last(node):
            return super().reduced(node)
        self._use(value, keeps_mean=True)
        return f"'{node.name}' yields no channels"

    def weighing(self, node: fx.Node, weights: Any, values: fx.Node, repeats: int = 1) -> Value:
        found, value = super().weighing(node, weights, values, repeats), self.of(values)
        if isinstance(found, Tensor) and isinstance(value, Tensor):
            self._unbiased(value, node)
            self._use(value)
        return found

    def _use(self, value: Tensor, *, keeps_mean: bool = False) -> None:
        for dim in range(value.dim() - 1):
            value = value.narrow(dim, 0, 1) if value.stride(dim) == 0 else value
        self._uses.append(Use(torch.unique(value.reshape(-1, value.shape[-1]), dim=0), keeps_mean))

    def _in_basis(self, operand: Any) -> Tensor | None:
        """Returns the numbers of an operand that has channels which no norm's weight stands before."""
        value = self.of(operand)
        is_plain = isinstance(value, Tensor) and self._weighed_by_norms.isdisjoint(distinct(value))
        return value if is_plain and isinstance(value, Tensor) else None

    def _is_biased(self, value: Value) -> bool:
        return isinstance(value, Tensor) and not self._biased.isdisjoint(distinct(value))

    def _unbiased(self, value: Value, node: fx.Node) -> None:
        if self._is_biased(value):
            self.numbering.keep(value, f"'{node.name}' changes the bias of a norm")


def _is_one_a_block(factor: Any) -> bool:
    """Tells whether a factor is the same for all channels of the last dimension."""
    if not isinstance(factor, fx.Node):
        return True
    sizes = likely_sizes(factor)
    return not sizes or sizes[-1] == 1


def _is_vector(factor: fx.Node, value: Tensor) -> bool:
    sizes = likely_sizes(factor)
    return sizes[-1:] == value.shape[-1:] and math.prod(sizes) == value.shape[-1]


def _sums_last(node: fx.Node) -> bool:
    """Tells whether a node sums over the last dimension alone, or means."""
    if operator_name(node) not in ("aten::mean", "aten::sum") or not (dims := operands(node).get("dim")):
        return False
    return [dim % len(likely_sizes(node.args[0])) for dim in dims] == [len(likely_sizes(node.args[0])) - 1]


def _joined(parts: Sequence[Part]) -> list[list[Part]]:
    """Returns parts that have channels in common."""
    union, holders = UnionFind(range(len(parts))), dict[int, int]()
    for index, part in enumerate(parts):
        for number in set(part.channels.reshape(-1).tolist()) - {0}:
            union.join(holders.setdefault(number, index), index)
    return [[parts[index] for index in members] for members in union.groups() if parts[members[0]].channels.any()]


def _basis(parts: list[Part]) -> Basis | str:
    """Returns parts as a basis, or why they are none."""
    rows = [row[row > 0] for part in parts for row in part.channels.reshape(-1, part.channels.shape[-1])]
    size = math.gcd(*(len(row) for row in rows))
    starts = set[int]()
    for row in rows:
        blocks = row.reshape(-1, max(size, 1))
        if size < 2 or not torch.equal(blocks, blocks[:, :1] + torch.arange(size)):
            return f"its channels stand in no common blocks, of {size} at most"
        starts.update(blocks[:, 0].tolist())
    if any(after - before < size for before, after in pairwise(sorted(starts))):
        return "its channels stand in blocks that overlap"
    sources = tuple(part for part in parts if isinstance(part, Source))
    readers = tuple(part for part in parts if isinstance(part, Reader))
    if not sources or not readers:
        return "nothing writes and reads its channels"
    keeps_mean = any(part.keeps_mean for part in parts if isinstance(part, Use))
    return Basis(sources, readers, tuple(part for part in parts if isinstance(part, Norm)), size, keeps_mean)


_Rule: TypeAlias = Callable[[_BlockWalk, fx.Node], Value]
_RULES: dict[Any, _Rule] = {
    overload: rule
    for rule, names in (
        (_BlockWalk.embedding, ("embedding",)),
        (_BlockWalk.same, (*IDENTITIES, *COPIES)),
        (_BlockWalk.unchanged, ("neg",)),
        (_BlockWalk.padded, PADS),
        (_BlockWalk.sum, ("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor")),
        (_BlockWalk.product, ("mul.Tensor", "mul_.Tensor", "mul.Scalar", "mul_.Scalar")),
        (_BlockWalk.quotient, ("div.Tensor", "div_.Tensor", "div.Scalar", "div_.Scalar")),
        (_BlockWalk.squared, ("pow.Tensor_Scalar", "square")),
        (_BlockWalk.matrices, ("matmul", "mm", "bmm")),
        (_BlockWalk.attention, ("scaled_dot_product_attention",)),
        (_BlockWalk.reduced, ("mean.dim", "sum.dim_IntList")),
        (_BlockWalk.norm, ("layer_norm", "rms_norm")),
        (_BlockWalk.norm_of_several, ("native_layer_norm",)),
    )
    for overload in overloads_of(names)
}
