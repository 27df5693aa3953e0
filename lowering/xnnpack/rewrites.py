"""Rewrites of a float graph that let more of it run on XNNPACK's integer kernels.

Before: an exported ATen graph, float, about to be annotated (`transform_for_annotation`). After: a graph that
computes the same numbers with operators that XNNPACK has in int8: pieces that only move data are written as
the moves that it knows, activations as the products of activations that it knows.

Each rewrite takes a graph module, changes it in place and returns it. None looks at annotations, so the same
passes serve any quantizer for this target.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph import constant_value, operands, tensor_value
from quantplug.lowering.xnnpack.conversions import add_constant, like, operator_name

_ATEN = torch.ops.aten

Rewrite = Callable[[fx.GraphModule], fx.GraphModule]


def rewrite_for_xnnpack(model: fx.GraphModule) -> fx.GraphModule:
    """Applies every rewrite in an order in which none undoes another.

    Args:
        model: an exported graph module; it is changed in place and returned.
    """
    for rewrite in ALL:
        model = rewrite(model)
    return model


class _Writer:
    """Writes the nodes that replace one node, with its metadata and the values they will have."""

    def __init__(self, model: fx.GraphModule, node: fx.Node) -> None:
        self.model = model
        self.node = node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Creates an operator call before the node."""
        with self.model.graph.inserting_before(self.node):
            created = like(self.model.graph.call_function(target, args, kwargs), self.node)
        created.meta["val"] = target(*fx.node.map_arg(args, _value), **fx.node.map_arg(kwargs, _value))
        return created

    def constant(self, value: Tensor, name: str) -> fx.Node:
        """Registers a buffer and creates its node before the node."""
        with self.model.graph.inserting_before(self.node):
            created = add_constant(self.model, self.model.graph, value, name)
        # The value is a fake tensor of the graph's own mode, so that later operators can be evaluated on it.
        reference = tensor_value(self.node)
        mode = getattr(reference, "fake_mode", None)
        created.meta["val"] = mode.from_tensor(value, static_shapes=True) if mode is not None else value
        return created

    def replace(self, new: fx.Node) -> None:
        """Puts a node in the place of the old one."""
        new.meta["val"] = self.node.meta.get("val", new.meta.get("val"))
        self.node.replace_all_uses_with(new)
        self.model.graph.erase_node(self.node)


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = constant_value(node)
    return value


