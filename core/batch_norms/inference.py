"""Folding batch norms into the operator before them, for inference.

Before: a private copy of an exported graph with convolution -> batch_norm and linear -> batch_norm.
After: the same graph in which the weight and bias of the producer carry the normalization, and the batch
norm is gone wherever that is exact; for every batch norm a `Folding` that says what happened and why.

Nothing is folded on a guess: a producer whose result is also used elsewhere keeps its batch norm, and a
weight that several producers share is folded once for each batch norm it meets, into tensors of its own.
The parameters that were there before are only read, so a copy may share them with the caller's module.
"""

import operator
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from quantplug.core.errors import ModelError
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.editing import erase_unused, new_parameter, set_operand
from quantplug.core.graph.facts import (
    constant_value,
    describe,
    is_batch_counter,
    module_path,
    operands,
    rank,
)
from quantplug.core.graph.operators import TRANSPOSES
from quantplug.core.patterns.language import Match, Miss, constant, either, op, optional

Permission: TypeAlias = Callable[[fx.Node, fx.Node], str | None]
"""Asked with (producer, batch norm); returns None to allow the folding or the reason against it."""

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_DIRECT = op(
    *_CONVOLUTIONS, "convolution", "linear", weight=constant("weight"), bias=optional(constant("bias")), name="producer"
)
# What run_decompositions makes of a linear layer: the weight is turned by an operator of its own.
_TURNED = op(*TRANSPOSES, self=constant("weight"), name="turn")
_ADDMM = op("addmm", self=constant("bias"), mat2=_TURNED, beta=1, alpha=1, name="producer")
_MM = op("mm", mat2=_TURNED, name="producer")
_NORMALIZED = op(
    "batch_norm",
    "_native_batch_norm_legit_no_training",
    input=either(_DIRECT, _ADDMM, _MM),
    weight=optional(constant("gamma")),
    bias=optional(constant("beta")),
    running_mean=constant("mean"),
    running_var=constant("var"),
    name="batch_norm",
)
BATCH_NORMS = _NORMALIZED.overloads
_PRODUCERS = _DIRECT.overloads | _ADDMM.overloads | _MM.overloads
_TRANSPOSED = frozenset().union(*(op(name).overloads for name in _CONVOLUTIONS if "transpose" in name))
_LINEAR = op("linear", "addmm", "mm").overloads
_SHAPE_ONLY = op("sym_size", "sym_stride", "sym_numel", "sym_storage_offset").overloads


@dataclass(frozen=True)
class Folding:
    """What happened to one batch norm.

    Attributes:
        batch_norm: name of the batch norm's node before folding.
        module_path: dotted path of the module it was traced in.
        producer: name of the node it follows, "" where that is no convolution or linear layer.
        folded: whether it went into the producer.
        reason: why it was not folded, in words; empty when it was.
    """

    batch_norm: str
    module_path: str
    producer: str
    folded: bool
    reason: str = ""

    def __str__(self) -> str:
        where = f" (module '{self.module_path}')" if self.module_path else ""
        if self.folded:
            return f"'{self.batch_norm}'{where} is folded into '{self.producer}'."
        return f"'{self.batch_norm}'{where} is not folded: {self.reason}."


