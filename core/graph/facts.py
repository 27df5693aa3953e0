"""Facts about an exported graph: operands by schema name, module paths, constants, tensor values.

Before: a `torch.fx.GraphModule` from `torch.export`. After: the same graph,
unchanged; every function here only looks.
"""

import operator
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torchao.quantization.pt2e import AffineQuantizedObserverBase, FakeQuantizeBase, ObserverBase

from quantplug.core.errors import ModelError
from quantplug.core.graph.meta import LIFTED
from quantplug.core.graph.operators import MAY_SHARE
from quantplug.core.peers.torch_names import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    pytree,
    schema_of,
    schema_or_none,
)


@cache
def _schema_defaults(target: OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    return tuple((a.name, a.has_default_value(), a.default_value) for a in schema_of(target).arguments)


def operands(node: fx.Node) -> dict[str, Any]:
    """Returns every operand of an operator node by its schema name, defaults filled in.

    Operands without default that the node leaves out are absent. A node whose target is not an
    operator overload (a placeholder, `getitem`) has its positional arguments under "0", "1", ...

    Args:
        node: any node that calls something.
    """
    target: Any = node.target
    if isinstance(target, OpOverloadPacket):  # as torchao's convert writes its operators of blocks
        target = target.default
    if not isinstance(target, OpOverload):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    found: dict[str, Any] = {}
    for position, (name, has_default, default) in enumerate(_schema_defaults(target)):
        if position < len(node.args):
            found[name] = node.args[position]
        elif name in node.kwargs:
            found[name] = node.kwargs[name]
        elif has_default:
            found[name] = default
    return found


def module_stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Returns (module path, qualified module type) from the outermost to the innermost module.

    Empty for nodes that no module called (constants, placeholders). Strict and non-strict export
    write the stack's keys differently; the values agree, and only these are read.
    """
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return tuple((path.removeprefix("L['self']").lstrip("."), _type_name(kind)) for path, kind in stack.values())


def _type_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def module_path(node: fx.Node) -> str:
    """Returns the path of the innermost module that the node was traced in ("" for the root)."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""


def describe(node: fx.Node) -> str:
    """Returns how errors and reports name a node: `'conv2d_3' (aten.conv2d.default, module 'layer1.0')`."""
    path = module_path(node)
    where = f", module '{path}'" if path else ""
    return f"'{node.name}' ({node.target}{where})"


def is_held(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node reads a parameter, buffer or lifted constant of the graph module, or a submodel."""
    return isinstance(node, fx.Node) and node.op == "get_attr"


def is_batch_counter(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node is the counter that a batch norm keeps of the batches it was trained on."""
    return is_held(node) and str(node.target).rpartition(".")[2] == "num_batches_tracked"


def is_constant(node: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node reads a tensor that the graph module holds and that is the same at every call.

    A buffer that the graph writes to is none. An input of a submodel is one where the graph around it always passes
    the same constant.
    """
    if not isinstance(node, fx.Node) or node.op not in ("get_attr", "placeholder"):
        return False
    return LIFTED.get(node, False) if node.op == "placeholder" else not is_written(node)


def is_written(node: fx.Node) -> bool:
    """Tells whether an operator writes into a node's memory, under its own name or that of a view."""
    pending, seen = [node], {node}
    while pending:
        name = pending.pop()
        for user in name.users:
            if written_argument(user) is name or any(is_written(inner) for inner in _inside(user, name)):
                return True
            if viewed_node(user) is name and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _inside(user: fx.Node, operand: fx.Node) -> Iterator[fx.Node]:
    """Yields what an operand is called in the submodels of a higher-order operator, whose last inputs are operands."""
    if not isinstance(user.target, HigherOrderOperator) or user.graph.owning_module is None:
        return
    held = [found for found in user.all_input_nodes if is_held(found)]
    submodels = [attribute(user.graph.owning_module, str(found.target)) for found in held]
    given = [found for found in pytree.tree_leaves(list(user.args)) if isinstance(found, fx.Node)]
    for submodel in submodels:
        if isinstance(submodel, fx.GraphModule):
            inputs = submodel.graph.find_nodes(op="placeholder")
            pairs = zip(reversed(given), reversed(inputs), strict=False)
            yield from (inner for outer, inner in pairs if outer is operand)


def written_argument(node: fx.Node) -> fx.Node | None:
    """Returns the node that an in-place operator writes into, or None if it writes into none."""
    target = node.target
    if not isinstance(target, OpOverload) or not schema_of(target).is_mutable or not node.args:
        return None
    alias = schema_of(target).arguments[0].alias_info
    first = node.args[0]
    return first if alias is not None and alias.is_write and isinstance(first, fx.Node) else None


def viewed_node(node: fx.Node) -> fx.Node | None:
    """Returns the node whose memory the result of an operator may share, or None."""
    if node.op == "call_module" and node.all_input_nodes:
        return node.all_input_nodes[0]  # an observer returns what it is given
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0]
    if not isinstance(node.target, OpOverload):
        return None
    returns = schema_of(node.target).returns
    shares = bool(returns) and returns[0].alias_info is not None
    return node.args[0] if shares or schema_of(node.target).name in MAY_SHARE else None


def attribute(module: torch.nn.Module, path: str) -> Any:
    """Returns the object at a dotted path below a module.

    Raises:
        ModelError: nothing stands at the path.
    """
    value: Any = module
    part = ""
    try:
        for part in path.split("."):
            value = getattr(value, part)
    except AttributeError:
        raise ModelError(
            f"The graph refers to attribute '{path}', which the module does not have (at '{part}'); "
            "export the model again."
        ) from None
    return value


def held_tensor(node: fx.Node) -> Tensor | None:
    """Returns the tensor behind a `get_attr` node, or None if it is no tensor or has no owning module.

    A buffer that the graph writes to has another value at the next call, see `constant_value`.
    """
    owner = node.graph.owning_module
    if not is_held(node) or owner is None:
        return None
    value = attribute(owner, str(node.target))
    return value if isinstance(value, Tensor) else None


def constant_value(node: fx.Node) -> Tensor | None:
    """Returns the tensor behind a `get_attr` node that is the same at every call, None for anything else.

    Args:
        node: any node of a graph.
    """
    value = held_tensor(node)
    return None if value is None or is_written(node) else value


def tensor_value(node: Any) -> Tensor | None:
    """Returns the (fake) tensor that a node yields as export recorded it, or None if it is no tensor.

    Only shape, dtype, device and strides of the result may be read; its sizes can be symbolic.
    """
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    if value is None:
        value = held_tensor(node)
    return value if isinstance(value, Tensor) else None


def sizes_of(node: Any) -> tuple[Any, ...]:
    """Returns the sizes of a node's tensor, symbolic where they are open; () where it yields none."""
    found = tensor_value(node)
    return () if found is None else tuple(found.shape)


def likely_sizes(node: Any) -> tuple[int, ...]:
    """Returns the sizes that a node's tensor most likely has, those of the example where they are open; () for none."""
    return tuple(optimization_hint(size) for size in sizes_of(node))


def rank(node: Any) -> int | None:
    """Returns the number of dimensions of a node's tensor, or None where it is not known."""
    value = tensor_value(node)
    return None if value is None else value.dim()


def is_float(node: Any) -> bool:
    """Tells whether a node yields a floating point tensor (False where the value is not known)."""
    value = tensor_value(node)
    return value is not None and value.is_floating_point()


def has_effect(node: fx.Node) -> bool:
    """Tells whether a node does more than yield its result; an operator of submodels does what they do."""
    inside = node.graph.owning_module
    if node.is_impure() or inside is None:
        return node.is_impure()
    held = (attribute(inside, str(found.target)) for found in node.all_input_nodes if is_held(found))
    submodels = (found for found in held if isinstance(found, fx.GraphModule))
    return any(has_effect(call) for found in submodels for call in found.graph.nodes if call.op == "call_function")


# What export adds around the computation: checks of sizes and of metadata.
_BOOKKEEPING = ("aten::_assert", "aten::sym_", "aten::_guard")


def compute_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the nodes that compute: operator calls, without guards, assertions and the counting of batches."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if not schema_of(node.target).name.startswith(_BOOKKEEPING) and not any(map(is_batch_counter, node.args[:1])):
            yield node


def _is_traced_only(graph: fx.Graph) -> bool:
    """Export records a value for every input and yields ATen operators; symbolic tracing does neither."""
    if any(isinstance(node.target, OpOverload) for node in graph.nodes):
        return False
    return any(node.op == "placeholder" and "val" not in node.meta for node in graph.nodes)


def require_graph_module(model: Any, function: str) -> fx.GraphModule:
    """Returns the model if it is an exported graph module.

    Raises:
        ModelError: it is something else; the sentence says how to export it.
    """
    if isinstance(model, fx.GraphModule):
        if _is_traced_only(model.graph):
            raise ModelError(
                f"{function} takes an exported graph module, found one from torch.fx.symbolic_trace, which has no ATen "
                "operators; pass `torch.export.export(model, example_inputs).module()`."
            )
        return model
    if isinstance(model, torch.export.ExportedProgram):
        raise ModelError(f"{function} takes a graph module, found an ExportedProgram; pass `exported.module()`.")
    raise ModelError(
        f"{function} takes an exported graph module, found {type(model).__name__}; "
        "pass `torch.export.export(model, example_inputs).module()`."
    )


def is_observer(module: Any) -> bool:
    """Tells whether a module is an observer or a fake quantize of torchao's interface."""
    return isinstance(module, (ObserverBase, FakeQuantizeBase, AffineQuantizedObserverBase))


def observer_of(node: Any) -> nn.Module | None:
    """Returns the observer that a node calls, or None if the node calls none."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or node.graph.owning_module is None:
        return None
    module = node.graph.owning_module.get_submodule(str(node.target))
    return module if is_observer(module) else None


def operator_name(node: Any) -> str:
    """Returns "namespace::name" of an operator call, "" for anything else."""
    target = node.target if isinstance(node, fx.Node) else None
    if isinstance(target, OpOverloadPacket):  # as torchao's convert writes affine operators
        return str(target).replace(".", "::", 1)
    schema = schema_or_none(target)
    return str(schema.name) if schema is not None else ""


def sole_user(node: fx.Node) -> fx.Node | None:
    """Returns the only node that uses another one, or None if there are none or several."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None
