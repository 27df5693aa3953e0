"""Parameters that an algorithm changes: found on a graph that is only read, then put into it, or into a copy of it.

Before: an exported float graph. After: the graph with other parameters, as tensors of their own: those that it had may
be the caller's. Of a parameter that several operators read one may get its own, and an operator without a bias one.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from quantplug.algorithms.layers import Readers
from quantplug.core.errors import ModelError
from quantplug.core.graph.editing import new_parameter, replace_inputs, replace_parameter, set_operand
from quantplug.core.graph.facts import attribute


@dataclass
class Change:
    """What becomes of a parameter for one of the operators that read it.

    Attributes:
        parameter: its node, in the graph that was looked at; of a bias that an operator lacks that of its weight.
        reader: the operator.
        is_new: whether it is a bias that the operator lacks.
        value: of double precision until all is found.
    """

    parameter: fx.Node
    reader: fx.Node
    is_new: bool
    value: Tensor


class Changes:
    """Parameters that are being changed, by the operators that read them; the model is only read."""

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model
        self._found: dict[tuple[fx.Node, fx.Node, bool], Change] = {}

    def found(self, done: str) -> list[Change]:
        """Returns the changes, with values of the types that the parameters have.

        Args:
            done: what was done, in an error.

        Raises:
            ModelError: a number leaves the range of its type.
        """
        return [replace(change, value=self._fitting(change, done)) for change in self._found.values()]

    def of(self, parameter: fx.Node, reader: fx.Node, *, is_new: bool = False) -> Change:
        """Returns what becomes of a parameter for an operator, until now nothing; of a new bias, zeros."""
        key = (parameter, reader, is_new)
        if key not in self._found:
            held = self.held(parameter)
            value = held.new_zeros(len(held)) if is_new else held.clone()
            self._found[key] = Change(parameter, reader, is_new, value)
        return self._found[key]

    def of_bias(self, reader: fx.Node, weight: fx.Node, bias: fx.Node | None) -> Change:
        """Returns what becomes of an operator's bias, a new one where it has none."""
        return self.of(bias or weight, reader, is_new=bias is None)

    def new_bias(self, reader: fx.Node, weight: fx.Node) -> Change | None:
        """Returns the bias that an operator is given, if it is."""
        return self._found.get((weight, reader, True))

    def held(self, parameter: fx.Node) -> Tensor:
        """Returns a parameter as the model has it, in double precision."""
        value: Tensor = attribute(self._model, str(parameter.target)).detach().double()
        return value

    def _fitting(self, change: Change, done: str) -> Tensor:
        value = change.value.to(attribute(self._model, str(change.parameter.target)).dtype)
        require_in_range(value, change.value, change.parameter, done)
        return value


def require_in_range(value: Tensor, before: Tensor, parameter: fx.Node, done: str) -> None:
    """Refuses a parameter whose numbers leave the range of its type.

    Raises:
        ModelError: what was a finite number before is none now.
    """
    if bool((torch.isfinite(before) & ~torch.isfinite(value)).any()):
        raise ModelError(
            f"{done}, the parameter '{parameter.target}' leaves the range of {value.dtype}; export the model in "
            "float32."
        )


def put_parameters(model: fx.GraphModule, changed: Mapping[str, Tensor]) -> None:
    """Gives a model other parameters, each under all names that it has."""
    paths = defaultdict(list)
    for path, held in model.named_parameters(remove_duplicate=False):
        paths[id(held)].append(path)
    for name, value in changed.items():
        replace_parameter(model, paths[id(attribute(model, name))], value)


def put_changes(model: fx.GraphModule, changes: list[Change]) -> None:
    """Gives a graph, or a copy of it, the changed parameters; of those that several read, each reader gets its own."""
    nodes, readers = {node.name: node for node in model.graph.nodes}, Readers(model)
    waiting = {change.parameter.name: len(readers.of(nodes[change.parameter.name])) for change in changes}
    last = dict[str, Tensor]()
    for change in changes:
        parameter, reader = nodes[change.parameter.name], nodes[change.reader.name]
        if change.is_new:
            set_operand(reader, "bias", new_parameter(model, parameter, "shift", change.value))
        elif waiting[parameter.name] > 1:
            waiting[parameter.name] -= 1
            own = new_parameter(model, parameter, "own", change.value)
            replace_inputs(_user(parameter, reader), {parameter: own})
        else:
            last[str(parameter.target)] = change.value
    put_parameters(model, last)
    if changes:
        model.recompile()


def _user(parameter: fx.Node, reader: fx.Node) -> fx.Node:
    """Returns what hands a parameter to an operator: itself, or a transpose."""
    return reader if reader in parameter.users else next(user for user in parameter.users if reader in user.users)
