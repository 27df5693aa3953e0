"""What is the user's own, left out of programs: the numbers of example inputs, lines of source code."""

from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.peers.torch_names import pytree


def blank(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns inputs whose tensors are zeros laid out like the given ones; what is no tensor stays."""
    made: tuple[Any, ...] = pytree.tree_map_only(Tensor, torch.zeros_like, inputs)
    return made


def shrunk(inputs: Any) -> Any:
    """Returns inputs whose tensors are zeros of the same shapes that store one element, for files."""
    return pytree.tree_map_only(Tensor, _one_zero, inputs)


def _one_zero(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def forget_source(model: fx.GraphModule) -> None:
    """Drops where in whose files an exported graph was traced: paths, and lines of code with their comments."""
    for module in model.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
