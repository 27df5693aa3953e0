"""Where each operator of the q/dq graph runs, read from what was serialized.

Before: the q/dq graph, the edge program and the recorded kernel calls. After: one `LoweredOp` for each
compute operator, and the numbers of kernel calls.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.facts import compute_nodes
from quantplug.core.graph.meta import ORIGINS
from quantplug.core.graph.traits import clamp_bounds, is_identity, moves, repeats
from quantplug.core.peers.torch_names import schema_or_none
from quantplug.core.qdq.by_rows import ROWS_OF_INTEGERS
from quantplug.core.qdq.calls import is_activation
from quantplug.core.qdq.nodes import is_conversion, is_dequantize
from quantplug.core.qdq.qparams import quantized_output, static_qparams
from quantplug.lowering.placement import NOTHING
from quantplug.lowering.program import LoweredOp
from quantplug.lowering.xnnpack.legalize import Legalized
from quantplug.lowering.xnnpack.legalize.refusals import FLOAT_RESULT
from quantplug.lowering.xnnpack.program import KernelCounts
from quantplug.lowering.xnnpack.serializer.records import KernelCall

_CAST = "it makes floats of integers"
_DROPPED = "no kernel was written that clamps to its bounds"


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
    recorded: Sequence[LoweredOp],
    working: fx.GraphModule,
    edge: torch.export.ExportedProgram,
    calls: Sequence[KernelCall],
    legal: Legalized,
) -> list[LoweredOp]:
    """Returns where each recorded operator runs.

    What legalization wrote is none of the user's operators; where one of those is gone, what stands for it tells.
    """
    carriers = _carriers(_placements(working, {op.node for op in recorded}, _portable(edge), calls))
    asked = {name: ("portable", reason) for name, reason in legal.portable.items()} | _taken_by_others(edge, working)
    found = ((op, asked.get(op.node) or _where(op, carriers[op.node])) for op in recorded)
    return [_told(operator, *where, legal) for operator, where in found]


def count(edge: torch.export.ExportedProgram, calls: Sequence[KernelCall]) -> KernelCounts:
    """Returns how many kernel calls of each kind an edge program makes."""
    compute = [c for c in calls if not c.is_convert and not c.is_movement]
    return KernelCounts(
        int8=sum(c.is_integer for c in compute),
        f32=sum(not c.is_integer for c in compute),
        converts=sum(c.is_convert for c in calls),
        moves=sum(c.is_movement for c in calls),
        delegates=sum(_is_xnnpack(lowered) for lowered in delegates(edge)),
        portable=len(_portable(edge)),
    )


def _portable(edge: torch.export.ExportedProgram) -> list[fx.Node]:
    return [node for node in edge.graph.nodes if _is_portable(node)]


def _taken_by_others(edge: torch.export.ExportedProgram, working: fx.GraphModule) -> dict[str, tuple[str, str]]:
    """Returns where each operator of an earlier graph runs that a delegate other than XNNPACK has."""
    others = (lowered for lowered in delegates(edge) if not _is_xnnpack(lowered))
    return {
        name: ("delegate", f"{lowered.backend_id} runs it")
        for lowered in others
        for node in lowered.original_module.graph.nodes
        for name in origins(node, working.graph)
    }


def delegates(edge: torch.export.ExportedProgram) -> Iterator[Any]:
    """Yields the lowered module of every call into a delegate."""
    for node in edge.graph.nodes:
        if "executorch_call_delegate" in str(node.target):
            yield getattr(edge.graph_module, str(node.args[0].target))


def _is_xnnpack(lowered: Any) -> bool:
    return str(lowered.backend_id) == "XnnpackBackend"


def _is_portable(node: fx.Node) -> bool:
    """Tells whether a node is an operator outside of the delegates; arithmetic of sizes is none."""
    name = _operator_name(node)
    return bool(name) and not name.startswith(("aten::sym_", "aten::_assert", "executorch_prim::"))


def _operator_name(node: fx.Node) -> str:
    """Returns "aten::name" of an operator call, "" for anything else (delegates, getitem, symbols)."""
    schema = schema_or_none(node.target)
    return str(schema.name) if node.op == "call_function" and schema is not None else ""


def _placements(
    working: fx.GraphModule, recorded: Container[str], outside: Iterable[fx.Node], calls: Iterable[KernelCall]
) -> dict[fx.Node, tuple[str, str]]:
    kernels: dict[str, list[KernelCall]] = defaultdict(list)
    portable: dict[str, list[fx.Node]] = defaultdict(list)
    for call in calls:
        for name in origins(call.node, working.graph):
            kernels[name].append(call)
    for node in outside:
        for name in origins(node, working.graph):
            portable[name].append(node)
    placed: dict[fx.Node, tuple[str, str]] = {}
    for node in compute_nodes(working.graph):
        if not is_conversion(node) or node.name in recorded:  # a cast of the user's may have become a conversion
            placed[node] = (
                _outside(portable[node.name])
                or _by_kernels(node, kernels[node.name])
                or _without_kernel(node, kernels, placed)
            )
    return placed


def _carriers(placed: Mapping[fx.Node, tuple[str, str]]) -> dict[str, dict[str, tuple[str, str]]]:
    """Returns for each operator of the q/dq graph where what was written for it runs, by its names."""
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for node, where in placed.items():
        for name in ORIGINS.get(node, frozenset()):
            found[name][node.name] = where
    return found


def _where(operator: LoweredOp, carriers: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Returns where an operator runs: where it stands itself, or what was written for it."""
    own = carriers.get(operator.node)
    written = [own] if own else [*carriers.values()] or [("float", NOTHING)]
    return next((where for where in written if where[0] == "int8"), written[-1])


