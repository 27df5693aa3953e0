"""Attention of transformers' models to the rows of a cache that are filled, by one operator.

Before: a model that asks transformers for an implementation of attention by its name. After: ours has a name there, and
models whose layers look back at everything before a token can take it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.core.errors import ModelError
from quantplug.lowering.cached_attention import cached_attention

# What models of transformers tell an attention that changes nothing of what it computes: positions are in the queries
# and keys already, windows in the mask.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "sliding_window", "is_causal", "cache", "past_key_values"}
_STARTS: ContextVar[Tensor] = ContextVar("start")
_POSITIONS: ContextVar[int] = ContextVar("positions", default=0)


@contextmanager
def beginning_at(start: Tensor) -> Iterator[None]:
    """Tells attention at which position, int64 [1], the first of a call's tokens stands."""
    token = _STARTS.set(start)
    try:
        yield
    finally:
        _STARTS.reset(token)


@contextmanager
def requiring_causal_masks(positions: int) -> Iterator[None]:
    """Makes models raise a ModelError whose layers do not look back at all of so many positions."""
    token = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


@cache
def registered() -> str:
    """Returns the name under which transformers knows this attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = "quantplug_cached"
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
    return name


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Returns attention to a cache [1, positions, heads, channels] of queries [1, heads, n, channels]."""
    scale, others = given.pop("scaling", None), {name for name, found in given.items() if found is not None}
    others -= _HARMLESS | {"dropout"}
    if others or attention_mask is not None or given.get("dropout"):
        raise ModelError(f"attention of {type(module).__name__} takes {sorted(others) or 'a mask or dropout'} too")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return cached_attention(query.transpose(1, 2), key, value, _STARTS.get(), scale), None


def _mask(*, mask_function: Callable[..., Any], use_vmap: bool = False, **_: Any) -> None:
    """Returns no mask: the operator has the causal one; where that is to be proved, it looks at the model's."""
    positions = _POSITIONS.get()
    if not positions:
        return
    from transformers.masking_utils import sdpa_mask

    found = sdpa_mask(
        1, positions, positions, mask_function=mask_function, allow_is_causal_skip=False, use_vmap=use_vmap
    )
    if found is None or not torch.equal(found[0, 0], torch.ones(positions, positions, dtype=torch.bool).tril()):
        raise ModelError("its layers do not look back at all tokens")