def _matching(model: fx.GraphModule, *names: str) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Yields the nodes of some operators; operands are read late, when earlier nodes are rewritten already."""
    wanted = {f"aten::{name}" for name in names}
    found = [node for node in model.graph.nodes if operator_name(node) in wanted]
    for node in found:
        if _is_pure(node):
            yield node, operands(node)


def _is_pure(node: fx.Node) -> bool:
    """Tells whether nothing but the node's own users sees its result.

    An in-place operator also changes its operand for everybody who uses that, or what it is a view of.
    """
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return True
    operand: Any = node.args[0]
    producer: Any = getattr(operand.target, "_schema", None)
    owned = producer is not None and all(r.alias_info is None for r in producer.returns)
    return owned and len(operand.users) == 1


def _done(model: fx.GraphModule) -> fx.GraphModule:
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _axis(axis: int, dims: int) -> int:
    return axis + dims if axis < 0 else axis


def spatial_mean_keeps_dims(model: fx.GraphModule) -> fx.GraphModule:
    """Writes mean(x, [2, 3]) as mean(x, [2, 3], keepdim=True) and a view.

    Only the form that keeps the dimensions is XNNPACK's global average pooling.
    """
    for node, values in _matching(model, "mean"):
        source = tensor_value(values["self"])
        if source is None or source.dim() != 4 or values.get("keepdim") or values.get("dtype") is not None:
            continue
        if sorted(_axis(a, 4) for a in values.get("dim") or ()) != [2, 3]:
            continue
        write = _Writer(model, node)
        pooled = write.call(_ATEN.mean.dim, values["self"], [-1, -2], True)
        write.replace(write.call(_ATEN.flatten.using_ints, pooled, 1))
    return _done(model)


def global_pooling_is_mean(model: fx.GraphModule) -> fx.GraphModule:
    """Writes adaptive_avg_pool2d(x, 1) and avg_pool2d over the whole image as mean(x, [2, 3], keepdim=True)."""
    for node, values in _matching(model, "adaptive_avg_pool2d", "avg_pool2d"):
        source = tensor_value(values["self"])
        if source is None or source.dim() != 4 or not _pools_whole_image(node, values, source):
            continue
        write = _Writer(model, node)
        write.replace(write.call(_ATEN.mean.dim, values["self"], [-1, -2], True))
    return _done(model)


def _pools_whole_image(node: fx.Node, values: dict[str, Any], source: Tensor) -> bool:
    if operator_name(node) == "aten::adaptive_avg_pool2d":
        return all(size == 1 for size in values["output_size"])
    kernel, padding = _pair(values["kernel_size"]), _pair(values["padding"])
    return kernel == list(source.shape[2:]) and padding == [0, 0] and values.get("divisor_override") is None


def _pair(value: Any) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * 2 if len(values) == 1 else values


def average_pooling_is_depthwise(model: fx.GraphModule) -> fx.GraphModule:
    """Writes avg_pool2d as a depthwise convolution with equal weights.

    XNNPACK has no int8 average pooling. Equal weights quantize without error (127 steps of weight/127), so the
    int8 convolution rounds once, as a pooling kernel would.
    """
    for node, values in _matching(model, "avg_pool2d"):
        source = tensor_value(values["self"])
        kernel, padding = _pair(values["kernel_size"]), _pair(values["padding"])
        unpadded = padding == [0, 0]
        if source is None or source.dim() != 4 or values["ceil_mode"] or values["divisor_override"] is not None:
            continue
        if not (values["count_include_pad"] or unpadded) or not isinstance(source.shape[1], int):
            continue
        channels = source.shape[1]
        write = _Writer(model, node)
        weight = torch.full((channels, 1, *kernel), 1.0 / math.prod(kernel), dtype=source.dtype)
        stride = _pair(values["stride"]) if values["stride"] else kernel
        held = write.constant(weight, "average")
        write.replace(write.call(_ATEN.conv2d.default, values["self"], held, None, stride, padding, [1, 1], channels))
    return _done(model)


def split_is_slices(model: fx.GraphModule) -> fx.GraphModule:
    """Writes chunk, split and unbind as one slice (and view) for each piece that is used."""
    for node, values in _matching(model, "chunk", "split", "split_with_sizes", "unbind", "tensor_split"):
        pieces = node.meta.get("val")
        getitems = list(node.users)
        if not isinstance(pieces, (list, tuple)) or not all(_is_getitem(user) for user in getitems):
            continue
        source = tensor_value(values["self"])
        if source is None:
            continue
        axis = _axis(values.get("dim", 0), source.dim())
        unbind = operator_name(node) == "aten::unbind"
        sizes = [1 if unbind else piece.shape[axis] for piece in pieces]
        if not all(isinstance(size, int) for size in (*sizes, source.shape[axis])):
            continue
        for user in getitems:
            index = _index(user) % len(sizes)
            _slice_for(model, user, values["self"], axis, sum(sizes[:index]), sizes[index], unbind=unbind)
    return _done(model)


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _index(getitem: fx.Node) -> int:
    index: Any = getitem.args[1]
    return int(index)


def _slice_for(
    model: fx.GraphModule, node: fx.Node, source: fx.Node, axis: int, start: int, size: int, *, unbind: bool
) -> None:
    write = _Writer(model, node)
    piece = write.call(_ATEN.slice.Tensor, source, axis, start, start + size)
    write.replace(write.call(_ATEN.squeeze.dim, piece, axis) if unbind else piece)


def select_is_slice(model: fx.GraphModule) -> fx.GraphModule:
    """Writes select(x, dim, i) as a slice of one element and a view without the dimension."""
    for node, values in _matching(model, "select"):
        source = tensor_value(values["self"])
        index: Any = values["index"]
        if source is None or not source.is_floating_point() or not isinstance(index, int):
            continue
        axis = _axis(values["dim"], source.dim())
        size: Any = source.shape[axis]
        if not isinstance(size, int):
            continue
        _slice_for(model, node, values["self"], axis, index % size, 1, unbind=True)
    return _done(model)


def squeeze_is_view(model: fx.GraphModule) -> fx.GraphModule:
    """Writes squeeze and unsqueeze of static shapes as a view: XNNPACK has them for the last dimension only."""
    for node, values in _matching(model, "squeeze", "unsqueeze"):
        result = tensor_value(node)
        if result is None or not result.is_floating_point() or not all(isinstance(s, int) for s in result.shape):
            continue
        write = _Writer(model, node)
        write.replace(write.call(_ATEN.reshape.default, values["self"], list(result.shape)))
    return _done(model)


def silu_is_product(model: fx.GraphModule) -> fx.GraphModule:
    """Writes silu(x) as x * sigmoid(x)."""
    for node, values in _matching(model, "silu", "silu_"):
        write = _Writer(model, node)
        gate = write.call(_ATEN.sigmoid.default, values["self"])
        write.replace(write.call(_ATEN.mul.Tensor, values["self"], gate))
    return _done(model)


def hardsigmoid_is_clamp(model: fx.GraphModule) -> fx.GraphModule:
    """Writes hardsigmoid(x) as clamp(x / 6 + 1/2, 0, 1), with the numbers as constants."""
    for node, values in _matching(model, "hardsigmoid", "hardsigmoid_"):
        result = tensor_value(node)
        dtype = torch.float32 if result is None else result.dtype
        write = _Writer(model, node)
        sixth = write.constant(torch.tensor([1.0 / 6.0], dtype=dtype), "sixth")
        half = write.constant(torch.tensor([0.5], dtype=dtype), "half")
        scaled = write.call(_ATEN.mul.Tensor, values["self"], sixth)
        moved = write.call(_ATEN.add.Tensor, scaled, half)
        write.replace(write.call(_ATEN.hardtanh.default, moved, 0.0, 1.0))
    return _done(model)


def numbers_are_constants(model: fx.GraphModule) -> fx.GraphModule:
    """Writes x + 2.5, x - 2.5, x * 2.5 and x / 2.5 with the number as a constant tensor, which can be quantized."""
    kinds = {"add": _ATEN.add.Tensor, "sub": _ATEN.sub.Tensor, "mul": _ATEN.mul.Tensor, "div": _ATEN.mul.Tensor}
    for node, values in _matching(model, *kinds):
        number, result = values.get("other"), tensor_value(node)
        if isinstance(number, (bool, fx.Node)) or not isinstance(number, (int, float)) or result is None:
            continue
        if not isinstance(values["self"], fx.Node) or not _same_float(values["self"], result):
            continue
        if values.get("alpha", 1) != 1 or values.get("rounding_mode") is not None:
            continue
        kind = operator_name(node).partition("::")[2]
        if kind == "div" and number == 0:
            continue
        write = _Writer(model, node)
        held = write.constant(torch.tensor([1.0 / number if kind == "div" else number], dtype=result.dtype), "number")
        write.replace(write.call(kinds[kind], values["self"], held))
    return _done(model)


def _same_float(node: fx.Node, result: Tensor) -> bool:
    value = tensor_value(node)
    return value is not None and value.is_floating_point() and value.dtype == result.dtype and value.dim() > 0


def batch_norm_is_depthwise(model: fx.GraphModule) -> fx.GraphModule:
    """Writes a batch norm that no convolution precedes as a depthwise 1x1 convolution.

    Pre-activation networks (densenet) normalize sums and concatenations, where nothing can be folded;
    the affine map of evaluation, x * w / sqrt(v + e) + (b - m * w / sqrt(v + e)), has an int8 kernel in this form.
    """
    for node, values in _matching(model, "batch_norm"):
        source, running = tensor_value(values["input"]), _constants(values)
        if source is None or source.dim() != 4 or values["training"] or running is None:
            continue
        if _folds(values["input"]):
            continue
        mean, variance, scale, shift = running
        factor = scale / torch.sqrt(variance + values["eps"])
        write = _Writer(model, node)
        weight = write.constant(factor.detach().reshape(-1, 1, 1, 1).clone(), "norm_weight")
        bias = write.constant((shift - mean * factor).detach().clone(), "norm_bias")
        channels = int(factor.numel())
        write.replace(write.call(_ATEN.conv2d.default, values["input"], weight, bias, [1, 1], [0, 0], [1, 1], channels))
    return _done(model)


def _constants(values: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    mean, variance = (_constant(values[name]) for name in ("running_mean", "running_var"))
    if mean is None or variance is None:
        return None
    scale, shift = _constant(values["weight"]), _constant(values["bias"])
    return (
        mean,
        variance,
        torch.ones_like(mean) if scale is None else scale,
        torch.zeros_like(mean) if shift is None else shift,
    )


def _constant(node: Any) -> Tensor | None:
    return constant_value(node) if isinstance(node, fx.Node) else None


def _folds(producer: fx.Node) -> bool:
    return operator_name(producer).startswith("aten::conv") and len(producer.users) == 1


def attention_is_products(model: fx.GraphModule) -> fx.GraphModule:
    """Writes scaled_dot_product_attention as matmul, softmax and matmul.

    ExecuTorch's decomposition guards against rows that are masked completely with portable operators that cost ten
    times the attention itself; a graph without mask has no such row, and one with a boolean mask keeps the original.
    Source of the formula: Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    for node, values in _matching(model, "scaled_dot_product_attention"):
        query, mask = tensor_value(values["query"]), values["attn_mask"]
        masked = tensor_value(mask) if mask is not None else None
        if query is None or values["dropout_p"] or values["is_causal"] or values.get("enable_gqa"):
            continue
        if mask is not None and (masked is None or not masked.is_floating_point()):
            continue
        scale = values.get("scale")
        factor = float(scale) if scale is not None else 1.0 / math.sqrt(query.shape[-1])
        write = _Writer(model, node)
        turned = write.call(_ATEN.transpose.int, values["key"], -2, -1)
        # The factor goes onto the query: it is the smaller tensor.
        held = write.constant(torch.tensor([factor], dtype=query.dtype), "attention_scale")
        scores = write.call(_ATEN.matmul.default, write.call(_ATEN.mul.Tensor, values["query"], held), turned)
        scores = scores if mask is None else write.call(_ATEN.add.Tensor, scores, mask)
        weights = write.call(_ATEN.softmax.int, scores, -1)
        write.replace(write.call(_ATEN.matmul.default, weights, values["value"]))
    return _done(model)


