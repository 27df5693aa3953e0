"""Lowering to TOSA and Arm Ethos-U: `lower(converted, example_inputs)` gives an `ArmProgram`."""

from quantplug.lowering.arm.lower import lower
from quantplug.lowering.arm.program import ArmProgram

__all__ = ["ArmProgram", "lower"]
