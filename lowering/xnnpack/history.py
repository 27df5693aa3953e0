"""Which node of an earlier graph a node descends from.

Before: export and ExecuTorch's passes write each node's ancestors to `meta["from_node"]`. After: the names of
those in one graph, in time linear in the number of passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx.traceback import NodeSource


def origins(node: fx.Node, graph: fx.Graph) -> set[str]:
    """Returns the names of the nodes of an earlier graph that a node descends from."""
    found: set[str] = set()
    pending = list(node.meta.get("from_node") or [])
    while pending:
        source = pending.pop()
        if source.graph_id == id(graph):
            found.add(source.name)
        else:
            pending.extend(source.from_node or [])
    return found


@contextmanager
def shared_histories() -> Iterator[None]:
    """Lets nodes share their ancestors inside the block.

    Each pass copies the whole history of each node and adds a link to it: time quadratic in the passes, and most of
    the time of lowering a graph of some thousand nodes. A link never changes once it is written, so a copy is itself.
    """

    def itself(source: NodeSource, _: dict[int, Any]) -> NodeSource:
        return source

    NodeSource.__deepcopy__ = itself  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del NodeSource.__deepcopy__  # type: ignore[attr-defined]
