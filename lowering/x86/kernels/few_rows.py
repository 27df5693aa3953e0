"""Linears of few rows, whose time is that of reading the weight.

Before: `onednn.qlinear_pointwise` with constants behind a prepack node. After, where oneDNN reads weights slowly: a
kernel that reads them as fast as memory gives them, and the epilogue that the other had fused. In eager mode that is
FBGEMM's, which computes the same integers. It takes a packed weight that is no tensor, so compilers get torch's kernel
on bfloat16, whose result is at about 50 dB.
"""

import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import call, free_name, replace, set_operand
from quantplug.core.graph.facts import attribute, constant_value, operands, rank, tensor_value
from quantplug.core.patterns.language import Match, op, optional, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import FULL_RANGE, QD, IntegerWeight
from quantplug.lowering.processor import has_amx, kernels_saturate
from quantplug.lowering.x86.kernels.weight_only import product_in_half, size_objection

aten, quantized = torch.ops.aten, torch.ops.quantized
ENGINE = "fbgemm"
# Without VNNI (AMD Zen 3) 1 x 4096 x 4096 takes FBGEMM 1.5 instead of oneDNN's 4.9 ms, 8 rows 2.0 instead of 5.9, 16
# rows of 512 x 1000 0.21 instead of 0.34; from 64 rows on, or with 65,000 weights, both take the same. With VNNI an
# Intel Xeon (family 6, model 167) takes the same up to 2 rows, then FBGEMM up to twice as long. An older Xeon's tiles
# read a weight beyond the second-level cache at half the speed of memory, which those of the newer do not.
ROWS, ROWS_WITH_VNNI, LEAST_ELEMENTS = 16, 2, 2**19
# In bfloat16 without VNNI: 1 row 1.6, 4 rows 3.3, 8 rows 6.5 ms. On the newer Xeon 1 row 0.8, where oneDNN takes 0.7.
HALF_ROWS, LEAST_HALF_ELEMENTS = 4, 2**22


def read_faster(graph: fx.Graph) -> None:
    """Puts FBGEMM's kernel in the place of oneDNN's where that is slow here; for a graph that runs in eager mode."""
    if most_rows():
        apply(graph, BY_FBGEMM)
        _join(graph)
        _pack(graph)


def stream(graph: fx.Graph) -> None:
    """Puts torch's own kernel in the place of oneDNN's where that is slow here; for a graph that is compiled."""
    if kernels_saturate():
        apply(graph, IN_HALF)


def most_rows() -> int:
    """Returns up to how many rows FBGEMM may read a weight faster than oneDNN, in this process."""
    if ENGINE not in torch.backends.quantized.supported_engines:
        return 0
    if kernels_saturate():  # so the weights have 7 bits, for either kernel
        return ROWS
    return 0 if fbgemm_saturates() else ROWS_WITH_VNNI


@lru_cache(maxsize=1)
def fbgemm_saturates() -> bool:
    """Tells whether FBGEMM's sums of two products overflow here, found by trying.

    It knows the VNNI of AVX512 alone. oneDNN also knows that of AVX2, and is right where FBGEMM has 16 bits for a sum.
    """
    inner = 64
    weight = IntegerWeight(torch.full((16, inner), 127, dtype=torch.int8), torch.ones(16))
    found = OF_NUMBERS(torch.full((1, inner), 255.0), 1.0, 0, _Layer(weight, None).packed())
    return bool((found != 255 * 127 * inner).any())


def least_elements(*, is_float: bool) -> int:
    """Returns from how many weights on FBGEMM is the faster here.

    It quantizes a float activation itself, in one pass instead of seven: on AMD Zen 4 a row of 32 to 1,024 channels by
    as many takes 0.3 to 0.4 of the time, and one by 300,000 to 28 million weights, read from memory, 0.3 to 0.7. What
    is in integers it would have to be given as floats: 1.1 to 1.5 of the time there, if the weight is in a cache.
    """
    if is_float:
        return 0
    return LEAST_ELEMENTS if kernels_saturate() or has_amx() else sys.maxsize


def is_read_faster(activation: fx.Node, weight: IntegerWeight) -> bool:
    """Tells whether a static linear of these integers goes to FBGEMM's kernel here, unless oneDNN's ends in more."""
    x = tensor_value(activation)
    least = least_elements(is_float=False)
    return x is not None and size_objection(x, weight, most_rows(), least) is None


Given = dict[str, Any]


