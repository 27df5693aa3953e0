"""Integers as XNNPACK has them: of the whole range, one dequantize for each reader, numbers as constants.

Before: a q/dq graph with shared dequantizes, numbers beside tensors, clamps behind kernels, integers of fewer than 256
values, and embeddings of quantized tables. After: the same reals.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call_like, constant, erase_dead_code, like
from quantplug.core.graph.facts import constant_value, operands, operator_name, rank, tensor_value
from quantplug.core.graph.operators import CLAMPS, schema_names
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.qdq.by_rows import ROWS_OF_INTEGERS
from quantplug.core.qdq.calls import QuantizedCall, is_activation, quantized_calls
from quantplug.core.qdq.nodes import AFFINE_OPS, DEQUANTIZE_OPS, is_dequantize, is_quantize
from quantplug.core.qdq.qparams import INT8, StaticQParams, requantize, static_qparams
from quantplug.lowering.xnnpack.legalize.products import GEMMS

_ATEN = torch.ops.aten
_Q = torch.ops.quantized_decomposed
# Kernels that take bounds of their results.
_FUSING = {*GEMMS, "aten::add", "aten::sub", "aten::mul"}
# Clamps that the serializer drops, unlike relu and hardtanh.
_UNFUSED = {f"{name}{in_place}" for name in schema_names(CLAMPS) if "clamp" in name for in_place in ("", "_")}
_BESIDE_NUMBERS: Mapping[str, Any] = MappingProxyType(
    {
        "aten::add": _ATEN.add.Tensor,
        "aten::sub": _ATEN.sub.Tensor,
        "aten::mul": _ATEN.mul.Tensor,
        "aten::div": _ATEN.mul.Tensor,
    }
)
_BY_ROW = "outside of the delegates, on a portable kernel that reads the integers of the rows it is asked for"
_CASTS = schema_names(("to", "_to_copy"))
# The rows of a table of which a kernel reads some have one scale each, and its integers one byte.
_ROWS = 0
_BYTES = (torch.int8, torch.uint8)


def one_dequantize_per_use(working: fx.GraphModule) -> None:
    """A dequantize that integer and float operators share would be written for one of them only.

    Every operator that looks quantized gets its own; the others keep one between them, so that the
    conversion is carried out once.
    """
    for node in [n for n in working.graph.nodes if is_dequantize(n)]:
        integer = [user for user in node.users if QuantizedCall.of(user).output is not None]
        shared = len(integer) < len(node.users)
        for user in integer[0 if shared else 1 :]:
            with working.graph.inserting_before(node.next):
                own = like(working.graph.node_copy(node), node)
            user.replace_input_with(node, own)


def quantize_scalars(working: fx.GraphModule) -> None:
    """A number beside a quantized operand becomes an int8 constant that stands for exactly that number."""
    for call in quantized_calls(working.graph, _BESIDE_NUMBERS):
        number, divides = call.operands.get("other"), operator_name(call.node) == "aten::div"
        if isinstance(number, fx.Node) or not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        if not is_dequantize(call.input) or call.output is None or call.operands.get("alpha", 1) != 1:
            continue
        if divides and (call.operands.get("rounding_mode") or not number):
            continue
        held = _int8_number(call.node, 1.0 / number if divides else float(number))
        call.node.target = _BESIDE_NUMBERS[operator_name(call.node)]
        call.node.args, call.node.kwargs = (call.input, held), {}


def _int8_number(node: fx.Node, number: float) -> fx.Node:
    # 127 steps of |number|/127 are the number itself, up to one rounding of the scale.
    scale = abs(number) / 127 or 1.0
    # Of the other operand's rank: ExecuTorch's layout pass turns 4-D operands back beside any other.
    shape = [1] * (rank(node) or 1)
    integer = torch.full(shape, 0 if number == 0 else 127 if number > 0 else -127, dtype=torch.int8)
    held = constant(node, "number", integer)
    with node.graph.inserting_before(node):
        return call_like(node.graph, node, _Q.dequantize_per_tensor.default, held, scale, 0, *INT8)


def clamps_as_fusable_activations(working: fx.GraphModule) -> None:
    """XNNPACK fuses relu and hardtanh into the kernel before them, but the serializer drops a clamp."""
    for call in quantized_calls(working.graph, _UNFUSED):
        given = clamp_bounds(call.node)
        if given is None or call.yielded is None or not _fuses(call.input):
            continue
        low, high = (float(end if own is None else own) for own, end in zip(given, call.yielded.bounds, strict=True))
        if low <= high:
            _become_hardtanh(call.node, call.input, low, high)


def _fuses(kernel: fx.Node) -> bool:
    """Tells whether an activation that reads a node is computed by its kernel."""
    return operator_name(kernel) in _FUSING and len(kernel.users) == 1


def _become_hardtanh(node: fx.Node, source: Any, low: float, high: float) -> None:
    node.target, node.args, node.kwargs = _ATEN.hardtanh.default, (source, low, high), {}


def narrow_ranges_as_clamps(working: fx.GraphModule) -> None:
    """XNNPACK's kernels saturate to the whole of int8; a narrower range becomes a clamp and the whole range."""
    for node in [n for n in working.graph.nodes if is_quantize(n)]:
        params = static_qparams(node)
        if params is not None and params.dtype == torch.int8 and not params.is_int8:
            _bound(node, params)
    for node in [n for n in working.graph.nodes if is_dequantize(n)]:
        params = static_qparams(node)
        if params is not None and params.dtype == torch.int8 and node.all_input_nodes[0].op != "get_attr":
            node.args = (node.args[0], params.scale, params.zero_point, *INT8)  # reading needs no range


