"""From a q/dq graph to ONNX, run by ONNX Runtime.

Before: the result of `convert_pt2e`. After: an `ONNXProgram` that has run on the example inputs. ONNX Runtime fuses
DequantizeLinear, an operator and QuantizeLinear to one kernel of integers where it has one, and the graph that it runs
says where it did.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.lowering.onnx.engines import ONNX_RUNTIME
from quantplug.lowering.onnx.export import checked
from quantplug.lowering.onnx.kernels import carried_out
from quantplug.lowering.onnx.program import ONNXProgram
from quantplug.lowering.onnx.write import Written, write
from quantplug.lowering.program import refusal


@torch.no_grad()
def lower(
    converted: fx.GraphModule, example_inputs: tuple[Any, ...], *, dynamic_shapes: Any = None, opset: int | None = None
) -> ONNXProgram:
    """Writes a q/dq graph as ONNX and runs it in ONNX Runtime.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        example_inputs: inputs as for `torch.export.export`; the program is run on them.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.
        opset: of the file, 18 to 23; None for 20, or 21 for weights in groups and integers of 4 or 16 bits.

    Raises:
        ModelError: `converted` is no graph module.
        ConfigError: there is no such opset, or it has no integers like those of the graph.
        LoweringError: a package is missing, an operator has no form in ONNX, or the program does not compute what the
            graph computes.
    """
    written = write(converted, example_inputs, dynamic_shapes, opset, ONNX_RUNTIME)
    program = _started(written)
    written.judge(program)
    kernels = carried_out(program.kernels, written.sources, written.products)
    program.ops = written.placed(kernels, "ONNX Runtime computes it in float")
    return program


def _started(written: Written) -> ONNXProgram:
    try:
        checked(written.model)
        return ONNXProgram(written.model, written.signature, written.outputs, written.pair)
    except LoweringError:
        raise
    except Exception as error:
        raise refusal("ONNX", error) from error
