"""Constants of four bits, two to a byte, where their integers are -8..7.

Before: an `openvino.Model` whose integer constants have eight bits, since torch has no tensors of four and the front
end makes none. After: those that fit have four, and OpenVINO's kernels of compressed weights read them as they are.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from quantplug.core.specs.stored_dtypes import stored_range

FOUR_BITS = (-8, 7)
# What lies between a constant and the kernel that reads it, or between a rounding of activations and that.
_ON_THE_WAY = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Squeeze", "Unsqueeze")


def stored_bits(spec: QuantizationSpec, activation: QuantizationSpec | None) -> int:
    """Returns how many bits a file takes for each number of a weight."""
    low, high = stored_range(spec)
    return 4 if activation is None and FOUR_BITS[0] <= low and high <= FOUR_BITS[1] else 8


def store_in_four_bits(model: Any) -> None:
    """Stores the integer constants of an `openvino.Model` in four bits where they fit.

    Kernels of integer activations read eight, so what is multiplied by those stays.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_element_type().get_type_name() == "i8":
            values = node.data
            if _fits(values) and _is_scaled(node) and not any(map(_reads_integers, _kernels(node))):
                node.output(0).replace(_packed(values, node.get_friendly_name()).output(0))


def _fits(values: Any) -> bool:
    return values.ndim > 1 and bool(values.min() >= FOUR_BITS[0] and values.max() <= FOUR_BITS[1])


def _is_scaled(constant: Any) -> bool:
    return {reader.get_type_name() for reader in _readers(constant)} == {"Convert"}


def _readers(node: Any) -> Iterator[Any]:
    return (port.get_node() for output in node.outputs() for port in output.get_target_inputs())


def _kernels(constant: Any) -> list[Any]:
    """Returns what reads a constant once it is scaled and in shape."""
    found, pending = [], list(_readers(constant))
    while pending:
        node = pending.pop()
        if node.get_type_name() in _ON_THE_WAY:
            pending += _readers(node)
        else:
            found.append(node)
    return found


def _reads_integers(kernel: Any) -> bool:
    return any(_origin(source.get_node()).get_type_name() == "FakeQuantize" for source in kernel.input_values())


def _origin(node: Any) -> Any:
    while node.get_type_name() in _ON_THE_WAY:
        node = node.input_value(0).get_node()
    return node


def _packed(values: Any, name: str) -> Any:
    """Returns a constant of two's complements of four bits, the first of each pair in the lower half."""
    import openvino
    from openvino import opset13

    halves = values.reshape(-1).view(np.uint8) & 15
    halves = np.append(halves, np.zeros(halves.size % 2, np.uint8))
    tensor = openvino.Tensor(openvino.Type.i4, openvino.Shape(list(values.shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = halves[::2] | (halves[1::2] << 4)
    constant = opset13.constant(tensor)
    constant.set_friendly_name(name)
    return constant
