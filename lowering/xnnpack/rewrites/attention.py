"""Attention as products and a softmax."""

import math

import torch
from torch import fx

from quantplug.core.graph import tensor_value
from quantplug.lowering.xnnpack.rewrites.writing import Writer, done, matching

_ATEN = torch.ops.aten


def attention_is_products(model: fx.GraphModule) -> fx.GraphModule:
    """Writes scaled_dot_product_attention as matmul, softmax and matmul.

    ExecuTorch's decomposition guards against rows that are masked completely with portable operators that cost ten
    times the attention itself; a graph without mask has no such row, and one with a boolean mask keeps the original.
    Source of the formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    for node, values in matching(model, "scaled_dot_product_attention"):
        query, mask = tensor_value(values["query"]), values["attn_mask"]
        masked = tensor_value(mask) if mask is not None else None
        if query is None or values["dropout_p"] or values["is_causal"] or values.get("enable_gqa"):
            continue
        if mask is not None and (masked is None or not masked.is_floating_point()):
            continue
        scale = values.get("scale")
        factor = float(scale) if scale is not None else 1.0 / math.sqrt(query.shape[-1])
        write = Writer(model, node)
        turned = write.call(_ATEN.transpose.int, values["key"], -2, -1)
        # The factor goes onto the query: it is the smaller tensor.
        held = write.number(factor, query, "attention_scale")
        scores = write.call(_ATEN.matmul.default, write.call(_ATEN.mul.Tensor, values["query"], held), turned)
        scores = scores if mask is None else write.call(_ATEN.add.Tensor, scores, mask)
        weights = write.call(_ATEN.softmax.int, scores, -1)
        write.replace(write.call(_ATEN.matmul.default, weights, values["value"]))
    return done(model)
