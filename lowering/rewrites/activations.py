"""Activations as the products and clamps that have integer kernels."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten
# Klambauer et al., "Self-Normalizing Neural Networks", 2017: what torch.nn.SELU computes with.
_SELU = {"alpha": 1.6732632423543772848170429916717, "scale": 1.0507009873554804934193349852946}


def silu_is_product(model: fx.GraphModule) -> fx.GraphModule:
    """Writes silu(x) as x * sigmoid(x)."""
    for node, values in matching(model, "silu", "silu_"):
        write = Writer(model, node)
        gate = write.call(_ATEN.sigmoid.default, values["self"])
        write.replace(write.call(_ATEN.mul.Tensor, values["self"], gate))
    return done(model)


def glu_is_product(model: fx.GraphModule) -> fx.GraphModule:
    """Writes glu as one half times the sigmoid of the other (Dauphin et al., arXiv:1612.08083)."""
    for node, values in matching(model, "glu"):
        result = tensor_value(node)
        if result is None or not isinstance(size := result.shape[values["dim"]], int):
            continue
        write = Writer(model, node)
        parts = ((0, size), (size, 2 * size))
        half, other = (write.call(_ATEN.slice.Tensor, values["self"], values["dim"], *part) for part in parts)
        write.replace(write.call(_ATEN.mul.Tensor, half, write.call(_ATEN.sigmoid.default, other)))
    return done(model)


def hardsigmoid_is_clamp(model: fx.GraphModule) -> fx.GraphModule:
    """Writes hardsigmoid(x) as clamp(x / 6 + 1/2, 0, 1).

    Behind a convolution or linear the map goes into its weights, so that one kernel computes all of it.
    """
    for node, values in matching(model, "hardsigmoid", "hardsigmoid_"):
        source, result = values["self"], tensor_value(node)
        if result is None:
            continue
        write = Writer(model, node)
        moved = _into_weights(write, source, 1.0 / 6.0, 0.5)
        if moved is None:
            scaled = write.call(_ATEN.mul.Tensor, source, write.number(1.0 / 6.0, result, "sixth"))
            moved = write.call(_ATEN.add.Tensor, scaled, write.number(0.5, result, "half"))
        write.replace(write.call(_ATEN.hardtanh.default, moved, 0.0, 1.0))
    return done(model)


def _into_weights(write: Writer, layer: fx.Node, factor: float, shift: float) -> fx.Node | None:
    """Returns a layer that computes factor * layer + shift, None if this one has no constants of its own."""
    if operator_name(layer) not in ("aten::conv1d", "aten::conv2d", "aten::linear") or len(layer.users) != 1:
        return None
    values = operands(layer)
    weight, bias = constant_operand(values["weight"]), constant_operand(values["bias"])
    if weight is None or (bias is None and values["bias"] is not None):
        return None
    scaled = weight.detach() * factor
    moved = weight.new_full((weight.shape[0],), shift) if bias is None else bias.detach() * factor + shift
    values["weight"] = write.constant(_as_trainable_as(weight, scaled), "gate_weight")
    values["bias"] = write.constant(_as_trainable_as(weight, moved), "gate_bias")
    return write.call(cast(Callable[..., Any], layer.target), *values.values())


def _as_trainable_as(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new) if isinstance(old, nn.Parameter) else new


def rrelu_is_leaky_relu(model: fx.GraphModule) -> fx.GraphModule:
    """Writes rrelu of evaluation as leaky_relu with the mean of its slopes; the runtime has no rrelu."""
    for node, values in matching(model, "rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"):
        if not values["training"]:
            write = Writer(model, node)
            slope = (values["lower"] + values["upper"]) / 2
            write.replace(write.call(_ATEN.leaky_relu.default, values["self"], slope))
    return done(model)


def single_slope_is_leaky_relu(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a prelu of one slope as leaky_relu, whose kernel takes any number of dimensions; not for training."""
    for node, values in matching(model, "prelu"):
        slope = constant_operand(values["weight"])
        if slope is not None and slope.numel() == 1:
            write = Writer(model, node)
            write.replace(write.call(_ATEN.leaky_relu.default, values["self"], float(slope)))
    return done(model)


def elu_is_plain(model: fx.GraphModule) -> fx.GraphModule:
    """Writes selu, celu and elu with scales as b * elu(x * a): ExecuTorch 1.4 drops the scales of an elu in silence.

    scale * elu(x), with exp(input_scale * x) in it, is (scale / input_scale) * elu(input_scale * x).
    """
    for node, values in matching(model, "elu", "elu_", "selu", "selu_", "celu", "celu_"):
        result, (alpha, scale, inner) = tensor_value(node), _elu_numbers(operator_name(node), values)
        if result is None or (scale == inner == 1 and operator_name(node).startswith("aten::elu")):
            continue
        write = Writer(model, node)
        source = _times(write, values["self"], inner, result)
        plain = write.call(_ATEN.elu.default, source, alpha * inner)
        write.replace(_times(write, plain, scale / inner, result))
    return done(model)


def _elu_numbers(name: str, values: dict[str, Any]) -> tuple[float, float, float]:
    """Returns alpha, the scale of the result and the scale of the input."""
    if name.startswith("aten::selu"):
        return _SELU["alpha"], _SELU["scale"], 1.0
    if name.startswith("aten::celu"):
        return values["alpha"], 1.0, 1.0 / values["alpha"]
    return values["alpha"], values["scale"], values["input_scale"]


def _times(write: Writer, source: fx.Node, number: float, beside: Tensor) -> fx.Node:
    return source if number == 1 else write.call(_ATEN.mul.Tensor, source, write.number(number, beside, "elu_scale"))


def clamp_is_activation(model: fx.GraphModule) -> fx.GraphModule:
    """Writes clamp(x, a, b) as hardtanh and clamp(x, min=0) as relu: the forms that kernels fuse."""
    for node, values in matching(model, "clamp", "clamp_", "clamp_min"):
        low, high = values.get("min"), values.get("max")
        if isinstance(low, fx.Node) or isinstance(high, fx.Node) or tensor_value(node) is None:
            continue
        write = Writer(model, node)
        if low == 0 and high is None:
            write.replace(write.call(_ATEN.relu.default, values["self"]))
        elif low is not None and high is not None and low <= high:
            write.replace(write.call(_ATEN.hardtanh.default, values["self"], float(low), float(high)))
    return done(model)
