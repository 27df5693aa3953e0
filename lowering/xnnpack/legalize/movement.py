"""Operators that move integers, in one scale from input to output, and what goes over the last dimension of images.

Before: moves, pads and concatenations whose qparams differ; softmax and dynamic linears of four dimensions, which
ExecuTorch 1.4's layout pass gets wrong. After: the same numbers, rescaled beside them; the same operators over rows.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.editing import call_like, constant, like
from quantplug.core.graph.facts import constant_value, operands, operator_name, tensor_value
from quantplug.core.graph.operators import ALIASES, COPIES, IDENTITIES, JOINS, MOVES, PADS, schema_names
from quantplug.core.qdq.calls import QuantizedCall, quantized_calls
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic, is_quantize
from quantplug.core.qdq.qparams import requantize, static_qparams
from quantplug.lowering.rewrites.writing import is_getitem
from quantplug.lowering.xnnpack.legalize.integers import one_dequantize_per_use

_ATEN = torch.ops.aten
_Q = torch.ops.quantized_decomposed
# Kernels that move or mix integers of one scale: their output has the quantization parameters of their input.
_KERNELS = tuple(name for name in MOVES if name not in ("flip", "roll"))
_MOVES = schema_names((*_KERNELS, *IDENTITIES, *PADS, "expand", "max_pool2d", "upsample_bilinear2d"))
_PADS = schema_names(PADS)


def contiguous_constants(working: fx.GraphModule) -> None:
    """Gives each constant memory of its own, in order.

    ExecuTorch's layout pass turns weights itself, and refuses those that are channels-last already. Its serializer
    (1.4) writes what a view is a part of, from the beginning.
    """
    for node in working.graph.find_nodes(op="get_attr"):
        value = constant_value(node)
        if value is not None and not lies_by_itself(value):
            own = value.detach().clone(memory_format=torch.contiguous_format)
            node.replace_all_uses_with(constant(node, "contiguous", own))
            working.graph.erase_node(node)


def lies_by_itself(value: Tensor) -> bool:
    """Tells whether a tensor lies in memory as its sizes say, and nothing else does there."""
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def aliases_are_clones(working: fx.GraphModule) -> None:
    """A second name for a tensor has no kernel there, a copy has one; names are kept.

    Where an operator writes the tensor under one name and another reads it under the other, it stays: ExecuTorch
    makes the operator one that writes nothing, and knows who reads what.
    """
    tied = changed_under_other_names(working.graph)
    for call in quantized_calls(working.graph, schema_names(ALIASES)):
        if call.node not in tied:
            call.node.target = _ATEN.clone.default


def copies_of_integers_are_views(working: fx.GraphModule) -> None:
    """ExecuTorch 1.4 drops a copy and leaves the conversions around it; a view takes integers and costs nothing."""
    for call in quantized_calls(working.graph, schema_names(COPIES)):
        value = tensor_value(call.node)
        if value is None or not is_dequantize(call.input) or call.entered != call.yielded:
            continue
        sizes = [size if isinstance(size, int) else -1 for size in value.shape]
        if sizes.count(-1) <= 1:
            call.node.target, call.node.args, call.node.kwargs = _ATEN.reshape.default, (call.input, sizes), {}


def spell_out_slopes(working: fx.GraphModule) -> None:
    """The serializer reads the factor of elu by position; export leaves it out where it equals the default, an int."""
    for call in quantized_calls(working.graph, ("aten::elu", "aten::elu_")):
        call.node.args, call.node.kwargs = (call.input, float(call.operands["alpha"])), {}


def moves_keep_qparams(working: fx.GraphModule) -> None:
    """dq(a) - move - q(b) becomes dq(a) - move - q(a) - dq(a) - q(b): moving integers changes no number."""
    for call in quantized_calls(working.graph, _MOVES):
        if call.entered is None or call.yielded is None or call.entered == call.yielded or not call.entered.is_int8:
            continue
        if operator_name(call.node) in _PADS and not _pads_with_zero(call):
            continue
        quantize = next(iter(call.node.users))
        with working.graph.inserting_before(quantize):
            quantize.replace_input_with(call.node, requantize(working.graph, call.node, call.entered))


def pads_of_integers_are_moves(working: fx.GraphModule) -> None:
    """A pad of integers, as the plain spelling has them, stands between conversions: there it has a kernel."""
    for call in quantized_calls(working.graph, ("aten::constant_pad_nd",)):
        node, readers = call.node, list(call.node.users)
        params = static_qparams(readers[0]) if readers and is_dequantize(readers[0]) else None
        if params is None or call.operands["value"] != params.zero_point:
            continue
        with working.graph.inserting_before(node):
            real = call_like(working.graph, node, _Q.dequantize_per_tensor.default, call.input, *params.args())
        node.args = (real, call.operands["pad"], 0.0)
        node.meta["val"] = tensor_value(readers[0])
        with working.graph.inserting_before(node.next):
            integers = call_like(working.graph, node, _Q.quantize_per_tensor.default, node, *params.args())
        for reader in readers:
            reader.replace_input_with(node, integers)


def _pads_with_zero(call: QuantizedCall) -> bool:
    """Tells whether a pad of integers puts zeros beside them, which stand among them."""
    is_zero = call.operands.get("mode", "constant") == "constant" and not call.operands.get("value")
    return is_zero and call.entered is not None and -128 <= call.entered.zero_point <= 127


def concatenations_share_qparams(working: fx.GraphModule) -> None:
    """Inputs of a quantized concatenation are converted to its output's parameters before it."""
    for call in quantized_calls(working.graph, schema_names(JOINS)):
        output, values = call.yielded, call.input
        if output is None or not output.is_int8 or not all(is_dequantize(v) and static_qparams(v) for v in values):
            continue
        with working.graph.inserting_before(call.node):
            shared = [v if static_qparams(v) == output else requantize(working.graph, v, output) for v in values]
        call.node.args = (shared, *call.node.args[1:])


