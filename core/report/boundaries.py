"""Boundaries of a converted graph: where numbers change their form, or pass from one quantizer to another.

Before: a q/dq graph. After: for each quantize and dequantize node at which something changes, who writes and who
reads the tensor, in which form, how many elements it has, and what the change costs in accuracy.

Errors are known twice. From the qparams alone: the largest error over every value that the quantized producer can
hold, whatever the data. From data, by `measure_boundaries`: the signal to noise ratio that was seen.
"""

import operator
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.facts import is_constant, require_graph_module, tensor_value
from quantplug.core.observers.sharing import annotation_of
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic, is_qdq, is_quantize, is_weight, range_of, stored_dtype
from quantplug.core.qdq.qparams import StaticQParams, static_qparams
from quantplug.core.report.compare import node_values
from quantplug.core.specs.decision import decision
from quantplug.core.specs.levels import sqnr

# int16 has 65,536 values; an error over more of them is not worth its time.
_MOST_LEVELS = 2**16


@dataclass(frozen=True)
class Boundary:
    """A place where numbers change their form, or pass from one quantizer to another.

    Attributes:
        node: the quantize or dequantize node.
        kind: "quantize" from float, "dequantize" to float, "requantize" from integers to other integers, or
            "shared" where another quantizer's operators read the integers as they are.
        producer: the node whose value crosses.
        consumers: the nodes that read it on the other side.
        elements: elements of the tensor, or None where its shape is symbolic or not known.
        source: the quantizer that annotated what computes the tensor; "" if none is known.
        readers: the quantizers that annotated what reads it.
        before: the form of the numbers on the producer's side, such as "int8, scale 0.0123, zero point -5".
        after: their form on the readers' side.
        error: the largest error that the change makes of a value within the range of both sides, by the qparams
            alone; None where they are found at run time or there is one for each channel.
        clipped: the share of the producer's integers that lie outside of the readers' range; None where it is
            not known.
    """

    node: str
    kind: str
    producer: str
    consumers: tuple[str, ...]
    elements: int | None
    source: str = ""
    readers: tuple[str, ...] = ()
    before: str = "float"
    after: str = "float"
    error: float | None = None
    clipped: float | None = None


def boundaries(graph: fx.Graph, quantized: Set[fx.Node]) -> Iterator[Boundary]:
    """Yields the boundaries of a graph in graph order.

    Args:
        graph: of a converted model; other graphs have none.
        quantized: the operators that compute in integers.
    """
    for node in graph.nodes:
        if is_dequantize(node) and not is_weight(node):
            yield from _behind(node, quantized)
        elif is_quantize(node) and not is_constant(node.args[0]) and _producer(node) not in quantized:
            kind = "requantize" if is_dequantize(node.args[0]) else "quantize"
            yield _boundary(node, kind, list(node.users), [u for dq in node.users for u in dq.users])


def _behind(node: fx.Node, quantized: Set[fx.Node]) -> Iterator[Boundary]:
    """Yields what happens behind a dequantize node: its value goes on in float, or to another quantizer."""
    floats = [user for user in node.users if user not in quantized and not is_qdq(user)]
    if floats:
        yield _boundary(node, "dequantize", floats, floats)
    quantize, source = node.args[0], _owner(_origin(node))
    others = [user for user in node.users if user in quantized and source and _owner(user) not in ("", source)]
    if not others or not is_quantize(quantize) or is_dequantize(quantize.args[0]):
        return
    if _writes_float(quantize):
        yield _boundary(quantize, "quantize", [node], others)
    else:
        yield _boundary(node, "shared", others, others)


def _writes_float(quantize: fx.Node) -> bool:
    """Tells whether it is the reader who quantizes: at run time, or because the producer's kernel ends in float."""
    annotation = annotation_of(_origin(quantize))
    return is_dynamic(quantize) or annotation is None or annotation.output_qspec is None


