"""From a q/dq graph to TOSA, and on to the command stream of an Ethos-U.

Before: the result of `convert_pt2e`. After: an `ArmProgram` that has run on the example inputs. ExecuTorch's own
passes and partitioner write the TOSA graphs, from the operators that our rules took.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import ConfigError, LoweringError
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.lowering.agreement import agreement
from quantplug.lowering.arm.forms import write_forms
from quantplug.lowering.arm.program import ArmProgram, contiguous
from quantplug.lowering.arm.reference_model import delegates_of
from quantplug.lowering.arm.target import Target, target_of
from quantplug.lowering.arm_marks import mark_quantized, quiet
from quantplug.lowering.executorch_names import telling_partitioner, unchecked
from quantplug.lowering.placement import record
from quantplug.lowering.program import LoweredOp, refusal
from quantplug.lowering.scopes import require_no_autocast
from quantplug.lowering.signed import signed_integers
from quantplug.lowering.sources import sources
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting, twin

_PORTABLE = "ExecuTorch's partitioner for this target leaves it to the processor"


def lower(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    target: str = "ethos-u85-256",
    dynamic_shapes: Any = None,
) -> ArmProgram:
    """Lowers a q/dq graph to TOSA and compiles it for an NPU.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        example_inputs: inputs as for `torch.export.export`.
        target: the NPU, such as "ethos-u55-128" or "ethos-u85-256", or "tosa" for TOSA alone.
        dynamic_shapes: must be None: command streams are of one size.

    Raises:
        ModelError: `converted` is no graph module.
        ConfigError: there is no such target, or shapes are dynamic.
        LoweringError: a package is missing, the passes or Vela refuse the graph, or the program does not compute what
            the graph computes.
    """
    source = require_graph_module(converted, "lower")
    if dynamic_shapes is not None:
        raise ConfigError("Programs for Arm NPUs have one shape, found dynamic_shapes; leave it out.")
    chosen, inputs = target_of(target), contiguous(example_inputs)
    module = starting(source)
    require_no_autocast(module.graph, "TOSA does")
    reference, recorded = twin(module), record(module.graph)
    mark_quantized(module.graph)
    signed_integers(module.graph)
    spell_plainly(module.graph)
    write_forms(module.graph)
    finish(module)
    try:
        with quiet(), torch.no_grad():
            exported, said = _through_passes(module, inputs, chosen)
            program = ArmProgram(exported, chosen)
            program(*inputs)
            found = program(*inputs)  # the second call: what the first left behind shows
    except LoweringError:
        raise
    except Exception as error:
        cause = error.__cause__
        raise refusal("TOSA", cause if isinstance(cause, Exception) else error) from error
    program.restart()
    with torch.no_grad():
        agreement(found, twin(reference)(*inputs), reference, inputs)
    program.ops = tuple(_placed(recorded, program, module.graph, said))
    return program


def _through_passes(
    model: fx.GraphModule, inputs: tuple[Any, ...], target: Target
) -> tuple[torch.export.ExportedProgram, dict[fx.Node, str]]:
    """Returns an edge program with delegates, and for the nodes that are in none why not."""
    from executorch.exir import to_edge_transform_and_lower

    exported, said = torch.export.export(model, inputs), dict[fx.Node, str]()
    partitioner = [telling_partitioner(target.tosa, said)]
    lowered = to_edge_transform_and_lower(exported, partitioner=partitioner, compile_config=unchecked(()))
    return lowered.exported_program(), said


def _placed(
    recorded: tuple[LoweredOp, ...], program: ArmProgram, graph: fx.Graph, said: Mapping[fx.Node, str]
) -> Iterator[LoweredOp]:
    """Yields the operators with their placement: one that a TOSA graph carries out is there in integers.

    Conversions at its border stand outside of it, so that one inside is a step of an operator, such as a clamp.
    """
    names = {operator.node for operator in recorded}
    inside: set[str] = set()
    for delegate in delegates_of(program.exported).values():
        nodes = delegate.original_module.graph.nodes
        known = sources(nodes, graph, names)
        computing = (node for node in nodes if node.op == "call_function" and not is_dequantize(node))
        inside.update(name for node in computing for name in known[node.name])
    reasons = _reasons(said, graph, names)
    for operator in recorded:
        if operator.node in inside:
            yield dataclasses.replace(operator, placement="int8", reason="")
        else:
            reason = operator.reason or reasons.get(operator.node, _PORTABLE)
            yield dataclasses.replace(operator, placement="portable", reason=reason)


def _reasons(said: Mapping[fx.Node, str], graph: fx.Graph, names: Set[str]) -> dict[str, str]:
    """Returns why operators of the q/dq graph are in no TOSA graph, in the partitioner's words."""
    known = sources(said, graph, names)
    found: dict[str, str] = {}
    for node, reason in said.items():
        for name in known[node.name]:
            found.setdefault(name, f"ExecuTorch's partitioner leaves it to the processor: {reason.rstrip('.')}")
    return found
