"""Emulation: a q/dq graph computed with the integer arithmetic of a backend's kernels, in PyTorch."""

from quantplug.lowering.emulation.emulate import EmulatedProgram, KernelSet, Prepared, emulate, kernel_set
from quantplug.lowering.emulation.numerics import FixedPoint, Numerics, float_round_even
from quantplug.lowering.emulation.rows import Row

__all__ = [
    "EmulatedProgram",
    "FixedPoint",
    "KernelSet",
    "Numerics",
    "Prepared",
    "Row",
    "emulate",
    "float_round_even",
    "kernel_set",
]