def _producer(node: fx.Node) -> Any:
    """What computes the tensor that a node reads: behind `getitem`, the operator that yields several."""
    source = node.args[0]
    return source.args[0] if isinstance(source, fx.Node) and source.target is operator.getitem else source


def _origin(node: fx.Node) -> fx.Node:
    """Returns what computed a tensor before it was quantized, perhaps several times."""
    while is_qdq(node) or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _owner(node: fx.Node) -> str:
    found = decision(node)
    return found.owner if found is not None and found.quantized else ""


def _boundary(node: fx.Node, kind: str, consumers: list[fx.Node], readers: list[fx.Node]) -> Boundary:
    crossing = node.args[0]
    assert isinstance(crossing, fx.Node)
    before = node if kind in ("dequantize", "shared") else crossing if kind == "requantize" else None
    after = node if kind != "dequantize" else None
    error, clipped = _cost(before, after)
    return Boundary(
        node=node.name,
        kind=kind,
        producer=crossing.name,
        consumers=tuple(consumer.name for consumer in consumers),
        elements=_elements(crossing),
        source=_owner(_origin(crossing)),
        readers=tuple(dict.fromkeys(filter(None, map(_owner, readers)))),
        before=_form(before),
        after=_form(after),
        error=error,
        clipped=clipped,
    )


def _elements(node: fx.Node) -> int | None:
    found = tensor_value(node)
    known = found is not None and all(isinstance(size, int) for size in found.shape)
    return found.numel() if found is not None and known else None


def _form(node: fx.Node | None) -> str:
    if node is None:
        return "float"
    found = static_qparams(node)
    if found is not None:
        return f"{_name(found.dtype)}, scale {found.scale:.3g}, zero point {found.zero_point}"
    stored = stored_dtype(node)
    dtype = "integer" if stored is None else _name(stored)
    if not is_dynamic(node):
        return f"{dtype}, a scale for each channel"
    return f"{dtype}, {' '.join(filter(None, ('scale', range_of(node), 'found at run time')))}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cost(before: fx.Node | None, after: fx.Node | None) -> tuple[float | None, float | None]:
    """Returns the largest error of a change and the share of integers that it clips."""
    if after is None or before is after:
        return 0.0, 0.0
    new = static_qparams(after)
    old = static_qparams(before) if before is not None else None
    if new is None or (before is not None and old is None):
        return None, None
    # Which float values occur is not in the qparams: those inside of the range move by half a step at most.
    return _requantization(old, new) if old is not None else (new.scale / 2, None)


def _requantization(old: StaticQParams, new: StaticQParams) -> tuple[float | None, float | None]:
    if old.quant_max - old.quant_min >= _MOST_LEVELS:
        return None, None
    levels = torch.arange(old.quant_min, old.quant_max + 1, dtype=torch.float64)
    values = (levels - old.zero_point) * old.scale
    wanted = torch.round(values / new.scale) + new.zero_point
    inside = (wanted >= new.quant_min) & (wanted <= new.quant_max)
    errors = ((wanted - new.zero_point) * new.scale - values).abs()[inside]
    return float(errors.max()) if errors.numel() else None, float((~inside).double().mean())


def measure_boundaries(converted: fx.GraphModule, inputs: tuple[Any, ...]) -> dict[str, float]:
    """Returns the signal to noise ratio in decibels that each quantization and requantization keeps, on data.

    Args:
        converted: what convert returned; submodels of control flow are left out.
        inputs: positional inputs of one batch.

    Returns:
        For each quantize node at a boundary: `sqnr` of the dequantized to the crossing values.

    Raises:
        ModelError: the model is no exported graph.
    """
    graph = require_graph_module(converted, "measure_boundaries").graph
    crossing = {n: n.all_input_nodes[0] for n in graph.nodes if is_quantize(n) and not is_constant(n.args[0])}
    names = {node.name: (source.name, next(iter(node.users)).name) for node, source in crossing.items()}
    values = node_values(converted, inputs, {name for pair in names.values() for name in pair})
    return {name: sqnr(values[after], values[before]) for name, (before, after) in names.items()}