def _by_fbgemm(match: Match) -> fx.Node | str:
    given = operands(match.root)
    if rank(given["qx"]) == 1:
        return "its activation is a vector, which the kernel does not take"
    is_float = _source(given["qx"], _parameters(given)) is not None
    return _instead(match, given, _fbgemm, most_rows(), least_elements(is_float=is_float))


def _in_half(match: Match) -> fx.Node | str:
    given = operands(match.root)
    if _is_dynamic(given):
        return "its parameters are known at run time only"
    return _instead(match, given, _half, HALF_ROWS, LEAST_HALF_ELEMENTS)


def _instead(
    match: Match,
    given: Given,
    product: Callable[[Match, Given, IntegerWeight], fx.Node],
    most_rows: int,
    least_elements: int,
) -> fx.Node | str:
    """Returns another product for the place of a kernel, or why there is none."""
    found = (operands(given["qw"]).get("weight"), given["w_scale"])
    values, scales = (constant_value(node) if isinstance(node, fx.Node) else None for node in found)
    x = tensor_value(given["qx"])
    if values is None or scales is None or x is None or x.dtype != torch.uint8:
        return "it is no product of uint8 and constants"
    if given["post_op_name"] not in _FUNCTIONS or given["output_dtype"] == torch.bfloat16:
        return "it ends in what only oneDNN fuses"
    weight = IntegerWeight(values, scales)
    reason = size_objection(x, weight, most_rows, least_elements)
    return reason or _quantized(match.root, given, product(match, given, weight))


def _is_dynamic(given: Given) -> bool:
    return isinstance(given["x_scale"], fx.Node)


def _parameters(given: Given) -> tuple[Any, ...]:
    return given["x_scale"], given["x_zero_point"], *FULL_RANGE[torch.uint8], torch.uint8


def _fbgemm(match: Match, given: Given, weight: IntegerWeight) -> fx.Node:
    """Inserts the kernel, which takes float32 and quantizes it itself."""
    node, parameters = match.root, _parameters(given)
    x, function = _real(node, given["qx"], parameters), given["post_op_name"]
    bias = constant_value(match["bias"]) if "bias" in match else None
    args = (x, *parameters[:2], _held(node, _Layer(weight, bias)))
    if _is_dynamic(given):
        return _activated(node, given, call(node, of_parameters, args, node, torch.float32))
    product = call(node, _WITH_RELU if function == "relu" else _PLAIN, args, node, torch.float32)
    return product if function == "relu" else _activated(node, given, product)


def _source(integers: fx.Node, parameters: tuple[Any, ...]) -> fx.Node | None:
    """Returns the float32 tensor that was quantized to these integers, None where there is none."""
    is_static = integers.target is QD.quantize_per_tensor.default
    if not (is_static or integers.target is QD.quantize_per_tensor.tensor) or tuple(integers.args[1:]) != parameters:
        return None
    real = integers.args[0]
    found = tensor_value(real) if isinstance(real, fx.Node) else None
    return real if isinstance(real, fx.Node) and found is not None and found.dtype == torch.float32 else None


def _real(before: fx.Node, integers: fx.Node, parameters: tuple[Any, ...]) -> fx.Node:
    """Returns the float32 tensor that was quantized to these integers, or else dequantizes them."""
    source = _source(integers, parameters)
    if source is not None:
        return source
    is_dynamic = isinstance(parameters[0], fx.Node)
    dequantize = QD.dequantize_per_tensor.tensor if is_dynamic else QD.dequantize_per_tensor.default
    return call(before, dequantize, (integers, *parameters), integers, torch.float32)


def of_parameters(x: Tensor, scale: Tensor, zero_point: Tensor, packed: Any) -> Tensor:
    """Returns FBGEMM's product of a float32 tensor that it quantizes with parameters of run time."""
    found: Tensor = OF_NUMBERS(x, scale.item(), zero_point.item(), packed)
    return found


def _half(match: Match, given: Given, weight: IntegerWeight) -> fx.Node:
    node = match.root
    half = call(node, aten.to.dtype, (given["qx"], torch.bfloat16), given["qx"], torch.bfloat16)
    centred = call(node, aten.sub.Tensor, (half, given["x_zero_point"]), half)  # exact: 8 bits
    return _activated(node, given, product_in_half(match, centred, weight.values, weight.scales * given["x_scale"]))


