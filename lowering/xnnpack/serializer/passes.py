"""The passes that ExecuTorch runs over each delegate before it writes it, without those that find nothing there.

Before: a delegate's program. After: what all passes make of it. A pass of ExecuTorch 1.4 that has nothing to do traces
the delegate again all the same, which was a quarter of the time that lowering a transformer took.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.lowering.executorch_names import edge_operator, passes_of_delegates

_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
# Operators without any of which a pass changes nothing. One that is not here always runs.
_LOOKS_FOR: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(operators)
        for name, operators in {
            "DimOrderOpsRevertPass": ("_to_dim_order_copy", "_clone_dim_order", "_empty_dim_order"),
            "ConvertToUpsampleBilinear2d": ("index", "_unsafe_index"),
            "ConvertToLinearPass": ("mm", "addmm", "bmm", "view_copy"),  # views behind linear layers too
            "ConvertToSDPAPass": ("_softmax",),
            "FuseBatchNormPass": _NORMS,
            "DecomposeBatchNorm": _NORMS,
            "FuseActivationPass": ("relu", "hardtanh"),
            "DecomposeConcatenate": ("cat",),
            "RemoveGetItemPass": ("max_pool2d_with_indices", "max"),
            "InsertPadQDQPass": ("constant_pad_nd",),
            "Conv1dUnsqueezePass": ("convolution",),
            "PReLUReshapePass": ("prelu", "_prelu_kernel"),
            "ChannelsLastTaggedReshapePass": (
                *("convolution", "upsample_bilinear2d", "mean", "max_pool2d", "avg_pool2d", "amax", "max", "prelu"),
                *("max_pool2d_with_indices", "_to_copy"),
            ),
            "RemoveRedundantCopyPass": ("_to_copy",),
        }.items()
    }
)


def has_work(name: str, graph: fx.Graph) -> bool:
    """Tells whether a pass may find something in a delegate.

    Args:
        name: of the pass's class.
        graph: the delegate's, in the edge dialect.
    """
    if name == "ConstPropPass":
        return any(node.op == "call_function" and not node.all_input_nodes for node in graph.nodes)
    if name == "PropagateCustomMetaPass":
        return any("custom" in node.meta for node in graph.nodes)
    looks_for = _LOOKS_FOR.get(name)
    return looks_for is None or not looks_for.isdisjoint(map(_name, graph.nodes))


def _name(node: fx.Node) -> str:
    """Returns an operator's name without namespace and overload: those of the edge dialect are "aten.add.Tensor"."""
    return getattr(node.target, "__name__", "").partition(".")[2].partition(".")[0]


@contextmanager
def idle_passes_left_out() -> Iterator[None]:
    """Lets ExecuTorch run over delegates only passes that may find something, inside of the block."""
    module, name = passes_of_delegates()
    stock = getattr(module, name)

    class WithWork(stock):  # type: ignore[misc, valid-type]  # ExecuTorch's own
        def transform(self) -> Any:
            program = self.exported_program
            for one in self.passes:
                if one.__name__ == "ChannelsLastTaggedReshapePass":
                    # It takes operators that it does not know for such as work in any order.
                    one.memory_sensitive_ops_nchw.add(edge_operator("matmul", "quantplug"))
                    images_are_turned_for_their_scales(program.graph)
                if has_work(one.__name__, program.graph):
                    program = stock(program, [one]).transform()
            return program

    setattr(module, name, WithWork)
    try:
        yield
    finally:
        setattr(module, name, stock)


def images_are_turned_for_their_scales(graph: fx.Graph) -> None:
    """Copies to channels last what a convolution reads whose scales are found at run time.

    ExecuTorch's layout pass would turn what stands first in the delegate in its place, as if all that comes after kept
    the order: a view in between mixes channels and pixels up. Copies of what is turned already are removed again.

    Args:
        graph: a delegate's, in the edge dialect; it is changed in place.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        quantized = _quantized_at_run_time(node.args[0]) if _name(node) == "convolution" else None
        if quantized is None or not isinstance(source := quantized.args[0], fx.Node) or source in copies.values():
            continue
        if source not in copies:
            with graph.inserting_after(source):
                copy = graph.call_function(edge_operator("_to_copy"), (source,), {"memory_format": torch.channels_last})
            copy.meta = {"val": source.meta["val"]}
            copies[source] = copy
        for scale in quantized.all_input_nodes[1:]:
            scale.all_input_nodes[0].replace_input_with(source, copies[source])
        quantized.replace_input_with(source, copies[source])


def _quantized_at_run_time(dequantized: Any) -> fx.Node | None:
    """Returns what quantizes an input with scales of run time, None for others."""
    if not isinstance(dequantized, fx.Node) or not is_dequantize(dequantized):
        return None
    quantized: Any = dequantized.args[0]
    scales = quantized.all_input_nodes[1:] if is_quantize(quantized) else []
    return quantized if scales and all(scale.target is operator.getitem for scale in scales) else None
