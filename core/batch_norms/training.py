"""Batch norms in quantization-aware training: fused for training, folded after it.

Before `fuse_batch_norms_qat`: an annotated private copy with convolution -> batch_norm. After: the same
two nodes, but the convolution works on the weight that inference will have, so that the fake quantize
between the two sees it (Jacob et al. 2018, section 3.2; Krishnamoorthi 2018, section 3.2.2)::

    scale = gamma / sqrt(running_var + eps)
    y = batch_norm(conv(x, fake_quantize(weight * scale)) / scale + bias)

Before `fold_batch_norms_qat`: the trained graph, with fake quantizes or with q/dq nodes in their place.
After: one convolution with the folded weight and bias. They are folded by torch's own formula, as in torchao and in
FX graph mode, so that their integers are the same; training, here as there, divides by the root where the formula
multiplies by its reciprocal, which moves a weight that lies on the very border between two integers, and no other.
"""

from collections.abc import Set
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.batch_norms.inference import (
    BATCH_NORMS,
    Folding,
    Normalized,
    Permission,
    bypass,
    folded_tensors,
    left_alone,
    normalized_producer,
    refused,
    remove_batch_counters,
    taken,
)
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.constants import computed, written_buffers
from quantplug.core.graph.editing import OWN_META, erase_unused, new_parameter, set_operand
from quantplug.core.graph.facts import describe, operands, tensor_value
from quantplug.core.patterns.language import Match, Op, constant, either, op, optional, value
from quantplug.core.peers.torch_names import OpOverload

Point: TypeAlias = fx.Node | tuple[fx.Node, fx.Node]
Moves: TypeAlias = dict[Point, Point]

_aten = torch.ops.aten


def fuse_batch_norms_qat(model: fx.GraphModule, allow: Permission | None = None) -> list[Folding]:
    """Rewrites annotated convolution (or linear) -> batch_norm pairs for training, in place.

    A pair is fused if the producer's weight is annotated and nothing is quantized between the two; then
    the annotation's weight and bias entries, and specs anywhere in the graph that refer to these edges,
    follow to the scaled weight and the zero bias. Every other pair stays as it is. The time is linear.

    Args:
        model: an annotated copy of an exported graph module, before observers are inserted.
        allow: asked for every pair; None allows all. So a backend declares which pairs it folds.

    Returns:
        What happened to every batch norm of the graph; `folded` means fused.

    Raises:
        AnnotationError: a bias is to be quantized by a range of its own; in training it is zero, so an
            observer would learn a range that the folded bias does not fit into.
    """
    written = written_buffers(model.graph)
    pairs = {n: _pair_to_fuse(n, written, allow) for n in model.graph.nodes if n.target in BATCH_NORMS}
    moves: Moves = {}
    for pair in pairs.values():
        if isinstance(pair, Normalized):
            moves |= _fuse(pair)
    if moves:
        _follow(model.graph, moves)
        model.recompile()
    return [left_alone(n, pair) if isinstance(pair, str) else taken(n, pair.producer) for n, pair in pairs.items()]


def _pair_to_fuse(node: fx.Node, written: Set[str], allow: Permission | None) -> Normalized | str:
    pair = normalized_producer(node, written)
    if isinstance(pair, str):
        return pair
    return _not_trainable(pair) or refused(pair, allow) or pair


def _not_trainable(pair: Normalized) -> str | None:
    """Returns the reason why a pair that could be folded is not fused for training, or None."""
    if pair.turn is not None or pair.batch_norm.target is not _aten.batch_norm.default:
        return "the graph was decomposed for inference before training"
    annotation = _annotation(pair.producer)
    if annotation.input_qspec_map.get(pair.weight) is None and _annotation(pair.weight).output_qspec is None:
        return f"the weight of {describe(pair.producer)} is not quantized"
    between = annotation.output_qspec or _annotation(pair.batch_norm).input_qspec_map.get(pair.producer)
    if between is not None:
        return f"the result of {describe(pair.producer)} is quantized before the batch norm"
    bias = annotation.input_qspec_map.get(pair.bias) if pair.bias else None
    if isinstance(bias, QuantizationSpec) and not bias.dtype.is_floating_point:
        raise AnnotationError(
            f"The bias of {describe(pair.producer)} is to be quantized to {bias.dtype} by a range of its own, but it "
            "is zero until the batch norm is folded in; use a DerivedQuantizationSpec of the input and weight scales."
        )
    return None


def _annotation(node: fx.Node) -> QuantizationAnnotation:
    found = node.meta.get(Q_ANNOTATION_KEY)
    return found if isinstance(found, QuantizationAnnotation) else QuantizationAnnotation()


