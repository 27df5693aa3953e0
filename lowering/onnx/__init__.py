"""Lowering to ONNX, run by ONNX Runtime: `lower(converted, example_inputs)` gives an `ONNXProgram`."""

from quantplug.lowering.onnx.lower import lower
from quantplug.lowering.onnx.program import ONNXProgram

__all__ = ["ONNXProgram", "lower"]
