"""What reads a quantized tensor: each operator that a quantizer annotated gets a dequantize node of its own.

Before: a graph in which operators read observers' calls, and what stands in for each call. After: they read what stands
in, and nobody reads a call. Partitioners take an operator together with the dequantize nodes before it, so that a node
that two operators read would belong to one of them only.
"""

import operator
from collections.abc import Iterator, Mapping
from itertools import chain, islice

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import is_valid_annotation

from quantplug.core.graph.editing import replace_inputs
from quantplug.core.observers.sharing import annotation_of
from quantplug.core.peers.torch_names import OpOverload, schema_of
from quantplug.core.pt2e.metadata import port
from quantplug.core.qdq.nodes import CHOOSE_OPS, CHOOSE_ROWS, DEQUANTIZE_OPS

_STAYS_SHARED = {CHOOSE_OPS[0], CHOOSE_ROWS, torch.ops.torchao.choose_qparams_affine.default}


def rewire(graph: fx.Graph, stand_in: Mapping[fx.Node, fx.Node]) -> None:
    """Makes all nodes read what stands in for observers' calls.

    Args:
        graph: the graph.
        stand_in: by call what is read instead.
    """
    for node in list(graph.nodes):
        read = [] if node in stand_in else [n for n in node.all_input_nodes if n in stand_in]
        if read:
            own = is_valid_annotation(annotation_of(node))
            replace_inputs(node, {n: _of_its_own(n, stand_in[n], node) if own else stand_in[n] for n in read})


def _of_its_own(call: fx.Node, result: fx.Node, consumer: fx.Node) -> fx.Node:
    """Returns the dequantize node that an annotated consumer reads."""
    if result.target not in DEQUANTIZE_OPS:
        return result
    if _is_shared(call, result):
        with result.graph.inserting_after(result):
            result = result.graph.node_copy(result)
    for node in _with_choice(result):
        port(consumer, node)
    return result


def _is_shared(call: fx.Node, result: fx.Node) -> bool:
    """Tells whether partitioners need a dequantize node of a consumer's own: dynamic ones stay shared."""
    # Those that are still to be rewired, and those that read the first dequantize node already.
    readers = (u for u in chain(call.users, result.users) if not _asks_for_size(u))
    return len(list(islice(readers, 2))) > 1 and _STAYS_SHARED.isdisjoint(n.target for n in _with_choice(result))


def _with_choice(dequantize: fx.Node) -> Iterator[fx.Node]:
    """Yields a dequantize node and, if its parameters are chosen at run time, what it was chosen by."""
    yield dequantize
    quantize = dequantize.all_input_nodes[0]
    chosen = [n.all_input_nodes[0] for n in quantize.all_input_nodes[1:] if n.target is operator.getitem]
    if chosen and chosen[0].target in CHOOSE_OPS:
        yield from (quantize, chosen[0])


def _asks_for_size(node: fx.Node) -> bool:
    sizes = ("aten::sym_size", "aten::sym_numel")
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in sizes
