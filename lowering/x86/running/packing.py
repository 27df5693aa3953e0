"""A lowered graph made ready to run on this machine.

Before: the portable graph, functional, weights as int8 constants behind `prepack` nodes. After: weights in
the layout that this machine's kernels want, linears of few rows on the kernel that reads weights fastest,
residual sums in place, conversions in as few passes as torch offers.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import erase_unused, finish, free_name
from quantplug.core.graph.facts import attribute, constant_value, is_constant
from quantplug.lowering.halves import is_half_constant
from quantplug.lowering.rewrites.folding import all_constant_expressions_are_folded
from quantplug.lowering.x86.cleaning import remove_guards
from quantplug.lowering.x86.kernels.few_rows import read_faster
from quantplug.lowering.x86.kernels.four_bits import UNPACK as UNPACK_FOUR_BITS
from quantplug.lowering.x86.kernels.sums import fuse_sums
from quantplug.lowering.x86.running.eager_conversions import spell_out

onednn = torch.ops.onednn
WIDEN = torch.ops.aten.to.dtype
_CALL = "call_function"
PREPACK = (onednn.qconv_prepack.default, onednn.qlinear_prepack.default)
# the weights of layers that stay float, and those of four bits: made once here, not at every call
UNPACK = (
    torch.ops.quantized_decomposed.dequantize_per_channel.default,
    torch.ops.quantized_decomposed.dequantize_per_tensor.default,
    WIDEN,
    *UNPACK_FOUR_BITS,
)


def pack(module: fx.GraphModule, made: dict[str, Tensor]) -> fx.GraphModule:
    """Makes a lowered module run as fast as this machine's kernels and eager mode allow, in place, and returns it.

    Args:
        module: a copy of a lowered module.
        made: weights that are packed already, by the names of their nodes, from another copy; it gets those of this.
    """
    own = {node.name for node in module.graph.nodes}  # what is written from here on has names of its own
    remove_guards(module.graph)
    read_faster(module.graph)
    fuse_sums(module.graph)
    has_halves = any(is_half_constant(node.args[0]) for node in module.graph.find_nodes(op=_CALL, target=WIDEN))
    for node in [node for node in module.graph.nodes if node.name in own & made.keys()]:
        _hold(module, node, made[node.name])
    packed = fold(module, PREPACK + UNPACK)
    made |= {name: attribute(module, str(node.target)) for name, node in packed.items() if name in own and node.users}
    if has_halves:  # what is computed from them alone, which the graph had folded if they were floats
        all_constant_expressions_are_folded(module)
    spell_out(module.graph)
    finish(module)
    return module


def fold(module: fx.GraphModule, targets: Container[Any]) -> dict[str, fx.Node]:
    """Computes operators of constants once, here and now; the module then holds their results.

    Returns:
        What reads the results, by the names of the operators' nodes.
    """
    held: dict[str, fx.Node] = {}
    for node in list(module.graph.nodes):
        sources = node.all_input_nodes
        if node.target in targets and sources and all(map(is_constant, sources)):
            args = fx.node.map_arg(node.args, constant_value)
            with torch.no_grad():
                held[node.name] = _hold(module, node, node.target(*args, **node.kwargs))
    return held


def _hold(module: fx.GraphModule, node: fx.Node, packed: Tensor) -> fx.Node:
    """Puts a constant in the place of an operator of constants, and returns what reads it."""
    name = free_name(module, "packed")
    module.register_buffer(name, packed, persistent=False)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    if "val" in node.meta:
        constant.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(constant)
    erase_unused((node,))
    return constant


_registered: list[Any] = []


def register_fakes() -> None:
    """Tells export and inductor the shapes of the prepack operators, which torch has no fake implementation of."""
    if not _registered:
        _registered.append(torch.library.register_fake("onednn::qconv_prepack", _prepacked))
        _registered.append(torch.library.register_fake("onednn::qlinear_prepack", _linear_prepacked))


def _prepacked(weight: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.empty_like(weight)


def _linear_prepacked(weight: Tensor, x_shape: Any) -> Tensor:
    return weight.new_empty((weight.shape[1], weight.shape[0]))
