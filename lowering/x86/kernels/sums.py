"""Residual sums, fused into the kernel of one summand.

Before: `kernel (float32) -> add -> relu -> quantize` and parts of it. After: one kernel that yields the quantized sum.
It writes onto the other summand's memory, which export and AOT autograd cannot express; so this is a step of its own,
taken where the graph is about to run or be compiled.
"""

from collections.abc import Container

import torch
from torch import fx

from quantplug.core.graph.editing import call, set_operand
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.patterns.language import Match, Op, Pattern, either, op, single_use, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.peers.torch_names import schema_of
from quantplug.core.qdq.qparams import QD, QParams, dequantize, qparams, quantize
from quantplug.lowering.open_sizes import same_shape
from quantplug.lowering.x86.kernels.calls import (
    CONVOLUTION,
    LINEAR,
    NO_SCALARS,
    bounded,
    kernel,
    with_output,
)

onednn = torch.ops.onednn
FLOAT = QParams(1.0, 0, 0, 0, torch.float32)
LINEARS = (onednn.qlinear_pointwise.default, onednn.qlinear_pointwise.tensor)
STATIC = (onednn.qlinear_pointwise.default, onednn.qconv_pointwise.default)
# of static and of dynamic kernels
LINEAR_SUMS = (onednn.qlinear_pointwise.binary, onednn.qlinear_pointwise.binary_tensor)
IMAGE_SUMS = (onednn.qconv2d_pointwise.binary, onednn.qconv2d_pointwise.binary_tensor)
# What the kernels call the summand, its numbers, how it is added, and the function of the sum.
_OUTPUT = ("output_scale", "output_zero_point", "output_dtype")
_OF_LINEARS = (
    *("other", "other_scale", "other_zp", "binary_post_op", "binary_alpha"),
    *("unary_post_op", "unary_post_op_args", "unary_post_op_algorithm"),
)
_OF_IMAGES = (
    *("qaccum", "accum_scale", "accum_zero_point", "binary_attr", "alpha"),
    *("unary_attr", "unary_scalars", "unary_algorithm"),
)
# Operators whose result is new memory, and that read their inputs without keeping a view of them.
FRESH = frozenset(
    (
        onednn.qconv_pointwise.default,
        onednn.qconv_pointwise.tensor,
        *IMAGE_SUMS,
        onednn.qlinear_pointwise.default,
        onednn.qlinear_pointwise.tensor,
        onednn.qlinear_pointwise.binary,
        torch.ops.quantized.max_pool2d.default,
        QD.quantize_per_tensor.default,
        QD.dequantize_per_tensor.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.cat.default,
    )
)
CHANNELS_LAST = frozenset((onednn.qconv_pointwise.default, onednn.qconv_pointwise.tensor, *IMAGE_SUMS))
CONTIGUOUS = frozenset((*LINEARS, onednn.qlinear_pointwise.binary, onednn.qlinear_pointwise.binary_tensor))


def fuse_sums(graph: fx.Graph) -> None:
    """Fuses residual sums, and what follows them, into the kernels; the kernels then write in place."""
    apply(graph, INTEGER_SUMS)
    # from the end, so that a relu is seen before the sum it follows
    apply(graph, FLOAT_SUMS, backwards=True)
    apply(graph, SUM_OUTPUTS)


def _sum(name: str, other: Pattern) -> Op:
    return op(
        "add.Tensor", self=single_use(kernel(name)), other=other, alpha=1, commutative=("self", "other"), name="add"
    )


def _rectified(total: Op) -> Pattern:
    return single_use(either(op("relu", self=single_use(total), name="relu"), total))


def _fuse_integer_sum(match: Match) -> fx.Node | str:
    """The kernel adds onto integers of the output's dtype, in their place."""
    theirs, ours = qparams(match["dequantize"]), qparams(match.root)
    if not (theirs.is_static and ours.is_static) or theirs.dtype != ours.dtype:
        return "the sum's other input is not quantized as its output is"
    return _shape_objection(match, match["integers"]) or _with_summand(match, match["integers"], theirs, ours)


def _fuse_float_sum(match: Match) -> fx.Node | str:
    other = tensor_value(match["other"])
    if other is None or other.dtype != torch.float32:
        return "the sum's other input is not torch.float32"
    return _shape_objection(match, match["other"]) or _with_summand(match, match["other"], FLOAT, FLOAT)


