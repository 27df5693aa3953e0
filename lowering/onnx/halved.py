"""A model of ONNX whose floats are of half precision.

Before: a model of float32. After: the same operators on float16, between casts at its ends. Scales are float16 too:
DequantizeLinear yields the dtype of its scale, and TensorRT's strongly typed networks take it from there.
"""

from typing import Any


def halved(model: Any) -> Any:
    """Returns a model in float16, whose inputs and outputs keep their dtypes.

    Args:
        model: the `onnx_ir.Model`; it is not used any more.
    """
    import onnx_ir
    from onnxruntime.transformers.float16 import convert_float_to_float16

    proto = convert_float_to_float16(onnx_ir.to_proto(model), keep_io_types=True, op_block_list=[])
    found = onnx_ir.from_proto(proto)
    found.graph.sort()  # casts of inputs stand at the end
    return found
