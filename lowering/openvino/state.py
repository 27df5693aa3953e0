"""Buffers that a model writes, as inputs and outputs of the model that OpenVINO runs.

Before: the front end's graph, functional, with one copy into each buffer at its end; OpenVINO reads a buffer as a
constant and drops the copy. After: the buffers are inputs and what is copied into them outputs, which the program
carries from call to call. (OpenVINO's own variables do not serve: its CPU plugin writes a variable before it is read
where the new value does not depend on the old one.)
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import describe, held_tensor, is_written, written_argument
from quantplug.core.peers.torch_names import pytree

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Variable:
    """One buffer.

    Attributes:
        name: its path in the model.
        begin: the value that it begins with.
        output: position of the output that is its next value.
    """

    name: str
    begin: Tensor
    output: int


def expose(module: fx.GraphModule) -> tuple[list[Variable], list[int]]:
    """Makes the buffers that a functional graph writes its last inputs, and their next values outputs.

    A value that is an output already stays the one that it is: OpenVINO's front end takes none twice.

    Args:
        module: a graph whose only writes are copies into buffers; changed in place, its inputs and outputs are flat.

    Returns:
        The buffers, and the position that each output has now: a buffer and what was copied into it are one.

    Raises:
        LoweringError: the graph writes in another way.
    """
    graph = module.graph
    held = [node for node in graph.find_nodes(op="get_attr") if held_tensor(node) is not None and is_written(node)]
    outputs = [leaf for leaf in pytree.tree_leaves(graph.output_node().args[0]) if isinstance(leaf, fx.Node)]
    count = len(outputs)
    if not held:
        return [], list(range(count))
    # To the front end a copy is the tensor itself.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    outputs = [leaf for leaf in pytree.tree_leaves(graph.output_node().args[0]) if isinstance(leaf, fx.Node)]
    found: list[Variable] = []
    for node in held:
        copy = next((user for user in node.users if written_argument(user) is node), None)
        if copy is None or copy.target is not _COPY:
            writer = describe(copy or next(iter(node.users)))
            raise LoweringError(
                f"OpenVINO cannot keep buffer '{node.target}', which {writer} writes in place; pass the state as an "
                "input and return it, or use backend 'x86'."
            )
        value: Any = copy.args[1]
        outputs = [value if leaf is copy else leaf for leaf in outputs]
        outputs += [] if value in outputs else [value]
        copy.replace_all_uses_with(value)
        graph.erase_node(copy)
        given, variable = _as_input(module, node, outputs.index(value))
        # The next value of another buffer may be what this one was.
        outputs = [given if leaf is node else leaf for leaf in outputs]
        found.append(variable)
    distinct = list(dict.fromkeys(outputs))
    places = [distinct.index(leaf) for leaf in outputs]
    graph.output_node().args = (tuple(distinct),)
    graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return [replace(variable, output=places[variable.output]) for variable in found], places[:count]


def _as_input(module: fx.GraphModule, node: fx.Node, output: int) -> tuple[fx.Node, Variable]:
    begin = held_tensor(node)
    assert begin is not None  # the caller chose it by that
    last = [found for found in module.graph.nodes if found.op == "placeholder"]
    place = module.graph.inserting_after(last[-1]) if last else module.graph.inserting_before(None)
    with place:
        given = module.graph.placeholder(f"state_{node.name}")
    given.meta = {**node.meta, "val": node.meta.get("val", begin)}
    _move_up(given, node)
    node.replace_all_uses_with(given)
    module.graph.erase_node(node)
    return given, Variable(str(node.target), begin.detach().clone(), output)


def _move_up(given: fx.Node, node: fx.Node) -> None:
    """Buffers are read at the head of a graph, before its inputs: who reads them there comes after those."""
    early = [user for user in node.users if user < given]
    pending = list(early)
    while pending:
        reader = pending.pop()
        early += [user for user in reader.users if user < given and user not in early]
        pending += [user for user in reader.users if user < given]
    after = given
    for reader in sorted(set(early)):
        after.append(reader)
        after = reader
