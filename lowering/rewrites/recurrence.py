"""Recurrent layers as their cells, step by step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.core.graph.meta import STATE
from quantplug.core.patterns.language import Match
from quantplug.lowering.rewrites.writing import Writer, done, index_of, is_getitem, matching, value_of

_ATEN = torch.ops.aten


def outside_of_states(match: Match, config: QuantizationConfig | None) -> str | None:
    """Holds outside of an unrolled recurrence, and for its linear layers and its input.

    The others carry the state from step to step, so that the roundings of all steps add up in them.
    """
    is_state = STATE.get(match["op"], False)
    return "it carries the state of a recurrence, where roundings add up" if is_state else None


class _StateWriter(Writer):
    """Marks what it writes, but for linear layers, as what carries the state of a recurrence."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Creates an operator call before the node."""
        created = super().call(target, *args, **kwargs)
        STATE.put(created, target is not _ATEN.linear.default)
        return created


def recurrence_is_unrolled(model: fx.GraphModule) -> fx.GraphModule:
    """Writes LSTM, GRU and RNN over a static sequence as their cells, step by step.

    The cell is linear layers, sigmoid, tanh, products and sums, which all have int8 kernels; as one operator it
    has none, and ExecuTorch's decomposition comes after annotation. The input's linear layer runs once for the
    whole sequence. Equations: torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN.
    """
    for node, values in matching(model, "lstm", "gru", "rnn_tanh", "rnn_relu"):
        sequence = tensor_value(values.get("input"))
        if sequence is None or not _can_unroll(node, values, sequence):
            continue
        write = _StateWriter(model, node)
        _replace_results(node, _Recurrence(write, values, _Cell(write, operator_name(node))).run())
    return done(model)


