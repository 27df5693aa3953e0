"""From a q/dq graph to a file of ONNX that TensorRT's explicit quantization reads.

Before: the result of `convert_pt2e`. After: a `TensorRTProgram` whose file was held to every rule of `explicit.py` and
has run in ONNX Runtime as it is written. There what stands between DequantizeLinear and QuantizeLinear is computed in
float; in an engine of TensorRT it is a kernel of int8, since its explicit quantization computes in the precision that
the file says (NVIDIA, "Explicit Quantization").
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx

from quantplug.core.errors import LoweringError, shown
from quantplug.lowering.onnx.build import EngineLayer, build
from quantplug.lowering.onnx.engines import TENSORRT, Engine
from quantplug.lowering.onnx.explicit import is_int8, require_explicit
from quantplug.lowering.onnx.export import checked, number_of
from quantplug.lowering.onnx.halved import halved
from quantplug.lowering.onnx.program import ONNXProgram
from quantplug.lowering.onnx.write import Written, write
from quantplug.lowering.outputs import Outputs
from quantplug.lowering.program import refusal
from quantplug.lowering.signature import Signature

_FLOATS = (torch.float32, torch.float16)


class TensorRTProgram(ONNXProgram):
    """A file for TensorRT, which ONNX Runtime runs here as it is written, in float.

    Attributes:
        model: the `onnx_ir.Model`.
        session: the `onnxruntime.InferenceSession`.
        ops: every compute operator of the q/dq graph; "int8" is what the file tells TensorRT to run in integers.
        engine: what the file is for.
    """

    engine: ClassVar[Engine] = TENSORRT
    has_kernels = False

    def __init__(self, model: Any, signature: Signature, outputs: Outputs, pair: int = 0) -> None:
        require_explicit(model)
        super().__init__(model, signature, outputs, pair)

    def build(
        self,
        path: str | Path | None = None,
        *,
        smallest: tuple[Any, ...] | None = None,
        largest: tuple[Any, ...] | None = None,
    ) -> tuple[EngineLayer, ...]:
        """Has TensorRT read the file and build an engine of it, for this machine's GPU; returns the engine's layers.

        Args:
            path: where to write the engine, None for nowhere. It runs on GPUs like this one, with this TensorRT.
            smallest: inputs, by position, of the least sizes that the engine takes; for models with open sizes.
            largest: inputs of the greatest sizes, with which it is to be the fastest.

        Raises:
            LoweringError: TensorRT is not installed, finds no GPU, or does not take the file; or inputs do not fit it.
            ArtefactError: the engine cannot be written.
        """
        ends = (None if inputs is None else self._sizes(inputs) for inputs in (smallest, largest))
        return build(self, path, *ends)

    def _sizes(self, inputs: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.named_tensors(inputs, {}).items()}


@torch.no_grad()
def lower(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    float_dtype: torch.dtype = torch.float32,
) -> TensorRTProgram:
    """Writes a q/dq graph as ONNX for TensorRT, and runs it in ONNX Runtime.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        example_inputs: inputs as for `torch.export.export`; the program is run on them.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.
        opset: of the file, 18 to 23; None for 20, or 21 for weights in groups.
        float_dtype: of what stays float, and of scales: torch.float16 computes it in half precision, as TensorRT's
            strongly typed networks take it from the file. Inputs and outputs keep their dtypes.

    Raises:
        ModelError: `converted` is no graph module.
        ConfigError: there is no such opset, or it has no integers like those of the graph.
        LoweringError: a package is missing, an operator has no form in ONNX, the graph is quantized in a way that
            TensorRT does not read, or the file does not compute what the graph computes.
    """
    if not isinstance(float_dtype, torch.dtype) or float_dtype not in _FLOATS:
        raise LoweringError(f"float_dtype is {shown(float_dtype)}; choose torch.float32 or torch.float16.")
    written = write(converted, example_inputs, dynamic_shapes, opset, TENSORRT)
    model = written.model if float_dtype is torch.float32 else halved(written.model)
    require_explicit(model, _declared(written))
    program = _started(written, model)
    written.judge(program)
    program.ops = written.placed(_layers(written, model), "the file has it in float", "in an engine of TensorRT")
    return program


def _started(written: Written, model: Any) -> TensorRTProgram:
    try:
        checked(model)
        return TensorRTProgram(model, written.signature, written.outputs, written.pair)
    except LoweringError:
        raise
    except Exception as error:
        raise refusal("ONNX", error) from error


def _declared(written: Written) -> frozenset[int]:
    """Returns the numbers of the nodes that carry out nothing but operators that are declared int8."""
    floats = {operator.node for operator in written.operators if operator.reason}
    known = {operator.node for operator in written.operators}
    return frozenset(number for number, names in written.sources.items() if names & known and not names & floats)


def _layers(written: Written, model: Any) -> dict[str, str]:
    """Returns the operators that the file has in integers, each with the operator of ONNX."""
    found: dict[str, str] = {}
    for node in model.graph:
        number = number_of(node.name or "")
        if number is not None and is_int8(node):
            found |= dict.fromkeys(written.sources.get(number, ()), node.op_type)
    return found
