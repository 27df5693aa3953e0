"""Products that stay float, in bfloat16.

Before: `linear|convolution|matmul|attention` between float32 tensors. After: the same on bfloat16, between
conversions. Conversions move up through what only moves values, until a kernel in front writes bfloat16 itself.
Processors with AMX or AVX512-BF16 multiply bfloat16 faster, and it is half the memory; what lies between products
(sums, normalizations, softmax) stays float32.
"""

from collections.abc import Callable

import torch
from torch import fx

from quantplug.core.graph.editing import call, erase_dead_code, erase_unused, set_operand
from quantplug.core.graph.facts import is_constant, operands, tensor_value
from quantplug.core.graph.meta import HOW, REASON
from quantplug.core.graph.traits import moves, repeats
from quantplug.core.patterns.language import op

aten, onednn = torch.ops.aten, torch.ops.onednn
CAST = aten.to.dtype
HALF = torch.bfloat16
PRODUCTS = frozenset(
    target
    for name in (
        *("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
    for target in op(name).targets
) | {aten.scaled_dot_product_attention.default}
KERNELS = (
    *(onednn.qconv_pointwise.default, onednn.qconv_pointwise.tensor),
    *(onednn.qlinear_pointwise.default, onednn.qlinear_pointwise.tensor),
)


def is_float_product(node: fx.Node) -> bool:
    """Tells whether a node multiplies float32 tensors."""
    return node.target in PRODUCTS and bool(_operands(node)) and _dtype(node) == torch.float32


def _only_moves(node: fx.Node) -> bool:
    return moves(node) or repeats(node)


def is_half_for_free(node: fx.Node) -> bool:
    """Tells whether a node can give bfloat16 without a conversion at run time: constants, and what kernels write."""
    while _only_moves(node):
        node = node.all_input_nodes[0]
    return node.target in KERNELS or all(map(is_constant, node.all_input_nodes or [node]))


def compute_in_half(graph: fx.Graph, choose: Callable[[fx.Node], str | None]) -> None:
    """Lets float products compute in bfloat16.

    Args:
        graph: a lowered graph, whose epilogues are fused.
        choose: says for a product why it should stay float32, or None.
    """
    casts: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if is_float_product(node) and choose(node) is None:
            _halve(node, casts)
    for node in reversed(list(graph.nodes)):
        _move_up(node)
    erase_dead_code(graph)


def _dtype(node: fx.Node) -> torch.dtype | None:
    found = tensor_value(node)
    return None if found is None else found.dtype


def _operands(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if _dtype(source) == torch.float32]


def _halve(node: fx.Node, casts: dict[fx.Node, fx.Node]) -> None:
    for source in _operands(node):
        if source not in casts:  # converted once for all its readers
            casts[source] = call(node, CAST, (source, HALF), source, HALF)
        node.replace_input_with(source, casts[source])
    REASON.put(node, REASON.get(node) or "no integer kernel in this place")
    HOW.put(node, "it computes in bfloat16")
    whole = call(node.next, CAST, (node, torch.float32), node)
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    node.meta["val"] = node.meta["val"].to(HALF)


def _is_cast(node: fx.Node) -> bool:
    return node.target is CAST and node.args[1:] == (HALF,)


def _move_up(node: fx.Node) -> None:
    """Lets a node give bfloat16 where all its readers convert to that."""
    if not node.users or not all(_is_cast(user) for user in node.users):
        return
    if node.target is CAST and _dtype(node.all_input_nodes[0]) == HALF:
        _skip_casts(node, node.all_input_nodes[0])
    elif node.target in KERNELS and operands(node)["output_dtype"] == torch.float32:
        set_operand(node, "output_dtype", HALF)
        _skip_casts(node, node)
    elif _only_moves(node) and _dtype(node) == torch.float32:
        (source,) = _operands(node)
        node.replace_input_with(source, call(node, CAST, (source, HALF), source, HALF))
        _skip_casts(node, node)


def _skip_casts(node: fx.Node, instead: fx.Node) -> None:
    node.meta["val"] = node.meta["val"].to(HALF)
    for cast in list(node.users):
        cast.replace_all_uses_with(instead)
        erase_unused((cast,))
