"""Example inputs without their data: shapes and dtypes are what a program needs, the numbers are its user's."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def blank(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns inputs whose tensors are zeros laid out like the given ones; what is no tensor stays."""
    made: tuple[Any, ...] = pytree.tree_map_only(Tensor, torch.zeros_like, inputs)
    return made


def shrunk(inputs: Any) -> Any:
    """Returns inputs whose tensors are zeros of the same shapes that store one element, for files."""
    return pytree.tree_map_only(Tensor, _one_zero, inputs)


def _one_zero(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
