"""Mixtures of experts as linear layers, each of which quantizers and lowerings know.

Before: a model of transformers whose experts are stacked in one parameter, of which a token reads some. After: a
model over the same weights, in which each expert computes each token, and those that were not chosen count 0 times.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

# What functions for experts that are registered with transformers call on a module with gates.
_GATE = "_apply_gate"


def with_experts_apart(model: nn.Module) -> nn.Module:
    """Returns a model over the same weights, with linear layers in the place of stacked experts where it has any."""
    if not any(map(_is_stacked, model.modules())):
        return model
    other: nn.Module = over_same_weights(model)
    apart(other)
    return other


def over_same_weights(model: nn.Module) -> Any:
    """Returns a copy of a model, of its own class, whose parameters and buffers are the model's own."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def apart(model: nn.Module) -> None:
    """Puts linear layers in the place of stacked experts, in place; the layers' weights are views.

    Args:
        model: a copy, whose stacked modules lose their weights.
    """
    for path, module in list(model.named_modules()):
        if _is_stacked(module):
            model.set_submodule(path, _Experts(module))


def _is_stacked(module: nn.Module) -> bool:
    """Tells whether a module is what `use_experts_implementation` of transformers makes."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed"))


class _Experts(nn.Module):
    """Experts side by side.

    Args:
        stacked: the module of transformers.
    """

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        first = "gate_up_proj" if stacked.has_gate else "up_proj"
        count = range(stacked.num_experts)
        self.up = nn.ModuleList(_layer(stacked, first, number) for number in count)
        self.down = nn.ModuleList(_layer(stacked, "down_proj", number) for number in count)
        self.kind = stacked  # its activation, its gate, its norm
        for name in [name for name, _ in stacked.named_parameters(recurse=False)]:
            delattr(stacked, name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sum of what the experts yield [tokens, channels], times their weights.

        Args:
            hidden_states: [tokens, channels].
            top_k_index: which experts each token has, [tokens, k].
            top_k_weights: and how much they count.
        """
        numbers = torch.arange(len(self.up), device=top_k_index.device)
        shares = ((top_k_index[..., None] == numbers) * top_k_weights[..., None]).sum(1)
        total = torch.zeros_like(hidden_states)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            found = down(self._activated(up(hidden_states)))
            if getattr(self.kind, "has_post_expert_norm", False):
                found = self.kind.post_expert_norm(found)
            total = total + found * shares[:, number : number + 1]
        return total

    def _activated(self, inner: Tensor) -> Tensor:
        kind: Any = self.kind
        activated: Tensor = getattr(kind, _GATE)(inner) if kind.has_gate else kind.act_fn(inner)
        return activated


def _layer(stacked: Any, name: str, number: int) -> nn.Linear:
    weight = getattr(stacked, name).detach()[number]
    weight = weight.t().contiguous() if stacked.is_transposed else weight
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=stacked.has_bias, device="meta")
    layer.weight = nn.Parameter(weight)
    if stacked.has_bias:
        layer.bias = nn.Parameter(getattr(stacked, f"{name}_bias").detach()[number])
    return layer