@dataclass(frozen=True)
class Normalized:
    """A convolution or linear layer and the batch norm that reads its result.

    Attributes:
        producer: the node of the convolution or linear layer.
        batch_norm: the node of the batch norm.
        weight: the constant that holds the producer's weight.
        bias: the constant that holds the producer's bias, or None.
        turn: the node between weight and producer that transposes the weight, or None.
        statistics: the constants gamma, beta, mean and var of the batch norm by these names; None where
            it is not affine.
        eps: what the batch norm adds to the variance.
    """

    producer: fx.Node
    batch_norm: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turn: fx.Node | None
    statistics: dict[str, fx.Node | None]
    eps: float

    @property
    def is_linear(self) -> bool:
        """Tells whether the producer is a linear layer in any of its forms."""
        return self.producer.target in _LINEAR

    @property
    def is_transposed(self) -> bool:
        """Tells whether the weight is laid out as (in, out / groups, ...)."""
        return self.producer.target in _TRANSPOSED or operands(self.producer).get("transposed") is True

    @property
    def groups(self) -> int:
        """Number of groups of the convolution; 1 for linear layers."""
        return int(operands(self.producer).get("groups", 1))

    @cached_property
    def constants(self) -> dict[str, fx.Node]:
        """Every constant that the pair reads: weight, bias, gamma, beta, mean and var, without absent ones."""
        every = {"weight": self.weight, "bias": self.bias, **self.statistics}
        return {name: node for name, node in every.items() if node is not None}

    def optional_tensor(self, name: str) -> Tensor | None:
        """Returns the tensor of one of the constants, None if the pair does without it."""
        return constant_value(self.constants[name]) if name in self.constants else None

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor of one of the constants that every pair has.

        Raises:
            ModelError: the constant is no tensor.
        """
        value = self.optional_tensor(name)
        if value is None:
            raise ModelError(
                f"The {name} of {describe(self.producer)} and {describe(self.batch_norm)} is no tensor; "
                "export the model again."
            )
        return value


def normalized_producer(node: fx.Node, written: Set[str]) -> Normalized | str:
    """Reads a batch norm together with the operator that it can be folded into.

    Args:
        node: the batch norm.
        written: the constants that the graph changes when it runs (`written_buffers`).

    Returns:
        The pair, or the reason in words why the batch norm cannot be folded exactly.
    """
    found = _NORMALIZED.match(node)
    if isinstance(found, Miss):
        return found.reason
    pair = _read(found)
    return _objection(pair, written) or pair


def _read(found: Match) -> Normalized:
    statistics: dict[str, fx.Node | None] = {name: found.get(name) for name in ("gamma", "beta", "mean", "var")}
    eps = float(operands(found["batch_norm"])["eps"])
    return Normalized(
        found["producer"], found["batch_norm"], found["weight"], found.get("bias"), found.get("turn"), statistics, eps
    )


def _objection(pair: Normalized, written: Set[str]) -> str | None:
    readers = (u for u in pair.producer.users if u is not pair.batch_norm and u.target not in _SHAPE_ONLY)
    other = next(readers, None)
    if other is not None:
        return f"the result of {describe(pair.producer)} is also used by {describe(other)}"
    expected = 2 if pair.is_linear else rank(pair.weight)
    if rank(pair.producer) != expected:
        return (
            f"{describe(pair.producer)} yields {rank(pair.producer)} dimensions, so its channels are not on axis 1, "
            f"where the batch norm normalizes (it would have to yield {expected})"
        )
    changing = next((c.target for c in pair.constants.values() if c.target in written), None)
    return f"the graph writes to '{changing}' when it runs" if changing else _unread_results(pair.batch_norm)


def _unread_results(batch_norm: fx.Node) -> str | None:
    """Returns a reason if more than the normalized tensor of a multi-result batch norm is used."""
    if batch_norm.target is torch.ops.aten.batch_norm.default:
        return None
    extra = [u for u in batch_norm.users if u.target is not operator.getitem or (u.args[1] != 0 and u.users)]
    return f"the statistics that it saves are used by {describe(extra[0])}" if extra else None


@torch.no_grad()
def fold_batch_norms(model: fx.GraphModule, allow: Permission | None = None) -> list[Folding]:
    """Folds every batch norm that follows a convolution or linear layer into its weight and bias, in place.

    Folded are conv1d/2d/3d, conv_transpose1d/2d/3d (with groups), aten.convolution, linear, addmm and mm,
    each with or without bias, followed by a batch norm with running statistics, affine or not. One that
    was exported in training mode is folded with its running statistics too: the result is for inference.
    The time is linear in the graph.

    Args:
        model: a copy of an exported graph module (`get_attr` parameters); its parameters are only read,
            folded ones are new parameters of the root module under names of their own.
        allow: asked for every pair; None allows all. So a backend declares which pairs it folds.

    Returns:
        What happened to every batch norm of the graph, in its order.

    The algebra is W' = W * gamma / sqrt(var + eps), b' = (b - mean) * gamma / sqrt(var + eps) + beta
    (Jacob et al., "Quantization and Training of Neural Networks", 2018, section 3.2).
    """
    folder = _Folder(model, allow)
    outcome = [folder.visit(node) for node in list(model.graph.nodes) if node.target in BATCH_NORMS]
    if any(folding.folded for folding in outcome):
        remove_batch_counters(model.graph)
        model.recompile()
    return outcome


class _Folder:
    """One walk over a graph; pairs with the same constants share their folded tensors."""

    def __init__(self, model: fx.GraphModule, allow: Permission | None) -> None:
        self._model = model
        self._allow = allow
        self._written = written_buffers(model.graph)
        self._folded: dict[tuple[Any, ...], tuple[fx.Node, fx.Node]] = {}

    def visit(self, node: fx.Node) -> Folding:
        pair = normalized_producer(node, self._written)
        if isinstance(pair, Normalized):
            pair = refused(pair, self._allow) or pair
        if isinstance(pair, str):
            return left_alone(node, pair)
        outcome = taken(node, pair.producer)
        _give(pair, *self._constants(pair))
        bypass(pair.batch_norm, pair.producer)
        return outcome

    def _constants(self, pair: Normalized) -> tuple[fx.Node, fx.Node]:
        names = tuple(None if c is None else c.target for c in (pair.weight, pair.bias, *pair.statistics.values()))
        key = (*names, pair.eps, pair.is_transposed, pair.groups, pair.is_linear)
        if key not in self._folded:
            weight, bias = folded_tensors(pair)
            names_bias = pair.bias or pair.weight
            self._folded[key] = (
                new_parameter(self._model, pair.weight, "folded", weight),
                new_parameter(self._model, names_bias, "folded" if pair.bias else "folded_bias", bias),
            )
        return self._folded[key]


def refused(pair: Normalized, allow: Permission | None) -> str | None:
    """Returns the reason that a permission has against a pair, or None."""
    return allow(pair.producer, pair.batch_norm) if allow else None


def taken(batch_norm: fx.Node, producer: fx.Node) -> Folding:
    """Returns the record of a batch norm that goes into its producer; to be called while it is in the graph."""
    return Folding(batch_norm.name, module_path(batch_norm), producer.name, True)


def left_alone(batch_norm: fx.Node, reason: str) -> Folding:
    """Returns the record of a batch norm that stays in the graph."""
    source = batch_norm.args[0]
    known = isinstance(source, fx.Node) and source.target in _PRODUCERS
    name = source.name if known and isinstance(source, fx.Node) else ""
    return Folding(batch_norm.name, module_path(batch_norm), name, False, reason)


@torch.no_grad()
def folded_tensors(pair: Normalized) -> tuple[Tensor, Tensor]:
    """Returns a pair's folded weight in the layout of the weight, and the folded bias with one value per channel.

    The order of operations of each family is torch's own, so that other cores' results agree bit for bit.
    """
    weight, bias = pair.tensor("weight"), pair.optional_tensor("bias")
    mean, var = pair.tensor("mean"), pair.tensor("var")
    gamma, beta = pair.optional_tensor("gamma"), pair.optional_tensor("beta")
    gamma = torch.ones_like(mean) if gamma is None else gamma
    beta = torch.zeros_like(mean) if beta is None else beta
    if pair.is_linear:
        return fuse_linear_bn_weights(weight, bias, mean, var, pair.eps, gamma, beta)
    if not pair.is_transposed:
        return fuse_conv_bn_weights(weight, bias, mean, var, pair.eps, gamma, beta)
    rows = _out_channels_first(weight, pair.groups)
    folded, folded_bias = fuse_conv_bn_weights(rows, bias, mean, var, pair.eps, gamma, beta)
    # The same exchange leads back: (out, in / groups, ...) to (in, out / groups, ...).
    return _out_channels_first(folded, pair.groups).contiguous(), folded_bias


def _out_channels_first(weight: Tensor, groups: int) -> Tensor:
    """Exchanges the channel axes of a grouped convolution's weight: (in, out / groups) and (out, in / groups)."""
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2).flatten(0, 1)


