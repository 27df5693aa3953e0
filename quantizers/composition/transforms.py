"""The transforms of a composition: each quantizer's see its own territory only.

Before: an exported graph on which the borders of members are drawn. After: the graph that their transforms return, and
what a plan has to replay.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from quantplug.core.annotation.plan import Transforms
from quantplug.core.annotation.stable_names import Names
from quantplug.core.graph.hidden_nodes import transform_without
from quantplug.core.graph.meta import TRANSFORMS
from quantplug.quantizers.composition.members import Member
from quantplug.quantizers.composition.precedence import draw_borders, erase_borders, territory


def transform_in_turn(model: fx.GraphModule, members: Iterable[Member]) -> fx.GraphModule:
    """Runs the transforms of every member in its territory, one member after the other.

    Raises:
        ModelError: a transform returns no graph module.
    """
    each, carried_out = list(members), tuple[Transforms, ...]()
    erase_borders(model)
    draw_borders(model, each)
    for member in each:
        model, own = _transformed(model, member)
        draw_borders(model, each, member)
        carried_out += own
    TRANSFORMS.put(model, carried_out)
    return model


def _transformed(model: fx.GraphModule, member: Member) -> tuple[fx.GraphModule, tuple[Transforms, ...]]:
    """Runs a quantizer's transforms in its territory; returns the graph and what a plan has to replay."""
    inside = territory(model, member)
    names = Names(model.graph)
    outside = [node for node in names.nodes if node.op == "call_function" and node not in inside]
    hidden = tuple(map(names.name, outside))
    TRANSFORMS.drop(model)
    model = transform_without(model, outside, member.quantizer.transform_for_annotation)
    return model, tuple(replace(asked, outside=hidden) for asked in TRANSFORMS.get(model, ()))
