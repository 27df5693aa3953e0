"""Lowering to an ExecuTorch program whose kernels are XNNPACK's."""

from quantplug.lowering.xnnpack.pipeline import lower
from quantplug.lowering.xnnpack.program import KernelCounts, XNNPACKProgram

__all__ = ["KernelCounts", "XNNPACKProgram", "lower"]
