"""Channels followed through a float graph: which of them may have another scale, given where and taken where.

Before: an exported float graph. After: its *sources*, operators whose parameters give each channel a scale (layers,
norms, multiplications by a weight), and its *readers*, layers whose weights take one. Each has a number for every
channel: channels of one number have one scale, a channel of number 0 keeps its scale.

Every tensor has the numbers of its elements. Operators that move elements are run on these numbers, so that no operator
needs a rule of its own: heads of an attention, repeated for groups of queries or not, parts of a fused projection and
pixels that a classifier reads as features are all found by the same means.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.fx.node import map_arg

from quantplug.algorithms.layers import Layer, Readers, layer_of
from quantplug.algorithms.numbering import KEPT, Numbering, Value, along, merged
from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.facts import (
    compute_nodes,
    is_float,
    is_held,
    likely_sizes,
    operands,
    operator_name,
    tensor_value,
)
from quantplug.core.graph.operators import (
    CLAMPS,
    COPIES,
    IDENTITIES,
    JOINS,
    MAXIMA,
    MOVES,
    PADS,
    REPEATS,
    VIEWS,
    overloads_of,
)
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.peers.torch_names import OpOverload


@dataclass(frozen=True)
class Source:
    """An operator whose parameters give its channels a scale.

    Attributes:
        node: the operator.
        parameters: the nodes of its weight and bias, in proportion to which its result grows.
        channels: a number for each channel, or for each element of what a multiplication multiplies by.
    """

    node: fx.Node
    parameters: tuple[fx.Node, ...]
    channels: Tensor


@dataclass(frozen=True)
class Reader:
    """A layer whose weight takes the scales of what it reads.

    Attributes:
        layer: the layer.
        channels: a number for each channel that it reads, those of all groups one after the other.
    """

    layer: Layer
    channels: Tensor


@dataclass(frozen=True)
class Channels:
    """The channels of a graph.

    Attributes:
        sources: what gives scales, in graph order.
        readers: what takes them, in graph order.
        left: by the name of a layer that reads no channel that may have another scale, the reason.
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    left: dict[str, str]


def channels_of(model: fx.GraphModule) -> Channels:
    """Returns the channels of an exported float graph that can have other scales while it computes the same.

    Args:
        model: the graph module; it is only read. Open sizes count as in the example inputs.
    """
    return Walk(model).found()


