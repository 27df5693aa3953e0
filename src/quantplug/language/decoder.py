"""A causal model of transformers with its keys and values in buffers, as one method for prompts and for single tokens.

Before: `model(input_ids)` over a whole sequence. After: `decoder(tokens [1, n], start [1])` gives the logits
[1, vocabulary] behind the last token, and keeps what later tokens look back at.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.core.errors import ModelError, first_line


def _shapes(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Returns the keys and values of one token, layer by layer, as the model itself makes them.

    Raises:
        ModelError: the model keeps no keys and values, or something else beside them.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64), past_key_values=cache, use_cache=True)
        found = [(layer.keys, layer.values) for layer in cache.layers]
    except Exception as error:  # whatever a model of another kind does with a cache
        raise ModelError(
            f"{type(model).__name__} does not decode with a cache of keys and values ({first_line(error)}); pass a "
            "causal language model of transformers."
        ) from error
    if not found or any(part is None or part.dim() != 4 for pair in found for part in pair):
        raise ModelError(f"{type(model).__name__} keeps no keys and values of its tokens; pass a model with attention.")
    return found


@cache
def _slots() -> type:
    """Returns the kind of cache that fills two buffers; transformers is imported when it is needed."""
    from transformers.cache_utils import StaticLayer

    class Slots(StaticLayer):
        """Rows of two buffers, filled at given positions."""

        def __init__(self, keys: Tensor, values: Tensor, start: Tensor, positions: Tensor) -> None:
            super().__init__(keys.shape[2])
            self.keys, self.values, self.is_initialized = keys, values, True
            self.start, self.positions = start, positions

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys.index_copy_(2, self.positions, keys)
            self.values.index_copy_(2, self.positions, values)
            return self.keys, self.values

        def get_seq_length(self) -> Tensor:
            return self.start

    return Slots


class Decoder(nn.Module):
    """A causal language model over a cache of fixed size.

    Rows of the cache behind the last position are masked, whatever is in them: a text that begins at position 0 does
    not see the one before.

    Args:
        model: of transformers, such as `LlamaForCausalLM`; its weights are shared.
        context: positions of the cache.

    Raises:
        ModelError: the model has no such cache, or was not trained for so many positions.
    """

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__()
        config: Any = model.config
        most = getattr(config.get_text_config(), "max_position_embeddings", None) or context
        if not 2 <= context <= most:
            raise ModelError(
                f"The context is {context}, and {type(model).__name__} has {most} positions; give 2 to {most}."
            )
        self.model = model
        shapes = _shapes(model)
        self.layers, self.context = len(shapes), context
        for number, pair in enumerate(shapes):
            for name, one in zip(("keys", "values"), pair, strict=True):
                empty = torch.zeros(1, one.shape[1], context, one.shape[3], dtype=one.dtype)
                self.register_buffer(f"{name}_{number}", empty, persistent=False)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Returns the logits behind the last of the tokens, whose first one stands at a position.

        Args:
            tokens: ids, int64 [1, n].
            start: int64 [1].
        """
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)
        found = self.model(
            input_ids=tokens,
            position_ids=positions[None],
            past_key_values=self._cache(start[0], positions),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = found.logits[:, -1]
        return logits

    def _cache(self, start: Tensor, positions: Tensor) -> Any:
        from transformers.cache_utils import Cache

        buffers, slots = dict(self.named_buffers(recurse=False)), _slots()
        pairs = ((buffers[f"keys_{number}"], buffers[f"values_{number}"]) for number in range(self.layers))
        return Cache(layers=[slots(*pair, start, positions) for pair in pairs])
