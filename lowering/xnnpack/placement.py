"""Where each operator of the q/dq graph runs, read from what was serialized.

Before: the q/dq graph, the edge program and the recorded kernel calls. After: one `LoweredOp` for each
compute operator, and the numbers of kernel calls.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.facts import compute_nodes, module_path
from quantplug.core.graph.traits import is_identity
from quantplug.core.peers.torch_names import schema_or_none
from quantplug.core.qdq.nodes import is_conversion
from quantplug.lowering.placement import NOTHING
from quantplug.lowering.program import LoweredOp
from quantplug.lowering.xnnpack.program import KernelCounts
from quantplug.lowering.xnnpack.serializer.records import KernelCall


def origins(node: fx.Node, graph: fx.Graph) -> set[str]:
    """Returns the names of the nodes of an earlier graph that a node descends from.

    Export and ExecuTorch's passes write each node's ancestors to `meta["from_node"]`.
    """
    found: set[str] = set()
    pending = list(node.meta.get("from_node") or [])
    while pending:
        source = pending.pop()
        if source.graph_id == id(graph):
            found.add(source.name)
        else:
            pending.extend(source.from_node or [])
    return found


def place(
    working: fx.GraphModule,
    edge: torch.export.ExportedProgram,
    calls: Sequence[KernelCall],
    floats: Mapping[str, str],
) -> tuple[list[LoweredOp], KernelCounts]:
    """Returns where each compute operator runs, and how many kernel calls of each kind there are."""
    outside = [n for n in edge.graph.nodes if _is_portable(n)]
    compute = [c for c in calls if not c.is_convert and not c.is_movement]
    counts = KernelCounts(
        int8=sum(c.is_integer for c in compute),
        f32=sum(not c.is_integer for c in compute),
        converts=sum(c.is_convert for c in calls),
        moves=sum(c.is_movement for c in calls),
        delegates=sum(_is_xnnpack(lowered) for lowered in _delegates(edge)),
        portable=len(outside),
    )
    return _placements(working, outside, calls, floats), counts


def taken_by_others(edge: torch.export.ExportedProgram, graph: fx.Graph) -> dict[str, str]:
    """Returns the name of the delegate for each operator of an earlier graph that one other than XNNPACK runs."""
    others = (lowered for lowered in _delegates(edge) if not _is_xnnpack(lowered))
    return {
        name: lowered.backend_id
        for lowered in others
        for node in lowered.original_module.graph.nodes
        for name in origins(node, graph)
    }


def _delegates(edge: torch.export.ExportedProgram) -> Iterator[Any]:
    """Yields the lowered module of every call into a delegate."""
    for node in edge.graph.nodes:
        if "executorch_call_delegate" in str(node.target):
            yield getattr(edge.graph_module, str(node.args[0].target))


def _is_xnnpack(lowered: Any) -> bool:
    return str(lowered.backend_id) == "XnnpackBackend"


def _is_portable(node: fx.Node) -> bool:
    name = _operator_name(node)
    return bool(name) and not name.startswith(("aten::sym_", "aten::_assert"))


def _operator_name(node: fx.Node) -> str:
    """Returns "aten::name" of an operator call, "" for anything else (delegates, getitem, symbols)."""
    schema = schema_or_none(node.target)
    return str(schema.name) if node.op == "call_function" and schema is not None else ""


def _placements(
    working: fx.GraphModule, outside: Iterable[fx.Node], calls: Iterable[KernelCall], floats: Mapping[str, str]
) -> list[LoweredOp]:
    kernels: dict[str, list[KernelCall]] = defaultdict(list)
    portable: dict[str, list[fx.Node]] = defaultdict(list)
    for call in calls:
        for name in origins(call.node, working.graph):
            kernels[name].append(call)
    for node in outside:
        for name in origins(node, working.graph):
            portable[name].append(node)
    placed: dict[fx.Node, str] = {}
    ops = []
    for node in compute_nodes(working.graph):
        if is_conversion(node):
            continue
        placement, reason = _placement(node, kernels[node.name], portable[node.name], placed)
        placed[node] = placement
        reason = floats.get(node.name, reason) if placement != "int8" else ""
        ops.append(LoweredOp(node.name, str(node.target), module_path(node), placement, reason))
    return ops


def _placement(
    node: fx.Node, kernels: list[KernelCall], portable: list[fx.Node], placed: dict[fx.Node, str]
) -> tuple[str, str]:
    if portable:
        names = sorted({_operator_name(n) for n in portable})
        return "portable", f"XNNPACK does not take {', '.join(names)} here"
    own = [c for c in kernels if not c.is_convert]
    if not own and is_identity(node) and not any(map(is_conversion, node.all_input_nodes)):
        return "float", NOTHING
    if not own:  # fused into its producer, a view that costs nothing, or a copy that lost its history
        producer = next((placed[n] for n in node.all_input_nodes if n in placed), None)
        if producer is None:
            quantized = any(is_conversion(n) for n in node.all_input_nodes)
            return ("int8", "") if quantized else ("portable", "it only copies or casts, outside XNNPACK")
        return producer, "" if producer == "int8" else "runs with its producer"
    if all(c.is_integer for c in own):
        return "int8", ""
    return "float", _why_float(node)


def _why_float(node: fx.Node) -> str:
    floats = [n.name for n in node.all_input_nodes if n.op != "get_attr" and not is_conversion(n)]
    if floats:
        return f"its input '{floats[0]}' is not quantized"
    if not all(is_conversion(user) for user in node.users):
        return "its output is not quantized"
    return "no integer kernel for this operator"