def recurrence_is_unrolled(model: fx.GraphModule) -> fx.GraphModule:
    """Writes LSTM and GRU over a static sequence as their cells, step by step.

    The cell is linear layers, sigmoid, tanh, products and sums, which all have int8 kernels; as one operator it
    has none, and ExecuTorch's decomposition comes after annotation. The input's linear layer runs once for the
    whole sequence. Equations: torch.nn.LSTM and torch.nn.GRU.
    """
    for node, values in _matching(model, "lstm", "gru"):
        sequence = tensor_value(values.get("input"))
        if sequence is None or not _can_unroll(node, values, sequence):
            continue
        write = _Writer(model, node)
        outputs = _Recurrence(write, values, lstm=operator_name(node) == "aten::lstm").run()
        for getitem in list(node.users):
            getitem.replace_all_uses_with(outputs[_index(getitem)])
            model.graph.erase_node(getitem)
        model.graph.erase_node(node)
    return _done(model)


def _can_unroll(node: fx.Node, values: dict[str, Any], sequence: Tensor) -> bool:
    packed = "batch_first" not in values or (values["train"] and values["dropout"])
    static = all(isinstance(size, int) for size in sequence.shape)
    return static and not packed and sequence.dim() == 3 and all(_is_getitem(user) for user in node.users)


