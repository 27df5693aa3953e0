"""How a graph module is called: the names of its inputs, and which of them export saw as keywords.

Before: a graph module of `torch.export`, which takes each input the way it was exported with. After: names, values in
the graph's order, or the same graph with all inputs by position, which is what a lowering and a runtime know.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from quantplug.core.errors import LoweringError, did_you_mean
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.peers.torch_names import calling_structure, pytree, with_structures


def input_names(model: fx.GraphModule) -> tuple[str, ...]:
    """Returns the names of a graph module's inputs in the graph's order, positional ones first."""
    return tuple(inspect.signature(model.forward).parameters)


def keyword_names(model: fx.GraphModule) -> tuple[str, ...]:
    """Returns the names of the inputs that were keyword arguments when the model was exported."""
    spec = _structure(model)
    children = [] if spec is None else spec.children()
    return tuple(children[1].context) if len(children) == 2 and children[1].type is dict else ()


def by_position(model: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module that takes keyword inputs by position, behind the positional ones.

    It is the model itself if it has none; else a copy of the graph over the same parameters and buffers.
    """
    if not keyword_names(model):
        return model
    duplicate = over_same_tensors(model)
    given = calling_structure(duplicate.graph)
    args, kwargs = given.in_spec.children()
    positional = pytree.TreeSpec(tuple, None, [*args.children(), *kwargs.children()])
    nothing = pytree.tree_structure({})
    inputs = pytree.TreeSpec(tuple, None, [positional, nothing])
    duplicate.graph.set_codegen(with_structures(duplicate.graph, in_spec=inputs))
    duplicate.recompile()
    return duplicate


def return_flat(model: fx.GraphModule, leaves: Sequence[Any]) -> pytree.TreeSpec:
    """Lets a graph module return a tuple of these nodes; returns the structure of what it returned before."""
    output, given = model.graph.output_node(), calling_structure(model.graph)
    structure = pytree.tree_structure(output.args[0]) if given is None else given.out_spec
    output.args = (tuple(leaves),)
    if given is not None:
        model.graph.set_codegen(with_structures(model.graph, out_spec=pytree.tree_structure(tuple(leaves))))
    model.recompile()
    return structure


def in_order(names: Sequence[str], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the values of all inputs in the graph's order.

    Args:
        names: of the inputs, in the graph's order.
        inputs: those given by position.
        keywords: those given by name, in any order.

    Raises:
        LoweringError: a name is unknown or given twice, or an input is missing.
    """
    if not keywords:
        return tuple(inputs)
    strange = next((name for name in keywords if name not in names), None)
    if strange is not None:
        raise LoweringError(f"There is no input '{strange}'{did_you_mean(strange, names)}; pass {list(names)}.")
    left = names[len(inputs) :]
    twice = next((name for name in keywords if name not in left), None)
    if twice is not None:
        raise LoweringError(f"Input '{twice}' is given by position and by name; pass it once.")
    missing = next((name for name in left if name not in keywords), None)
    if missing is not None:
        raise LoweringError(f"Input '{missing}' is missing; pass {list(names)}, as the model was exported with.")
    return (*inputs, *(keywords[name] for name in left))


def _structure(model: fx.GraphModule) -> pytree.TreeSpec | None:
    found = calling_structure(model.graph)
    return None if found is None else found.in_spec
