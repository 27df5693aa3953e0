"""Edits of an exported graph: operands set, nodes added with their metadata, dead ones erased."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.facts import attribute, has_effect, operands, tensor_value
from quantplug.core.graph.meta import HOW, ORIGINS, REASON, SOURCE
from quantplug.core.peers.torch_names import OpOverload, is_erased, schema_of

# What a new node does not take over from the node that it comes from.
OWN_META = frozenset({"val", "tensor_meta", Q_ANNOTATION_KEY})
# Metadata that names an operator or a layer class, which another operator in its place is not.
_OF_ONE_OPERATOR = (REASON.key, HOW.key, SOURCE.key, "torch_fn")


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


def set_operand(node: fx.Node, name: str, value: Any) -> None:
    """Sets one operand of an operator call by its schema name; operands before it are written out."""
    if not isinstance(node.target, OpOverload) or name in node.kwargs:
        node.update_kwarg(name, value)
        return
    arguments = schema_of(node.target).arguments
    names = [argument.name for argument in arguments]
    position, given = names.index(name), operands(node)
    if arguments[position].kwarg_only:
        node.update_kwarg(name, value)
        return
    missing = tuple(given[n] for n in names[len(node.args) : position + 1])
    node.args = (*node.args, *missing)
    node.update_arg(position, value)


def new_parameter(model: fx.GraphModule, origin: fx.Node, suffix: str, value: Tensor) -> fx.Node:
    """Adds a parameter to the root module and returns the constant that reads it.

    It is named after the constant that it comes from ("conv.weight", "folded" give "conv_weight_folded"),
    stands right after it in the graph, and takes over its metadata.
    """
    parameter = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
    name = register(model, f"{origin.target}_{suffix}", parameter)
    with origin.graph.inserting_after(origin):
        node = origin.graph.get_attr(name)
    node.meta = {key: found for key, found in origin.meta.items() if key not in OWN_META}
    recorded = tensor_value(origin)
    node.meta["val"] = recorded if alike(recorded, value) else as_recorded(value.detach(), recorded)
    return node


def replace_parameter(model: nn.Module, names: Iterable[str], value: Tensor) -> None:
    """Puts a parameter of its own in the place of one under all its names: the tensor itself may be the caller's."""
    first, *others = names
    parameter = nn.Parameter(value.detach(), requires_grad=attribute(model, first).requires_grad)
    for name in (first, *others):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def as_recorded(value: Tensor, beside: Tensor | None) -> Tensor:
    """Returns a tensor as export records one: fake, of the mode of another that is recorded, where that is fake."""
    mode = getattr(beside, "fake_mode", None)
    fake: Tensor = value if mode is None else mode.from_tensor(value, static_shapes=True)
    return fake


def alike(recorded: Tensor | None, value: Tensor) -> bool:
    """Tells whether a recorded value describes a tensor too: making a fake tensor takes longer than folding."""
    return recorded is not None and (recorded.shape, recorded.dtype) == (value.shape, value.dtype)


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases nodes that nothing reads, then those of their inputs that are left unread, and so on.

    For this, reading constants and operator calls of this module count as free of effects; model inputs stay.
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or is_erased(node) or node.op not in ("call_function", "get_attr", "call_module"):
            continue
        waiting.extend(node.all_input_nodes)
        node.graph.erase_node(node)


def like(node: fx.Node, model: fx.Node) -> fx.Node:
    """Gives a new node the module path and the history of the node that it stands for."""
    for key in ("nn_module_stack", "stack_trace", "from_node", "custom"):
        if key in model.meta:
            node.meta[key] = model.meta[key]
    return node


def call(before: fx.Node, target: Any, args: Sequence[Any], like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """Inserts an operator call before a node.

    Args:
        before: the node that the call is inserted in front of.
        target: the operator overload.
        args: its positional operands.
        like: the node whose module path and tensor value (shape) the result has.
        dtype: the result's dtype where it differs from that node's.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, tuple(args))
    node.meta.update({k: v for k, v in like.meta.items() if k not in _OF_ONE_OPERATOR})
    ORIGINS.put(node, frozenset())
    value = tensor_value(like)
    if value is not None:
        node.meta["val"] = value.to(dtype) if dtype else value
    return node


def viewed(before: fx.Node, view: Any, source: fx.Node, *args: Any) -> fx.Node:
    """Inserts a view of a node's tensor before a node; its value is known where the tensor's is.

    Args:
        before: the node that the new one is inserted in front of.
        view: the operator overload, such as `aten.permute.default`.
        source: the node whose tensor it is a view of.
        args: its other positional operands.
    """
    node = call(before, view, (source, *args), source)
    value = tensor_value(source)
    if value is not None:
        node.meta["val"] = view(value, *args)
    return node


def constant(before: fx.Node, name: str, value: Tensor) -> fx.Node:
    """Registers a tensor under a free name and inserts a node that reads it before a node.

    Args:
        before: the node that the new one is inserted in front of.
        name: what the buffer is called, with a number behind it where that is taken.
        value: the tensor, as it is stored.
    """
    owner = before.graph.owning_module
    assert owner is not None
    with before.graph.inserting_before(before):
        node = before.graph.get_attr(register(owner, name, value))
    node.meta["val"] = value
    return node


def register(owner: nn.Module, name: str, value: Tensor | nn.Module) -> str:
    """Registers a parameter, a module or, of any other tensor, a buffer under a free name; returns the name."""
    free = free_name(owner, name)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(free, value)
    elif isinstance(value, nn.Module):
        owner.add_module(free, value)
    else:
        owner.register_buffer(free, value)
    return free


def free_name(owner: Any, name: str) -> str:
    """Returns a name under which a module has no attribute yet: the one given without dots, or that with a number."""
    stem = name.replace(".", "_")
    names = itertools.chain((stem,), (f"{stem}_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(owner, name))


def replace(old: fx.Node, new: fx.Node) -> None:
    """Lets every user of a node use another one, and erases what nobody needs any more.

    Args:
        old: the node that goes.
        new: the node that takes its place.
    """
    old.replace_all_uses_with(new)
    erase_unused((old,))


def finish(module: fx.GraphModule) -> None:
    """Drops what nobody reads from a rewritten module, checks its graph and makes it run."""
    erase_dead_code(module.graph)
    module.graph.lint()
    drop_unread_attributes(module)
    module.recompile()


def drop_unread_attributes(module: fx.GraphModule) -> None:
    """Deletes parameters and buffers that no node reads, by itself or with its submodel: float weights beside integers.

    An exporter would store them in the file.
    """
    read = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name in [name for name, _ in held]:
        if read.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format)):
            owner, _, leaf = name.rpartition(".")
            delattr(attribute(module, owner) if owner else module, leaf)


def call_like(graph: fx.Graph, model: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Creates an operator call at the graph's insertion point, with the path and history of another node."""
    node = like(graph.call_function(target, args, kwargs), model)
    ORIGINS.put(node, frozenset())  # and be it that alone: export forgets where nodes without metadata come from
    return node