class Walk:
    """One walk over a graph, in its order.

    Attributes:
        numbering: the numbers of channels so far.
        parameters: who reads which.
        sources: what gives scales, so far.
        refusal: why an operator without a rule lets channels be, given its name and target.
    """

    refusal: ClassVar[str] = "'{0}' ({1}) keeps no scale of a channel"

    def __init__(self, model: fx.GraphModule) -> None:
        self.numbering, self.parameters = Numbering(), Readers(model)
        self._values: dict[fx.Node, Value] = {}
        self.sources, self._readers, self._left = list[Source](), list[Reader](), dict[str, str]()
        self._computing = set(compute_nodes(model.graph))
        self._changed = changed_under_other_names(model.graph)
        for node in model.graph.nodes:
            self._take(node)

    def found(self) -> Channels:
        """Returns the channels of the graph."""
        standing, reasons = self.numbering.settled()
        sources = [replace(each, channels=standing[each.channels]) for each in self.sources]
        readers = [replace(each, channels=standing[each.channels.clamp(min=0)]) for each in self._readers]
        left = dict(self._left)
        for before, after in zip(self._readers, readers, strict=True):
            if not after.channels.any():
                told = (reasons[number] for number in before.channels.tolist() if number in reasons)
                left[after.layer.node.name] = next(told, "every channel that it reads keeps its scale")
        return Channels(
            tuple(each for each in sources if each.channels.any()),
            tuple(each for each in readers if each.channels.any()),
            left,
        )

    def _take(self, node: fx.Node) -> None:
        """Finds the numbers of a node's result; checks and sizes have none."""
        if isinstance(node.target, OpOverload) and node not in self._computing:
            return
        value = self._value(node)
        if node in self._changed:
            value = self.kept([node], f"'{self._changed[node].name}' changes '{node.name}' in place", value)
        self._values[node] = value

    def _value(self, node: fx.Node) -> Value:
        layer = layer_of(node)
        if layer is not None:
            return self.layer(layer)
        rule = self.rule_of(node)
        if rule is not None:
            return rule(node)
        return self.stop(node)

    def rule_of(self, node: fx.Node) -> Callable[[fx.Node], Value] | None:
        """Returns what finds the numbers of an operator's result, None where all keep their scale."""
        rule = _RULES.get(node.target)
        return None if rule is None else partial(rule, self)

    def stop(self, node: fx.Node, reason: str | None = None) -> str:
        """Lets what a node reads keep its scale, and its result."""
        said = reason or _BY_KIND.get(node.op, self.refusal)
        return self.kept(node.all_input_nodes, said.format(node.name, operator_name(node) or node.target))

    def kept(self, nodes: Iterable[fx.Node], reason: str, *values: Value) -> str:
        """Notes why values, and those of nodes, keep their scale; returns the reason."""
        for value in (*values, *(self._values[node] for node in nodes if node in self._values)):
            self.numbering.keep(value, reason)
        return reason

    def of(self, operand: Any) -> Value:
        """Returns the numbers of an operand, or why it has none."""
        if not isinstance(operand, fx.Node):
            return f"{operand} is a number"
        return self._values.get(operand, f"'{operand.name}' is no tensor")

    def layer(self, layer: Layer) -> Value:
        """A layer takes scales by the columns of its weight and gives some by the rows."""
        self._read(layer)
        sizes = likely_sizes(layer.node)
        return self.source(layer.node, layer.parameters, len(sizes) - layer.spatial - 1, sizes)

    def _read(self, layer: Layer) -> None:
        value = self.of(layer.input)
        if not isinstance(value, Tensor):
            self._left[layer.node.name] = str(value)
            return
        axis = value.dim() - layer.spatial - 1
        reason = self.objection_to_reading(layer)
        if reason is not None:
            self._left[layer.node.name] = self.kept([layer.input], reason)
            return
        columns = self.along(value, axis)
        self._readers.append(Reader(layer, columns.reshape(-1)))

    def along(self, value: Tensor, axis: int) -> Tensor:
        """Returns the numbers of what stands along an axis; all that has one place there has one number from now on."""
        others = [dim for dim in range(value.dim()) if dim != axis % value.dim()]
        found = merged(value, others)
        if found is not None:
            return found
        first = value.amax(others, keepdim=True)
        self.numbering.join(value, first, "another channel in its place keeps its scale")
        return first

    def objection_to_reading(self, layer: Layer) -> str | None:
        """Returns why a layer's weight takes nothing, None where it does."""
        return self.parameters.objection(layer.weight, layer.node, "weight")

    def source(self, node: fx.Node, parameters: Iterable[Any], axis: int, sizes: tuple[int, ...]) -> Value:
        """What has a weight, and a bias or none, for each channel along an axis gives them any scale."""
        weight, *biases = parameters
        held = (weight, *(bias for bias in biases if bias is not None))
        reason = f"'{node.name}' has no weight" if weight is None else self.parameters.objections(held, node)
        if reason is not None or not sizes:
            return reason or f"the shape of '{node.name}' is not known"
        channels = self.numbering.fresh(sizes[axis])
        self.sources.append(Source(node, held, channels))
        return along(channels, axis, sizes)

    def norm(self, node: fx.Node) -> Value:
        """Norms have no scale of what they read, and a weight and a bias for each channel of their own."""
        self.stop(node)
        given = operands(node)
        if given.get("training") is True or given.get("use_input_stats") is True:
            return f"'{node.name}' is in training mode"
        shape = given.get("normalized_shape")
        if shape is not None and len(shape) != 1:
            return f"'{node.name}' normalizes {len(shape)} dimensions"
        axis = 1 if shape is None else -1
        return self.source(node, (given["weight"], given.get("bias")), axis, likely_sizes(given["input"]))

    def norm_of_several(self, node: fx.Node) -> Value:
        """As `norm`, for decomposed norms, which yield what they computed on the way too."""
        return (self.norm(node),)

    def same(self, node: fx.Node) -> Value:
        """Operators under which f(s x) = s f(x), element by element; of dropouts in training not all are."""
        if operands(node).get("train") is True:
            return self.stop(node, "'{0}' is in training mode")
        return self.of(node.args[0] if node.args else next(iter(node.kwargs.values())))

    def clamp(self, node: fx.Node) -> Value:
        """A clamp at zero keeps a scale, one at another bound does not."""
        return self.same(node) if clamp_bounds(node) in ((0, None), (None, 0)) else self.stop(node)

    def cast(self, node: fx.Node) -> Value:
        """Another type of floating point keeps a scale, integers do not."""
        return self.same(node) if is_float(node) and is_float(node.all_input_nodes[0]) else self.stop(node)

    def moved(self, node: fx.Node) -> Value:
        """Operators that only move elements move their numbers."""
        values = [self.of(each) for each in node.all_input_nodes]
        if not any(isinstance(value, Tensor) for value in values):
            return values[0] if values else self.stop(node)
        # Numbers lie elsewhere in memory than what they stand for: a view of those may be none of these.
        target: Any = torch.ops.aten.reshape.default if node.target in _VIEWS else node.target
        args, kwargs = map_arg((node.args, node.kwargs), self._numbers)
        found: Any = target(*args, **kwargs)
        return found if isinstance(found, Tensor) else tuple(found)

    def _numbers(self, node: fx.Node) -> Any:
        value = self.of(node)
        if isinstance(value, Tensor):
            return value.view_as(value)  # an operator in place changes what it is given
        if tensor_value(node) is None:
            return optimization_hint(node.meta["val"])
        return torch.tensor(KEPT).expand(likely_sizes(node))

    def padded(self, node: fx.Node) -> Value:
        """Padding by zero belongs to any channel, by another number to none; modes that repeat elements move them."""
        given, value = operands(node), self.of(node.args[0])
        if not isinstance(value, Tensor):
            return value
        if given.get("mode", "constant") == "constant" and given["value"] not in (0, None):
            return self.stop(node)
        target: Any = node.target
        _, *rest = map_arg(tuple(node.args), self._numbers)
        padded: Tensor = target((value + 1).double(), *rest, **node.kwargs)  # no mode but constant takes integers
        return padded.long() - 1

    def item(self, node: fx.Node) -> Value:
        """One of several results."""
        values, index = self.of(node.args[0]), node.args[1]
        if not isinstance(values, tuple) or not isinstance(index, int):
            return self.stop(node) if isinstance(values, Tensor) else str(values)
        return values[index] if index < len(values) else self.stop(node)

    def sum(self, node: fx.Node) -> Value:
        """Terms have one scale."""
        terms = [operands(node)[name] for name in ("self", "other")]
        values = [self.of(term) for term in terms]
        for term, value in zip(terms, values, strict=True):
            if not isinstance(value, Tensor):
                return self.stop(node, f"'{{0}}' adds '{term}', which keeps its scale")
        one, other = values
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        return self.numbering.join(one, other, f"'{node.name}' adds what keeps its scale")

    def product(self, node: fx.Node) -> Value:
        """A product has the scale of one factor; the other one keeps its own."""
        factors = [operands(node)[name] for name in ("self", "other")]
        for factor, other in (factors, factors[::-1]):
            if is_held(factor) and not self._objection(factor, node):
                self.kept([other] if isinstance(other, fx.Node) else [], f"'{node.name}' multiplies it by a weight")
                return self._weighted(node, factor)
        for factor, other in (factors, factors[::-1]):
            value = self.of(factor)
            if isinstance(value, Tensor) and other is not factor:
                return self._beside(node, value, other)
        return self.stop(node)

    def _objection(self, factor: fx.Node, node: fx.Node) -> str | None:
        is_one = len(likely_sizes(factor)) == 0
        return "it is one number" if is_one else self.parameters.objection(factor, node, "weight")

    def _weighted(self, node: fx.Node, weight: fx.Node) -> Value:
        sizes = likely_sizes(weight)
        channels = self.numbering.fresh(torch.Size(sizes).numel())
        self.sources.append(Source(node, (weight,), channels))
        return channels.reshape(sizes).expand(likely_sizes(node))

    def _beside(self, node: fx.Node, value: Tensor, other: Any) -> Value:
        if isinstance(other, fx.Node):
            self.kept([other], f"'{node.name}' multiplies it by what has another scale")
        return value.expand(likely_sizes(node))

    def quotient(self, node: fx.Node) -> Value:
        """A quotient has the scale of its numerator."""
        given = operands(node)
        value, other = self.of(given["self"]), given["other"]
        if not isinstance(value, Tensor) or other is given["self"] or given.get("rounding_mode") is not None:
            return self.stop(node)
        return self._beside(node, value, other)

    def matrices(self, node: fx.Node) -> Value:
        """A product of matrices has the scales of the columns of its second factor, as softmax(q k) v those of v."""
        first, second = (operands(node)[name] for name in _MATRICES[operator_name(node)])
        return self.weighing(node, first, second)

    def attention(self, node: fx.Node) -> Value:
        """An attention has the scales of its values; heads that several queries share come once for each of them."""
        given = operands(node)
        self.kept([given["query"], given["key"]], f"'{node.name}' takes a softmax of it")
        repeats = 1
        if given["enable_gqa"]:
            repeats = likely_sizes(given["query"])[-3] // likely_sizes(given["value"])[-3]
        return self.weighing(node, given["attn_mask"], given["value"], repeats)

    def weighing(self, node: fx.Node, weights: Any, values: fx.Node, repeats: int = 1) -> Value:
        """Rows of values, each times a weight, have the scales of their columns."""
        value = self.of(values)
        if not isinstance(value, Tensor) or value.dim() < 2 or weights is values:
            return self.stop(node)
        columns = merged(value, [value.dim() - 2])
        if columns is None:
            return self.stop(node, f"'{{0}}' sums over channels of '{values.name}'")
        if isinstance(weights, fx.Node):
            self.kept([weights], f"'{node.name}' multiplies it by what has another scale")
        columns = columns if repeats == 1 else columns.repeat_interleave(repeats, -3)
        return columns.expand(likely_sizes(node))

    def reduced(self, node: fx.Node) -> Value:
        """Means, sums and extremes over elements of one channel have its scale."""
        given, value = operands(node), self.of(node.args[0])
        if not isinstance(value, Tensor):
            return value
        dims = given["dim"] if isinstance(given["dim"], list | tuple) else [given["dim"]]
        found = merged(value, [dim % value.dim() for dim in (range(value.dim()) if dims in ([], [None]) else dims)])
        if found is None:
            return self.stop(node, "'{0}' sums over channels")
        return found.reshape(likely_sizes(node)) if not given["keepdim"] else found

    def pooled(self, node: fx.Node) -> Value:
        """Pooling and resizing stay in a channel; what pads, pads by zero or by what is never the maximum."""
        value = self.of(node.args[0])
        if not isinstance(value, Tensor):
            return value
        spatial = next(int(letter) for letter in operator_name(node) if letter.isdigit())
        found = merged(value, range(value.dim() - spatial, value.dim()))
        if found is None:
            return self.stop(node, "'{0}' sums over channels")
        recorded = node.meta["val"]
        sizes = (recorded[0] if isinstance(recorded, list | tuple) else recorded).shape
        labels = found.expand(tuple(map(optimization_hint, sizes)))
        return (labels,) if isinstance(recorded, list | tuple) else labels


