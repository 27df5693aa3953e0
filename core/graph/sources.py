"""Which function or module each operator of an exported graph comes from, in the words of strict export.

Before: a graph of torch's default export, which records `torch_fn` and the stack of modules. After: the same graph
with `source_fn_stack` in the metadata of its operators, as strict export leaves it. `get_source_partitions`, and
quantizers that are written with it, find nothing without.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import get_ignored_functions

from quantplug.core.graph.facts import module_stack
from quantplug.core.graph.meta import SOURCE
from quantplug.core.peers.torch_names import BUILT_IN

_LEAVES = "torch.nn.modules."
_CONTAINERS = "torch.nn.modules.container."
# Operators of Python whose method on tensors has another name.
_PYTHONS = {"div": "truediv", "floor_divide": "floordiv", "remainder": "mod"}


def add_sources(model: fx.GraphModule) -> list[fx.Node]:
    """Writes on operators what they come from, where export did not, in place.

    An operator inside of a module of `torch.nn` comes from that module's class, others from the function that was
    called. `x + y` and `x.add(y)` leave the same trace; both count as `operator.add`. So do `F.sigmoid(x)` and
    `x.sigmoid()`, `F.tanh(x)` and `x.tanh()`, which torch does not override: they count as the function.

    Args:
        model: a graph module from `torch.export.export(...).module()`.

    Returns:
        The nodes that were written on.
    """
    written: list[fx.Node] = []
    for node in model.graph.nodes:
        # A constant belongs to the operator that reads it first, as one of its parameters.
        reader = next(iter(node.users), node) if node.op == "get_attr" else node
        source = _source(reader) if reader.op == "call_function" and not SOURCE.on(node) else None
        if source is not None:
            SOURCE.put(node, [source])
            written.append(node)
    return written


def _source(node: fx.Node) -> tuple[str, Any] | None:
    """Returns the name of a call, one for each, and what was called; None where export recorded nothing."""
    stack = module_stack(node)
    kind = stack[-1][1] if stack else ""
    if kind.startswith(_LEAVES) and not kind.startswith(_CONTAINERS):
        found = getattr(nn, kind.rpartition(".")[2], None)
        if found is not None:
            # The last key counts the calls of a module that is called several times.
            return str(list(node.meta["nn_module_stack"])[-1]), found
    recorded = node.meta.get("torch_fn")
    # The name counts the calls: what one call leaves is one partition, however many operators.
    return (recorded[0], _function(recorded[1])) if recorded else None


def _function(recorded: str) -> Any:
    """Returns the function that export recorded as "kind.name"."""
    kind, _, name = recorded.partition(".")
    if name.startswith("__") or recorded == "function.pow":
        return _python_operator(name.strip("_"), name)
    if kind == "method_descriptor":
        if getattr(F, name, None) in get_ignored_functions():
            return getattr(F, name)
        in_place = f"i{_PYTHONS.get(name[:-1], name[:-1])}" if name.endswith("_") else ""
        return getattr(operator, in_place or _PYTHONS.get(name, name), name)
    namespaces = (F, torch) if kind == "function" else (torch, F, *BUILT_IN)
    return next((getattr(namespace, name) for namespace in namespaces if hasattr(namespace, name)), name)


def _python_operator(word: str, name: str) -> Any:
    """Returns what a method such as `__rsub__` stands for: `1 - x` calls the reflected one."""
    plain = word if hasattr(operator, f"__{word}__") else word.removeprefix("r")
    return getattr(operator, f"__{_PYTHONS.get(plain, plain)}__", name)
