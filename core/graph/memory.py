"""State that a graph holds under several names.

Before: a graph of which two attributes may be one memory, as a buffer that two modules share. After: tensors that are
the same have one name, so that whoever asks what the graph writes hears it of all their readers, and a copy of the
attributes, one by one, is a copy of the state.
"""

from collections import defaultdict
from itertools import combinations
from typing import TypeAlias

import torch
from torch import Tensor, fx

from quantplug.core.errors import ModelError
from quantplug.core.graph.constants import written_buffers
from quantplug.core.graph.facts import attribute

Held: TypeAlias = dict[fx.Node, Tensor]


def name_memory_once(graph: fx.Graph, model: fx.GraphModule) -> set[str]:
    """Lets a graph call each tensor of its state by one name, in place, and returns the paths that it writes.

    Args:
        graph: the model's graph, or a copy of it.
        model: the module with its attributes.

    Raises:
        ModelError: the graph writes a tensor, and holds another that overlaps with it.
    """
    written = written_buffers(model.graph)
    if not written:
        return written
    shared: dict[int, Held] = defaultdict(dict)
    for node in graph.find_nodes(op="get_attr"):
        value = attribute(model, str(node.target))
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            shared[value.untyped_storage().data_ptr()][node] = value
    for held in shared.values():
        _require_apart(_one_name_each(graph, held, written), written)
    return written


def _one_name_each(graph: fx.Graph, held: Held, written: set[str]) -> Held:
    first: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], fx.Node] = {}
    for node, value in held.items():
        kept = first.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), node)
        if kept is not node:
            written.update({str(kept.target)} if str(node.target) in written else ())
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    return {node: held[node] for node in first.values()}


def _require_apart(held: Held, written: set[str]) -> None:
    for (one, first), (other, second) in combinations(held.items(), 2):
        paths = str(one.target), str(other.target)
        if not written.isdisjoint(paths) and _end(first) > second.data_ptr() and _end(second) > first.data_ptr():
            raise ModelError(
                f"'{paths[0]}' and '{paths[1]}' of the model are parts of one memory, which it writes: a quantized "
                "model would hold two tensors; register one buffer and take the part in forward, as `self.buffer[:2]`."
            )


def _end(value: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr() + (reach + 1) * value.element_size()
