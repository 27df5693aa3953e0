"""Edits of an exported graph: operands set, nodes added with their metadata, dead ones erased."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.facts import has_effect, operands, tensor_value


def erase_dead_code(graph: fx.Graph) -> None:
    """Erases nodes that nobody reads and that have no effect of their own; submodels stay as they are.

    `eliminate_dead_code` asks every node for its effects and checks the whole graph before, which takes longer.
    """
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def replace_inputs(node: fx.Node, replacement: Mapping[fx.Node, fx.Node]) -> None:
    """Makes a node read other nodes; in time linear in its inputs, however many of them change."""
    node.args = map_arg(node.args, lambda n: replacement.get(n, n))
    if node.kwargs:
        node.kwargs = map_arg(node.kwargs, lambda n: replacement.get(n, n))


OWN_META = frozenset({"val", "tensor_meta", Q_ANNOTATION_KEY})


def set_operand(node: fx.Node, name: str, value: Any) -> None:
    """Sets one operand of an operator call by its schema name; operands before it are written out."""
    if not isinstance(node.target, torch._ops.OpOverload) or name in node.kwargs:
        node.update_kwarg(name, value)
        return
    names = [argument.name for argument in node.target._schema.arguments]
    position, given = names.index(name), operands(node)
    missing = tuple(given[n] for n in names[len(node.args) : position + 1])
    node.args = (*node.args, *missing)
    node.update_arg(position, value)


def new_parameter(model: fx.GraphModule, origin: fx.Node, suffix: str, value: Tensor) -> fx.Node:
    """Adds a parameter to the root module and returns the constant that reads it.

    It is named after the constant that it comes from ("conv.weight", "folded" give "conv_weight_folded"),
    stands right after it in the graph, and takes over its metadata.
    """
    stem = f"{str(origin.target).replace('.', '_')}_{suffix}"
    numbered = (f"{stem}_{i}" for i in itertools.count(1))
    name = next(n for n in itertools.chain((stem,), numbered) if not hasattr(model, n))
    model.register_parameter(name, torch.nn.Parameter(value.detach(), requires_grad=value.requires_grad))
    with origin.graph.inserting_after(origin):
        node = origin.graph.get_attr(name)
    node.meta = {key: found for key, found in origin.meta.items() if key not in OWN_META}
    recorded = tensor_value(origin)
    mode = getattr(recorded, "fake_mode", None)
    if alike(recorded, value):
        node.meta["val"] = recorded
    else:
        node.meta["val"] = mode.from_tensor(value.detach(), static_shapes=True) if mode else value.detach()
    return node


def alike(recorded: Tensor | None, value: Tensor) -> bool:
    """Tells whether a recorded value describes a tensor too: making a fake tensor takes longer than folding."""
    return recorded is not None and (recorded.shape, recorded.dtype) == (value.shape, value.dtype)


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases nodes that nothing reads, then those of their inputs that are left unread, and so on.

    For this, reading constants and operator calls of this module count as free of effects; model inputs stay.
    """
    waiting, erased = list(nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.users or node in erased or node.op not in ("call_function", "get_attr", "call_module"):
            continue
        erased.add(node)
        waiting.extend(node.all_input_nodes)
        node.graph.erase_node(node)
