"""The engines that read a file of ONNX, and how each wants a q/dq graph spelled.

Before: nothing. After: values that the writing of a graph asks, so that it is written once for all of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """What reads a file.

    Attributes:
        name: how messages call it.
        backend: the backend of ours that writes for it.
        remedy: the end of a sentence about a graph that cannot be written, with what else runs it; may be empty.
        computes_on_integers: whether its operators read and write integers beside QuantizeLinear and DequantizeLinear.
            Then clamps are clamps of integers, biases int32, activations uint8 and scales of run time allowed.
            Otherwise what stands between DequantizeLinear and QuantizeLinear is float and stays in its order.
    """

    name: str
    backend: str
    remedy: str
    computes_on_integers: bool


ONNX_RUNTIME = Engine("ONNX Runtime", "onnxruntime", ", or use backend 'x86'", True)
TENSORRT = Engine("TensorRT", "tensorrt", "", False)
