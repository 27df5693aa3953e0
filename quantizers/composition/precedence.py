"""Which quantizer of a composition annotates first: places on a graph, and their order.

Before: quantizers with their regions and precedence. After: the same, each with the nodes of a graph that it may
annotate, in an order that does not depend on the order in which they were added.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import compute_nodes, describe
from quantplug.core.graph.meta import TERRITORY
from quantplug.quantizers.composition.members import Member


@dataclass(frozen=True, eq=False)
class Place:
    """A member on a graph.

    Attributes:
        member: the member.
        inside: the nodes that it may annotate.
        operators: the operators among them.
        first: the position of the first of these.
    """

    member: Member
    inside: set[fx.Node]
    operators: set[fx.Node]
    first: int

    def yields_to(self, other: "Place") -> bool:
        """Tells whether another member comes first."""
        return other.member.precedence > self.member.precedence and not self.operators.isdisjoint(other.operators)


def places(model: fx.GraphModule, members: Iterable[Member]) -> list[Place]:
    """Returns where members, the greatest precedence first, annotate a graph, in the order in which they do.

    Raises:
        ConfigError: members of one precedence cover the same operator.
    """
    position = {node: i for i, node in enumerate(compute_nodes(model.graph))}
    found = [_place(model, member, position) for member in members]
    for node in position:
        _check_precedence(node, [place.member for place in found if node in place.operators])
    return list(_in_order(found))


def _place(model: fx.GraphModule, member: Member, position: Mapping[fx.Node, int]) -> Place:
    inside = territory(model, member)
    operators = inside & position.keys()
    return Place(member, inside, operators, min(map(position.__getitem__, operators), default=len(position)))


def territory(model: fx.GraphModule, member: Member) -> set[fx.Node]:
    """Returns the nodes of a graph that a member may change and annotate.

    A region is held against the graph before anything was rewritten, where `draw_borders` noted it: what takes an
    operator's place may have another name.
    """
    noted = {node: names for node in model.graph.nodes if (names := TERRITORY.get(node)) is not None}
    if not noted:
        return member.region.nodes(model.graph)
    return {node for node, names in noted.items() if member.name in names}


def draw_borders(model: fx.GraphModule, members: Sequence[Member], maker: Member | None = None) -> None:
    """Notes for each node that has no note yet in whose territory it lies.

    Args:
        model: the graph.
        members: the members of a composition.
        maker: the member whose rewrites made the nodes without a note; they are its own, if in nobody's region.
    """
    new = [node for node in model.graph.nodes if not TERRITORY.on(node)]
    regions = {member.name: member.region.nodes(model.graph) for member in members} if new else {}
    for node in new:
        names = tuple(name for name, inside in regions.items() if node in inside)
        TERRITORY.put(node, names or ((maker.name,) if maker else ()))


def erase_borders(model: fx.GraphModule) -> None:
    """Takes back what `draw_borders` noted."""
    for node in model.graph.nodes:
        TERRITORY.drop(node)


def _check_precedence(node: fx.Node, members: list[Member]) -> None:
    # The greatest precedence comes first, so equals are neighbours.
    for one, other in pairwise(members):
        if one.precedence == other.precedence:
            raise ConfigError(
                f"Quantizers '{one.name}' and '{other.name}' of the composition both cover {describe(node)} with "
                f"precedence {one.precedence}; declare different precedences or regions without a common operator."
            )


def _in_order(found: list[Place]) -> Iterator[Place]:
    """Yields places by precedence where they overlap, and by the order of data where they do not.

    What only moves data stays in integers behind a quantized producer: producers have to come first.
    """
    waiting = sorted(found, key=lambda place: (place.first, place.member.name))
    while waiting:
        free = next(p for p in waiting if not any(p.yields_to(other) for other in waiting))
        waiting.remove(free)
        yield free