def pads_stay_quantized(working: fx.GraphModule) -> None:
    """A zero pad behind a dequantize is always serialized as integers, so it gets a quantized output."""
    for call in quantized_calls(working.graph, _PADS):
        if call.entered is None or call.yielded is not None or not _pads_with_zero(call):
            continue
        users = list(call.node.users)
        with working.graph.inserting_before(call.node.next):
            kept = requantize(working.graph, call.node, call.entered)
        for user in users:
            user.replace_input_with(call.node, kept)
    one_dequantize_per_use(working)


def softmax_over_rows(working: fx.GraphModule) -> None:
    """A softmax of images works on rows: ExecuTorch's layout pass would run it over channels behind a pooling.

    The pass keeps values channels-last until an operator asks otherwise, and softmax does not; a reshape does. One
    over another dimension than the last is turned, as the kernel takes none.
    """
    for call in quantized_calls(working.graph, ("aten::softmax", "aten::_softmax")):
        node, value = call.node, tensor_value(call.node)
        shape: list[Any] = [] if value is None else list(value.shape)
        if value is not None and len(shape) > 2 and call.operands["dim"] not in (-1, len(shape) - 1):
            shape = list(_turned(node, call.input, call.operands["dim"], value).shape)
        if len(shape) != 4 or not all(isinstance(s, int) for s in shape):
            continue
        with working.graph.inserting_before(node):
            rows = call_like(working.graph, node, _ATEN.reshape.default, node.all_input_nodes[0], [-1, shape[-1]])
        node.args = (rows, -1, *node.args[2:])
        _as_image(node, shape)


