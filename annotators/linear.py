"""Linear layers, whole or decomposed to addmm and mm, with optional bias, batch norm and fused activation."""

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.constraints import quantizes_weight
from quantplug.annotators.fusion import with_activations, with_batch_norm
from quantplug.annotators.weighted import annotate_weighted, batch_norm_in_training
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.graph.facts import describe, is_constant, rank
from quantplug.core.graph.operators import CLAMPS, operator_overloads
from quantplug.core.graph.traits import transposes
from quantplug.core.patterns.language import Match, constant, op, optional, value

_WHOLE = operator_overloads("linear")


def linear(activations: tuple[str, ...] = tuple(CLAMPS)) -> Annotator:
    """Returns the annotator of linear layers with constant weights.

    Args:
        activations: activations that the kernel fuses, such as "relu".
    """
    whole = op("linear", input=value("x"), weight=constant("w"), bias=optional(constant("b")), name="op")
    # `addmm` and `mm` come from run_decompositions(): the weight is transposed on the way in.
    addmm = op("addmm", self=constant("b"), mat1=value("x"), mat2=value("w", _weight), beta=1, alpha=1, name="op")
    mm = op("mm", self=value("x"), mat2=value("w", _weight), name="op")
    patterns = tuple(
        labelled for base in (whole, addmm, mm) for labelled in with_activations("linear", base, activations)
    )
    patterns += with_batch_norm("linear", whole.where(_is_matrix), activations)
    return Annotator("linear", patterns, _decide, (quantizes_weight, batch_norm_in_training))


def _is_matrix(match: Match) -> str | None:
    """Batch norm counts channels on axis 1, a linear layer on the last one: they are one for matrices only."""
    found = rank(match["x"])
    return None if found in (2, None) else f"batch norm is over axis 1, not the features, of {found} dimensions"


def _weight(found: fx.Node) -> str | None:
    if is_constant(found) or (transposes(found) and is_constant(found.args[0])):
        return None
    return f"the weight {describe(found)} is computed, not a constant"


def _decide(match: Match, config: QuantizationConfig) -> Annotations:
    return annotate_weighted(match, config, channel_axis=0 if match["op"].target in _WHOLE else 1)
