"""Expressions of constants as the constants that they yield.

Masks, positions and rotary tables are computed from sizes alone, on every call and on portable kernels; as
constants they are operands of integer kernels, and a mask that is known can be written as a sum.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.graph.constants import computed, constant_nodes, evaluate_constants, written_buffers
from quantplug.core.graph.editing import set_operand
from quantplug.core.graph.facts import (
    constant_value,
    operands,
    operator_name,
    tensor_value,
    viewed_node,
    written_argument,
)
from quantplug.core.graph.meta import TRAINING
from quantplug.core.peers.torch_names import OpOverload, schema_of
from quantplug.core.qdq.nodes import CAST_OP, is_conversion
from quantplug.lowering.rewrites.writing import Writer, done, matching

# What such an operator yields depends on the sizes of its operand alone.
_LIKE = {
    "aten::zeros_like": 0, "aten::new_zeros": 0, "aten::ones_like": 1, "aten::new_ones": 1, "aten::full_like": None,
    "aten::new_full": None,
}  # fmt: skip
_LAYERS = (
    *("linear", "convolution", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
# A megabyte: the masks of 64 windows of 49 positions are stored, a batch of images is not.
_MOST_ELEMENTS = 2**18


def constant_expressions_are_folded(model: fx.GraphModule) -> fx.GraphModule:
    """Stores what expressions of sizes and buffers yield; parameters may yet be trained."""
    return _fold(model, parameters=False)


def all_constant_expressions_are_folded(model: fx.GraphModule) -> fx.GraphModule:
    """Stores what expressions of sizes, buffers and parameters yield."""
    return _fold(model, parameters=True)


def computed_weights_are_folded(model: fx.GraphModule) -> fx.GraphModule:
    """Stores weights and biases of layers that are computed from parameters alone, but where these are to be trained.

    Standardized and normalized weights, parts of one weight for queries, keys and values.
    """
    if TRAINING.get(model):
        return model
    known = constant_nodes(model.graph)
    found = [(node, name) for node, _ in matching(model, *_LAYERS) for name in ("weight", "bias")]
    read: dict[tuple[fx.Node, str], Any] = {(node, name): operands(node).get(name) for node, name in found}
    wanted = {each for each in read.values() if each in known and each.op != "get_attr"}
    values = evaluate_constants([node for node in model.graph.nodes if node in known], wanted)
    made = dict[Any, fx.Node]()
    for each, value in values.items():
        own = value.detach().contiguous()
        made[each] = Writer(model, each).constant(nn.Parameter(own, requires_grad=own.is_floating_point()), "weight")
    for (node, name), each in read.items():
        if each in made:
            set_operand(node, name, made[each])
    return done(model)


def _fold(model: fx.GraphModule, *, parameters: bool) -> fx.GraphModule:
    known = _known(model.graph, parameters)
    operators = [node for node in known if node.op == "call_function"]
    for node in [node for node in operators if any(user not in known for user in node.users)]:
        write = Writer(model, node)
        node.replace_all_uses_with(
            write.constant(known[node].contiguous().clone(), "folded"), lambda user: user not in known
        )
    for node in reversed(operators):
        model.graph.erase_node(node)
    return done(model)


def _known(graph: fx.Graph, parameters: bool) -> dict[fx.Node, Tensor]:
    """Returns the values of all nodes that are the same at every call.

    A tensor that is filled in place piece by piece, as masks are, is known if all that is written to it is, and
    before anybody else reads it.
    """
    lost: set[fx.Node] = set()
    while True:
        known, late = _known_without(graph, parameters, lost)
        if not late:
            return known
        lost |= late


def _known_without(graph: fx.Graph, parameters: bool, lost: set[fx.Node]) -> tuple[dict[fx.Node, Tensor], set[fx.Node]]:
    """Returns what is known without some memories, and those of it that are written to by others, or too late."""
    written_attributes, known = written_buffers(graph), dict[fx.Node, Tensor]()
    memory: dict[fx.Node, fx.Node] = {}
    read, late = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        viewed = viewed_node(node)
        memory[node] = node if viewed is None else memory[viewed]
        value = constant_value(node) if node.op == "get_attr" else _evaluated(node, known)
        trained = isinstance(value, nn.Parameter) and not parameters
        if value is not None and not trained and node.target not in written_attributes and memory[node] not in lost:
            known[node] = value.detach()
        else:
            read.update(memory[source] for source in node.all_input_nodes if source in known)
        destination = written_argument(node)
        if destination in known and (node not in known or memory[destination] in read):
            late.add(memory[destination])
    return known, late


def _evaluated(node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor | None:
    """Returns the value of an operator over known values, None if it has none or is not to be stored."""
    target, result = node.target, tensor_value(node)
    if not isinstance(target, OpOverload) or result is None or not _is_stored(result) or is_conversion(node):
        return None
    if target is CAST_OP:
        return None  # a weight that is to be stored in half precision
    name = operator_name(node)
    if name in _LIKE:
        number: Any = operands(node)["fill_value"] if _LIKE[name] is None else _LIKE[name]
        return None if isinstance(number, fx.Node) else torch.full(tuple(result.shape), number, dtype=result.dtype)
    elsewhere = schema_of(target).is_mutable and written_argument(node) is None
    if elsewhere or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if not all(source in known for source in node.all_input_nodes):
        return None
    value = computed(node, known.__getitem__)
    return value if isinstance(value, Tensor) else None


def _is_stored(result: Tensor) -> bool:
    return all(isinstance(size, int) for size in result.shape) and 0 < result.numel() <= _MOST_ELEMENTS