def _turned(node: fx.Node, source: fx.Node, dim: int, value: Tensor) -> Tensor:
    """Lets a softmax run over the last dimension of what is turned, turns its result back, and returns its value."""
    users = list(node.users)
    with node.graph.inserting_before(node):
        node.args = (call_like(node.graph, node, _ATEN.transpose.int, source, dim, -1), -1, *node.args[2:])
    with node.graph.inserting_after(node):
        back = call_like(node.graph, node, _ATEN.transpose.int, node, dim, -1)
    own = value.transpose(dim, -1)
    node.meta["val"], back.meta["val"] = own, value
    for user in users:
        user.replace_input_with(node, back)
    return own


def dynamic_linears_over_rows(working: fx.GraphModule) -> None:
    """A dynamic linear of images works on rows: ExecuTorch's layout pass would put a copy before the linear.

    Behind that copy the serializer no longer finds the dequantize, and refuses the program.
    """
    linears = dict.fromkeys(c.node for c in quantized_calls(working.graph, ("aten::linear",)) if _is_dynamic_image(c))
    quantizes: dict[Any, None] = dict.fromkeys(linear.all_input_nodes[0].args[0] for linear in linears)
    for quantize in quantizes:
        readers = [user for dequantize in quantize.users for user in dequantize.users]
        if not all(reader in linears for reader in readers):
            continue
        source, chosen = quantize.args[0], quantize.args[1].args[0]
        with working.graph.inserting_before(chosen):
            rows = call_like(working.graph, quantize, _ATEN.flatten.using_ints, source, 0, -2)
        for node in (chosen, quantize):
            node.replace_input_with(source, rows)
        for reader in readers:
            value = tensor_value(reader)
            assert value is not None
            _as_image(reader, [-1, *value.shape[1:]])


def _is_dynamic_image(call: QuantizedCall) -> bool:
    value = tensor_value(call.node)
    sizes = [] if value is None else list(value.shape)[1:]
    if not call.is_dynamic or "affine" in operator_name(call.input):  # whose blocks have the image's rank
        return False
    return len(sizes) == 3 and all(isinstance(size, int) for size in sizes)


def _as_image(node: fx.Node, sizes: list[Any]) -> None:
    """Lets the readers of an operator over rows read an image."""
    users = list(node.users)
    with node.graph.inserting_before(node.next):
        image = call_like(node.graph, node, _ATEN.reshape.default, node, sizes)
    image.meta["val"] = node.meta.get("val")
    for user in users:
        user.replace_input_with(node, image)


def single_taps_have_own_scales(working: fx.GraphModule) -> None:
    """Lets convolutions of one tap quantize for themselves what others quantize at run time too.

    XNNPACK 1.4's products of rows and its convolutions over windows both read integers with scales of run time, but
    not the same ones: what stands behind one of them is wrong where both share.
    """
    for quantize in [n for n in working.graph.nodes if is_quantize(n) and is_dynamic(n)]:
        backs = list(quantize.users)
        single = [user for back in backs for user in back.users if _has_one_tap(user)]
        if not single or all(_has_one_tap(user) for back in backs for user in back.users):
            continue
        scales = [node for node in quantize.all_input_nodes[1:] if is_getitem(node)]
        found = [node for scale in scales[:1] for node in scale.all_input_nodes]
        own, behind = dict[fx.Node, fx.Node](), backs[0].next
        for node in (*found, *scales, quantize, backs[0]):
            with working.graph.inserting_before(behind):
                own[node] = like(working.graph.node_copy(node, partial(_one_of, own)), node)
        for user in single:
            for back in backs:
                user.replace_input_with(back, own[backs[0]])


def _one_of(own: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return own.get(node, node)


def _has_one_tap(node: fx.Node) -> bool:
    """Tells whether a convolution is a product of rows to XNNPACK."""
    if operator_name(node) not in ("aten::conv1d", "aten::conv2d"):
        return False
    given = operands(node)
    weight = tensor_value(given["weight"])
    is_dense = set(given["stride"]) == {1} and given["groups"] == 1 and not any(given["padding"])
    return is_dense and weight is not None and math.prod(weight.shape[2:]) == 1
