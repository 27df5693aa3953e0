"""Lowering to oneDNN quantized kernels on x86: `lower(converted, example_inputs)` gives an `X86Program`."""

from quantplug.lowering.x86.lower import lower, lower_to_package
from quantplug.lowering.x86.running.packaged import X86Package
from quantplug.lowering.x86.running.program import X86Program

__all__ = ["X86Package", "X86Program", "lower", "lower_to_package"]
