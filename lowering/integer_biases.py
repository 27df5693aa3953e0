"""Float biases as the int32 ones that integer kernels add to their sums: training leaves them float.

Before: products of dequantized integers with a bias in float. After: the bias is a dequantized constant in the scale
of the sums, input scale x weight scale.
"""

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call, constant, set_operand
from quantplug.core.graph.facts import compute_nodes, constant_value, operands
from quantplug.core.patterns.language import op
from quantplug.core.qdq.qparams import IntegerWeight, dequantize, integer_weight, qparams

_QDQ = torch.ops.quantized_decomposed
_TRANSPOSED = op("conv_transpose2d.input").overloads
_PRODUCTS = op("conv1d", "conv2d", "linear").overloads | _TRANSPOSED
_LIMITS = torch.iinfo(torch.int32)


def quantize_biases(graph: fx.Graph) -> None:
    """Replaces float biases of products with static scales, in place."""
    for node in compute_nodes(graph):
        if node.target in _PRODUCTS:
            _quantize_bias(node)


def _quantize_bias(node: fx.Node) -> None:
    given = operands(node)
    bias, into = given["bias"], given["input"]
    values = constant_value(bias) if isinstance(bias, fx.Node) else None
    if values is None or into.target not in dequantize().targets:
        return
    weight = integer_weight(given["weight"], 1 if node.target in _TRANSPOSED else 0)
    scale = qparams(into).scale
    if isinstance(weight, IntegerWeight) and isinstance(scale, float):
        set_operand(node, "bias", _dequantized(node, values.detach(), weight.scales * scale))


def _dequantized(node: fx.Node, bias: Tensor, scales: Tensor) -> fx.Node:
    is_whole = bool((scales == scales[0]).all())
    steps = scales[:1] if is_whole else scales  # groups of a transposed convolution have more biases than scales
    integers = (bias.double() / steps.double()).round().clamp(_LIMITS.min, _LIMITS.max).to(torch.int32)
    held = constant(node, "bias_integers", integers)
    numbers = (_LIMITS.min, _LIMITS.max, torch.int32)
    if is_whole:
        made = call(node, _QDQ.dequantize_per_tensor.default, (held, float(scales[0]), 0, *numbers), node)
    else:
        per_channel = (constant(node, "bias_scales", scales), constant(node, "bias_zeros", torch.zeros_like(integers)))
        made = call(node, _QDQ.dequantize_per_channel.default, (held, *per_channel, 0, *numbers), node)
    made.meta["val"] = bias
    return made
