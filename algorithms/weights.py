"""Weights that can be rounded anew, and the integers that their observers round them to.

Before: a prepared, calibrated graph. After: its layers, each with a weight as a matrix (rows are output channels,
columns what one of them multiplies, a matrix for each group of a convolution) and the grid of its integers. Who rounds
knows of matrices alone: here they are taken from tensors, however they lie, and put back, their scales likewise.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import AffineQuantizedObserverBase, FixedQParamsObserver

from quantplug.algorithms.frozen import freeze
from quantplug.algorithms.layers import Layer as Operator
from quantplug.algorithms.layers import layer_of
from quantplug.core.calibration.node_by_node import move_parameter
from quantplug.core.graph.editing import new_parameter
from quantplug.core.graph.facts import attribute, observer_of, operands, operator_name
from quantplug.core.observers.torchao_histogram import calculate_qparams
from quantplug.core.pt2e.observed import calls_of_observers, observe_constants
from quantplug.core.pt2e.quantization import kind_of, static_quantization

# Weights with more integers than these bits give are near enough to float that other things matter more.
FEW_BITS = 5
_TABLE = "aten::embedding"


@dataclass(frozen=True)
class Grid:
    """The values that the integers of a weight stand for.

    Attributes:
        scale: float32 [groups, rows, blocks of columns]; 1 of what shares its scales.
        zero_point: likewise.
        low: the least integer.
        high: the greatest.
        shape: in which the observer gives the scales and zero points of the whole weight.
    """

    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    shape: torch.Size

    @property
    def is_of_few_bits(self) -> bool:
        """Whether it has no more values than `FEW_BITS` give, so that rounding takes much away."""
        return self.high - self.low < 1 << FEW_BITS

    def as_given(self, numbers: Tensor) -> Tensor:
        """Returns scales or zero points of the whole weight as the observer gives them."""
        return numbers.reshape(self.shape)

    def spread(self, numbers: Tensor, matrix: Tensor) -> Tensor:
        """Returns scales or zero points, one for each element of a matrix [groups, rows, columns]."""
        return numbers.repeat_interleave(matrix.shape[2] // numbers.shape[2], 2).expand_as(matrix)

    def spread_over(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a scale and a zero point for each element of a matrix [groups, rows, columns]."""
        return self.spread(self.scale, matrix), self.spread(self.zero_point, matrix)

    def by_block(self, matrix: Tensor) -> Tensor:
        """Returns the sums of a matrix [groups, rows, columns] over what shares a scale, in the scale's shape."""
        return over_shared(self._blocks(matrix).sum(-1), self.scale)

    def multiplied(self, matrix: Tensor, factor: Tensor) -> Tensor:
        """Returns a matrix [groups, rows, columns] times a factor for each scale, in the scale's shape."""
        return (self._blocks(matrix) * factor.unsqueeze(3)).reshape(matrix.shape)

    def _blocks(self, matrix: Tensor) -> Tensor:
        """Returns a matrix [groups, rows, columns] as [groups, rows, blocks, columns of a block]."""
        return matrix.reshape(*matrix.shape[:2], self.scale.shape[2], -1)

    def rounded(self, matrix: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Returns the nearest values, given a scale and zero point for each element."""
        integers = (torch.round(matrix / scale) + zero_point).clamp(self.low, self.high)
        return (integers - zero_point) * scale

    def nearest(self, matrix: Tensor) -> Tensor:
        """Returns a matrix [groups, rows, columns] rounded to the nearest values, as the q/dq operators round.

        What is halfway between two integers is decided by their product with the reciprocal. Nothing but the result
        takes memory.
        """
        blocks, scale, zero_point = self._blocks(matrix), self.scale.unsqueeze(3), self.zero_point.unsqueeze(3)
        integers = torch.mul(blocks, 1 / scale).round_().add_(zero_point).clamp_(self.low, self.high)
        return integers.sub_(zero_point).mul_(scale).reshape(matrix.shape)

    def rescaled(self, matrix: Tensor, scale: Tensor) -> Tensor:
        """Returns values [groups, rows, columns] of the grid as their integers are with other scales."""
        integers = torch.div(self._blocks(matrix), self.scale.unsqueeze(3)).round_()
        return integers.mul_(scale.unsqueeze(3)).reshape(matrix.shape)

    def scaled(self, factor: Tensor) -> "Grid":
        """Returns the grid with its scales multiplied by a factor each."""
        return replace(self, scale=(self.scale * factor).to(self.scale.dtype))


def over_shared(numbers: Tensor, scale: Tensor) -> Tensor:
    """Returns numbers [groups, rows, ...] summed over the groups and rows that share their scales."""
    shared = [axis for axis in (0, 1) if scale.shape[axis] == 1]
    return numbers.sum(shared, keepdim=True) if shared else numbers


@dataclass(frozen=True)
class Layer:
    """An operator with a weight that can be rounded anew.

    Attributes:
        operator: the linear layer or convolution, or the look-up in a table.
        observed: what it reads as its weight, the call of an observer.
        observer: that observer.
        constant: the node of the weight.
    """

    operator: Operator
    observed: fx.Node
    observer: nn.Module
    constant: fx.Node

    @property
    def node(self) -> fx.Node:
        """The operator's node."""
        return self.operator.node


@dataclass(frozen=True)
class Weight:
    """A weight with the layers that read it.

    Attributes:
        layers: in graph order; more than one where it is tied.
        value: the tensor.
        paths: the attributes that hold it.
        grid: the integers that it is rounded to.
        is_alone: whether no other weight shares its observer.
        is_read_besides: whether other operators read it as it is or with observers of their own, as a table that is a
            model's head too.
    """

    layers: tuple[Layer, ...]
    value: nn.Parameter
    paths: tuple[str, ...]
    grid: Grid
    is_alone: bool
    is_read_besides: bool

    @property
    def by_rows(self) -> Tensor:
        """The tensor as [output channels, input channels / groups, ...]."""
        return self.layers[0].operator.by_rows(self.value.detach())

    @property
    def matrix(self) -> Tensor:
        """The weight as float32 [groups, rows, columns]."""
        by_rows, groups = self.by_rows, self.layers[0].operator.groups
        return by_rows.float().reshape(groups, len(by_rows) // groups, -1)

    @property
    def is_given(self) -> bool:
        """Whether its scale is not its observers' to choose: a fixed one, or a power of two."""
        observers: list[Any] = [layer.observer for layer in self.layers]
        return any(
            isinstance(observer, FixedQParamsObserver)
            or bool(getattr(getattr(observer, "scheme", None), "power_of_two", False))
            for observer in observers
        )

    def as_held(self, matrix: Tensor) -> Tensor:
        """Returns a matrix [groups, rows, columns], or some of its rows, as the tensor is laid out, in its dtype."""
        held = self.layers[0].operator.as_held(matrix.reshape(-1, *self.by_rows.shape[1:]))
        return held.to(self.value.dtype).contiguous()


def weights_of(model: fx.GraphModule) -> tuple[list[Weight], dict[str, str]]:
    """Returns the weights of layers that can be rounded anew, and by operator why others cannot.

    Args:
        model: a prepared, calibrated graph module; observers that wait for convert see their constants.

    Raises:
        CalibrationError: an observer cannot observe a constant.
    """
    return _weights(model, layer_of)


def tables_of(model: fx.GraphModule) -> tuple[list[Weight], dict[str, str]]:
    """Returns the tables of embeddings that can be rounded anew, and by operator why others cannot.

    Args:
        model: as for `weights_of`.

    Raises:
        CalibrationError: an observer cannot observe a constant.
    """
    tables, left = _weights(model, _table_of)
    names = {node.name for node in model.graph.nodes if operator_name(node) == _TABLE}
    return tables, {name: reason for name, reason in left.items() if name in names}


def _table_of(node: fx.Node) -> Operator | None:
    """Returns a look-up in a table as what has its rows for output channels; it reads no columns."""
    if operator_name(node) != _TABLE:
        return None
    given = operands(node)
    return Operator(node, given["indices"], given["weight"], None, 1, 0)


def _weights(
    model: fx.GraphModule, operator_of: Callable[[fx.Node], Operator | None]
) -> tuple[list[Weight], dict[str, str]]:
    observe_constants(model.graph, calls_of_observers(model.graph))
    layers: dict[int, list[Layer]] = defaultdict(list)
    left: dict[str, str] = {}
    for node in model.graph.nodes:
        found = _layer(node, operator_of(node))
        if isinstance(found, Layer):
            layers[id(attribute(model, str(found.constant.target)))].append(found)
        elif found:
            left[node.name] = found
    holders, served = _holders(model), _served(model)
    weights = []
    for identity, readers in layers.items():
        weight = _weight(model, readers, holders[identity], served)
        if isinstance(weight, Weight):
            weights.append(weight)
        else:
            left |= {layer.node.name: weight for layer in readers}
    return weights, left


def keep(model: fx.GraphModule, weight: Weight, value: Tensor, scale: Tensor) -> None:
    """Gives a weight's layers another value, and its observers a scale; who else reads the weight keeps it.

    Args:
        model: the prepared graph module.
        weight: of it.
        value: on the grid of the scale.
        scale: in the shape in which the observers give theirs.
    """
    paths = weight.paths
    if weight.is_read_besides:
        own = new_parameter(model, weight.layers[0].constant, "rounded", weight.value)
        for layer in weight.layers:
            layer.observed.replace_input_with(layer.constant, own)
        paths = (str(own.target),)
    move_parameter(model, paths, value)
    for layer in weight.layers:
        freeze(layer.observer, scale, weight.grid.as_given(weight.grid.zero_point))


def _layer(node: fx.Node, operator: Operator | None) -> Layer | str | None:
    given = operands(node) if node.op == "call_function" else {}
    observed = given.get("weight")
    observer = observer_of(observed)
    if not isinstance(observed, fx.Node) or observer is None:
        return None
    constant = observed.all_input_nodes[0]
    if operator is None:
        return f"{operator_name(node)} is neither a linear layer nor a convolution"
    if constant.op != "get_attr":
        return "its weight is computed"
    if not isinstance(attribute(node.graph.owning_module, str(constant.target)), nn.Parameter):  # type: ignore[arg-type]
        return "its weight is no parameter"
    return Layer(operator, observed, observer, constant)


def _holders(model: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """Returns by a tensor's identity the nodes that read it under any of its names."""
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in model.graph.find_nodes(op="get_attr"):
        found[id(attribute(model, str(node.target)))].append(node)
    return found


def _served(model: fx.GraphModule) -> dict[nn.Module, set[int]]:
    """Returns by observer the identities of what it sees."""
    found: dict[nn.Module, set[int]] = defaultdict(set)
    for node in model.graph.find_nodes(op="call_module"):
        observer, seen = observer_of(node), node.all_input_nodes[0]
        if observer is not None:
            held = seen.op == "get_attr"
            found[observer].add(id(attribute(model, str(seen.target)) if held else seen))
    return found


def _weight(
    model: fx.GraphModule, layers: list[Layer], holders: list[fx.Node], served: dict[nn.Module, set[int]]
) -> Weight | str:
    known = {layer.observed for layer in layers}
    besides = [user for node in holders for user in node.users if user not in known]
    observers = {layer.observer for layer in layers}
    others = [user for user in besides if observer_of(user) in observers]
    others += [user for call in known for user in call.users if user not in {layer.node for layer in layers}]
    if others:
        return f"'{others[0].name}' reads its weight too"
    value = attribute(model, str(layers[0].constant.target))
    grids = [_grid(layer, value) for layer in {layer.observer: layer for layer in layers}.values()]
    wrong = next((grid for grid in grids if isinstance(grid, str)), None)
    if wrong is not None:
        return wrong
    found = [grid for grid in grids if isinstance(grid, Grid)]
    if any(not _alike(found[0], grid) for grid in found[1:]):
        return "its weight is tied, and quantized in different ways"
    if len({(layer.operator.groups, layer.operator.is_transposed) for layer in layers}) > 1:
        return "its weight is tied, and multiplied in different ways"
    alone = all(len(served[layer.observer]) == 1 for layer in layers)
    paths = tuple(dict.fromkeys(str(node.target) for node in holders))
    return Weight(tuple(layers), value, paths, found[0], alone, bool(besides))


def _alike(one: Grid, other: Grid) -> bool:
    limits = (one.low, one.high) == (other.low, other.high)
    return limits and torch.equal(one.scale, other.scale) and torch.equal(one.zero_point, other.zero_point)


def _grid(layer: Layer, value: Tensor) -> Grid | str:
    observer: Any = layer.observer
    if isinstance(observer, AffineQuantizedObserverBase):
        return _grid_of_blocks(observer, value)
    if kind_of(observer) != "static" or observer.dtype.is_floating_point:
        return "its weight is not quantized to integers"
    found = static_quantization(observer, f"the weight of '{layer.node.name}'")
    scale, zero_point = (torch.as_tensor(number) for number in calculate_qparams(observer))
    if found.axis not in (None, 0, 1):
        return f"its weight has scales along axis {found.axis}"
    lie = _lie(layer.operator, found.axis)
    return Grid(scale.float().reshape(lie), zero_point.reshape(lie), found.quant_min, found.quant_max, scale.shape)


def _lie(operator: Operator, axis: int | None) -> tuple[int, int, int]:
    """Returns the shape [groups, rows, blocks] of scales along an axis: only the first axis counts all groups."""
    if axis is None:
        return 1, 1, 1
    groups = operator.groups if axis == 0 else 1
    return (groups, -1, 1) if axis == int(operator.is_transposed) else (groups, 1, -1)


def _grid_of_blocks(observer: Any, value: Tensor) -> Grid | str:
    sizes, (scale, zero_point) = observer.block_size, observer.calculate_qparams()
    if len(sizes) != 2 or sizes[0] != 1 or observer.zero_point_domain.name != "INT":
        return f"its weight has scales for blocks of {tuple(sizes or ())}"
    zero_point = torch.zeros_like(scale, dtype=torch.int64) if zero_point is None else zero_point
    scales, zero_points = (number.reshape(1, len(value), -1) for number in (scale, zero_point))
    return Grid(scales, zero_points, int(observer.quant_min), int(observer.quant_max), scale.shape)