def _told(operator: LoweredOp, placement: str, found: str, legal: Legalized) -> LoweredOp:
    """Returns an operator with the reason: that of annotation where it left it float, else what legalization found."""
    how = legal.notes.get(operator.node, "")
    if placement == "int8":
        return replace(operator, placement=placement, reason="", how=how)
    if placement == "float":
        return replace(operator, reason=operator.reason or legal.floats.get(operator.node) or how or found, how=how)
    return replace(operator, placement=placement, reason=operator.reason or found, how=how or found)


def _outside(portable: list[fx.Node]) -> tuple[str, str] | None:
    names = sorted({_operator_name(n) for n in portable})
    if names and {*names} <= {*ROWS_OF_INTEGERS}:
        return "portable", ""
    return ("portable", f"XNNPACK does not take {', '.join(names)} here") if names else None


def _by_kernels(node: fx.Node, kernels: list[KernelCall]) -> tuple[str, str] | None:
    if kernels and is_conversion(node):
        return "float", _CAST
    own = [c for c in kernels if not c.is_convert]
    if not own:
        return None
    own = [c for c in own if not c.is_movement] or own
    return ("int8", "") if all(c.reads_integers for c in own) else ("float", _why_float(node))


def _without_kernel(
    node: fx.Node, kernels: Mapping[str, list[KernelCall]], placed: Mapping[fx.Node, tuple[str, str]]
) -> tuple[str, str]:
    """Returns where an operator runs that no kernel was written for: fused, passed by, or nowhere."""
    sources = node.all_input_nodes
    producer = next((placed[source][0] for source in sources if source in placed), None)
    bounds = _bounds(node)
    if bounds is not None:
        return _fused([call for call in kernels[sources[0].name] if call.bounds == bounds])
    if _passes_integers(node):
        return "int8", ""
    if producer not in (None, "int8") and not is_identity(node):
        return str(producer), "runs with its producer"
    if producer is None and not any(map(is_conversion, sources)):
        return "portable", "it only copies or casts, outside XNNPACK"
    return "float", NOTHING


def _fused(clamping: list[KernelCall]) -> tuple[str, str]:
    """Returns where an activation runs, from the calls of the kernel before it that clamp to its bounds."""
    if not clamping:
        return "float", _DROPPED
    return ("int8", "") if any(call.yields_integers for call in clamping) else ("float", FLOAT_RESULT)


def _bounds(node: fx.Node) -> tuple[float, float] | None:
    """Returns the bounds that the kernel before an activation has if it is fused, None for other operators."""
    low, high = (clamp_bounds(node) if is_activation(node) else None) or (None, None)
    return None if low is None else (low, float("inf") if high is None else high)


def _passes_integers(node: fx.Node) -> bool:
    """Tells whether an operator yields the integers that it reads, so that a copy of them was written."""
    entered = [static_qparams(source) for source in node.all_input_nodes if is_dequantize(source)]
    still = moves(node) or repeats(node) or is_identity(node)
    return still and None not in entered and entered == [quantized_output(node)]


def _why_float(node: fx.Node) -> str:
    floats = [n.name for n in node.all_input_nodes if n.op != "get_attr" and not is_conversion(n)]
    if floats:
        return f"its input '{floats[0]}' is not quantized"
    if not all(is_conversion(user) for user in node.users):
        return "its output is not quantized"
    return "no integer kernel for this operator"
