"""Parameters that an algorithm gives to one of the operators that read them, or a bias to one that had none.

Before: an exported float graph and changes that were found on it. After: the graph, or a copy of it, with them.
"""

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor, fx

from quantplug.algorithms.layers import Readers
from quantplug.core.graph.editing import new_parameter, replace_inputs, replace_parameter, set_operand
from quantplug.core.graph.facts import attribute


@dataclass
class Change:
    """What becomes of a parameter for one of the operators that read it.

    Attributes:
        parameter: its node, in the graph that was looked at; of a bias that an operator lacks that of its weight.
        reader: the operator.
        is_new: whether it is a bias that the operator lacks.
        value: of double precision.
    """

    parameter: fx.Node
    reader: fx.Node
    is_new: bool
    value: Tensor


def _user(parameter: fx.Node, reader: fx.Node) -> fx.Node:
    """Returns what hands a parameter to an operator: itself, or a transpose."""
    return reader if reader in parameter.users else next(user for user in parameter.users if reader in user.users)


def put_changes(model: fx.GraphModule, changes: list[Change]) -> None:
    """Gives a graph, or a copy of it, the changed parameters; of those that several read, each reader gets its own."""
    nodes, readers = {node.name: node for node in model.graph.nodes}, Readers(model)
    paths = defaultdict(list)
    for path, held in model.named_parameters(remove_duplicate=False):
        paths[id(held)].append(path)
    waiting = {change.parameter.name: len(readers.of(nodes[change.parameter.name])) for change in changes}
    for change in changes:
        parameter, reader = nodes[change.parameter.name], nodes[change.reader.name]
        if change.is_new:
            set_operand(reader, "bias", new_parameter(model, parameter, "shift", change.value))
            continue
        if waiting[parameter.name] > 1:
            waiting[parameter.name] -= 1
            user = (
                reader if reader in parameter.users else next(user for user in parameter.users if reader in user.users)
            )
            replace_inputs(user, {parameter: new_parameter(model, parameter, "own", change.value)})
            continue
        replace_parameter(model, paths[id(attribute(model, str(parameter.target)))], change.value)
    if changes:
        model.recompile()
