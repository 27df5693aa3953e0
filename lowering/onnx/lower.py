"""From a q/dq graph to ONNX, run by ONNX Runtime.

Before: the result of `convert_pt2e`. After: an `ONNXProgram` that has run on the example inputs, whose weights are
integers in the file. torch's exporter writes the graph; ONNX Runtime fuses DequantizeLinear, an operator and
QuantizeLinear to one kernel of integers where it has one, and the graph that it runs says where it did.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import ConfigError, LoweringError
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import (
    describe,
    operator_name,
    require_graph_module,
)
from quantplug.core.graph.operators import KEEPERS, schema_names
from quantplug.core.qdq.nodes import is_qdq, is_quantize
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.agreement import agreement
from quantplug.lowering.halves import spell_out_halves
from quantplug.lowering.onnx.export import checked, number_of, to_onnx
from quantplug.lowering.onnx.forms import of_wide_opset, shift_to_unsigned, write_forms
from quantplug.lowering.onnx.kernels import carried_out
from quantplug.lowering.onnx.program import ONNXProgram
from quantplug.lowering.onnx.runtime import WRITERS, require
from quantplug.lowering.onnx.translations import WIDE_OPSET
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.outputs import make_distinct
from quantplug.lowering.placement import record
from quantplug.lowering.processor import largest_factors
from quantplug.lowering.program import LoweredOp, refusal
from quantplug.lowering.scopes import require_no_autocast
from quantplug.lowering.signature import Signature
from quantplug.lowering.sources import sources
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting, state_of, twin

# The exporter writes no earlier one. From 21 on ONNX Runtime (1.32) refuses some graphs of int8 activations.
_OPSETS = range(18, 24)
_USUAL = 20
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
    source = require_graph_module(converted, "lower")
    require(WRITERS)
    module = starting(source)
    require_no_autocast(module.graph, "ONNX does")
    _require_no_state(module)
    reference, recorded = twin(module), record(module.graph)
    pair = _require_pairs(module.graph)
    shift_to_unsigned(module.graph)
    spell_plainly(module.graph)
    halves = spell_out_halves(module.graph)
    narrow = write_forms(module.graph)
    version = _opset(opset, module.graph)
    outputs = make_distinct(module)
    finish(module)
    # As the graph has them: the user's own may name parameters that it has no longer, or sizes that got a condition.
    shapes = open_sizes(module.graph, example_inputs) or dynamic_shapes
    try:
        exported = torch.export.export(module, example_inputs, dynamic_shapes=shapes)
        model, written = to_onnx(exported, version, narrow)
        checked(model)
        program = ONNXProgram(model, Signature.of_exported(exported), outputs, pair)
        program(*example_inputs)
        found = program(*example_inputs)  # the second call: what a kernel left behind in the first shows
    except LoweringError:
        raise
    except Exception as error:
        raise refusal("ONNX", error) from error
    agreement(found, twin(reference)(*example_inputs), reference, example_inputs)
    names = sources(written.graph.nodes, module.graph, {operator.node for operator in recorded})
    program.ops = _placed(recorded, _kernels(program, names), reference.graph, halves)
    return program


def _opset(asked: int | None, graph: fx.Graph) -> int:
    node = of_wide_opset(graph)
    if asked is None:
        return _USUAL if node is None else WIDE_OPSET
    if asked not in _OPSETS:
        raise ConfigError(f"opset is {asked!r}; choose one of {_OPSETS.start} to {_OPSETS.stop - 1}.")
    if node is not None and asked < WIDE_OPSET:
        raise ConfigError(
            f"opset is {asked}, and {describe(node)} has integers of 4 or 16 bits or scales of groups, which ONNX has "
            f"from opset {WIDE_OPSET} on; give opset={WIDE_OPSET}."
        )
    return asked


def _require_pairs(graph: fx.Graph) -> int:
    """Returns how large the sum of two products can get; without VNNI the kernels overflow where those of torch do."""
    activation, weight = largest_factors(graph, otherwise=255)
    pair = activation * weight
    reason = ONEDNN_PAIRS.objection(pair)
    if reason is not None:
        raise LoweringError(f"The graph would give wrong numbers in ONNX Runtime: {reason}.")
    return pair


def _require_no_state(module: fx.GraphModule) -> None:
    written = next(iter(state_of(module)), None)
    if written is not None:
        raise LoweringError(
            f"ONNX keeps no state, and the model writes buffer '{written}'; pass it as an input and return it, or use "
            "backend 'x86'."
        )


def _kernels(program: ONNXProgram, names: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Returns the operators of the q/dq graph that integer kernels carry out."""
    of_numbers: dict[int, frozenset[str]] = {}
    for node in program.model.graph:
        number = number_of(node.name)
        if number is not None:
            of_numbers[number] = names.get(node.name.partition("@")[0], frozenset())
    return carried_out(program.kernels, of_numbers)


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