OF_NUMBERS = _PLAIN = quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_WITH_RELU = quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default
# The functions that oneDNN's kernels end in, with what they take beside the product.
_FUNCTIONS: dict[str, tuple[Any, Callable[[Given], tuple[Any, ...]]] | None] = {
    "none": None,
    "relu": (aten.relu.default, lambda given: ()),
    "hardtanh": (aten.hardtanh.default, lambda given: tuple(given["post_op_args"])),
    "hardswish": (aten.hardswish.default, lambda given: ()),
    "swish": (aten.silu.default, lambda given: ()),
    "gelu": (aten.gelu.default, lambda given: ()),
    "leaky_relu": (aten.leaky_relu.default, lambda given: tuple(given["post_op_args"])),
    "tanh": (aten.tanh.default, lambda given: ()),
}


def _activated(node: fx.Node, given: Given, product: fx.Node) -> fx.Node:
    """Returns a product behind the function that the kernel had fused."""
    function = _FUNCTIONS[given["post_op_name"]]
    if function is None:
        return product
    target, rest = function
    activated = call(node, target, (product, *rest(given)), product)
    if target is aten.gelu.default:
        set_operand(activated, "approximate", given["post_op_algorithm"])
    return activated


def _quantized(node: fx.Node, given: Given, product: fx.Node) -> fx.Node:
    """Returns a float product, quantized if the kernel's result was."""
    dtype = given["output_dtype"]
    if dtype == torch.float32:
        return product
    to = (given["output_scale"], given["output_zero_point"], *FULL_RANGE[dtype], dtype)
    return call(node, QD.quantize_per_tensor.default, (product, *to), product, dtype)


@dataclass(frozen=True)
class _Layer:
    """What a product multiplies by, until it is packed: integers, their scales, and what is added."""

    weight: IntegerWeight
    bias: Tensor | None

    @classmethod
    def of_all(cls, layers: Sequence["_Layer"]) -> "_Layer":
        """Returns one layer whose output channels are those of several, one after the other."""
        values, scales = (torch.cat([getattr(layer.weight, name) for layer in layers]) for name in ("values", "scales"))
        biases = [torch.zeros_like(layer.weight.scales) if layer.bias is None else layer.bias for layer in layers]
        has_bias = any(layer.bias is not None for layer in layers)
        return cls(IntegerWeight(values, scales), torch.cat(biases) if has_bias else None)

    def packed(self) -> Any:
        zeros = torch.zeros(len(self.weight.scales), dtype=torch.int64)
        chosen = torch.backends.quantized.engine
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are on their way out: one is made, packed and gone
            floats, scales = self.weight.values * self.weight.scales[:, None], self.weight.scales.double()
            integers = torch.quantize_per_channel(floats, scales, zeros, 0, torch.qint8)
            torch.backends.quantized.engine = ENGINE
            try:
                return quantized.linear_prepack(integers, self.bias)
            finally:
                torch.backends.quantized.engine = chosen


def _held(before: fx.Node, layer: Any) -> fx.Node:
    module = before.graph.owning_module
    assert module is not None
    name = free_name(module, "packed")
    setattr(module, name, layer)
    with before.graph.inserting_before(before), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fx would rather have a parameter
        return before.graph.get_attr(name)


def _join(graph: fx.Graph) -> None:
    """Makes one product of those that read the same activation, such as queries, keys and values of attention."""
    alike = defaultdict(list)
    for node in graph.nodes:
        if node.target in (_PLAIN, of_parameters):
            alike[node.args[:3]].append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _joined(nodes)


def _joined(nodes: Sequence[fx.Node]) -> None:
    first, values = nodes[0], [node.meta["val"] for node in nodes]
    layer = _Layer.of_all([_layer(node.args[3]) for node in nodes])
    product = call(first, first.target, (*first.args[:3], _held(first, layer)), first)
    ends = list(itertools.accumulate(value.shape[-1] for value in values))
    product.meta["val"] = values[0].new_empty((*values[0].shape[:-1], ends[-1]))
    for node, start, end in zip(nodes, [0, *ends], ends, strict=False):
        replace(node, call(node, aten.slice.Tensor, (product, -1, start, end), node))


def _layer(node: Any) -> _Layer:
    found: _Layer = attribute(node.graph.owning_module, node.target)
    return found


def _pack(graph: fx.Graph) -> None:
    module = graph.owning_module
    assert module is not None
    for node in graph.find_nodes(op="get_attr"):
        layer = attribute(module, node.target)
        if isinstance(layer, _Layer):
            setattr(module, node.target, layer.packed())


_LINEAR = op("onednn::qlinear_pointwise.default", "onednn::qlinear_pointwise.tensor", bias=optional(value("bias")))
BY_FBGEMM = (Rule(_LINEAR, _by_fbgemm),)
IN_HALF = (Rule(_LINEAR, _in_half),)
