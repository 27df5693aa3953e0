"""Embedding tables alone, as a declaration: a row of the table is one scale and 8-bit integers.

It is meant for compositions, beside a quantizer of the rest: `ComposableQuantizer([EmbeddingQuantizer(), other])`.
"""

from quantplug.annotators.embedding import embedding
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

__all__ = ["EMBEDDING", "EmbeddingQuantizer"]

EMBEDDING = Backend(
    name="embedding",
    summary="embedding tables, read row by row in ExecuTorch programs",
    annotators=(embedding(),),
    configs={"int8": lambda **options: get_symmetric_quantization_config(True, is_weight_only=True, **options)},
    lowering="quantplug.lowering.xnnpack:lower",
    weight_bits=8,
)


class EmbeddingQuantizer(BackendQuantizer):
    """Quantizes tables of embeddings to int8 and nothing else, as one of several in a `ComposableQuantizer`."""

    backend = EMBEDDING
