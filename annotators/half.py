"""Weights stored in half precision: every operator with a constant weight, whatever its geometry."""

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.embedding import embedding
from quantplug.annotators.linear import linear
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.patterns.language import Match

DIMS = (1, 2, 3)


def half_weight(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for configs that store the weight in half precision."""
    found = config.weight.dtype if config.weight is not None else None
    return None if found == torch.float16 else f"its weight can be stored in torch.float16 alone, not in {found}"


def half_table() -> Annotator:
    """Returns the annotator of embedding tables in half precision."""
    return embedding().where(half_weight)


def half_weights() -> tuple[Annotator, ...]:
    """Returns the annotators of targets that widen every kind of weight from float16; put them behind the others."""
    rows = (convolution(DIMS, ()), transposed_convolution(DIMS, ()), linear(()), embedding())
    return tuple(row.where(half_weight).writing_float() for row in rows)
