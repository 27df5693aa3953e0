"""Weights of four bits with one scale for a group of input channels, two to a byte.

Before: int8 constants of -8..7 behind an affine dequantization in blocks of one row. After: bytes with two of them,
which the portable graph takes apart and hands to torch's packing; that layout depends on the processor, so it is made
once wherever the program is to run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.core.graph.editing import call
from quantplug.core.graph.facts import constant_value, operands, tensor_value
from quantplug.core.patterns.language import Match
from quantplug.core.qdq.nodes import AFFINE_OPS, DEQUANTIZE_OPS
from quantplug.core.specs.dtypes import group_size

aten = torch.ops.aten
# What aten::_weight_int4pack_mm_for_cpu takes: groups of these sizes, and output channels in tiles.
SIZES, TILE = (32, 64, 128, 256), 16
FOUR_BITS = (-8, 7)
PACK = aten._convert_weight_to_int4pack_for_cpu.default
# What takes the bytes apart; its operands are constants.
UNPACK = (
    aten.bitwise_and.Scalar,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.zeros_like.default,
    aten.stack.default,
    aten.reshape.default,
    aten.to.dtype,
    PACK,
)
_GROUPS = frozenset(AFFINE_OPS) & frozenset(DEQUANTIZE_OPS)


def stored_bits(spec: QuantizationSpec, activation: QuantizationSpec | None) -> int:
    """Returns how many bits a file takes for each number of a weight."""
    return 8 if group_size(spec) is None else 4


def readable_groups(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for weights "w" without groups, and for groups that the kernel reads."""
    size, weight = group_size(config.weight), tensor_value(match["w"])
    if size is None or weight is None:
        return None
    if size not in SIZES:
        return f"the kernel takes groups of {', '.join(map(str, SIZES))} input channels, not of {size}"
    if int(weight.shape[0]) % TILE:
        return f"its {int(weight.shape[0])} output channels are no multiple of {TILE}"
    return None


@dataclass(frozen=True)
class GroupedWeight:
    """A symmetric weight of four bits.

    Attributes:
        packed: uint8, shape (output channels, input channels / 2): the even ones in the lower half, each plus 8.
        scales: float32, shape (output channels, groups).
        size: input channels in a group.
    """

    packed: Tensor
    scales: Tensor
    size: int

    @property
    def columns(self) -> int:
        """How many input channels there are."""
        return 2 * self.packed.shape[1]


def grouped_weight(node: fx.Node) -> GroupedWeight | str:
    """Returns the constant of four bits behind a linear's weight, or why it is none that the kernel multiplies."""
    if node.target not in _GROUPS:
        return "its weight is not quantized in groups of input channels"
    given = operands(node)
    values, scales, zeros = (_constant(given.get(name)) for name in ("input", "scale", "zero_point"))
    if values is None or scales is None or values.dim() != 2 or values.dtype != torch.int8:
        return "its weight is no constant matrix of int8"
    size = given["block_size"][1]
    if tuple(given["block_size"]) != (1, size) or size not in SIZES or values.shape[0] % TILE:
        return f"its weight of {tuple(values.shape)} has blocks of {given['block_size']}"
    if (zeros is not None and bool((zeros != 0).any())) or not _fits(values):
        return "its weight has zero points, or more than four bits"
    raised = (values - FOUR_BITS[0]).to(torch.uint8)
    packed = raised[:, ::2] | (raised[:, 1::2] << 4)
    return GroupedWeight(packed.contiguous(), scales.detach().reshape(values.shape[0], -1).to(torch.float32), size)


def _constant(found: object) -> Tensor | None:
    return constant_value(found) if isinstance(found, fx.Node) else None


def _fits(values: Tensor) -> bool:
    low, high = values.aminmax()
    return FOUR_BITS[0] <= int(low) and int(high) <= FOUR_BITS[1]


def integers(before: fx.Node, packed: fx.Node) -> fx.Node:
    """Writes, in front of a node, the int32 matrix of the halves of a constant's bytes."""
    rows, columns = packed.meta["val"].shape

    def made(target: object, args: tuple[object, ...], *shape: int, dtype: torch.dtype = torch.uint8) -> fx.Node:
        node = call(before, target, args, packed)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    low = made(aten.bitwise_and.Scalar, (packed, 15), rows, columns)
    high = made(aten.bitwise_right_shift.Tensor_Scalar, (packed, 4), rows, columns)
    pairs = made(aten.stack.default, ([low, high], -1), rows, columns, 2)
    matrix = made(aten.reshape.default, (pairs, [rows, 2 * columns]), rows, 2 * columns)
    return made(aten.to.dtype, (matrix, torch.int32), rows, 2 * columns, dtype=torch.int32)


def scales_and_zeros(before: fx.Node, scales: fx.Node) -> fx.Node:
    """Writes, in front of a node, scales beside the real number of the integer 8, which is 0."""
    zeros = call(before, aten.zeros_like.default, (scales,), scales)
    both = call(before, aten.stack.default, ([scales, zeros], -1), scales)
    both.meta["val"] = torch.empty((*scales.meta["val"].shape, 2), dtype=scales.meta["val"].dtype, device="meta")
    return both
