"""What the nodes that replace an observer's call carry: the tensor's value, its history, its debug handles.

Before: the call, with what export and the quantizer left on it and on the operator before it. After: the same on the
quantize and dequantize nodes in its place, so that partitioners and debuggers find them.
"""

from typing import Any

from torch import Tensor, fx
from torch.fx.traceback import NodeSource, NodeSourceAction

from quantplug.core.observers.sharing import annotation_of
from quantplug.core.qdq.nodes import stored_dtype

# What a quantize or dequantize node takes over from the operator that it belongs to.
_PORTED_META = ("nn_module_stack", "stack_trace", "quantization_tag")
_PASS_NAME = "quantplug.convert"


class Metadata:
    """Describes the nodes of one graph."""

    def __init__(self) -> None:
        self._stored: dict[Any, Tensor] = {}

    def describe(self, call: fx.Node, quantized: fx.Node, dequantized: fx.Node) -> None:
        """Carries the tensor's value and its debug handles over to the nodes that replace an observer's call."""
        source = _source_of(call)
        value = call.meta.get("val")
        for node in (quantized, dequantized):
            node.meta["from_node"] = [source]
            if "custom" in call.meta:
                node.meta["custom"] = call.meta["custom"]
        if isinstance(value, Tensor):
            dequantized.meta["val"] = value
            if quantized.op == "call_function":
                quantized.meta["val"] = self.stored(value, stored_dtype(quantized))
        producer = call.all_input_nodes[0]
        annotation = annotation_of(producer)
        # What holds a stored constant stands for the constant itself.
        if quantized.op == "get_attr" or (annotation is not None and annotation.output_qspec is not None):
            port(producer, quantized)

    def stored(self, value: Tensor, dtype: Any) -> Tensor:
        """Returns a recorded value in the dtype that is stored; alike tensors share one, for the time it takes."""
        if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return value.to(dtype)
        key = (tuple(value.shape), value.stride(), value.device, dtype)
        if key not in self._stored:
            self._stored[key] = value.to(dtype)
        return self._stored[key]


def port(operator: fx.Node, node: fx.Node) -> None:
    """Gives a quantize or dequantize node what it takes over from the operator that it belongs to."""
    node.meta.update({key: operator.meta[key] for key in _PORTED_META if key in operator.meta})


def _source_of(call: fx.Node) -> NodeSource:
    """Returns where the nodes that replace a call come from.

    `NodeSource(call)` would copy the call's whole history, which takes longer than the conversion.
    """
    source = NodeSource(None, _PASS_NAME, NodeSourceAction.CREATE)
    source.node_info = NodeSource.NodeInfo(call.name, str(call.target), id(call.graph))
    source.from_node = list(call.meta.get("from_node", ()))
    return source
