"""What the graph around a piece says about it: each fact is found once, when it is first asked for."""

from functools import cached_property

from torch import fx

from quantplug.core.annotation.annotator import Piece
from quantplug.core.annotation.positions import angles, positions
from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.constants import constant_nodes
from quantplug.core.graph.facts import describe
from quantplug.core.graph.meta import IO_DTYPES
from quantplug.core.graph.multiplications import shares
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.integer_io import IODTypes


class Surroundings:
    """Facts about the graph that is annotated; none of them changes meanwhile.

    Attributes:
        ends: the dtypes that the model's inputs and outputs get.
    """

    def __init__(self, model: fx.GraphModule) -> None:
        self.ends = IO_DTYPES.get(model, IODTypes())
        self._graph = model.graph
        self._changed = changed_under_other_names(model.graph)

    @cached_property
    def constants(self) -> set[fx.Node]:
        """The nodes whose values do not depend on the inputs: weights, as parameters or computed from them."""
        return constant_nodes(self._graph)

    @cached_property
    def _positions(self) -> set[fx.Node]:
        return positions(self._graph)

    @cached_property
    def _angles(self) -> set[fx.Node]:
        return angles(self._graph)

    @cached_property
    def _shares(self) -> dict[fx.Node, float]:
        return shares(self._graph)

    def share(self, node: fx.Node) -> float:
        """Returns which share of the model's multiplications a node does; 1 where they are not known."""
        return self._shares.get(node, 1.0)

    def mutation(self, match: Match) -> str | None:
        """A quantize/dequantize pair is a copy: it would hide a change in place from a later reader."""
        for node in match.nodes:
            for touched in (node, *node.all_input_nodes):
                if touched in self._changed:
                    return (
                        f"{describe(self._changed[touched])} changes the tensor of {describe(touched)} in place, "
                        "which is read afterwards"
                    )
        return None

    def position(self, piece: Piece) -> str | None:
        """Positions and angles stay float, unless layers with weights take them for ordinary inputs or outputs."""
        match, is_weighted = piece.match, "w" in piece.match or piece.owner.output == "float"
        reads = next((n for node in match.nodes for n in node.all_input_nodes if n in self._positions), None)
        turns = next((node for node in match.nodes if node in self._angles), None)
        if turns is not None and (not is_weighted or reads is not None):
            return f"{describe(turns)} is an angle of sin or cos, which 8 bits do not hold"
        if reads is not None and not is_weighted:
            return f"operand {describe(reads)} is made from integers alone, as positions are, which 8 bits do not hold"
        return None
