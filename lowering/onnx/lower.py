"""From a q/dq graph to ONNX, run by ONNX Runtime.

Before: the result of `convert_pt2e`. After: an `ONNXProgram` that has run on the example inputs. ONNX Runtime fuses
DequantizeLinear, an operator and QuantizeLinear to one kernel of integers where it has one, and the graph that it runs
says where it did.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.operators import KEEPERS, schema_names
from quantplug.core.qdq.nodes import is_qdq, is_quantize
from quantplug.lowering.onnx.engines import ONNX_RUNTIME
from quantplug.lowering.onnx.export import checked
from quantplug.lowering.onnx.kernels import carried_out
from quantplug.lowering.onnx.program import ONNXProgram
from quantplug.lowering.onnx.write import Written, write
from quantplug.lowering.program import LoweredOp, refusal

_KEEPERS = schema_names(KEEPERS)


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
    kernels = carried_out(program.kernels, written.sources)
    program.ops = _placed(written.operators, kernels, written.reference.graph, written.halves)
    return program


def _started(written: Written) -> ONNXProgram:
    try:
        checked(written.model)
        return ONNXProgram(written.model, written.signature, written.outputs, written.pair)
    except LoweringError:
        raise
    except Exception as error:
        raise refusal("ONNX", error) from error


def _placed(
    recorded: tuple[LoweredOp, ...], kernels: dict[str, str], graph: fx.Graph, halves: Mapping[str, str]
) -> tuple[LoweredOp, ...]:
    """Returns the operators with their placement.

    What moves or bounds integers, and has no kernel left, went into the kernel that yields or reads them.
    """
    nodes = {node.name: node for node in graph.nodes}
    for operator in recorded:
        if operator.node not in kernels and not operator.reason:
            before = _read_between(nodes[operator.node])
            if before in kernels:
                kernels[operator.node] = kernels[before]
    return tuple(_told(operator, kernels, halves) for operator in recorded)


def _read_between(node: fx.Node) -> str | None:
    """Returns the operator that yields what a move or clamp reads, of integers or on the way to them."""
    name = operator_name(node).removesuffix("_")
    if name not in _KEEPERS or not node.users or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    while is_qdq(source):
        source = source.all_input_nodes[0]
    return source.name if all(is_quantize(user) for user in node.users) else None


def _told(operator: LoweredOp, kernels: Mapping[str, str], halves: Mapping[str, str]) -> LoweredOp:
    kernel = kernels.get(operator.node)
    if kernel is not None and not operator.reason:
        return dataclasses.replace(operator, placement="int8", how="")
    reason = operator.reason or halves.get(operator.node) or "ONNX Runtime computes it in float"
    return dataclasses.replace(operator, placement="float", reason=reason)
