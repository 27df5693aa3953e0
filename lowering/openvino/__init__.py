"""Lowering to OpenVINO's own compiler: `lower(converted, example_inputs)` gives an `OpenVINOProgram`."""

from quantplug.lowering.openvino.lower import lower
from quantplug.lowering.openvino.program import OpenVINOProgram

__all__ = ["OpenVINOProgram", "lower"]
