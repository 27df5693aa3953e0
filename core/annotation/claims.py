"""What rules have claimed of a graph so far: annotations that nobody has written yet.

Before: pieces in graph order, each with what its rule decided. After: an annotation for every node that a rule took,
and for every piece that was refused the reason.
"""

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpecBase, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.annotation.annotator import Annotations, Piece
from quantplug.core.patterns.matching import NearMiss
from quantplug.core.peers.torchao_names import mark
from quantplug.core.qdq.integer_io import IODTypes


class Claims:
    """The annotations so far, together with those that stood on the graph before.

    Attributes:
        annotations: by node, of pieces that were taken.
        piece_of: the piece that a node was last taken with.
        refused: by the last node of a piece that was refused.
    """

    def __init__(self, ends: IODTypes) -> None:
        self.annotations: Annotations = {}
        self.piece_of: dict[fx.Node, Piece] = {}
        self.refused: dict[fx.Node, NearMiss] = {}
        self._ends = ends

    def take(self, piece: Piece, decided: Annotations) -> None:
        """Annotates the nodes of a piece as its rule decided."""
        for node in piece.match.nodes:
            self.annotations[node] = decided.get(node) or QuantizationAnnotation()
            mark(self.annotations[node])
            self.piece_of[node] = piece

    def refuse(self, piece: Piece, reason: str) -> None:
        """Leaves a piece float, and takes back its annotations where it has some."""
        for node in piece.match.nodes:
            self.annotations.pop(node, None)
        self.refused[piece.match.root] = NearMiss(piece.label, reason, len(piece.match.nodes))

    def __contains__(self, piece: Piece) -> bool:
        """Tells whether a piece is taken."""
        return piece.match.root in self.annotations

    def reads(self, user: fx.Node, source: fx.Node) -> bool:
        """Tells whether a node reads another in integers; the graph's output does where integers are asked for."""
        if user.op == "output":
            return self._ends.output is not None
        annotation = self._annotation(user, {})
        return annotation is not None and source in annotation.input_qspec_map

    def is_quantized(self, node: fx.Node) -> bool:
        """Tells whether a node writes integers."""
        return self._spec_at(node, {}) is not None

    def resolve(self, spec: QuantizationSpecBase | None, decided: Annotations) -> QuantizationSpecBase | None:
        """Returns what a spec comes to when the points that it shares with are followed.

        Args:
            spec: the spec, or None for float.
            decided: annotations that are tried; they come before those so far.
        """
        seen: set[object] = set()
        while isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node not in seen:
            seen.add(spec.edge_or_node)
            spec = self._spec_at(spec.edge_or_node, decided)
        return None if isinstance(spec, SharedQuantizationSpec) else spec

    def _spec_at(self, place: object, decided: Annotations) -> QuantizationSpecBase | None:
        if isinstance(place, fx.Node):
            annotation = self._annotation(place, decided)
            return annotation.output_qspec if annotation is not None else None
        assert isinstance(place, tuple)
        source, user = place
        annotation = self._annotation(user, decided)
        return annotation.input_qspec_map.get(source) if annotation is not None else None

    def _annotation(self, node: fx.Node, decided: Annotations) -> QuantizationAnnotation | None:
        return decided.get(node) or self.annotations.get(node) or node.meta.get(Q_ANNOTATION_KEY)