def cells_are_layers(model: fx.GraphModule) -> fx.GraphModule:
    """Writes LSTMCell, GRUCell and RNNCell as linear layers, activations, products and sums."""
    for node, values in matching(model, "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
        write = _StateWriter(model, node)
        cell = _Cell(write, operator_name(node).removesuffix("_cell"))
        states = tuple(values["hx"]) if cell.kind == "lstm" else (values["hx"],)
        now = write.call(_ATEN.linear.default, values["input"], values["w_ih"], values["b_ih"])
        recurrent = write.call(_ATEN.linear.default, states[0], values["w_hh"], values["b_hh"])
        states = cell.step(now, recurrent, states)
        if cell.kind == "lstm":
            _replace_results(node, list(states))
        else:
            write.replace(states[0])
    return done(model)


def _replace_results(node: fx.Node, results: list[fx.Node]) -> None:
    for getitem in list(node.users):
        getitem.replace_all_uses_with(results[index_of(getitem)])
        node.graph.erase_node(getitem)
    node.graph.erase_node(node)


def _can_unroll(node: fx.Node, values: dict[str, Any], sequence: Tensor) -> bool:
    packed = "batch_first" not in values or (values["train"] and values["dropout"])
    static = all(isinstance(size, int) for size in sequence.shape)
    return static and not packed and sequence.dim() == 3 and all(is_getitem(user) for user in node.users)


class _Recurrence:
    """Unrolls one recurrent operator; sequences are rows of (time x batch, features), so that a step is one slice."""

    def __init__(self, write: Writer, values: dict[str, Any], cell: "_Cell") -> None:
        self.write = write
        self.values = values
        self.cell = cell
        self.batch_first = bool(values["batch_first"])
        self.parameters = list(values["params"])
        directions = 2 if values["bidirectional"] else 1
        # Weights of input and state, a bias of each, and the projection of an LSTM's state to fewer features.
        self.per_cell = len(self.parameters) // (values["num_layers"] * directions)
        first, second = value_of(values["input"]).shape[:2]
        self.steps, self.batch = (second, first) if self.batch_first else (first, second)

    def run(self) -> list[fx.Node]:
        """Returns the nodes of the operator's results: output, last hidden states and, for LSTM, cell states."""
        layer = self._rows_of_input()
        last: list[tuple[fx.Node, ...]] = []
        for index in range(self.values["num_layers"]):
            directions = [False, True] if self.values["bidirectional"] else [False]
            ran = [
                self._direction(layer, index * len(directions) + d, backward) for d, backward in enumerate(directions)
            ]
            last += [states for _, states in ran]
            layer = self._joined([rows for rows, _ in ran], -1)
        output = self._in_time(self._view(layer, [self.steps, self.batch, -1]))
        return [output, *(self._stacked(list(states)) for states in zip(*last, strict=True))]

    def _rows_of_input(self) -> fx.Node:
        moved, source = Writer(self.write.model, self.write.node), self.values["input"]
        if self.batch_first:
            source = moved.call(_ATEN.transpose.int, source, 0, 1)
        return moved.call(_ATEN.reshape.default, source, [self.steps * self.batch, -1])

    def _in_time(self, node: fx.Node) -> fx.Node:
        return self.write.call(_ATEN.transpose.int, node, 0, 1) if self.batch_first else node

    def _view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        return self.write.call(_ATEN.reshape.default, node, shape)

    def _joined(self, nodes: list[fx.Node], axis: int) -> fx.Node:
        return nodes[0] if len(nodes) == 1 else self.write.call(_ATEN.cat.default, nodes, axis)

    def _stacked(self, states: list[fx.Node]) -> fx.Node:
        return self._view(self._joined(states, 0), [len(states), self.batch, -1])

    def _direction(self, layer: fx.Node, cell: int, backward: bool) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        start = cell * self.per_cell
        weights = self.parameters[start : start + self.per_cell]
        biases = weights[2:4] if self.values["has_biases"] else [None, None]
        projection = weights[-1] if self.per_cell % 2 else None
        gates = self.write.call(_ATEN.linear.default, layer, weights[0], biases[0])
        states = tuple(
            self._rows(self._view(given, [-1, value_of(given).shape[-1]]), cell) for given in self._initial()
        )
        hidden = []
        for step in reversed(range(self.steps)) if backward else range(self.steps):
            now = self._rows(gates, step)
            recurrent = self.write.call(_ATEN.linear.default, states[0], weights[1], biases[1])
            states = self._projected(self.cell.step(now, recurrent, states), projection)
            hidden.append(states[0])
        return self._joined(hidden[::-1] if backward else hidden, 0), states

    def _projected(self, states: tuple[fx.Node, ...], projection: fx.Node | None) -> tuple[fx.Node, ...]:
        if projection is None:
            return states
        return self.write.call(_ATEN.linear.default, states[0], projection), *states[1:]

    def _initial(self) -> list[fx.Node]:
        given: Any = self.values["hx"]
        return list(given) if self.cell.kind == "lstm" else [given]

    def _rows(self, node: fx.Node, index: int) -> fx.Node:
        if value_of(node).shape[0] == self.batch:
            return node
        return self.write.call(_ATEN.slice.Tensor, node, 0, index * self.batch, (index + 1) * self.batch)


class _Cell:
    """One step of a recurrent layer, from the linear layers of its input and of its hidden state."""

    def __init__(self, write: Writer, operator: str) -> None:
        self.write = write
        self.kind = operator.removeprefix("aten::")

    def step(self, now: fx.Node, recurrent: fx.Node, states: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Returns the next hidden state and, for LSTM, cell state."""
        if self.kind == "lstm":
            return self._lstm(now, recurrent, *states)
        if self.kind == "gru":
            return self._gru(now, recurrent, *states)
        activation = _ATEN.tanh.default if self.kind == "rnn_tanh" else _ATEN.relu.default
        return (self.write.call(activation, self.write.call(_ATEN.add.Tensor, now, recurrent)),)

    def _part(self, node: fx.Node, of: int, first: int, last: int) -> fx.Node:
        """Slices some of the parts that the features of a node consist of."""
        size = value_of(node).shape[-1] // of
        return self.write.call(_ATEN.slice.Tensor, node, -1, first * size, last * size)

    # One kernel for few features costs as much as one for many: gates are opened together, and sliced then.
    def _lstm(self, now: fx.Node, recurrent: fx.Node, _: fx.Node, cell: fx.Node) -> tuple[fx.Node, ...]:
        call = self.write.call
        gates = call(_ATEN.add.Tensor, now, recurrent)
        opened = call(_ATEN.sigmoid.default, gates)  # the third part is no gate; nobody reads it
        enter, keep, leave = (self._part(opened, 4, i, i + 1) for i in (0, 1, 3))
        new = call(_ATEN.tanh.default, self._part(gates, 4, 2, 3))
        cell = call(_ATEN.add.Tensor, call(_ATEN.mul.Tensor, keep, cell), call(_ATEN.mul.Tensor, enter, new))
        return call(_ATEN.mul.Tensor, leave, call(_ATEN.tanh.default, cell)), cell

    def _gru(self, now: fx.Node, recurrent: fx.Node, hidden: fx.Node) -> tuple[fx.Node, ...]:
        call = self.write.call
        gates = call(_ATEN.add.Tensor, self._part(now, 3, 0, 2), self._part(recurrent, 3, 0, 2))
        opened = call(_ATEN.sigmoid.default, gates)
        reset, update = (self._part(opened, 2, i, i + 1) for i in range(2))
        new_x, new_h = (self._part(node, 3, 2, 3) for node in (now, recurrent))
        new = call(_ATEN.tanh.default, call(_ATEN.add.Tensor, new_x, call(_ATEN.mul.Tensor, reset, new_h)))
        # new + update * (hidden - new) is (1 - update) * new + update * hidden with one product less.
        moved = call(_ATEN.mul.Tensor, update, call(_ATEN.sub.Tensor, hidden, new))
        return (call(_ATEN.add.Tensor, new, moved),)