_VIEWS = overloads_of(VIEWS)
_Rule: TypeAlias = Callable[[Walk, fx.Node], Value]
_BY_KIND = {
    "placeholder": "'{0}' is an input of the model",
    "get_attr": "'{0}' is a constant",
    "output": "it is an output of the model",
}
_MATRICES = {"aten::matmul": ("self", "other"), "aten::mm": ("self", "mat2"), "aten::bmm": ("self", "mat2")}
_PIXELS = tuple(f"adaptive_avg_pool{n}d" for n in (1, 2, 3)) + tuple(f"avg_pool{n}d" for n in (1, 2, 3))
_RESIZES = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d")
_NORMS = ("batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm")
_DECOMPOSED_NORMS = ("_native_batch_norm_legit_no_training", "native_layer_norm", "native_group_norm")
_MOVERS = (*MOVES, *REPEATS, *JOINS, "chunk", "split", "split_with_sizes", "unbind")
MOVING: dict[Any, _Rule] = {
    operator.getitem: Walk.item,
    **dict.fromkeys(overloads_of(_MOVERS), Walk.moved),
    **dict.fromkeys(overloads_of(("to", "_to_copy", "type_as")), Walk.cast),
}
"""Rules of operators that only put elements elsewhere, or give them another type."""
_RULES: dict[Any, _Rule] = {
    **MOVING,
    **{
        overload: rule
        for rule, names in (
            (Walk.same, (*IDENTITIES, *COPIES, "leaky_relu", "prelu", "abs", "neg")),
            (Walk.clamp, tuple(CLAMPS)),
            (Walk.padded, PADS),
            (Walk.sum, ("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor")),
            (Walk.product, ("mul.Tensor", "mul_.Tensor", "mul.Scalar", "mul_.Scalar")),
            (Walk.quotient, ("div.Tensor", "div_.Tensor", "div.Scalar", "div_.Scalar")),
            (Walk.matrices, ("matmul", "mm", "bmm")),
            (Walk.attention, ("scaled_dot_product_attention",)),
            (Walk.reduced, ("mean.dim", "sum.dim_IntList", "amax", "amin")),
            (Walk.pooled, (*MAXIMA, "max_pool2d_with_indices", "max_pool3d_with_indices", *_PIXELS, *_RESIZES)),
            (Walk.pooled, ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")),
            (Walk.norm, _NORMS),
            (Walk.norm_of_several, _DECOMPOSED_NORMS),
        )
        for overload in overloads_of(names)
    },
}
