"""Operators over the last dimension of images, as operators over rows.

Before: softmax and dynamic linears of four dimensions, which ExecuTorch 1.4's layout pass gets wrong. After: of two.
"""

from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import operands, operator_name, tensor_value
from quantplug.core.qdq.nodes import is_dynamic
from quantplug.lowering.xnnpack.legalize.operators import calls, first_input

_ATEN = torch.ops.aten


def softmax_over_rows(working: fx.GraphModule) -> None:
    """A softmax of images works on rows: ExecuTorch's layout pass would run it over channels behind a pooling.

    The pass keeps values channels-last until an operator asks otherwise, and softmax does not; a reshape does.
    """
    for node in calls(working, ("aten::softmax", "aten::_softmax")):
        value, source = tensor_value(node), first_input(node)
        shape: list[Any] = [] if value is None else list(value.shape)
        if len(shape) != 4 or operands(node)["dim"] not in (-1, 3) or not all(isinstance(s, int) for s in shape):
            continue
        users = list(node.users)
        with working.graph.inserting_before(node):
            rows = call_like(working.graph, node, _ATEN.reshape.default, source, [-1, shape[-1]])
        node.args = (rows, -1, *node.args[2:])
        with working.graph.inserting_before(node.next):
            image = call_like(working.graph, node, _ATEN.reshape.default, node, shape)
        for user in users:
            user.replace_input_with(node, image)


def dynamic_linears_over_rows(working: fx.GraphModule) -> None:
    """A dynamic linear of images works on rows: ExecuTorch's layout pass would put a copy before the linear.

    Behind that copy the serializer no longer finds the dequantize, and refuses the program.
    """
    linears = dict.fromkeys(n for n in calls(working, ("aten::linear",)) if _is_dynamic_image(n))
    quantizes: dict[Any, None] = dict.fromkeys(first_input(first_input(n)) for n in linears)
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
            _as_image(working, reader)


def _is_dynamic_image(linear: fx.Node) -> bool:
    value, source = tensor_value(linear), first_input(linear)
    sizes = [] if value is None else list(value.shape)[1:]
    if not is_dynamic(source) or "affine" in operator_name(source):  # whose blocks have the image's rank
        return False
    return len(sizes) == 3 and all(isinstance(size, int) for size in sizes)


def _as_image(working: fx.GraphModule, linear: fx.Node) -> None:
    value, users = tensor_value(linear), list(linear.users)
    assert value is not None
    with working.graph.inserting_before(linear.next):
        image = call_like(working.graph, linear, _ATEN.reshape.default, linear, [-1, *value.shape[1:]])
    for user in users:
        user.replace_input_with(linear, image)
