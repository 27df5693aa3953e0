"""Scales of run time: as a graph says them, as XNNPACK's kernels choose them, as ExecuTorch's serializer reads them.

Before: a q/dq graph with one scale for a tensor, a row or a sample. After `as_kernels_choose`: the graph that the
kernels compute, with one scale for each row of a linear and for each sample of a convolution. After
`as_serializer_reads`: the same, spelled so that the serializer knows it, which asks no further where it reads that a
scale is chosen at run time.
"""

import copy
import operator
from collections.abc import Container, Iterator

import torch
from torch import fx
from torchao.quantization.pt2e import PerAxis, PerToken

from quantplug.core.graph.editing import constant, erase_dead_code, like
from quantplug.core.graph.facts import constant_value, operands, operator_name, rank, tensor_value
from quantplug.core.observers.rowwise import Granularity, add_rows, granularity_text
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic, range_of
from quantplug.core.qdq.qparams import INT8
from quantplug.lowering.run_time import Chain, chain_of
from quantplug.lowering.xnnpack.legalize.products import one_channel_each

_Q = torch.ops.quantized_decomposed
_ALL_OF_IT = "the kernel takes all of int8 from the lowest to the highest number, the graph less"
_FINER = "the kernel chooses a scale {}, the graph {}"


def as_kernels_choose(working: fx.GraphModule) -> dict[str, str]:
    """Gives every linear a scale for each row of its input and every convolution one for each sample, in place.

    Args:
        working: a private copy of the q/dq graph.

    Returns:
        What is to be said of the operators whose graph has one scale for the tensor, by their names.
    """
    notes: dict[str, str] = {}
    for chain in list(_chains(working.graph)):
        for granularity in (PerToken(), PerAxis(0)):
            readers = [u for u in chain.dequantize.users if _chooses(u, chain) == granularity]
            if not readers or _is_spelled(chain, granularity):
                continue
            if chain.granularity != granularity:
                said = range_of(chain.dequantize) or "per tensor"
                notes |= {u.name: _FINER.format(granularity_text(granularity), said) for u in readers}
            elif not chain.takes_all:
                notes |= dict.fromkeys((reader.name for reader in readers), _ALL_OF_IT)
            _replace(working.graph, chain, granularity, readers)
    erase_dead_code(working.graph)
    working.recompile()
    return notes


def scales_of_groups_as_stored(working: fx.GraphModule) -> bool:
    """Rounds scales of groups that linear layers read to bfloat16, as ExecuTorch 1.4 stores them; tells if any changed.

    Thirty layers add that rounding up until the program and a graph with other scales have little in common.

    Args:
        working: a private copy of the q/dq graph.
    """
    changed = False
    for node in working.graph.nodes:
        if operator_name(node) != "torchao::dequantize_affine" or not any(map(_is_linear, node.users)):
            continue
        held = operands(node)["scale"]
        scale = constant_value(held)
        if scale is None or not _is_of_groups(node) or torch.equal(scale, scale.bfloat16().to(scale.dtype)):
            continue
        node.replace_input_with(held, constant(node, "scale", scale.detach().bfloat16().to(scale.dtype)))
        changed = True
    erase_dead_code(working.graph)
    working.recompile()
    return changed


def _is_of_groups(node: fx.Node) -> bool:
    """Tells whether a weight has several scales a row, and is read by a layer whose kernel takes these."""
    block, weight = operands(node)["block_size"], tensor_value(node)
    return weight is None or (block[-1] != weight.shape[-1] and any(map(_has_kernel_of_groups, node.users)))


def _has_kernel_of_groups(reader: fx.Node) -> bool:
    return _is_linear(reader) and is_dynamic(operands(reader)["input"])


def _is_linear(node: fx.Node) -> bool:
    return operator_name(node) == "aten::linear"


def as_serializer_reads(working: fx.GraphModule, outside: Container[str]) -> fx.GraphModule:
    """Returns a graph without scales for samples, which ExecuTorch has neither a form nor a portable kernel for.

    Args:
        working: a legalized graph; it is not changed.
        outside: operators that XNNPACK does not take; they read the tensor as it is.
    """
    if not any(chain.granularity == PerAxis(0) for chain in _chains(working.graph)):
        return working
    spelled = fx.GraphModule(working, copy.deepcopy(working.graph))
    for chain in [c for c in _chains(spelled.graph) if c.granularity == PerAxis(0)]:
        readers = [u for u in chain.dequantize.users if _chooses(u, chain) and u.name not in outside]
        whole = _one_scale(spelled.graph, chain) if readers else chain.source
        for user in list(chain.dequantize.users):
            user.replace_input_with(chain.dequantize, whole if user in readers else chain.source)
    erase_dead_code(spelled.graph)
    spelled.recompile()
    return spelled


def _chains(graph: fx.Graph) -> Iterator[Chain]:
    return filter(None, (chain_of(node) for node in list(graph.nodes) if is_dequantize(node)))


def _chooses(reader: fx.Node, chain: Chain) -> Granularity | None:
    """Returns for what the kernel of an operator chooses a scale each, None where there is no such kernel."""
    name, given, read = operator_name(reader), operands(reader), chain.dequantize
    if name == "aten::linear":
        return PerToken() if given["input"] is read and given["weight"] is not read else None
    if name != "aten::conv2d" or given["input"] is not read or not is_dequantize(given["weight"]):
        return None
    weight = tensor_value(given["weight"])
    depthwise = given["groups"] > 1 if weight is None else one_channel_each(weight)
    return None if depthwise or rank(chain.source) != 4 else PerAxis(0)


def _is_spelled(chain: Chain, granularity: Granularity) -> bool:
    """Tells whether a chain says what a kernel chooses, and by the operator that the passes here know."""
    rows = granularity == PerToken()
    is_alike = chain.granularity == granularity and chain.takes_all
    return is_alike and ("per_token" in operator_name(chain.quantize)) == rows


def _replace(graph: fx.Graph, chain: Chain, granularity: Granularity, readers: list[fx.Node]) -> None:
    before = set(graph.nodes)
    with graph.inserting_before(chain.choose):
        own = add_rows(graph, chain.source, granularity)
    for node in set(graph.nodes) - before:
        like(node, chain.dequantize)
    own.meta["val"] = tensor_value(chain.dequantize)
    for reader in readers:
        reader.replace_input_with(chain.dequantize, own)


def _one_scale(graph: fx.Graph, chain: Chain) -> fx.Node:
    low, high, dtype = INT8
    with graph.inserting_before(chain.choose):
        chosen = graph.call_function(_Q.choose_qparams.tensor, (chain.source, low, high, 2.0**-126, dtype))
        scale, zero_point = (graph.call_function(operator.getitem, (chosen, i)) for i in (0, 1))
        quantize = graph.call_function(_Q.quantize_per_tensor.tensor, (chain.source, scale, zero_point, *INT8))
        whole = graph.call_function(_Q.dequantize_per_tensor.tensor, (quantize, scale, zero_point, *INT8))
    for node in (chosen, scale, zero_point, quantize, whole):
        like(node, chain.dequantize)
    whole.meta["val"] = tensor_value(chain.dequantize)
    return whole
