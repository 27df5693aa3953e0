"""Quantization parameters as they stand in a q/dq graph, and integer weights behind dequantize nodes.

Before: `quantized_decomposed` nodes and constants. After: plain values; the graph is not changed.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators of quantized_decomposed)
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.constants import expression_value
from quantplug.core.graph.editing import call_like
from quantplug.core.graph.facts import constant_value, operands, operator_name, sole_user
from quantplug.core.graph.traits import transposes
from quantplug.core.patterns.language import Op, op
from quantplug.core.qdq.nodes import is_dequantize, is_quantize

QD = torch.ops.quantized_decomposed
FULL_RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


@dataclass(frozen=True)
class QParams:
    """Per-tensor parameters: real value = (integer - zero_point) * scale.

    Attributes:
        scale: a positive number, or a node that computes it at run time.
        zero_point: an integer, or a node that computes it at run time.
        quant_min: lowest integer.
        quant_max: highest integer.
        dtype: the integers' dtype.
    """

    scale: float | fx.Node
    zero_point: int | fx.Node
    quant_min: int
    quant_max: int
    dtype: torch.dtype

    @property
    def is_static(self) -> bool:
        """Tells whether scale and zero point are numbers known now."""
        return not isinstance(self.scale, fx.Node) and not isinstance(self.zero_point, fx.Node)

    @property
    def is_full_range(self) -> bool:
        """Tells whether every integer of the dtype is allowed, so that a kernel's saturation is the clamp."""
        return FULL_RANGE.get(self.dtype) == (self.quant_min, self.quant_max)

    @property
    def is_int8(self) -> bool:
        """Tells whether the range is the whole of int8, the only one that XNNPACK's kernels saturate to."""
        return self.dtype == torch.int8 and self.is_full_range

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest real value, of static parameters."""
        scale, zero_point = self.static().scale, self.static().zero_point
        return (self.quant_min - zero_point) * scale, (self.quant_max - zero_point) * scale

    def static(self) -> "StaticQParams":
        """Returns the same parameters, typed as numbers.

        Raises:
            LoweringError: they are computed at run time, which `is_static` tells.
        """
        if isinstance(self.scale, fx.Node) or isinstance(self.zero_point, fx.Node):
            raise LoweringError(
                f"Scale {self.scale} and zero point {self.zero_point} are computed at run time, where numbers are "
                "needed; ask `is_static` first, or `has_static_qparams` in the pattern."
            )
        return StaticQParams(self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype)

    def shifted(self, by: int, dtype: torch.dtype) -> "QParams":
        """Returns the parameters of the same real values with every integer moved by a constant.

        Args:
            by: what is added to every integer.
            dtype: of the moved integers.
        """
        return replace(
            self,
            zero_point=self.static().zero_point + by,
            quant_min=self.quant_min + by,
            quant_max=self.quant_max + by,
            dtype=dtype,
        )

    def args(self) -> tuple[float | fx.Node, int | fx.Node, int, int, torch.dtype]:
        """Returns the operands that follow the tensor in quantize_per_tensor and dequantize_per_tensor."""
        return (self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype)


@dataclass(frozen=True)
class StaticQParams(QParams):
    """Per-tensor parameters that are numbers.

    Attributes:
        scale: the step between two integers, as a real number.
        zero_point: the integer that stands for 0.
        quant_min: the least integer that is used.
        quant_max: the greatest.
        dtype: that of the integers.
    """

    scale: float
    zero_point: int


def qparams(node: fx.Node) -> QParams:
    """Returns the parameters of a quantize_per_tensor or dequantize_per_tensor node; constants are read.

    Args:
        node: the node.
    """
    given = operands(node)
    scale, zero_point = (_number(given[name]) for name in ("scale", "zero_point"))
    return QParams(
        scale if isinstance(scale, fx.Node) else float(scale),
        zero_point if isinstance(zero_point, fx.Node) else int(zero_point),
        _limit(given["quant_min"], given["dtype"], 0),
        _limit(given["quant_max"], given["dtype"], 1),
        given["dtype"],
    )


def _number(found: float | int | fx.Node) -> float | int | fx.Node:
    value = constant_value(found) if isinstance(found, fx.Node) else None
    return found if value is None else value.item()


def _limit(found: int | fx.Node, dtype: torch.dtype, side: int) -> int:
    number = _number(found)
    return FULL_RANGE[dtype][side] if isinstance(number, fx.Node) else int(number)


def quantize(**inputs: object) -> Op:
    """Returns the pattern of a per-tensor quantization.

    Args:
        inputs: patterns of operands by their names in the schema (`input`, `scale`, ...), and `name`.
    """
    return op("quantized_decomposed::quantize_per_tensor", **inputs)  # type: ignore[arg-type]


def dequantize(**inputs: object) -> Op:
    """Returns the pattern of a per-tensor dequantization.

    Args:
        inputs: patterns of operands by their names in the schema (`input`, `scale`, ...), and `name`.
    """
    return op("quantized_decomposed::dequantize_per_tensor", **inputs)  # type: ignore[arg-type]


def is_static(node: fx.Node) -> str | None:
    """A condition: the node's parameters are numbers, not computed at run time.

    Args:
        node: a quantize_per_tensor or dequantize_per_tensor node.
    """
    return None if qparams(node).is_static else "its quantization parameters are computed at run time"


@dataclass(frozen=True)
class IntegerWeight:
    """A symmetric int8 weight, output channel first.

    Attributes:
        values: int8, shape (output channels, ...).
        scales: float32, shape (output channels,).
    """

    values: Tensor
    scales: Tensor


DEQUANTIZE_PER_TENSOR = (
    QD.dequantize_per_tensor.default,
    QD.dequantize_per_tensor.tensor,
    QD.dequantize_per_tensor.tensor2,
)


def integer_weight(node: fx.Node, channel_axis: int = 0) -> IntegerWeight | str:
    """Returns the int8 constant behind a weight operand, or why it is none that oneDNN multiplies.

    Args:
        node: the weight operand; a two-dimensional transpose of the dequantized constant is seen through.
        channel_axis: the operand's axis of output channels.
    """
    if transposes(node) and isinstance(node.args[0], fx.Node):
        found = integer_weight(node.args[0], 1 - channel_axis)
        return found if isinstance(found, str) or found.values.dim() == 2 else "a transposed weight is not a matrix"
    if node.target in DEQUANTIZE_PER_TENSOR:
        return _per_tensor_weight(node, channel_axis)
    if node.target is QD.dequantize_per_channel.default:
        return _per_channel_weight(node, channel_axis)
    return "its weight is not quantized"


def _per_tensor_weight(node: fx.Node, channel_axis: int) -> IntegerWeight | str:
    given, params = operands(node), qparams(node)
    values = constant_value(given["input"])
    if values is None or isinstance(params.scale, fx.Node):
        return "its weight is not a constant"
    values = values.detach().movedim(channel_axis, 0)
    scales = torch.full((values.shape[0],), float(params.scale))
    return _checked(values, scales, torch.tensor([params.zero_point]))


def _per_channel_weight(node: fx.Node, channel_axis: int) -> IntegerWeight | str:
    given = operands(node)
    values, scales, zero_points = (constant_value(given[name]) for name in ("input", "scales", "zero_points"))
    if values is None or scales is None:
        return "its weight is not a constant"
    if given["axis"] % values.dim() != channel_axis:
        return f"its weight has scales along axis {given['axis']}, the kernel wants axis {channel_axis}"
    zeros = torch.zeros(1) if zero_points is None else zero_points
    return _checked(values.detach().movedim(channel_axis, 0), scales.detach(), zeros)


def _checked(values: Tensor, scales: Tensor, zero_points: Tensor) -> IntegerWeight | str:
    if values.dtype != torch.int8:
        return f"its weight is {values.dtype}, the kernel wants torch.int8"
    if bool((zero_points != 0).any()):
        return "its weight has a zero point other than 0"
    return IntegerWeight(values.contiguous(), scales.to(torch.float32).contiguous())


INT8 = (-128, 127, torch.int8)


def static_qparams(node: Any) -> StaticQParams | None:
    """Returns the parameters of a static per-tensor quantize or dequantize node, None for any other node."""
    name = operator_name(node)
    if name not in ("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::dequantize_per_tensor"):
        return None
    values = operands(node)
    if isinstance(values["scale"], fx.Node):  # chosen at run time
        return None
    return StaticQParams(
        float(values["scale"]),
        int(values["zero_point"]),
        int(values["quant_min"]),
        int(values["quant_max"]),
        values["dtype"],
    )


def quantized_output(node: fx.Node) -> StaticQParams | None:
    """Returns the int8 parameters of the one quantize node that uses a node, None if there is none."""
    user = sole_user(node)
    return static_qparams(user) if user is not None and is_quantize(user) else None


def requantize(graph: fx.Graph, value: fx.Node, params: QParams) -> fx.Node:
    """Creates a quantize and a dequantize of a value at the insertion point; returns the dequantize."""
    quantized = call_like(graph, value, QD.quantize_per_tensor.default, value, *params.args())
    return call_like(graph, value, QD.dequantize_per_tensor.default, quantized, *params.args())


def folded(node: fx.Node) -> Tensor | None:
    """Returns the value of a dequantize node over constants, None if an operand is computed at run time."""
    return expression_value(node) if is_dequantize(node) else None
