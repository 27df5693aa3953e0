"""Weights packed into the layout that this machine's kernels want.

Before: `prepack(int8 constant, ...)` nodes. After: the packed constants.
"""

import copy
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph import constant_value
from quantplug.lowering.x86.rewriting import drop_unread_attributes, erase_unused, fresh_name

onednn = torch.ops.onednn
PREPACK = (onednn.qconv_prepack.default, onednn.qlinear_prepack.default)


def pack(portable: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a lowered module in which every prepack node is a packed constant."""
    module = fx.GraphModule(portable, copy.deepcopy(portable.graph))
    for node in list(module.graph.nodes):
        if node.target in PREPACK:
            _fold(module, node)
    module.graph.eliminate_dead_code()
    drop_unread_attributes(module)
    module.recompile()
    return module


def _fold(module: fx.GraphModule, node: fx.Node) -> None:
    args = fx.node.map_arg(node.args, constant_value)
    with torch.no_grad():
        packed = node.target(*args)  # type: ignore[operator]
    name = fresh_name(module, "packed")
    module.register_buffer(name, packed, persistent=False)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    node.replace_all_uses_with(constant)
    erase_unused(node)


_registered: list[Any] = []


def register_fakes() -> None:
    """Tells export the shapes of oneDNN operators that torch has no fake implementation of."""
    if _registered:
        return
    library = torch.library
    _registered.append(library.register_fake("onednn::qconv_prepack", _prepacked))
    _registered.append(library.register_fake("onednn::qlinear_prepack", _linear_prepacked))
    elementwise = (f"onednn::{name}.tensor" for name in ("qadd", "qadd_relu", "qmul"))
    _registered.extend(library.register_fake(name, _elementwise) for name in elementwise)


def _prepacked(weight: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.empty_like(weight)


def _linear_prepacked(weight: Tensor, x_shape: Any) -> Tensor:
    return weight.new_empty((weight.shape[1], weight.shape[0]))


def _elementwise(one: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(one, dtype=rest[-1])
