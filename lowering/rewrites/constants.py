"""Numbers and statistics as constants that can be quantized."""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten


def numbers_are_constants(model: fx.GraphModule) -> fx.GraphModule:
    """Writes x + 2.5, x - 2.5, x * 2.5 and x / 2.5 with the number as a constant tensor, which can be quantized."""
    kinds = {"add": _ATEN.add.Tensor, "sub": _ATEN.sub.Tensor, "mul": _ATEN.mul.Tensor, "div": _ATEN.mul.Tensor}
    for node, values in matching(model, *kinds):
        number, result = values.get("other"), tensor_value(node)
        if isinstance(number, (bool, fx.Node)) or not isinstance(number, (int, float)) or result is None:
            continue
        if not isinstance(values["self"], fx.Node) or not _same_float(values["self"], result):
            continue
        if values.get("alpha", 1) != 1 or values.get("rounding_mode") is not None:
            continue
        kind = operator_name(node).partition("::")[2]
        if kind == "div" and number == 0:
            continue
        write = Writer(model, node)
        held = write.number(1.0 / number if kind == "div" else number, result, "number")
        write.replace(write.call(kinds[kind], values["self"], held))
    return done(model)


def _same_float(node: fx.Node, result: Tensor) -> bool:
    value = tensor_value(node)
    return value is not None and value.is_floating_point() and value.dtype == result.dtype and value.dim() > 0


def batch_norm_is_depthwise(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a batch norm that no convolution precedes as a depthwise 1x1 convolution.

    Pre-activation networks (densenet) normalize sums and concatenations, where nothing can be folded;
    the affine map of evaluation, x * w / sqrt(v + e) + (b - m * w / sqrt(v + e)), has an int8 kernel in this form.
    """
    for node, values in matching(model, "batch_norm"):
        source, line = tensor_value(values["input"]), line_of_batch_norm(values)
        if source is None or source.dim() != 4 or line is None or _folds(values["input"]):
            continue
        factor, summand = line
        write = Writer(model, node)
        weight = write.constant(factor.reshape(-1, 1, 1, 1), "norm_weight")
        bias = write.constant(summand, "norm_bias")
        channels = int(factor.numel())
        write.replace(write.call(_ATEN.conv2d.default, values["input"], weight, bias, [1, 1], [0, 0], [1, 1], channels))
    return done(model)


def line_of_batch_norm(values: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Returns by what a batch norm multiplies each channel at inference, and what it adds; None if either is open.

    Args:
        values: its operands.
    """
    mean, variance = (constant_operand(values[name]) for name in ("running_mean", "running_var"))
    if mean is None or variance is None or values["training"]:
        return None
    scale, shift = constant_operand(values["weight"]), constant_operand(values["bias"])
    factor = (1.0 if scale is None else scale) / torch.sqrt(variance + values["eps"])
    return factor.detach(), ((0.0 if shift is None else shift) - mean * factor).detach()


def _folds(producer: fx.Node) -> bool:
    return operator_name(producer).startswith("aten::conv") and len(producer.users) == 1
