"""From a q/dq graph to ExecuTorch's `cortex_m` dialect.

Before: the result of `convert_pt2e`. After: a `CortexMProgram` that has run on the example inputs. ExecuTorch's own
passes do the work; they look for a mark that Arm's quantizers leave on the operators that they quantize, so
this one leaves it on those that our rules took.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import ConfigError, LoweringError, first_line
from quantplug.core.graph.constants import computed
from quantplug.core.graph.editing import constant, replace
from quantplug.core.graph.facts import (
    compute_nodes,
    is_float,
    is_written,
    module_path,
    require_graph_module,
)
from quantplug.core.patterns.language import op, single_use
from quantplug.core.patterns.rules import apply
from quantplug.core.qdq.nodes import is_qdq
from quantplug.lowering.agreement import agreement
from quantplug.lowering.arm_marks import mark_quantized, quiet
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.cortex_m.program import CortexMProgram, channels_last
from quantplug.lowering.executorch_names import unchecked
from quantplug.lowering.integer_biases import quantize_biases
from quantplug.lowering.program import LoweredOp, refusal
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.starting import starting, starting_from_state, twin

_ATEN = torch.ops.aten
# Operators that the passes want whole.
_PRESERVED = (_ATEN.linear.default, _ATEN.silu.default)
# ExecuTorch 1.4's passes lose the quantization of what a clamp that is not fused stands behind.
_CLAMPS = clamp_rules(single_use(op("conv2d", "linear", "add")))
# Tensors of one number, into which the passes fold quantization whether or not their readers are of integers.
_FILLED = op("full", "ones", "zeros", "full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros")
_PORTABLE = "no cortex_m kernel takes it in this place"


def lower(
    converted: fx.GraphModule, example_inputs: tuple[Any, ...], *, cpu: str = "cortex-m55", dynamic_shapes: Any = None
) -> CortexMProgram:
    """Lowers a q/dq graph to CMSIS-NN kernels.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        example_inputs: inputs as for `torch.export.export`.
        cpu: the core, such as "cortex-m4" or "cortex-m55"; kernels differ by its vector extension.
        dynamic_shapes: must be None: the kernels' buffers are planned for one shape.

    Raises:
        ModelError: `converted` is no graph module.
        ConfigError: there is no such core, or shapes are dynamic.
        LoweringError: a package that ExecuTorch's passes need is missing, or they refuse the graph.
    """
    graph_module = require_graph_module(converted, "lower")
    if dynamic_shapes is not None:
        raise ConfigError("Programs for Cortex-M have one shape, found dynamic_shapes; leave it out.")
    target, inputs = _target(cpu), channels_last(example_inputs)
    module = starting(graph_module)
    reference = twin(module)
    try:
        with quiet(), torch.no_grad():
            exported, buffer = _through_passes(_marked(module), inputs, target)
            program = CortexMProgram(exported, buffer, tuple(_ops(graph_module.graph, exported.graph)))
            found = program(*example_inputs)
    except Exception as error:
        cause = error.__cause__
        raise refusal("Cortex-M", cause if isinstance(cause, Exception) else error) from error
    program.restart()
    with torch.no_grad():
        agreement(found, twin(reference)(*example_inputs), reference, example_inputs)
    return program


def _target(cpu: str) -> Any:
    try:
        # The passes bring the dialect's operators along; imported before them, those do not find each other.
        from executorch.backends.cortex_m import passes  # noqa: F401
        from executorch.backends.cortex_m.target_config import CortexMTargetConfig
    except ImportError as error:
        raise LoweringError(
            f"Lowering to Cortex-M needs a package that is missing ({error}); pip install 'quantplug[cortex-m]'."
        ) from error
    try:
        return CortexMTargetConfig.from_target_string(cpu)
    except ValueError as error:
        raise ConfigError(f"There is no core '{cpu}': {first_line(error)}") from error


def _marked(module: fx.GraphModule) -> fx.GraphModule:
    mark_quantized(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default  # maps are channels-last there, of which not every view exists
    spell_plainly(module.graph)
    apply(module.graph, _CLAMPS)
    _hold_filled(module.graph)
    quantize_biases(module.graph)
    module.recompile()
    return module


def _hold_filled(graph: fx.Graph) -> None:
    """Replaces tensors of one number by constants, but for those that the graph writes into."""
    for node in list(graph.nodes):
        if node.target in _FILLED.overloads and not is_written(node):
            replace(node, constant(node, node.name, computed(node, _of_its_shape)))


def _of_its_shape(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.zeros((), dtype=value.dtype).expand(tuple(value.shape))


def _through_passes(
    model: fx.GraphModule, inputs: tuple[Any, ...], target: Any
) -> tuple[torch.export.ExportedProgram, bytes]:
    from executorch.backends.cortex_m.passes.cortex_m_pass_manager import CortexMPassManager
    from executorch.exir import EdgeProgramManager, to_edge

    from quantplug.lowering.cortex_m.passes import passes

    # The dialect's operators on int8 are none of the edge dialect's.
    settings = unchecked(_PRESERVED)
    edge = to_edge(torch.export.export(model, inputs), compile_config=settings)
    exported = CortexMPassManager(edge.exported_program(), passes(), target).transform()
    # Emission plans the memory of the program that it is given, which then does not run in Python any more.
    emitted = EdgeProgramManager(copy.deepcopy(exported), compile_config=settings)
    return exported, emitted.to_executorch(starting_from_state(exported)).buffer


def _ops(graph: fx.Graph, lowered: fx.Graph) -> Iterator[LoweredOp]:
    """An operator runs in integers unless something that came of it computes in float."""
    left = {source for node in lowered.nodes if _computes_in_float(node) for source in _sources(node)}
    for node in compute_nodes(graph):
        if not is_qdq(node):
            reason = _PORTABLE if node.name in left else ""
            placement = "portable" if reason else "int8"
            yield LoweredOp(node.name, str(node.target), module_path(node), placement, reason)


def _computes_in_float(node: fx.Node) -> bool:
    return node.op == "call_function" and "cortex_m" not in str(node.target) and is_float(node)


def _sources(node: fx.Node) -> Iterator[str]:
    pending = list(node.meta.get("from_node", ()))
    while pending:
        source = pending.pop()
        yield source.name
        pending += source.from_node
