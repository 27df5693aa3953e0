"""The q/dq graph as every lowering begins with it: a copy of its own, plain, with a state of its own.

Before: what convert returned, which stays as it is. After: a graph module over the same parameters and constants.
Export's guards are gone, scopes are inlined, and inputs and buffers that the graph writes to are copies: a program that
runs changes neither what it is given nor the model that it was lowered from.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.constants import expression_value, written_buffers
from quantplug.core.graph.editing import constant, replace
from quantplug.core.graph.facts import attribute, constant_value, is_constant, operands, operator_name, tensor_value
from quantplug.core.graph.memory import name_memory_once
from quantplug.core.graph.working_copy import over_same_tensors
from quantplug.core.graph.written_inputs import leave_inputs_as_they_are
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.quantized_tensors import spell_quantized_tensors
from quantplug.lowering.executorch_names import edge_operator
from quantplug.lowering.scopes import inline_scopes
from quantplug.lowering.strides import read_strides_as_exported


def starting(converted: fx.GraphModule, *, integer_products: bool = True) -> fx.GraphModule:
    """Returns the copy of a graph module that a lowering may change.

    Args:
        converted: a q/dq graph, or what export writes of a model with torchao's quantized tensors.
        integer_products: whether layers of such tensors are spelled as a q/dq graph's where they are products of
            integers, which the target has no operator for.
    """
    module = over_same_tensors(converted)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
    inline_scopes(module)
    name_memory_once(module.graph, module)
    leave_inputs_as_they_are(module.graph, stacklevel=4)
    read_strides_as_exported(module.graph)
    spell_quantized_tensors(module.graph, integer_products=integer_products)
    # Weights are stored as the integers that a graph quantizes them to at every call, as others write them.
    store_conversions(module.graph, lambda node, held: is_quantize(node))
    _convert_before_copies(module.graph)
    own_state(module)
    module.recompile()
    return module


def store_conversions(graph: fx.Graph, is_wanted: Callable[[fx.Node, torch.Tensor], bool]) -> None:
    """Puts what conversions of constants yield in their place.

    Args:
        graph: the graph, which is changed.
        is_wanted: tells of a node, and of the constant that it converts, whether it is one of them.
    """
    for node in list(graph.nodes):
        source: Any = operands(node).get("input") if is_quantize(node) or is_dequantize(node) else None
        held = constant_value(source) if is_constant(source) else None
        value = expression_value(node) if held is not None and is_wanted(node, held) else None
        if value is not None:
            replace(node, constant(node, f"{source.target}_folded".replace(".", "_"), value.detach()))


def _convert_before_copies(graph: fx.Graph) -> None:
    """Writes out the conversion in copies between dtypes, which exporters and runtimes leave out."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        source, dtype = node.args[1], node.meta["val"].dtype
        value = tensor_value(source)
        if value is None or value.dtype == dtype:
            continue
        with graph.inserting_before(node):
            converted = graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
        converted.meta = {**node.meta, "val": value.to(dtype)}
        node.update_arg(1, converted)


def twin(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module of the same graph and tensors that has a state of its own."""
    other = over_same_tensors(module)
    own_state(other)
    return other


def own_state(module: fx.GraphModule) -> None:
    """Replaces what a graph writes to by copies that are buffers, in place; two names of one tensor stay that."""
    copies: dict[int, torch.Tensor] = {}
    for path in sorted(written_buffers(module.graph)):
        place, _, leaf = path.rpartition(".")
        owner, before = attribute(module, place) if place else module, attribute(module, path)
        after = copies.setdefault(id(before), before.detach().clone())
        if isinstance(before, torch.nn.Parameter):
            delattr(owner, leaf)
            owner.register_buffer(leaf, after)
        else:
            setattr(owner, leaf, after)


def state_of(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Returns the buffers that a graph writes to, by their paths."""
    return {path: attribute(module, path) for path in sorted(written_buffers(module.graph))}


def starting_from_state(program: torch.export.ExportedProgram) -> Any:
    """Returns ExecuTorch's config of a program whose buffers begin as the model's; by default as anything."""
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    names = [name for name, buffer in signature.inputs_to_buffers.items() if buffer in written]
    return ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(names)])


def write_in_place(program: torch.export.ExportedProgram) -> None:
    """Makes an edge program write rows into a buffer itself, not into a copy that is copied back.

    Only where nothing else reads the buffer: what was read before may be a view of it at run time, which ExecuTorch's
    own pass (`run_reinplace_pass`) does not ask. The kernel that writes in place does not add.
    """
    signature, graph = program.graph_signature, program.graph
    results = graph.output_node().args[0]
    for node in graph.nodes:
        if operator_name(node) == "aten::index_put" and node.args[3:] in ((), (False,)):
            buffer = signature.inputs_to_buffers.get(node.args[0].name)
            is_alone = len(node.args[0].users) == 1 and results.count(node) == 1
            if is_alone and buffer is not None and signature.buffers_to_mutate.get(node.name) == buffer:
                node.target = edge_operator("index_put_")
    program.graph_module.recompile()