class _Recurrence:
    """Unrolls one recurrent operator; sequences are rows of (time x batch, features), so that a step is one slice."""

    def __init__(self, write: _Writer, values: dict[str, Any], *, lstm: bool) -> None:
        self.write = write
        self.values = values
        self.lstm = lstm
        self.batch_first = bool(values["batch_first"])
        self.parameters = list(values["params"])
        self.per_cell = 4 if values["has_biases"] else 2
        first, second = _value(values["input"]).shape[:2]
        self.steps, self.batch = (second, first) if self.batch_first else (first, second)

    def run(self) -> list[fx.Node]:
        """Returns the nodes of the operator's results: output, last hidden states and, for LSTM, cell states."""
        layer = self._in_time(self.values["input"])
        layer = self._view(layer, [self.steps * self.batch, -1])
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
        biases = weights[2:] if self.per_cell == 4 else [None, None]
        gates = self.write.call(_ATEN.linear.default, layer, weights[0], biases[0])
        states = tuple(self._rows(self._view(given, [-1, _value(given).shape[-1]]), cell) for given in self._initial())
        hidden = []
        for step in reversed(range(self.steps)) if backward else range(self.steps):
            now = self._rows(gates, step)
            recurrent = self.write.call(_ATEN.linear.default, states[0], weights[1], biases[1])
            states = self._lstm(now, recurrent, states[1]) if self.lstm else self._gru(now, recurrent, states[0])
            hidden.append(states[0])
        return self._joined(hidden[::-1] if backward else hidden, 0), states

    def _initial(self) -> list[fx.Node]:
        given: Any = self.values["hx"]
        return list(given) if self.lstm else [given]

    def _rows(self, node: fx.Node, index: int) -> fx.Node:
        if _value(node).shape[0] == self.batch:
            return node
        return self.write.call(_ATEN.slice.Tensor, node, 0, index * self.batch, (index + 1) * self.batch)

    def _gates(self, node: fx.Node, count: int) -> list[fx.Node]:
        size = _value(node).shape[-1] // count
        return [self.write.call(_ATEN.slice.Tensor, node, -1, i * size, (i + 1) * size) for i in range(count)]

    def _lstm(self, now: fx.Node, recurrent: fx.Node, cell: fx.Node) -> tuple[fx.Node, ...]:
        call = self.write.call
        enter, keep, new, leave = self._gates(call(_ATEN.add.Tensor, now, recurrent), 4)
        kept = call(_ATEN.mul.Tensor, call(_ATEN.sigmoid.default, keep), cell)
        added = call(_ATEN.mul.Tensor, call(_ATEN.sigmoid.default, enter), call(_ATEN.tanh.default, new))
        cell = call(_ATEN.add.Tensor, kept, added)
        return call(_ATEN.mul.Tensor, call(_ATEN.sigmoid.default, leave), call(_ATEN.tanh.default, cell)), cell

    def _gru(self, now: fx.Node, recurrent: fx.Node, hidden: fx.Node) -> tuple[fx.Node, ...]:
        call = self.write.call
        pairs = zip(self._gates(now, 3), self._gates(recurrent, 3), strict=True)
        (reset_x, reset_h), (update_x, update_h), (new_x, new_h) = pairs
        reset = call(_ATEN.sigmoid.default, call(_ATEN.add.Tensor, reset_x, reset_h))
        update = call(_ATEN.sigmoid.default, call(_ATEN.add.Tensor, update_x, update_h))
        new = call(_ATEN.tanh.default, call(_ATEN.add.Tensor, new_x, call(_ATEN.mul.Tensor, reset, new_h)))
        # new + update * (hidden - new) is (1 - update) * new + update * hidden with one product less.
        moved = call(_ATEN.mul.Tensor, update, call(_ATEN.sub.Tensor, hidden, new))
        return (call(_ATEN.add.Tensor, new, moved),)


