"""Regions: which part of a graph a quantizer of a composition may annotate.

Before: modules, operators or a predicate as the user named them. After: for each node whether it lies
inside, and in words which names match nothing in the model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx, nn

from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import compute_nodes
from quantplug.quantizers.framework.scopes import OperatorType, Scopes

Module: TypeAlias = str | type[nn.Module]


@dataclass(frozen=True)
class Region:
    """A part of a graph: the nodes that fulfil every condition given; without any, the whole graph.

    Attributes:
        module: path or pattern of paths ("encoder", "layer*.conv1") or class of modules, or several.
            Everything below such a module is inside.
        operator: operator as for `set_operator_type`: ATen name, overload, packet or function, or several.
        filter: predicate over nodes.

    Raises:
        ConfigError: a module is neither a path nor a module class, or the filter cannot be called.
        PatternError: there is no such operator.
    """

    module: Module | tuple[Module, ...] = ()
    operator: OperatorType | tuple[OperatorType, ...] = ()
    filter: Callable[[fx.Node], bool] | None = None
    _conditions: tuple[Scopes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.filter is not None and not callable(self.filter):
            raise ConfigError(f"The filter of a region takes a function of a node, found {self.filter!r}.")
        modules, operators, filters = Scopes(), Scopes(), Scopes()
        for module in _several(self.module):
            (modules.set_module_name if isinstance(module, str) else modules.set_module_type)(module, None)
        for operator in _several(self.operator):
            operators.set_operator_type(operator, None)
        if self.filter is not None:
            filters.set_filter(self.filter, None)
        given = tuple(scopes for scopes in (modules, operators, filters) if scopes.settings)
        object.__setattr__(self, "_conditions", given)

    def __contains__(self, node: fx.Node) -> bool:
        """Tells whether every condition accepts a node."""
        return all(condition.choose(node).precedence for condition in self._conditions)

    @property
    def text(self) -> str:
        """The region in words."""
        kinds = (" or ".join(scope.text for scope in condition.settings) for condition in self._conditions)
        return " and ".join(kinds) or "the whole model"

    def nodes(self, graph: fx.Graph) -> set[fx.Node]:
        """Returns the nodes of a graph that lie inside.

        Inputs, constants and what takes one of several results have no operator of their own: they lie
        inside with any of the operators around them.
        """
        if not self._conditions:
            return set(graph.nodes)
        compute = set(compute_nodes(graph))
        inside = {node for node in compute if node in self}
        around = (n for n in graph.nodes if n not in compute)
        return inside | {n for n in around if not inside.isdisjoint((*n.users, *n.all_input_nodes))}

    def unmatched(self, model: fx.GraphModule) -> list[str]:
        """Returns in words what matches no operator of the model or its control flow."""
        silent = [text for condition in self._conditions for text in condition.unmatched(model)]
        if silent or not self._conditions:
            return silent
        parts = (part.graph for part in model.modules() if isinstance(part, fx.GraphModule))
        covers = any(node in self for graph in parts for node in compute_nodes(graph))
        return [] if covers else [f"no operator of the model lies in {self.text}"]


def _several(found: Any) -> Iterable[Any]:
    return found if isinstance(found, tuple | list) else (found,)
