"""Tensors that an in-place operator changes while somebody reads them later under another name.

Before: an exported graph, in which `v = h.view(-1); v.relu_()` also changes `h`. After: the nodes whose
tensors share memory with such a change. A quantize/dequantize pair makes a copy, so on any of these nodes
it would cut the tie, and the later reader would see the old values.
"""

from torch import fx

from quantplug.core.graph.facts import viewed_node, written_argument


def changed_under_other_names(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns each node whose memory is changed in place and then read as it stands, with the operator at fault.

    Reading the result of the in-place operator itself is harmless: the graph says where it comes from.
    One walk, linear in the graph: every name of a memory carries the number of changes that it knows of.
    """
    memory: dict[fx.Node, fx.Node] = {}
    known: dict[fx.Node, int] = {}
    changes: dict[fx.Node, list[fx.Node]] = {}
    at_fault: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            base = memory[source]
            made = changes.get(base, [])
            if len(made) > known[source]:
                at_fault.setdefault(base, made[known[source]])
        viewed = viewed_node(node)
        memory[node] = memory[viewed] if viewed else node
        written = written_argument(node) if node.op == "call_function" else None
        if written is not None:
            changes.setdefault(memory[written], []).append(node)
        known[node] = known[viewed] if viewed else 0
        if written is not None and written is viewed:
            known[node] = len(changes[memory[written]])
    return {node: at_fault[base] for node, base in memory.items() if base in at_fault}
