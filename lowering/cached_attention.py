"""Attention to a cache of keys and values, as one operator that says up to which row the cache is filled.

Before: an exported graph that would read all rows of a cache, and mask those that are still empty. After: one operator
that reads the rows up to each query's own, for targets that have such a kernel. In PyTorch it computes what attention
with a mask does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@torch.library.custom_op("quantplug::cached_attention", mutates_args=())
def cached_attention(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    """Returns causal attention of queries at successive positions, [1, n, heads, channels of values].

    Args:
        query: [1, n, heads, channels].
        keys: the cache, of which the queries' own rows are filled already, [1, positions, key heads, channels]; each
            of its heads serves as many heads of queries.
        values: likewise.
        start: position of the first query, int64 [1]; that and n are no more than the cache holds.
        scale: what the products of queries and keys are multiplied by.
    """
    return attend(query, keys, values, start, scale)


def attend(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    """Computes what `cached_attention` says, called without torch's dispatcher."""
    first, (_, count, heads, channels) = int(start), query.shape
    read, given = (cache[:, : first + count].transpose(1, 2) for cache in (keys, values))
    if count == 1:  # nothing is masked, and queries of one head of keys are rows beside each other
        rows = query.reshape(1, read.shape[1], -1, channels)
        return scaled_dot_product_attention(rows, read, given, scale=scale).reshape(1, 1, heads, -1)
    seen = torch.arange(first + count) <= torch.arange(first, first + count)[:, None]
    rows = scaled_dot_product_attention(query.transpose(1, 2), read, given, seen, scale=scale, enable_gqa=True)
    return rows.transpose(1, 2).contiguous()


@cached_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    return query.new_empty((*query.shape[:-1], values.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *rows, ctx.scale = inputs
    ctx.save_for_backward(*rows)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of queries, keys and values, for recipes that train."""
    *given, start = ctx.saved_tensors
    with torch.enable_grad():
        query, keys, values = (part.detach().requires_grad_() for part in given)
        found = attend(query, keys, values, start, ctx.scale)
    return *torch.autograd.grad(found, (query, keys, values), gradient), None, None


cached_attention.register_autograd(_gradients, setup_context=_keep)
CACHED_ATTENTION = torch.ops.quantplug.cached_attention.default
