"""A q/dq graph as a model of ONNX, for whatever engine reads it.

Before: the result of `convert_pt2e`. After: a `Written`: the model, what its calls take and return, and what is needed
to judge it by the graph. torch's exporter writes it; the weights are integers in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import ConfigError, LoweringError
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import describe, operator_name, require_graph_module
from quantplug.core.graph.multiplications import multiplications
from quantplug.core.graph.operators import KEEPERS, schema_names
from quantplug.core.qdq.nodes import is_qdq, is_quantize
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.agreement import agreement
from quantplug.lowering.halves import spell_out_halves
from quantplug.lowering.onnx.engines import Engine
from quantplug.lowering.onnx.export import number_of, to_onnx
from quantplug.lowering.onnx.forms import of_wide_opset, shift_to_unsigned, write_forms
from quantplug.lowering.onnx.program import ONNXProgram
from quantplug.lowering.onnx.runtime import WRITERS, require
from quantplug.lowering.onnx.translations import WIDE_OPSET
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.outputs import Outputs, make_distinct
from quantplug.lowering.placement import record
from quantplug.lowering.processor import largest_factors
from quantplug.lowering.program import LoweredOp, refusal
from quantplug.lowering.rewrites.control import quantized_branches_are_inlined
from quantplug.lowering.scopes import require_no_autocast
from quantplug.lowering.signature import Signature
from quantplug.lowering.sources import sources
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting, state_of, twin

# The exporter writes no earlier one. From 21 on ONNX Runtime (1.32) refuses some graphs of int8 activations.
_OPSETS = range(18, 24)
_USUAL = 20
_KEEPERS = schema_names(KEEPERS)


@dataclass(frozen=True)
class Written:
    """A model of ONNX and what it was written from.

    Attributes:
        model: the `onnx_ir.Model`.
        signature: what a call takes.
        outputs: what it returns.
        pair: how large the sum of two products can get.
        operators: the compute operators of the q/dq graph; those that stay float have their reason.
        sources: for the numbers in the names of the model's nodes the operators that each carries out.
        halves: what is said of operators whose weights are stored in half precision.
        reference: the q/dq graph.
        inputs: the example inputs.
    """

    model: Any
    signature: Signature
    outputs: Outputs
    pair: int
    operators: tuple[LoweredOp, ...]
    sources: Mapping[int, frozenset[str]]
    halves: Mapping[str, str]
    reference: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def products(self) -> frozenset[str]:
        """The operators of the graph that multiply tensors."""
        return frozenset(node.name for node in self.reference.graph.nodes if multiplications(node))

    def judge(self, program: ONNXProgram) -> None:
        """Makes sure that a program of the model computes what the graph computes.

        Raises:
            LoweringError: it does not, or it does not run.
        """
        try:
            program(*self.inputs)
            found = program(*self.inputs)  # the second call: what a kernel left behind in the first shows
        except LoweringError:
            raise
        except Exception as error:
            raise refusal("ONNX", error) from error
        agreement(found, twin(self.reference)(*self.inputs), self.reference, self.inputs)

    def placed(self, kernels: Mapping[str, str], otherwise: str, how: str = "") -> tuple[LoweredOp, ...]:
        """Returns the operators with their placement.

        What moves or bounds integers, and has no kernel left, went into the kernel that yields or reads them.

        Args:
            kernels: the operators that run on integers, each with its kernel.
            otherwise: why the others do not, where the plan gives no reason.
            how: what is said of those that do.
        """
        kernels, nodes = dict(kernels), {node.name: node for node in self.reference.graph.nodes}
        for operator in self.operators:
            if operator.node not in kernels and not operator.reason:
                before = _read_between(nodes[operator.node])
                if before in kernels:
                    kernels[operator.node] = kernels[before]
        return tuple(self._told(operator, kernels, otherwise, how) for operator in self.operators)

    def _told(self, operator: LoweredOp, kernels: Mapping[str, str], otherwise: str, how: str) -> LoweredOp:
        if operator.node in kernels and not operator.reason:
            return replace(operator, placement="int8", how=how)
        reason = operator.reason or self.halves.get(operator.node) or otherwise
        return replace(operator, placement="float", reason=reason)


def _read_between(node: fx.Node) -> str | None:
    """Returns the operator that yields what a move or clamp reads, of integers or on the way to them."""
    name = operator_name(node).removesuffix("_")
    if name not in _KEEPERS or not node.users or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    while is_qdq(source):
        source = source.all_input_nodes[0]
    return source.name if all(is_quantize(user) for user in node.users) else None


def write(
    converted: fx.GraphModule, inputs: tuple[Any, ...], dynamic_shapes: Any, opset: int | None, engine: Engine
) -> Written:
    """Writes a q/dq graph as a model of ONNX.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        inputs: as for `torch.export.export`.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.
        opset: of the file, 18 to 23; None for 20, or 21 for weights in groups and integers of 4 or 16 bits.
        engine: what is to read it.

    Raises:
        ModelError: `converted` is no graph module.
        ConfigError: there is no such opset, or it has no integers like those of the graph.
        LoweringError: a package is missing, an operator has no form in ONNX, or the engine would compute wrong numbers.
    """
    source = require_graph_module(converted, "lower")
    require(WRITERS, engine)
    module = quantized_branches_are_inlined(starting(source))
    require_no_autocast(module.graph, "ONNX does")
    _require_no_state(module, engine)
    reference, recorded = twin(module), record(module.graph)
    pair = _largest_pair(module.graph, engine)
    if engine.computes_on_integers:
        shift_to_unsigned(module.graph)
    spell_plainly(module.graph)
    halves = spell_out_halves(module.graph)
    narrow = write_forms(module.graph, engine)
    version = _opset(opset, module.graph)
    outputs = make_distinct(module)
    finish(module)
    # As the graph has them: the user's own may name parameters that it has no longer, or sizes that got a condition.
    shapes = open_sizes(module.graph, inputs) or dynamic_shapes
    try:
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes)
        model, program = to_onnx(exported, version, narrow, engine)
        signature = Signature.of_exported(exported)
    except LoweringError:
        raise
    except Exception as error:
        raise refusal("ONNX", error) from error
    names = sources(program.graph.nodes, module.graph, {operator.node for operator in recorded})
    return Written(model, signature, outputs, pair, recorded, _by_number(model, names), halves, reference, inputs)


def _by_number(model: Any, names: Mapping[str, frozenset[str]]) -> dict[int, frozenset[str]]:
    numbered = ((number_of(node.name), names.get(node.name.partition("@")[0])) for node in model.graph)
    return {number: found for number, found in numbered if number is not None and found}


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


def _largest_pair(graph: fx.Graph, engine: Engine) -> int:
    """Returns how large the sum of two products can get; without VNNI the kernels overflow where those of torch do."""
    activation, weight = largest_factors(graph, otherwise=255)
    pair = activation * weight
    reason = ONEDNN_PAIRS.objection(pair) if engine.computes_on_integers else None
    if reason is not None:
        raise LoweringError(f"The graph would give wrong numbers in {engine.name}: {reason}.")
    return pair


def _require_no_state(module: fx.GraphModule, engine: Engine) -> None:
    written = next(iter(state_of(module)), None)
    if written is not None:
        raise LoweringError(
            f"ONNX keeps no state, and the model writes buffer '{written}'; pass it as an input and return "
            f"it{engine.remedy}."
        )