def _fuse(pair: Normalized) -> Moves:
    """Puts the training form around one pair; returns where its weight and bias edges went."""
    producer, bias = pair.producer, pair.bias
    for node in pair.constants.values():
        if producer < node:
            producer.prepend(node)
    with producer.graph.inserting_before(producer):
        scale = _insert_scale(pair)
        scaled = _insert_scaled_weight(pair, scale)
        zero = None if bias is None else _insert_zero_bias(pair, bias)
    shape = _along(1, _recorded(producer).dim())
    with producer.graph.inserting_before(pair.batch_norm):
        result = _call(_aten.div.Tensor, producer, _reshape(scale, shape, pair.batch_norm), like=pair.batch_norm)
        if bias is not None:
            result = _call(_aten.add.Tensor, result, _reshape(bias, shape, pair.batch_norm), like=pair.batch_norm)
    pair.batch_norm.replace_input_with(producer, result)
    return _move_operands(pair, scaled, zero)


def _recorded(node: fx.Node) -> Tensor:
    """Returns the value that export recorded; normalized_producer has already compared its rank."""
    found = tensor_value(node)
    assert found is not None
    return found


def _insert_scale(pair: Normalized) -> fx.Node:
    """Inserts gamma / sqrt(var + eps), one value per channel."""
    like, gamma = pair.batch_norm, pair.constants.get("gamma")
    variance = _call(_aten.add.Tensor, pair.constants["var"], pair.eps, like=like)
    deviation = _call(_aten.sqrt.default, variance, like=like)
    if gamma is None:
        return _call(_aten.reciprocal.default, deviation, like=like)
    if bool((pair.tensor("gamma") == 0).any()):
        # Residual branches are often started with gamma = 0. Dividing by it would give NaN; with 1 in its
        # place the convolution keeps its range, and the batch norm still multiplies by the true gamma.
        absent = _call(_aten.eq.Scalar, gamma, 0, like=like)
        gamma = _call(_aten.where.ScalarSelf, absent, 1.0, gamma, like=like)
    return _call(_aten.div.Tensor, gamma, deviation, like=like)


