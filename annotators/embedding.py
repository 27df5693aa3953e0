"""Embeddings: the table is quantized, the indices are not, the result is float."""

from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.constraints import quantizes_weight
from quantplug.annotators.fusion import annotate_piece
from quantplug.annotators.qspecs import get_weight_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.patterns.language import Match, constant, op


def embedding() -> Annotator:
    """Returns the annotator of embedding tables."""

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        return annotate_piece(match, {match["w"]: get_weight_qspec(config)}, None)

    pattern = op("embedding", weight=constant("w"), name="op")
    return Annotator("embedding", (("embedding", pattern),), decide, (quantizes_weight,), output="float")