def _bound(quantize: fx.Node, params: StaticQParams) -> None:
    graph, value, (low, high) = quantize.graph, quantize.all_input_nodes[0], params.bounds
    quantize.args = (value, params.scale, params.zero_point, *INT8)
    if is_activation(value) and len(value.users) == 1:
        least, most = clamp_bounds(value) or (None, None)
        low, high = max(low, low if least is None else float(least)), min(high, high if most is None else float(most))
        _become_hardtanh(value, value.args[0], low, high)
        return
    with graph.inserting_before(quantize):
        # Behind a kernel that takes no bounds the clamp works on the integers; rounding commutes with it.
        whole = replace(params, quant_min=-128, quant_max=127)
        source = value if _fuses(value) else requantize(graph, value, whole)
        quantize.replace_input_with(value, call_like(graph, value, _ATEN.hardtanh.default, source, low, high))


def casts_of_integers_are_conversions(working: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> None:
    """An int8 tensor as float32, such as a cache in integers, is a conversion with scale 1, which delegates have.

    Args:
        working: a private copy; it is changed in place.
        taken: which nodes may be written so, None for all.
    """
    for node in [n for n in working.graph.nodes if operator_name(n) in _CASTS and (taken is None or taken(n))]:
        source, value = tensor_value(node.args[0]), tensor_value(node)
        if source is None or value is None or (source.dtype, value.dtype) != (torch.int8, torch.float32):
            continue
        node.target, node.args, node.kwargs = _Q.dequantize_per_tensor.default, (node.args[0], 1.0, 0, *INT8), {}


def read_tables_by_row(working: fx.GraphModule) -> dict[str, str]:
    """Replaces embeddings of quantized tables by `embedding_byte` or `embedding_4bit`, in place; names are kept.

    A dequantized table would be float at every call, and end the process where zero points are float (torchao's
    `EmbeddingQuantizer`; the portable kernel takes int64). That kernel dequantizes only the rows that it is asked for.

    Returns:
        How each of them runs, by its name.
    """
    import executorch.exir.passes.quant_fusion_pass  # noqa: F401  registers embedding_byte

    for node in list(working.graph.nodes):
        if operator_name(node) != "aten::embedding":
            continue
        if _is_table(operands(node)["weight"]):
            _read_rows(node)
        elif _is_table_of_groups(operands(node)["weight"]):
            _read_groups(node)
    erase_dead_code(working.graph)
    return {node.name: _BY_ROW for node in working.graph.nodes if operator_name(node) in ROWS_OF_INTEGERS}


def _is_table(weight: fx.Node) -> bool:
    if not is_dequantize(weight) or operator_name(weight) != "quantized_decomposed::dequantize_per_channel":
        return False
    return bool(weight.args[3] == _ROWS) and weight.args[6] in _BYTES and weight.kwargs.get("out_dtype") is None


def _read_rows(node: fx.Node) -> None:
    found = operands(node)
    table, scales, zero_points, _, low, high, _ = found["weight"].args
    offsets = constant_value(zero_points)
    if offsets is not None:
        # The kernel takes zero points in the type of the scales.
        zero_points = constant(node, f"{node.name}_zero_points", offsets.float())
    node.target = torch.ops.quantized_decomposed.embedding_byte.default
    node.args, node.kwargs = (table, scales, zero_points, low, high, found["indices"]), {}


def _is_table_of_groups(weight: fx.Node) -> bool:
    if not isinstance(weight, fx.Node) or weight.target not in DEQUANTIZE_OPS or weight.target not in AFFINE_OPS:
        return False
    table, block, scales, zeros, dtype = (*weight.args, None, None)[:5]
    stored, numbers, offsets = (constant_value(n) if isinstance(n, fx.Node) else None for n in (table, scales, zeros))
    if stored is None or numbers is None or dtype != torch.int8 or stored.dim() != 2 or numbers.dim() not in (1, 2):
        return False
    size = stored.shape[1] * len(stored) // numbers.numel()  # torchao drops the dimension of a single group
    is_symmetric = zeros is None or (offsets is not None and not bool(offsets.any()))
    return is_symmetric and block in ((1, size), [1, size])


def _read_groups(node: fx.Node) -> None:
    """The integers of four bits stand two in a byte, the even places in the upper half."""
    found = operands(node)
    weight = found["weight"]
    table, _, scales, _, _, low, high = weight.args[:7]
    if -8 <= low < high <= 7:
        raised = (constant_value(table) + 8).to(torch.uint8)  # type: ignore[operator, union-attr]
        table = constant(node, f"{node.name}_table", raised[:, ::2] << 4 | raised[:, 1::2])
        low, high, node.target = -8, 7, _Q.embedding_4bit.default
    else:
        node.target = _Q.embedding_byte.default
    node.args, node.kwargs = (table, scales, None, low, high, found["indices"]), {}
