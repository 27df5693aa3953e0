"""In-place operators made functional where nobody can tell the difference.

Before: `relu_(x)`, `add_(x, y)`, as export leaves them. After: `relu(x)`, `add(x, y)`, and readers of `x`
after that point read the result. Where memory may be shared with something else (an input, a buffer, a view
that others read), the operator stays in place and is not part of any rule.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.facts import compute_nodes, viewed_node
from quantplug.core.peers.torch_names import FunctionSchema, OpOverload, OpOverloadPacket, schema_of


def make_functional(graph: fx.Graph) -> None:
    """Replaces in-place operators by their functional form where the mutated memory has one owner."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(compute_nodes(graph)):
        target = _functional_form(node)
        if target is None or not _owns_memory(node, order):
            continue
        mutated = node.args[0]
        assert isinstance(mutated, fx.Node)
        for reader in [user for user in mutated.users if order[user] > order[node]]:
            reader.replace_input_with(mutated, node)
        node.target = target


def _functional_form(node: fx.Node) -> OpOverload | None:
    assert isinstance(node.target, OpOverload)
    schema = schema_of(node.target)
    library, _, name = schema.name.partition("::")
    if not schema.is_mutable or not name.endswith("_") or not node.args:
        return None
    packet = getattr(getattr(torch.ops, library), name[:-1], None)
    if packet is None:
        return None
    found: OpOverload | None = getattr(packet, schema.overload_name or "default", None)
    return found or _with_arguments(packet, _arguments(schema))


def _with_arguments(packet: OpOverloadPacket, wanted: list[tuple[str, str]]) -> OpOverload | None:
    """Returns the overload that takes certain arguments: `transpose_` has one without name, `transpose` has "int"."""
    overloads = (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    return next((found for found in overloads if _arguments(schema_of(found)) == wanted), None)


def _arguments(schema: FunctionSchema) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


def _owns_memory(mutator: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Tells whether no other name reads the memory that is written: going up views, each used once.

    What a view was taken of may be read before it is written: afterwards the reader would miss the change.
    """
    memory: Any = mutator.args[0]
    reader = mutator
    while isinstance(memory, fx.Node) and memory.op == "call_function":
        others = [user for user in memory.users if user is not reader]
        if any(is_view(user) for user in others):
            return False
        if not is_view(memory):
            return reader is mutator or all(order[user] < order[mutator] for user in others)
        if others:
            return False
        memory, reader = memory.args[0], memory
    return False


def is_view(node: fx.Node) -> bool:
    """Tells whether an operator's result may share memory with an input: a view, or what wrote in place."""
    return not isinstance(node.target, OpOverload) or viewed_node(node) is not None
