"""What the tables of trained classifiers share: settings, batches, logits, and how many of them are right."""

from typing import Any

import torch
from torch import Tensor

# Setting: integer bounds of weights, weights per channel.
SETTINGS = {
    "int8 weights, per channel": (-127, 127, True),
    "int8 weights, per tensor": (-127, 127, False),
    "4-bit weights, per channel": (-8, 7, True),
    "4-bit weights, per tensor": (-8, 7, False),
}


def logits(model: Any, inputs: Tensor, size: int) -> Tensor:
    """Returns a model's outputs for inputs whose number is a multiple of the batch's size."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in inputs.split(size)])


def whole_batches(*tensors: Tensor, size: int) -> list[Tensor]:
    """Returns tensors cut to a multiple of the batch's size."""
    return [tensor[: len(tensor) // size * size] for tensor in tensors]


def top1(found: Tensor, labels: Tensor) -> float:
    """Returns how many per cent of the labels are the greatest output."""
    return float((found.argmax(1) == labels).float().mean() * 100)
