"""Replacing a node of a float graph by other operators: what every rewrite has in common."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.constants import computed
from quantplug.core.graph.editing import as_recorded, call_like, constant, erase_dead_code
from quantplug.core.graph.facts import constant_value, operands, operator_name, tensor_value
from quantplug.core.graph.meta import ORIGINS, origins
from quantplug.core.graph.operators import schema_names
from quantplug.core.peers.torch_names import schema_or_none


class Writer:
    """Writes the nodes that replace one node, with its metadata and the values they will have."""

    def __init__(self, model: fx.GraphModule, node: fx.Node) -> None:
        self.model = model
        self.node = node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Creates an operator call before the node."""
        with self.model.graph.inserting_before(self.node):
            created = call_like(self.model.graph, self.node, target, *args, **kwargs)
        ORIGINS.put(created, origins(self.node))
        created.meta["val"] = computed(created, value_of)
        return created

    def reshape(self, source: fx.Node, *sizes: Any) -> fx.Node:
        """Creates a reshape to sizes of which the first, the batch, is inferred where it is dynamic."""
        wanted = [size if isinstance(size, int) else -1 for size in sizes]
        return self.call(torch.ops.aten.reshape.default, source, wanted)

    def constant(self, value: Tensor, name: str) -> fx.Node:
        """Registers a constant, a parameter if the value is one, and creates its node before the node."""
        created = constant(self.node, f"_quantplug_{name}", value)
        # So that later operators can be evaluated on it.
        created.meta["val"] = as_recorded(value, tensor_value(self.node))
        return created

    def number(self, value: float, beside: Tensor, name: str) -> fx.Node:
        """Creates the node of a number that is combined with a tensor.

        It has the tensor's rank: ExecuTorch's layout pass keeps 4-D operands channels-last only beside 4-D ones.
        """
        return self.constant(torch.full([1] * beside.dim(), value, dtype=beside.dtype), name)

    def replace(self, new: fx.Node) -> None:
        """Puts a node in the place of the old one."""
        new.meta["val"] = self.node.meta.get("val", new.meta.get("val"))
        self.node.replace_all_uses_with(new)
        self.model.graph.erase_node(self.node)


def value_of(node: fx.Node) -> Any:
    """Returns what a node yields as export recorded it, or the constant that it holds."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = constant_value(node)
    return value


def matching(model: fx.GraphModule, *names: str) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Yields the nodes of some operators; operands are read late, when earlier nodes are rewritten already."""
    wanted = schema_names(names)
    found = [node for node in model.graph.nodes if operator_name(node) in wanted]
    for node in found:
        if _is_pure(node):
            yield node, operands(node)


def _is_pure(node: fx.Node) -> bool:
    """Tells whether nothing but the node's own users sees its result.

    An in-place operator also changes its operand for everybody who uses that, or what it is a view of.
    """
    schema: Any = schema_or_none(node.target)
    if schema is None or not schema.is_mutable:
        return True
    operand: Any = node.args[0]
    producer: Any = schema_or_none(operand.target)
    owned = producer is not None and all(r.alias_info is None for r in producer.returns)
    return owned and len(operand.users) == 1


def done(model: fx.GraphModule) -> fx.GraphModule:
    """Removes what nothing reads any more and returns the graph module."""
    erase_dead_code(model.graph)
    model.recompile()
    return model


def axis_of(axis: int, dims: int) -> int:
    """Returns an axis counted from the front."""
    return axis + dims if axis < 0 else axis


def permutation(node: fx.Node) -> list[int]:
    """Returns for each dimension of a transpose's or permute's result the dimension of its input."""
    values: dict[str, Any] = operands(node)
    source = tensor_value(values["self"])
    assert source is not None
    if "dims" in values:
        return [axis_of(axis, source.dim()) for axis in values["dims"]]
    order = list(range(source.dim()))
    first, second = values["dim0"], values["dim1"]
    order[first], order[second] = order[second], order[first]
    return order


def alike(sizes: Iterable[Any], others: Iterable[Any]) -> bool:
    """Tells whether sizes are written the same; to compare open ones would decide about them."""
    return list(map(str, sizes)) == list(map(str, others))


def open_among(sizes: Iterable[Any]) -> int:
    """Returns how many sizes are open."""
    return sum(not isinstance(size, int) for size in sizes)


def is_getitem(node: fx.Node) -> bool:
    """Tells whether a node picks one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


def index_of(getitem: fx.Node) -> int:
    """Returns which result it picks."""
    index: Any = getitem.args[1]
    return int(index)


def constant_operand(node: Any) -> Tensor | None:
    """Returns the value of an operand that is a constant, None for any other."""
    return constant_value(node) if isinstance(node, fx.Node) else None
