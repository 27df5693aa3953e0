"""How one operator is quantized, in words: "int8, int8 per channel -> int8".

Before: a node of an annotated, prepared or converted graph. After: its inputs and its output as a report shows them.
"""

import math
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, QuantizationAnnotation, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.facts import constant_value, operands, tensor_value
from quantplug.core.observers.rowwise import granularity_of, granularity_text
from quantplug.core.qdq.nodes import CAST_OP, is_dequantize, is_dynamic, is_quantize, range_of, stored_dtype
from quantplug.core.specs.stored_dtypes import HALF_DTYPES


def how_annotated(node: fx.Node) -> tuple[list[str], str]:
    """Returns the specs of an annotated node's inputs and of its output, in words."""
    annotation = node.meta.get(Q_ANNOTATION_KEY) or QuantizationAnnotation()
    inputs = [_spec_text(annotation.input_qspec_map.get(_observed(source))) for source in node.all_input_nodes]
    return [text for text in inputs if text], _spec_text(annotation.output_qspec)


def _observed(node: fx.Node) -> fx.Node:
    """What a prepared graph observes at a node, or the node itself where it is no observer."""
    while node.op == "call_module" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _spec_text(spec: Any) -> str:
    if spec is None:
        return ""
    if isinstance(spec, SharedQuantizationSpec):
        place = spec.edge_or_node
        return f"shared with {place.name if isinstance(place, fx.Node) else ' to '.join(n.name for n in place)}"
    kind = "derived" if isinstance(spec, DerivedQuantizationSpec) else ""
    kind = "fixed" if hasattr(spec, "scale") else kind
    per_channel = "per channel" if str(getattr(spec, "qscheme", "")).find("per_channel") >= 0 else ""
    dynamic = "dynamic" if getattr(spec, "is_dynamic", False) else ""
    dtype = _dtype_text(spec.dtype, getattr(spec, "quant_min", None), getattr(spec, "quant_max", None))
    return " ".join(filter(None, (kind, dynamic, dtype, per_channel, granularity_text(granularity_of(spec)))))


def _dtype_text(dtype: torch.dtype, lowest: Any, highest: Any) -> str:
    """Returns a dtype and, where a range takes fewer bits than it has, how many."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(lowest, int) or not isinstance(highest, int):
        return name
    bits = math.ceil(math.log2(max(highest - lowest, 1)))  # -64..64 counts as 7
    return f"{name} of {bits} bits" if bits < 8 * dtype.itemsize else name


def how_converted(node: fx.Node) -> tuple[list[str], str]:
    """Returns what a node reads and what it writes in a converted graph, in words."""
    inputs = [_qdq_text(source) if is_dequantize(source) else _cast_text(source) for source in node.all_input_nodes]
    # A quantize with computed qparams belongs to the reader: the result itself is float.
    outputs = [_qdq_text(user) for user in node.users if is_quantize(user) and not is_dynamic(user)]
    return [text for text in inputs if text], outputs[0] if outputs else ""


def _cast_text(node: fx.Node) -> str:
    """Returns the half type that a tensor was cast to before a cast back, empty for other nodes."""
    source = node.args[0] if node.target is CAST_OP else None
    held = constant_value(source) if isinstance(source, fx.Node) else None
    value = held if held is not None else tensor_value(source)
    return _dtype_text(value.dtype, None, None) if value is not None and value.dtype in HALF_DTYPES else ""


def _qdq_text(node: fx.Node) -> str:
    given, found = operands(node), stored_dtype(node)
    dtype = "integer" if found is None else _dtype_text(found, given.get("quant_min"), given.get("quant_max"))
    dynamic = "dynamic" if is_dynamic(node) else ""
    return " ".join(filter(None, (dynamic, dtype, range_of(node))))


def arrow(inputs: list[str], output: str, into: str) -> str:
    """What goes in and what comes out; `into` names the last node of a fused piece from inside of it."""
    return f"{', '.join(inputs) or 'fused'} -> {output or (into and f'fused into {into}') or 'float'}"
