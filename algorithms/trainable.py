"""A calibrated graph whose outputs have gradients: to scales of weights whose integers stay, and to biases and norms.

Before: a prepared, calibrated graph, of any quantizer. After: runs of what convert makes of it, in which a weight is
its integers times scales that are trained, and what is read in float and has one dimension is trained as it is.
Whatever else is rounded, is rounded as convert would have it, and gradients pass straight through (Bengio et al.,
arXiv:1308.3432) but for values that a static range clips.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from quantplug.algorithms.operators import quantized_graph
from quantplug.algorithms.stretches import Stretch, stretches_of
from quantplug.algorithms.weights import Weight
from quantplug.core.calibration.node_by_node import Batch, BatchRun
from quantplug.core.graph.editing import drop_unread_attributes, erase_dead_code
from quantplug.core.graph.facts import attribute, observer_of, operands
from quantplug.core.observers.from_specs import is_derived
from quantplug.core.observers.straight_through import straight_through
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.nodes import is_qdq

T = TypeVar("T")
_LINEAR, _SLICE, _CAT = torch.ops.aten.linear.default, torch.ops.aten.slice.Tensor, torch.ops.aten.cat.default
# Numbers of a weight that are computed at once, more or less.
_BLOCK = 2**22


@dataclass(frozen=True, eq=False)
class Scaled:
    """A weight whose scales are trained.

    Attributes:
        weight: which.
        start: what its integers stand for with the scales that it has, [groups, rows, columns].
        trained: logarithms of what the scales are multiplied by, in the shape of the grid's.
    """

    weight: Weight
    start: Tensor
    trained: nn.Parameter

    @classmethod
    def of(cls, weight: Weight) -> "Scaled":
        """Returns a weight with the scales that it has, rounded to nearest."""
        start, nearest = weight.matrix, weight.grid.nearest(weight.matrix)
        if not torch.equal(start, nearest):  # of a weight that is rounded already there need not be two
            start = nearest
        return cls(weight, start, nn.Parameter(torch.zeros_like(weight.grid.scale)))

    def value(self, rows: slice = slice(None)) -> Tensor:
        """Returns what its integers stand for with the scales as they are trained so far, as the layer holds it.

        Args:
            rows: which of them; not of a convolution.
        """
        trained = self.trained if self.trained.shape[1] == 1 else self.trained[:, rows]
        return self.weight.as_held(self.weight.grid.multiplied(self.start[:, rows], trained.exp()))

    @property
    def scale(self) -> Tensor:
        """The scales as they are trained so far, as the observer gives them."""
        return self.weight.grid.as_given(self._scale)

    @property
    def _scale(self) -> Tensor:
        return self.weight.grid.scale * self.trained.detach().exp()

    def rescaled(self) -> Tensor:
        """Returns what its integers stand for with these scales, rounded once."""
        return self.weight.as_held(self.weight.grid.rescaled(self.start, self._scale))


@dataclass(frozen=True, eq=False)
class Vector:
    """A parameter of one dimension that is trained, in units of its own size.

    Attributes:
        paths: the attributes that hold it.
        start: what it is.
        unit: the root of the mean of its squares.
        trained: what is added, in units.
    """

    paths: tuple[str, ...]
    start: Tensor
    unit: Tensor
    trained: nn.Parameter

    @classmethod
    def of(cls, paths: tuple[str, ...], value: Tensor) -> "Vector":
        """Returns a parameter as it is."""
        start = value.detach()
        return cls(paths, start, start.float().square().mean().sqrt(), nn.Parameter(torch.zeros_like(start.float())))

    def value(self) -> Tensor:
        """Returns it as it is trained so far."""
        return (self.start + self.unit * self.trained).to(self.start.dtype)


class Trainable:
    """A calibrated graph with what can be trained of it.

    Args:
        prepared: the graph; it is not changed.
        weights: whose scales are trained.

    Attributes:
        scaled: these weights.
        vectors: biases, and weights and biases of norms; none that is 0 everywhere.
    """

    def __init__(self, prepared: fx.GraphModule, weights: list[Weight]) -> None:
        self.scaled = [Scaled.of(weight) for weight in weights]
        self.vectors = list(_vectors(prepared))
        graph = quantized_graph(prepared)
        self._model, self._pairs = graph.model, dict(graph.pairs)
        self._trained = self._values()
        self._constants = graph.constants - self._behind()
        self._stretches = stretches_of(self._model.graph, set(self._pairs.values()).__contains__)
        self._computed: dict[fx.Node, Any] = {}
        self._alive: dict[int, tuple[weakref.ref[Tensor], Callable[[], Tensor]]] = {}

    def parameters(self) -> list[nn.Parameter]:
        """Returns what an optimizer trains."""
        return [each.trained for each in self.scaled] + [each.trained for each in self.vectors]

    @property
    def weights(self) -> list[Weight]:
        """The weights whose scales are trained."""
        return [each.weight for each in self.scaled]

    def taken(self) -> Iterator[Scaled]:
        """Yields the weights and forgets them: what they were need not be there with what they become."""
        self._trained.clear()
        self._alive.clear()
        while self.scaled:
            yield self.scaled.pop()

    def result(self, batch: Batch) -> Any:
        """Returns what the quantized model makes of a batch, with gradients to what is trained."""
        with torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked):
            return _Run(self, _differentiable(batch)).result()

    def _values(self) -> dict[fx.Node, Callable[[], Tensor]]:
        """Lets the graph read what is trained in place of what is rounded, and returns by node what computes it."""
        weights = {path: each for each in self.scaled for path in each.weight.paths}
        vectors = {path: each.value for each in self.vectors for path in each.paths}
        found, graph = dict[fx.Node, Callable[[], Tensor]](), self._model.graph
        for node in graph.find_nodes(op="get_attr"):
            if str(node.target) in vectors:
                found[node] = vectors[str(node.target)]
        for back, quantize in self._pairs.items():
            path = str(quantize.all_input_nodes[0].target)
            if path in vectors and back.users:
                found[_read_late(back)] = vectors[path]
            elif path in weights and back.users:
                late = _read_late(back)
                found |= {late: weights[path].value} | _in_blocks(late, weights[path])
        erase_dead_code(graph)
        drop_unread_attributes(self._model)
        left = set(graph.nodes)
        found = {node: value for node, value in found.items() if node in left}
        self._pairs = {back: quantize for back, quantize in self._pairs.items() if back in left}
        return found

    def _behind(self) -> set[fx.Node]:
        """Returns the nodes that are computed of what is trained."""
        found = set(self._trained)
        for node in self._model.graph.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _packed(self, saved: Tensor) -> Any:
        """Keeps how a weight is computed instead of the weight: of all of them there would be a second model."""
        alive = self._alive.get(saved.untyped_storage().data_ptr())
        if alive is None or alive[0]() is None:
            return saved
        return alive[1], saved.shape, saved.stride(), saved.storage_offset()

    def trained(self, node: fx.Node) -> Tensor:
        """Returns the value of a node that is trained."""
        value = self._trained[node]()
        self._alive[value.untyped_storage().data_ptr()] = weakref.ref(value), self._trained[node]
        return value


def _read_late(back: fx.Node) -> fx.Node:
    """Lets what reads a pair read what is trained, in front of the first: so one weight at a time is computed."""
    with back.graph.inserting_before(min(back.users)):
        node = back.graph.call_function(_trained_value)
    back.replace_all_uses_with(node)
    return node


def _in_blocks(late: fx.Node, scaled: Scaled) -> dict[fx.Node, Callable[[], Tensor]]:
    """Computes large linear layers in blocks of their output channels, and returns what computes the blocks' weights.

    A language model's head is as large as many layers; so neither it nor its gradient is ever there as a whole.
    """
    rows, columns = scaled.start.shape[1:]
    graph, size, found = late.graph, max(1, _BLOCK // columns), dict[fx.Node, Callable[[], Tensor]]()
    for layer in list(late.users):
        if layer.target is not _LINEAR or size >= rows:
            continue
        x, bias, results = layer.args[0], operands(layer)["bias"], []
        with graph.inserting_before(layer):
            for start in range(0, rows, size):
                block = graph.call_function(_trained_value)
                found[block] = partial(scaled.value, slice(start, start + size))
                part = None if bias is None else graph.call_function(_SLICE, (bias, 0, start, start + size))
                results.append(graph.call_function(_LINEAR, (x, block, part)))
            whole = graph.call_function(_CAT, (results, -1))
        whole.meta = dict(layer.meta)
        layer.replace_all_uses_with(whole)
    return found


def _trained_value() -> Tensor:
    """Stands in a graph for what `_Run` computes there, so that the graph holds no weight itself."""
    raise NotImplementedError


def _differentiable(values: T) -> T:
    """Returns values, nested as pytrees, with copies of tensors of inference mode, which no gradient may go by."""
    found: T = pytree.tree_map_only(Tensor, lambda value: value.clone() if value.is_inference() else value, values)
    return found


def _unpacked(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    compute, shape, stride, offset = kept
    with torch.no_grad():
        value: Tensor = compute().as_strided(shape, stride, offset)
    return value


def _vectors(prepared: fx.GraphModule) -> Iterator[Vector]:
    """Yields parameters of one dimension that no observer of their own rounds."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    rounded = set[int]()
    for node in prepared.graph.find_nodes(op="get_attr"):
        value = attribute(prepared, str(node.target))
        if not isinstance(value, nn.Parameter) or value.dim() != 1 or not value.is_floating_point():
            continue
        found.setdefault(id(value), (value, []))[1].append(str(node.target))
        observers = (observer for user in node.users if (observer := observer_of(user)) is not None)
        if any(not is_derived(observer) for observer in observers):
            rounded.add(id(value))
    for identity, (value, paths) in found.items():
        if identity not in rounded and bool(value.any()):
            yield Vector.of(tuple(dict.fromkeys(paths)), value)