def filled_tensors_are_constants(model: fx.GraphModule) -> fx.GraphModule:
    """Stores what zeros, ones and full of a static shape yield; the runtime would fill them on every call."""
    for node, values in _matching(model, "zeros", "ones", "full"):
        result = tensor_value(node)
        if result is None or not result.is_floating_point() or not _is_small(result):
            continue
        number = {"aten::zeros": 0.0, "aten::ones": 1.0}.get(operator_name(node), values.get("fill_value"))
        if isinstance(number, (int, float)):
            write = _Writer(model, node)
            write.replace(write.constant(torch.full(list(result.shape), number, dtype=result.dtype), "filled"))
    return _done(model)


def _is_small(result: Tensor) -> bool:
    # 64k elements: a state or a mask is stored, an image is not.
    return all(isinstance(size, int) for size in result.shape) and 0 < result.numel() <= 65536


def clamp_is_activation(model: fx.GraphModule) -> fx.GraphModule:
    """Writes clamp(x, a, b) as hardtanh and clamp(x, min=0) as relu: the forms that kernels fuse."""
    for node, values in _matching(model, "clamp", "clamp_", "clamp_min"):
        low, high = values.get("min"), values.get("max")
        if isinstance(low, fx.Node) or isinstance(high, fx.Node) or tensor_value(node) is None:
            continue
        write = _Writer(model, node)
        if low == 0 and high is None:
            write.replace(write.call(_ATEN.relu.default, values["self"]))
        elif low is not None and high is not None and low <= high:
            write.replace(write.call(_ATEN.hardtanh.default, values["self"], float(low), float(high)))
    return _done(model)


def own_bias_per_use(model: fx.GraphModule) -> fx.GraphModule:
    """Gives each convolution and linear that shares weight or bias with another one its own constants.

    Two uses have two input scales, hence two quantized biases; one constant cannot be both.
    """
    seen: set[str] = set()
    for node, values in _matching(model, "conv1d", "conv2d", "linear", "conv_transpose2d"):
        for name in ("weight", "bias"):
            held: Any = values.get(name)
            value = _constant(held)
            if value is None:
                continue
            if str(held.target) in seen:
                node.replace_input_with(held, _Writer(model, node).constant(value.detach().clone(), name))
            seen.add(str(held.target))
    return _done(model)


ALL: tuple[Rewrite, ...] = (
    filled_tensors_are_constants,
    recurrence_is_unrolled,
    attention_is_products,
    split_is_slices,
    select_is_slice,
    squeeze_is_view,
    global_pooling_is_mean,
    spatial_mean_keeps_dims,
    average_pooling_is_depthwise,
    batch_norm_is_depthwise,
    silu_is_product,
    hardsigmoid_is_clamp,
    clamp_is_activation,
    numbers_are_constants,
    own_bias_per_use,
)
