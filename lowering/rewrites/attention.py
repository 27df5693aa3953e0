"""Attention as products and a softmax."""

import math
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import tensor_value
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_ATEN = torch.ops.aten


def attention_is_products(model: fx.GraphModule) -> fx.GraphModule:
    """Writes scaled_dot_product_attention as matmul, softmax and matmul.

    ExecuTorch's decomposition guards against rows that are masked completely with portable operators that cost ten
    times the attention itself. A graph without mask has no such row; one whose boolean mask is known and has none
    adds the mask; any other keeps the original.
    Source of the formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    for node, values in matching(model, "scaled_dot_product_attention"):
        query, key = tensor_value(values["query"]), tensor_value(values["key"])
        if query is None or key is None or values["dropout_p"] or values.get("enable_gqa"):
            continue
        write = Writer(model, node)
        masked, mask = _additive_mask(write, values, query, key)
        if masked and mask is None:
            continue
        scale = values.get("scale")
        factor = float(scale) if scale is not None else 1.0 / math.sqrt(query.shape[-1])
        turned = write.call(_ATEN.transpose.int, values["key"], -2, -1)
        # The factor goes onto the query: it is the smaller tensor.
        held = write.number(factor, query, "attention_scale")
        scores = write.call(_ATEN.matmul.default, write.call(_ATEN.mul.Tensor, values["query"], held), turned)
        scores = scores if mask is None else write.call(_ATEN.add.Tensor, scores, mask)
        weights = write.call(_ATEN.softmax.int, scores, -1)
        write.replace(write.call(_ATEN.matmul.default, weights, values["value"]))
    return done(model)


def attention_is_contiguous(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a copy behind attention that stays as it is.

    Tracing gives its result the strides of a kernel for CPUs, turned already, and takes a reshape behind a transpose
    for a view. ExecuTorch writes it as products later, whose result has other strides.
    """
    for node, _ in matching(model, "scaled_dot_product_attention"):
        with model.graph.inserting_after(node):
            copy = call_like(model.graph, node, _ATEN.clone.default)
        copy.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(copy)
        copy.args, copy.kwargs = (node,), {"memory_format": torch.contiguous_format}
    return done(model)


def _additive_mask(write: Writer, values: dict[str, Any], query: Tensor, key: Tensor) -> tuple[bool, fx.Node | None]:
    """Returns whether attention is masked, and the mask to add to the scores, None if it is not known."""
    given = values["attn_mask"]
    if given is None and not values["is_causal"]:
        return False, None
    value = tensor_value(given)
    if value is not None and value.is_floating_point():
        return True, given
    seen = _causal(query, key) if given is None else constant_operand(given)
    if seen is None or not bool(seen.any(-1).all()):
        return True, None
    return True, write.constant(torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -math.inf), "mask")


def _causal(query: Tensor, key: Tensor) -> Tensor | None:
    sizes = (query.shape[-2], key.shape[-2])
    return torch.ones(sizes, dtype=torch.bool).tril() if all(isinstance(size, int) for size in sizes) else None
