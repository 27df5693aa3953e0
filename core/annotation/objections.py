"""What speaks against the annotations that a rule decided about its piece, each as None or the reason."""

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

from quantplug.core.annotation.annotator import Annotations, Piece
from quantplug.core.annotation.claims import Claims
from quantplug.core.annotation.surroundings import Surroundings
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import describe, is_constant, tensor_value


def float_producer(piece: Piece, claims: Claims) -> str | None:
    """An operator that only moves data keeps integers, and starts none."""
    for name in piece.owner.follows:
        producer = piece.match[name]
        if not claims.is_quantized(producer):
            return f"operand '{name}' comes from {describe(producer)}, which is float"
    return None


def require_inside(piece: Piece, decided: Annotations) -> None:
    """Requires that a rule decides about its own piece.

    Raises:
        AnnotationError: it annotates another node.
    """
    outside = next((node for node in decided if node not in piece.match.nodes), None)
    if outside is not None:
        raise AnnotationError(
            f"Rule '{piece.label}' annotates {describe(outside)}, which is not part of the piece that it matched; "
            "let it return annotations of matched nodes only."
        )


def quantizes_nothing(decided: Annotations) -> str | None:
    """A rule that only fuses claims its piece, so that no other quantizes inside of it, and leaves it float."""
    specs = (spec for found in decided.values() for spec in (*found.input_qspec_map.values(), found.output_qspec))
    return None if any(spec is not None for spec in specs) else "the rule keeps the piece together in float"


def not_float32(decided: Annotations) -> str | None:
    """Observers and quantize operators take float32."""
    for node, annotation in decided.items():
        for source in annotation.input_qspec_map:
            found = tensor_value(source)
            if found is not None and found.dtype != torch.float32:
                kind = "constant" if is_constant(source) else "operand"
                return f"{kind} {describe(source)} of '{node.name}' is {found.dtype}, not torch.float32"
    return None


def contradiction(decided: Annotations, claims: Claims, surroundings: Surroundings) -> str | None:
    """An operand cannot have the numbers of another tensor in one dtype and its producer's in another."""
    for node, annotation in decided.items():
        for source, spec in annotation.input_qspec_map.items():
            if not isinstance(spec, SharedQuantizationSpec) or _is_input_of(node, spec.edge_or_node):
                continue
            wanted, found = claims.resolve(spec, decided), claims.resolve(SharedQuantizationSpec(source), decided)
            dtypes = [getattr(one, "dtype", None) for one in (wanted, found)]
            if None not in dtypes and dtypes[0] != dtypes[1] and source not in surroundings.constants:
                return f"operand '{source.name}' would share numbers in {dtypes[0]}, and is quantized to {dtypes[1]}"
    return None


def _is_input_of(node: fx.Node, point: object) -> bool:
    return isinstance(point, tuple) and point[1] is node
