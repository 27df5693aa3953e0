"""Which dtype config of its rule each piece runs under, and what keeps pieces from all of them.

Before: the dtype configs that rules declare, and what they decided about their pieces. After: the first that fits, or
the limit that is broken; and on annotated nodes the limits that their calibrated numbers have to keep.
"""

from collections.abc import Iterable, Iterator

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationSpecBase

from quantplug.core.annotation.annotator import Annotations, Piece
from quantplug.core.annotation.claims import Claims
from quantplug.core.annotation.surroundings import Surroundings
from quantplug.core.graph.meta import LIMITS
from quantplug.core.specs.limits import (
    Limits,
    Selection,
    Violation,
    asked_ports,
    pairs_violation,
    select_dtypes,
    shared_violation,
)


class KernelDtypes:
    """The dtype configs of one backend's kernels for the pieces of one graph."""

    def __init__(self, owner: str, surroundings: Surroundings) -> None:
        self._owner = owner
        self._surroundings = surroundings
        self._selected: dict[Piece, Selection] = {}
        self._violations: dict[fx.Node, Violation] = {}

    def select(self, piece: Piece, decided: Annotations) -> str | None:
        """Selects the first dtype config of a rule that its specs fit; returns why none does, or None."""
        asked = asked_ports(decided, self._surroundings.constants.__contains__, lambda spec: spec)
        selection = select_dtypes(piece.owner.dtypes, piece.match["op"], asked, self._owner)
        self._selected[piece] = selection
        return self._refusal(piece, selection.violation) or selection.reason or None

    def shared_refusal(self, piece: Piece, decided: Annotations, claims: Claims) -> str | None:
        """Returns which limit the numbers break that a piece shares with others, or None."""
        dtypes = self.selection(piece).chosen
        if dtypes is None:
            return None
        is_weight = self._surroundings.constants.__contains__
        resolved = asked_ports(decided, is_weight, lambda spec: claims.resolve(spec, decided))
        return self._refusal(piece, shared_violation(piece.match["op"], self._owner, dtypes, resolved))

    def _refusal(self, piece: Piece, violation: Violation | None) -> str | None:
        if violation is None:
            return None
        self._violations.setdefault(piece.match["op"], violation)
        return str(violation)

    def selection(self, piece: Piece) -> Selection:
        """Returns which dtype config was chosen for a piece, and which were passed over."""
        return self._selected.get(piece, Selection())

    def refuse(self, piece: Piece, input_spec: QuantizationSpecBase) -> bool:
        """Tells whether the kernel of a piece does not take a spec at its inputs."""
        dtypes = self.selection(piece).chosen
        return dtypes is not None and bool(dtypes.refuses([("input", input_spec)]))

    def unresolved(self, claims: Claims) -> list[Violation]:
        """Returns what kept operators float that no other rule took."""
        return [violation for node, violation in self._violations.items() if node not in claims.annotations]

    def leave_limits(self, piece: Piece, strict: bool) -> None:
        """Leaves on the annotated nodes of a piece what its calibrated numbers have to keep."""
        dtypes, rescale, pairs = self.selection(piece).chosen, piece.owner.rescale, piece.owner.pairs
        if dtypes is None and rescale is None and pairs is None:
            return
        for node in piece.match.nodes:
            is_root = node is piece.match["op"]
            LIMITS.put(
                node, Limits(self._owner, dtypes, rescale if is_root else None, strict, pairs if is_root else None)
            )

    def beyond_pairs(self, pieces: Iterable[Piece], claims: Claims) -> Iterator[Violation]:
        """Yields of taken pieces what the specs of their products may break on this processor; no error anywhere."""
        for piece in pieces:
            node, limit = piece.match["op"], piece.owner.pairs
            if limit is not None:
                own = {node: claims.annotations[node]}
                asked = asked_ports(own, self._surroundings.constants.__contains__, lambda s: claims.resolve(s, {}))
                found = pairs_violation(node, self._owner, limit, asked)
                yield from [found] if found else []