def _insert_scaled_weight(pair: Normalized, scale: fx.Node) -> fx.Node:
    """Inserts weight * scale, with the scale along the axis of the weight's output channels."""
    like, shape = pair.batch_norm, _recorded(pair.weight).shape
    if not pair.is_transposed:
        factor = _reshape(scale, _along(0, len(shape)), like)
    elif pair.groups == 1:
        factor = _reshape(scale, _along(1, len(shape)), like)
    else:
        # Rows of (in, out / groups, ...) belong to groups in turn: each group's scales serve in / groups rows.
        rows = _reshape(scale, [pair.groups, -1], like)
        rows = _call(_aten.repeat_interleave.self_int, rows, shape[0] // pair.groups, 0, like=like)
        factor = _reshape(rows, [*shape[:2], *(1 for _ in shape[2:])], like)
    # Observers are named after what they observe, so the name says which weight it is.
    return _call(_aten.mul.Tensor, pair.weight, factor, like=like, name=f"{pair.weight.name}_scaled")


def _insert_zero_bias(pair: Normalized, bias: fx.Node) -> fx.Node:
    """Inserts zeros in place of the bias, which is added after the scale has been taken out again.

    The convolution keeps an operand there, so that a quantized bias has its place in training already.
    """
    name, dtype = f"{bias.name}_zero", _recorded(pair.producer).dtype
    return _call(_aten.zeros_like.default, bias, like=pair.producer, name=name, dtype=dtype)


def _along(axis: int, dims: int) -> list[int]:
    return [-1 if i == axis else 1 for i in range(dims)]


def _reshape(node: fx.Node, shape: list[int], like: fx.Node) -> fx.Node:
    return _call(_aten.reshape.default, node, shape, like=like)


def _call(target: OpOverload, *args: Any, like: fx.Node, name: str | None = None, **kwargs: Any) -> fx.Node:
    """Inserts an operator call with the metadata of another node and the value that it would record."""
    node = like.graph.create_node("call_function", target, args, kwargs, name)
    node.meta = {key: found for key, found in like.meta.items() if key not in OWN_META}
    if all(isinstance(source.meta.get("val"), Tensor) for source in node.all_input_nodes):
        node.meta["val"] = computed(node, lambda source: source.meta["val"])
    return node


def _move_operands(pair: Normalized, scaled: fx.Node, zero: fx.Node | None) -> Moves:
    """Makes the producer read the scaled weight and zero bias; returns the edges that this renamed."""
    producer = pair.producer
    moves: Moves = {}
    for name, old, new in (("weight", pair.weight, scaled), ("bias", pair.bias, zero)):
        if old is None or new is None:
            continue
        set_operand(producer, name, new)
        moves[old, producer] = (new, producer)
        if _annotation(old).output_qspec is not None:
            # An annotation on the constant itself speaks of the tensor that the producer reads.
            new.meta[Q_ANNOTATION_KEY] = replace(_annotation(old))
            moves[old] = new
    return moves


def _follow(graph: fx.Graph, moves: Moves) -> None:
    """Points annotations at the edges that have moved; annotations without such an edge are left alone."""
    for old, new in moves.items():
        if isinstance(old, fx.Node) and isinstance(new, fx.Node) and set(old.users) <= {new}:
            del old.meta[Q_ANNOTATION_KEY]
    for node in graph.nodes:
        found = node.meta.get(Q_ANNOTATION_KEY)
        if isinstance(found, QuantizationAnnotation):
            node.meta[Q_ANNOTATION_KEY] = _moved_annotation(node, found, moves)


def _moved_annotation(node: fx.Node, found: QuantizationAnnotation, moves: Moves) -> QuantizationAnnotation:
    given = found.input_qspec_map.items()
    inputs = {_moved_input(source, node, moves): _moved_spec(spec, moves) for source, spec in given}
    return replace(found, input_qspec_map=inputs, output_qspec=_moved_spec(found.output_qspec, moves))


def _moved_input(source: fx.Node, node: fx.Node, moves: Moves) -> fx.Node:
    edge = moves.get((source, node), (source, node))
    return edge[0] if isinstance(edge, tuple) else source


def _moved_spec(spec: Any, moves: Moves) -> Any:
    if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in moves:
        return replace(spec, edge_or_node=moves[spec.edge_or_node])
    if isinstance(spec, DerivedQuantizationSpec) and not moves.keys().isdisjoint(spec.derived_from):
        return replace(spec, derived_from=[moves.get(point, point) for point in spec.derived_from])
    return spec


_GAMMA = either(
    constant("gamma"),
    op(
        "where.ScalarSelf",
        condition=op("eq.Scalar", self=constant("gamma"), other=0),
        self=1.0,
        other=constant("gamma"),
        name="guard",
    ),
)
_DEVIATION = op("sqrt", self=op("add.Tensor", self=constant("var")))
_SCALE = either(op("div.Tensor", self=_GAMMA, other=_DEVIATION), op("reciprocal", self=_DEVIATION))
_UNSCALED = op("div.Tensor", self=value("producer"), other=op("reshape", "view", self=_SCALE))
_BIASED = op("add.Tensor", self=_UNSCALED, other=op("reshape", "view", self=constant("bias")))
_SCALED_WEIGHT = op("mul.Tensor", self=constant("weight"), other=op("reshape", "view"))
_ZERO_BIAS = op("zeros_like", self=constant("bias"))
_FUSED = op(
    "batch_norm",
    "_native_batch_norm_legit",
    input=either(_BIASED, _UNSCALED),
    weight=optional(constant("gamma")),
    bias=optional(constant("beta")),
    running_mean=constant("mean"),
    running_var=constant("var"),
    name="batch_norm",
)


def fold_batch_norms_qat(model: fx.GraphModule) -> list[Folding]:
    """Folds the batch norms that were fused for training into their convolutions, in place.

    It does not matter whether fake quantizes or q/dq nodes stand between the scaled weight and the
    convolution, whether the graph is in training or evaluation mode, nor whether it was prepared here or
    by torchao. The running statistics are used. The time is linear in the graph.

    Args:
        model: a copy of a trained graph module; its parameters are only read.

    Returns:
        What happened to every fused batch norm of the graph, in its order; others are not mentioned.
    """
    fused = [m for n in model.graph.nodes if n.target in _FUSED.overloads if isinstance(m := _FUSED.match(n), Match)]
    outcome = [_fold(model, found) for found in fused]
    if any(folding.folded for folding in outcome):
        remove_batch_counters(model.graph)
        model.recompile()
    return outcome


def _fold(model: fx.GraphModule, found: Match) -> Folding:
    producer, batch_norm = found["producer"], found["batch_norm"]
    scaled = _origin(operands(producer).get("weight"), _SCALED_WEIGHT)
    zero = _origin(operands(producer).get("bias"), _ZERO_BIAS)
    if scaled is None or ("bias" in found and zero is None):
        return left_alone(batch_norm, f"{describe(producer)} does not read the scaled weight and zero bias of training")
    outcome = taken(batch_norm, producer)
    if "guard" in found:
        found["guard"].replace_all_uses_with(found["gamma"])
        erase_unused((found["guard"],))
    weight, bias = folded_tensors(_trained_pair(found, scaled["weight"]))
    scaled.root.replace_all_uses_with(new_parameter(model, scaled["weight"], "folded", weight))
    if zero is None:
        set_operand(producer, "bias", new_parameter(model, scaled["weight"], "folded_bias", bias))
    else:
        zero.root.replace_all_uses_with(new_parameter(model, found["bias"], "folded", bias))
    bypass(batch_norm, producer)
    erase_unused(match.root for match in (scaled, zero) if match is not None)
    return outcome


def _origin(node: Any, pattern: Op) -> Match | None:
    """Returns the match of a pattern where a chain of quantizing nodes starts, or None."""
    while isinstance(node, fx.Node) and node.target not in pattern.targets:
        node = node.args[0] if node.args else None
    found = pattern.match(node) if isinstance(node, fx.Node) else None
    return found if isinstance(found, Match) else None


def _trained_pair(found: Match, weight: fx.Node) -> Normalized:
    statistics = {name: found.get(name) for name in ("gamma", "beta", "mean", "var")}
    eps = float(operands(found["batch_norm"])["eps"])
    return Normalized(found["producer"], found["batch_norm"], weight, found.get("bias"), None, statistics, eps)