def _give(pair: Normalized, weight: fx.Node, bias: fx.Node) -> None:
    """Makes the producer read a folded weight and bias."""
    producer = pair.producer
    if pair.turn is None:
        producer.replace_input_with(pair.weight, weight)
        set_operand(producer, "bias", bias)
        return
    with producer.graph.inserting_before(producer):
        turn = producer.graph.node_copy(pair.turn, lambda n: weight if n is pair.weight else n)
    matrix = operands(producer)["mat1" if producer.target in _ADDMM.overloads else "self"]
    # mm has no bias: a folded linear layer without one becomes an addmm, whatever it was before.
    producer.target, producer.args, producer.kwargs = torch.ops.aten.addmm.default, (bias, matrix, turn), {}
    erase_unused((pair.turn,))


def bypass(batch_norm: fx.Node, producer: fx.Node) -> None:
    """Lets every reader of a batch norm read its producer instead, and erases what nothing reads any more."""
    if batch_norm.target is torch.ops.aten.batch_norm.default:
        batch_norm.replace_all_uses_with(producer)
    results = [user for user in batch_norm.users if user.target is operator.getitem]
    for result in results:
        result.replace_all_uses_with(producer)
    erase_unused((batch_norm, *results))


def remove_batch_counters(graph: fx.Graph) -> None:
    """Removes the counting of batches for batch norms that are no longer in the graph.

    A graph exported in training mode adds one to `num_batches_tracked` in every run; it would go on
    doing so in the caller's buffers after the batch norm itself has been folded.
    """
    normalized = {str(n.target).removesuffix("running_mean") for n in graph.find_nodes(op="get_attr") if n.users}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor):
        counter = node.args[0]
        if not is_batch_counter(counter) or node.users:
            continue
        if str(counter.target).removesuffix("num_batches_tracked") not in normalized:
            erase_unused((node,))