class _Run(BatchRun):
    """Runs the converted graph on what is trained."""

    def __init__(self, trainable: Trainable, batch: Batch) -> None:
        super().__init__(trainable._model, batch)
        self._trainable, self._rounded = trainable, dict[fx.Node, Tensor]()

    def result(self) -> Any:
        """Returns what the model does; all stretches but the last are run again for their gradients."""
        if torch.is_grad_enabled():
            for stretch in self._trainable._stretches[:-1]:
                values = [self.env[node] for node in stretch.reads]
                found = checkpoint(partial(self._through, stretch), *values, use_reentrant=False)
                self.env |= zip(stretch.yields, found, strict=True)
                for node in stretch.drops:
                    del self.env[node]
                self._next = stretch.stop
        return super().result()

    def _through(self, stretch: Stretch, *values: Any) -> list[Any]:
        """Returns what a stretch yields, given what it reads."""
        run = copy.copy(self)
        run.env, run._rounded, run._next = dict(zip(stretch.reads, values, strict=True)), {}, stretch.start
        run.advance(stretch.stop)
        return [run.env[node] for node in stretch.yields]

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; pairs of activations pass gradients."""
        of = self._trainable
        if n in of._trained:
            return of.trained(n)
        if n in of._constants:
            if n not in of._computed:
                of._computed[n] = pytree.tree_map_only(Tensor, Tensor.detach, self._alone(n))  # no gradient to tables
            return of._computed[n]
        if not is_qdq(n):
            return super().run_node(n)
        found = self._alone(n)
        quantize = of._pairs.get(n)
        if quantize is not None:
            return _passing(quantize, self._rounded[quantize], found)
        self._rounded[n] = self.env[n.all_input_nodes[0]]
        return found

    def _alone(self, node: fx.Node) -> Any:
        with torch.no_grad():
            return super().run_node(node)


def _passing(quantize: fx.Node, value: Tensor, rounded: Tensor) -> Tensor:
    """Returns a rounded value that hands gradients to what was rounded."""
    if not value.requires_grad:
        return rounded
    scale = operands(quantize).get("scale")
    if isinstance(scale, float):  # static: beyond the ends nothing moves the result
        value = torch.where((value - rounded).abs() <= scale, value, rounded)
    return straight_through(value, rounded)
