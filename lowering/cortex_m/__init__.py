"""Lowering to CMSIS-NN on Arm Cortex-M: `lower(converted, example_inputs)` gives a `CortexMProgram`."""

from quantplug.lowering.cortex_m.lower import lower
from quantplug.lowering.cortex_m.program import CortexMProgram

__all__ = ["CortexMProgram", "lower"]
