"""Layers of a float graph whose weights take and give a scale, and who else reads a parameter.

Before: an exported float graph. After: its linear layers and convolutions with their parameters, however export wrote
them, and for a parameter the reason why it cannot be replaced.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from quantplug.core.graph.facts import attribute, is_held, operands, operator_name, rank, sole_user
from quantplug.core.graph.traits import transposes

# By the dimensions of pixels behind the channels.
_BY_NAME = {"aten::linear": 0, "aten::conv1d": 1, "aten::conv2d": 2, "aten::conv3d": 3}
_TRANSPOSED = {f"aten::conv_transpose{spatial}d": spatial for spatial in (1, 2, 3)}


@dataclass(frozen=True)
class Layer:
    """A linear layer or convolution.

    Attributes:
        node: the operator.
        input: what it multiplies its weight by.
        weight: the node of the weight, [out, in / groups, ...]; of a transposed convolution [in, out / groups, ...].
        bias: the node of the bias, or None.
        groups: of a convolution; one for a linear layer.
        spatial: how many dimensions stand behind the channels.
        is_transposed: whether it is a transposed convolution.
    """

    node: fx.Node
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    groups: int
    spatial: int
    is_transposed: bool = False

    def by_rows(self, weight: Tensor) -> Tensor:
        """Returns its weight as [out, in / groups, ...]."""
        if not self.is_transposed:
            return weight
        by_group = weight.reshape(self.groups, -1, *weight.shape[1:])
        return by_group.transpose(1, 2).flatten(0, 1)

    def as_held(self, by_rows: Tensor) -> Tensor:
        """Returns a weight [out, in / groups, ...] as the layer holds it."""
        return self.by_rows(by_rows)  # what exchanges the two dimensions in each group undoes that too

    @property
    def parameters(self) -> tuple[fx.Node, ...]:
        """The nodes of its weight and of its bias, if it has one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def layer_of(node: fx.Node) -> Layer | None:
    """Returns a node as a layer, None where it is none or its weight is laid out in another way."""
    name, given = operator_name(node), operands(node) if node.op == "call_function" else {}
    if name in _BY_NAME:
        return _layer(node, given["input"], given["weight"], given["bias"], given, _BY_NAME[name])
    if name in _TRANSPOSED:
        return _layer(node, given["input"], given["weight"], given["bias"], given, _TRANSPOSED[name], transposed=True)
    if name == "aten::convolution":
        is_transposed, spatial = given["transposed"], len(given["stride"])
        return _layer(node, given["input"], given["weight"], given["bias"], given, spatial, transposed=is_transposed)
    if name == "aten::mm" and (weight := _turned(given["mat2"])) is not None:
        return _layer(node, given["self"], weight, None, given, 0)
    is_plain = name == "aten::addmm" and (given["beta"], given["alpha"]) == (1, 1) and rank(given["self"]) == 1
    if is_plain and (weight := _turned(given["mat2"])) is not None:
        return _layer(node, given["mat1"], weight, given["self"], given, 0)
    return None


def _layer(
    node: fx.Node,
    source: Any,
    weight: Any,
    bias: Any,
    given: dict[str, Any],
    spatial: int,
    *,
    transposed: bool = False,
) -> Layer:
    return Layer(node, source, weight, bias, int(given.get("groups", 1)), spatial, transposed)


def _turned(node: Any) -> fx.Node | None:
    """Returns the parameter that a decomposed linear layer reads through a transpose of its own."""
    if not isinstance(node, fx.Node) or not transposes(node) or sole_user(node) is None:
        return None
    return held if is_held(held := node.args[0]) and rank(held) == 2 else None


class Readers:
    """Who reads the memory of each parameter, in the graph and in the submodels of its control flow."""

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model
        self._readers: dict[int, list[fx.Node]] = defaultdict(list)
        for part in model.modules():
            for node in part.graph.find_nodes(op="get_attr") if isinstance(part, fx.GraphModule) else ():
                value = attribute(part, str(node.target))
                if isinstance(value, Tensor):
                    self._readers[_memory(value)].extend(node.users)

    def of(self, constant: fx.Node) -> list[fx.Node]:
        """Returns the operators that read a constant's memory, through a transpose of their own or not."""
        value = attribute(self._model, str(constant.target))
        return [_through_transpose(user) for user in self._readers[_memory(value)]] if isinstance(value, Tensor) else []

    def objection(self, constant: Any, reader: fx.Node, called: str) -> str | None:
        """Returns why a parameter that an operator reads cannot be replaced, None where it can.

        Args:
            constant: what the operator reads.
            reader: the operator.
            called: what it is to the operator, "weight" or "bias".
        """
        if not is_held(constant):
            return f"the {called} of '{reader.name}' is computed"
        value = attribute(self._model, str(constant.target))
        if not isinstance(value, nn.Parameter) or not value.is_floating_point():
            return f"the {called} of '{reader.name}' is no parameter of floating point"
        readers = self.of(constant)
        others = [found for found in readers if found is not reader]
        if others or len(readers) > 1:
            return f"'{(others or readers)[0].name}' reads the {called} of '{reader.name}' too"
        return None

    def objections(self, parameters: tuple[Any, ...], reader: fx.Node) -> str | None:
        """Returns why one of an operator's weight and bias cannot be replaced, None where both can."""
        pairs = zip(parameters, ("weight", "bias"), strict=False)
        return next(filter(None, (self.objection(each, reader, called) for each, called in pairs)), None)


def _through_transpose(user: fx.Node) -> fx.Node:
    only = sole_user(user) if transposes(user) else None
    return user if only is None else only


def _memory(value: Tensor) -> int:
    """Returns what is the same for tensors in the same memory; tensors of other classes have none to tell."""
    return value.data_ptr() if type(value) in (Tensor, nn.Parameter) else id(value)
