"""A causal model of transformers with its keys and values in buffers, as one method for prompts and for single tokens.

Before: `model(input_ids)` over a whole sequence. After: `decoder(tokens [1, n], start [1])` gives the logits
[1, vocabulary] behind the last token, and keeps what later tokens look back at.
"""

from contextlib import nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.core.errors import ConfigError, ModelError, first_line
from quantplug.core.specs.levels import sqnr
from quantplug.language.attention import beginning_at, registered, requiring_causal_masks
from quantplug.language.experts import apart, over_same_weights, with_experts_apart
from quantplug.language.weights import weights_let_go


def _shapes(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Returns the keys and values of one token, layer by layer, as the model itself makes them.

    Raises:
        ModelError: the model keeps no keys and values, or something else beside them.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    try:
        with torch.no_grad(), weights_let_go(model):
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=True, **_given(model, cache))
        found = [(layer.keys, layer.values) for layer in cache.layers]
    except Exception as error:  # whatever a model of another kind does with a cache
        raise ModelError(
            f"{type(model).__name__} does not decode with a cache of keys and values ({first_line(error)}); pass a "
            "causal language model of transformers."
        ) from error
    if not found or any(part is None or part.dim() != 4 for pair in found for part in pair):
        raise ModelError(f"{type(model).__name__} keeps no keys and values of its tokens; pass a model with attention.")
    return found