def _shape_objection(match: Match, other: fx.Node) -> str | None:
    total, part = tensor_value(match["add"]), tensor_value(other)
    if total is None or part is None or not same_shape(total, part):
        return "the sum broadcasts"
    if match["kernel"].target not in LINEARS and total.dim() != 4:
        return "convolution kernels add onto images only"
    return None


def _with_summand(match: Match, other: fx.Node, theirs: QParams, ours: QParams) -> fx.Node:
    product: fx.Node = match["kernel"]
    is_linear = product.target in LINEARS
    # "add" reads a float tensor of any owner; "sum" accumulates in place
    how = "add" if is_linear and ours is FLOAT else "sum"
    other = _contiguous(match.root, other) if how == "add" else other
    function = ("relu" if "relu" in match else "none", NO_SCALARS, "")
    added = (other, theirs.scale, theirs.zero_point, how, 1.0, *function)
    output = (ours.scale, ours.zero_point, ours.dtype)
    given = operands(product) | dict(zip(_OUTPUT, output, strict=True))
    given |= dict(zip(_OF_LINEARS if is_linear else _OF_IMAGES, added, strict=True))
    target = (LINEAR_SUMS if is_linear else IMAGE_SUMS)[product.target not in STATIC]
    names = [argument.name for argument in schema_of(target).arguments]
    node = call(match.root, target, [given[name] for name in names], match.root, ours.dtype)
    if how == "sum":
        _give_own_memory(node, other, match.nodes)
    return bounded(node, ours)


def _contiguous(before: fx.Node, other: fx.Node) -> fx.Node:
    """The kernels take the memory of a transposed summand for that of a contiguous one."""
    if other.target in CONTIGUOUS:
        return other
    return call(before, torch.ops.aten.contiguous.default, (other,), other)


def _give_own_memory(kernel: fx.Node, accumulator: fx.Node, piece: Container[fx.Node]) -> None:
    """Copies what a kernel adds onto, unless nobody else can read that memory from then on.

    Convolutions add onto channels-last memory only, linears onto contiguous; where the producer may have another
    layout it is changed.

    Args:
        kernel: what adds.
        accumulator: what it adds onto.
        piece: the operators that the kernel takes the place of, which read it no more.
    """
    others = [user for user in accumulator.users if user is not kernel and user not in piece]
    is_free = accumulator.target in FRESH and accumulator is not operands(kernel)["qx"]
    is_free = is_free and all(user.target in FRESH and user < kernel for user in others)
    is_image = kernel.target in IMAGE_SUMS
    if is_free and accumulator.target in (CHANNELS_LAST if is_image else CONTIGUOUS):
        return
    target = torch.ops.aten.contiguous.default if is_free else torch.ops.aten.clone.default
    own = call(kernel, target, (accumulator,), accumulator)
    own.kwargs = {"memory_format": torch.channels_last if is_image else torch.contiguous_format}
    set_operand(kernel, "qaccum" if is_image else "other", own)


INTEGER_OTHER = dequantize(input=value("integers"), name="dequantize")


INTEGER_SUMS = tuple(
    Rule(quantize(input=_rectified(_sum(name, INTEGER_OTHER))), _fuse_integer_sum) for name in (CONVOLUTION, LINEAR)
)
FLOAT_SUMS = tuple(
    rule
    for name in (CONVOLUTION, LINEAR)
    for rule in (
        Rule(op("relu", self=single_use(_sum(name, value("other"))), name="relu"), _fuse_float_sum),
        Rule(_sum(name, value("other")), _fuse_float_sum),
    )
)


def _fuse_sum_output(match: Match) -> fx.Node | str:
    """A linear with a float sum can still quantize its result: its own parameters stand before the sum's."""
    found = with_output(match)
    return found if isinstance(found, str) else bounded(found, qparams(match.root))


def _with_sum(overload: str) -> Op:
    return op(f"{LINEAR}.{overload}", name="kernel", output_dtype=torch.float32, binary_post_op="add")


SUM_OUTPUTS = tuple(
    Rule(quantize(input=single_use(_with_sum(overload))), _fuse_sum_output) for overload in ("binary", "binary_tensor")
)
