"""The reference quantized model: what two of them compute, as comparable values.

Before: converted graph modules. After: the same modules, unchanged; whether they are of the format that
docs/reference-model.md describes, and in what two of them differ.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import (
    attribute,
    constant_value,
    describe,
    observer_of,
    require_graph_module,
    tensor_value,
)
from quantplug.core.qdq.nodes import AFFINE_OPS, DEQUANTIZE_OPS, QUANTIZE_OPS
from quantplug.core.specs.stored_dtypes import dtype_range


def structure(model: fx.GraphModule) -> tuple[Counter[str], str]:
    """Returns how often each operator call occurs, named by everything it depends on, and what the outputs are.

    Two graphs with equal structures compute the same values by the same calls; only the order of the
    nodes and the names of attributes may differ. Constants count by their content.
    """
    names: dict[fx.Node, str] = {}
    calls: Counter[str] = Counter()
    outputs = ""
    state = written_buffers(model.graph)
    for node in model.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"input {node.target}"
        elif node.op == "get_attr":
            path = str(node.target)
            names[node] = f"state {path}" if path in state else _content(attribute(model, path))
        elif node.op == "call_function":
            names[node] = _digest(repr((str(node.target), _named(node.args, names), _named(node.kwargs, names))))
            calls[f"{node.target} {names[node]}"] += 1
        elif node.op == "output":
            outputs = repr(_named(node.args, names))
    return calls, outputs


def differences(ours: fx.GraphModule, theirs: fx.GraphModule) -> list[str]:
    """Returns what one graph has and the other has not, calls first."""
    (mine, my_outputs), (peer, peer_outputs) = structure(ours), structure(theirs)
    found = [f"only ours: {call}" for call in mine - peer] + [f"only theirs: {call}" for call in peer - mine]
    return found + (["other outputs"] if my_outputs != peer_outputs else [])


def _named(value: Any, names: dict[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return [_named(v, names) for v in value]
    if isinstance(value, dict):
        return {k: _named(v, names) for k, v in sorted(value.items())}
    return value


def _content(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        data = plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
        return _digest(f"{plain.dtype} {tuple(plain.shape)} {bytes(data.numpy().tobytes()).hex()}")
    if isinstance(value, fx.GraphModule):
        calls, outputs = structure(value)
        return _digest(repr((sorted(calls.items()), outputs)))
    return type(value).__name__


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def is_reference_quantized(model: fx.GraphModule) -> bool:
    """Tells whether a graph module is a reference quantized model: it has q/dq nodes and no defect."""
    has_pairs = any(node.target in DEQUANTIZE_OPS for node in model.graph.nodes)
    return has_pairs and not reference_defects(model)


def reference_defects(model: fx.GraphModule) -> list[str]:
    """Returns every way in which a graph module departs from the format of docs/reference-model.md.

    Raises:
        ModelError: the model is no graph module.
    """
    found: list[str] = []
    for node in require_graph_module(model, "reference_defects").graph.nodes:
        if observer_of(node) is not None:
            found.append(f"{describe(node)} still observes; convert the model.")
        elif node.target in QUANTIZE_OPS:
            found += _quantize_defects(node)
        elif node.target in DEQUANTIZE_OPS:
            found += _dequantize_defects(node)
    return found


def _quantize_defects(node: fx.Node) -> Iterator[str]:
    for user in node.users:
        if user.target not in DEQUANTIZE_OPS:
            yield f"{describe(node)} is read by {describe(user)}, which is no dequantize node."
        elif user.target not in AFFINE_OPS and not _same(node.args[1:], user.args[1 : len(node.args)]):
            yield f"{describe(user)} has other parameters than {describe(node)}, which it reads."
    yield from _parameter_defects(node)


def _dequantize_defects(node: fx.Node) -> Iterator[str]:
    source = node.all_input_nodes[0]
    if source.target in QUANTIZE_OPS:
        return
    if source.op not in ("get_attr", "placeholder"):
        yield f"{describe(node)} reads {describe(source)}, which is no quantize node, constant or input."
        return
    yield from _parameter_defects(node)
    stored = constant_value(source)
    if stored is None or node.target in AFFINE_OPS:
        return
    low, high, dtype = _limits(node)
    if stored.dtype != dtype:
        yield f"{describe(node)} expects {dtype}, but the constant '{source.target}' holds {stored.dtype}."
    elif stored.numel() and not (low <= stored.float().min() and stored.float().max() <= high):
        yield f"The constant '{source.target}' leaves the range {low}..{high} of {describe(node)}."


def _parameter_defects(node: fx.Node) -> Iterator[str]:
    if node.target in AFFINE_OPS or len(node.args) < 6:
        return
    low, high, dtype = _limits(node)
    least, greatest = dtype_range(dtype)
    if not least <= low < high <= greatest:
        yield f"{describe(node)} has the range {low}..{high}, which {dtype} cannot hold."
    scale, zero_point = (constant_value(n) if isinstance(n, fx.Node) else torch.tensor(n) for n in node.args[1:3])
    if scale is None or zero_point is None:
        return
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        yield f"{describe(node)} has a scale that is not finite and positive."
    if not zero_point.is_floating_point() and not bool(((low <= zero_point) & (zero_point <= high)).all()):
        yield f"{describe(node)} has a zero point outside of {low}..{high}."
    if len(node.args) == 7:
        yield from _channel_defects(node, scale, zero_point)


def _limits(node: fx.Node) -> tuple[int, int, torch.dtype]:
    """Returns the last three arguments of a q/dq node: quant_min, quant_max and dtype."""
    arguments: Any = node.args
    low, high, dtype = arguments[-3:]
    return low, high, dtype


def _channel_defects(node: fx.Node, scale: Tensor, zero_point: Tensor) -> Iterator[str]:
    value, axis = tensor_value(node.all_input_nodes[0]), node.args[3]
    if value is None or not isinstance(axis, int):
        return
    if axis >= value.dim():
        yield f"{describe(node)} has its channels along axis {axis} of {value.dim()} dimensions."
    elif {scale.numel(), zero_point.numel()} != {value.shape[axis]}:
        yield f"{describe(node)} has {scale.numel()} scales for {value.shape[axis]} channels."


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Tells whether arguments are equal; constants are equal if they read the same attribute."""

    def read(value: Any) -> Any:
        return ("constant", value.target) if isinstance(value, fx.Node) and value.op == "get_attr" else value

    return [read(v) for v in one] == [read(v) for v in other]