def _given(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Returns a cache by its name among the model's operands; in earlier versions of transformers it is the longer."""
    known = signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


@cache
def _slots() -> type:
    """Returns the kind of cache that fills two buffers; transformers is imported when it is needed."""
    from transformers.cache_utils import StaticLayer

    class Slots(StaticLayer):
        """Keys and values of a layer, filled at given positions."""

        def __init__(self, keys: "_Rows", values: "_Rows", start: Tensor, positions: Tensor) -> None:
            super().__init__(keys.count)
            self.keys, self.values, self.is_initialized = keys, values, True
            self.start, self.positions = start, positions

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            found = self.keys.filled(self.positions, keys), self.values.filled(self.positions, values)
            if keys.shape[-1] == values.shape[-1]:
                return found
            # What is no pair of keys and values goes through layers first (DeepSeek's latents), where rows of an
            # earlier text would count for the range of an activation.
            seen = torch.arange(self.keys.count, device=keys.device)[:, None] <= self.positions[-1]
            return found[0] * seen, found[1] * seen

        def get_seq_length(self) -> Tensor:
            return self.start

    return Slots


class _Rows(nn.Module):
    """A row of numbers for each head and position: [1, heads, positions, channels]."""

    data: Tensor

    def __init__(self, like: Tensor, count: int) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("data", self._empty(like, count), persistent=False)

    def _empty(self, like: Tensor, count: int) -> Tensor:
        return torch.zeros(1, like.shape[1], count, like.shape[3], dtype=like.dtype)

    def filled(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Returns all rows after some were written at their positions."""
        self.data.index_copy_(2, positions, rows)
        return self.data


class _WholeRows(_Rows):
    """Rows of all heads side by side, as the operator for attention to a cache reads them."""

    def _empty(self, like: Tensor, count: int) -> Tensor:
        # Made as it lies: ExecuTorch goes by strides, and those of a turned tensor differ where there is one head.
        return torch.zeros(1, count, like.shape[1], like.shape[3], dtype=like.dtype)

    def filled(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Returns all rows [1, positions, heads, channels] after some were written."""
        self.data.index_copy_(1, positions, rows.transpose(1, 2))
        return self.data


class _IntegerRows(_Rows):
    """Rows in int8, each with its own scale."""

    scales: Tensor

    def __init__(self, like: Tensor, count: int) -> None:
        super().__init__(like.to(torch.int8), count)
        self.register_buffer("scales", self._empty(like[..., :1], count), persistent=False)

    def filled(self, positions: Tensor, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny * 127)
        self.data.index_copy_(2, positions, (rows * (127 / largest)).round().to(torch.int8))
        self.scales.index_copy_(2, positions, largest / 127)
        return self.data.to(rows.dtype) * self.scales


def _ours(model: nn.Module, attention: str) -> nn.Module:
    """Returns a model of the same weights, with the operator for attention and with experts as layers where it has any.

    Without either it is the model itself.
    """
    if attention == PLAIN:
        return with_experts_apart(model)
    other: nn.Module = over_same_weights(model)
    other.set_attn_implementation(registered())  # type: ignore[operator]  # of transformers
    apart(other)
    return other


_ROWS = {"float32": _Rows, "int8": _IntegerRows}
# Attention by an operator that reads the rows that are filled, by the backend that has a kernel for it.
PLAIN, BY_BACKEND = "aten", {"xnnpack": "executorch", "x86": "filled"}
ATTENTIONS = (PLAIN, *BY_BACKEND.values())
# Decibels that logits keep where two ways to compute them differ by the order of sums only.
_LEAST = 80.0
# Tokens that show whether two ways do.
_FEW = 16


def require_cache(name: str) -> None:
    """Checks the name of a kind of cache.

    Raises:
        ConfigError: there is none.
    """
    if name not in _ROWS:
        raise ConfigError(f"There is no cache in '{name}'; choose one of {sorted(_ROWS)}.")


def require_attention(name: str, cache: str) -> None:
    """Checks the name of a way to attend to a cache.

    Raises:
        ConfigError: there is none, or it reads no such cache.
    """
    if name not in ATTENTIONS:
        raise ConfigError(f"There is no attention '{name}'; choose one of {list(ATTENTIONS)}.")
    if name != PLAIN and cache != "float32":
        raise ConfigError(f"Attention '{name}' reads a cache in float32, not in '{cache}'; leave one of them out.")


def objection(model: nn.Module, context: int, attention: str = BY_BACKEND["xnnpack"]) -> str | None:
    """Returns why a model of transformers cannot take an operator for attention to a cache, None if it can.

    What it computes with the operator is compared with what it computes without.

    Args:
        model: as for `Decoder`, in float32.
        context: positions of the cache.
        attention: the operator's name; ExecuTorch's reads keys and values of one width.
    """
    widths = [[part.shape[-1] for part in pair] for pair in _shapes(model)]
    uneven = next((pair for pair in widths if len({*pair}) > 1), None)
    if uneven is not None and attention == BY_BACKEND["xnnpack"]:
        return f"its keys have {uneven[0]} channels and its values {uneven[1]}"
    few = min(context, _FEW)
    tokens = _tokens(model, few - 1)
    starts = torch.tensor([[0], [tokens.shape[1] - 1]])
    try:
        with torch.no_grad(), requiring_causal_masks(context):
            decoders = [Decoder(model, few, attention=name).eval() for name in (PLAIN, attention)]
            with weights_let_go(*decoders):
                pairs = [(run(tokens[:, :-1], starts[0]), run(tokens[:, -1:], starts[1])) for run in decoders]
    except Exception as error:  # whatever a model of another kind does with an attention that is not its own
        return first_line(error).rstrip(".")
    levels = [sqnr(found, expected) for expected, found in zip(*pairs, strict=True)]
    return None if min(levels) > _LEAST else f"with it, its logits keep {min(levels):.0f} dB only"


def _tokens(model: Any, count: int) -> Tensor:
    return torch.arange(1, count + 1)[None].remainder(int(model.config.get_text_config().vocab_size))


def needs_mask(model: nn.Module, context: int) -> bool:
    """Tells whether a model has to be told that it may read each row of its cache, where it is no other one behind it.

    What it computes in two parts is compared with the whole sequence at once. Rows that are not filled hold noise:
    some models count them as tokens.

    Args:
        model: as for `Decoder`, in float32.
        context: positions of the cache.

    Raises:
        ModelError: it computes something else, told or not.
    """
    tokens, name = _tokens(model, min(context, _FEW)), type(model).__name__
    decoder, reason = Decoder(model, context).eval(), ""
    for decoder.gives_mask in (False, True):
        try:
            with torch.no_grad(), weights_let_go(model):
                expected = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
                level = sqnr(_in_parts(decoder, tokens), expected)
        except Exception as error:  # whatever a model of another kind does with a cache that is not its own
            reason = reason or first_line(error).rstrip(".")
            continue
        if level > _LEAST:
            return decoder.gives_mask
        reason = f"its logits keep {level:.0f} dB of those of the whole sequence at once"
    raise ModelError(f"{name} does not decode with a cache of fixed size ({reason}); pass another model.")


def _in_parts(decoder: "Decoder", tokens: Tensor) -> Tensor:
    """Returns logits behind tokens of which the last one comes by itself, over a cache full of noise."""
    for rows in (*decoder.keys, *decoder.values):
        rows.data.copy_(torch.linspace(-1, 1, rows.data.numel()).view_as(rows.data))
    decoder(tokens[:, :-1], torch.tensor([0]))
    found: Tensor = decoder(tokens[:, -1:], torch.tensor([tokens.shape[1] - 1]))
    return found


class Decoder(nn.Module):
    """A causal language model over a cache of fixed size.

    Rows of the cache behind the last position are masked, whatever is in them: a text that begins at position 0 does
    not see the one before.

    Args:
        model: of transformers, such as `LlamaForCausalLM`; its weights are shared.
        context: positions of the cache.
        cache: "float32", or "int8" with a scale for each head and position.
        attention: "aten" for the model's own over all positions, "executorch" or "filled" for an operator that stops
            at the last position that is filled.

    Attributes:
        gives_mask: whether the model is told that it may read each row. Some would ask for the number of those that
            are filled to make one up, which no export knows.

    Raises:
        ConfigError: there is no such cache or attention.
        ModelError: the model has no such cache, or was not trained for so many positions.
    """

    def __init__(self, model: nn.Module, context: int, cache: str = "float32", attention: str = PLAIN) -> None:
        super().__init__()
        require_cache(cache)
        require_attention(attention, cache)
        config: Any = model.config
        most = getattr(config.get_text_config(), "max_position_embeddings", None) or context
        if not 2 <= context <= most:
            raise ModelError(
                f"The context is {context}, and {type(model).__name__} has {most} positions; give 2 to {most}."
            )
        self.context, self.attends_to_rows, self.gives_mask = context, attention != PLAIN, False
        self.model = _ours(model, attention)
        rows = _WholeRows if self.attends_to_rows else _ROWS[cache]
        pairs = [[rows(part, context) for part in pair] for pair in _shapes(model)]
        self.keys, self.values = (nn.ModuleList(kind) for kind in zip(*pairs, strict=True))

    @property
    def layers(self) -> int:
        """How many layers look back."""
        return len(self.keys)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Returns the logits behind the last of the tokens, whose first one stands at a position.

        Args:
            tokens: ids, int64 [1, n].
            start: int64 [1].
        """
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)
        mask = {"attention_mask": torch.ones(1, self.context, dtype=torch.int64)} if self.gives_mask else {}
        with beginning_at(start) if self.attends_to_rows else nullcontext():
            found = self.model(
                input_ids=tokens,
                position_ids=positions[None],
                **_given(self.model, self._cache(start[0], positions)),
                use_cache=True,
                logits_to_keep=1,
                **mask,
            )
        logits: Tensor = found.logits[:, -1]
        return logits

    def _cache(self, start: Tensor, positions: Tensor) -> Any:
        from transformers.cache_utils import Cache

        slots = _slots()
        return Cache(layers=[slots(*pair, start, positions) for pair in zip(self.keys, self.values, strict=True)])
