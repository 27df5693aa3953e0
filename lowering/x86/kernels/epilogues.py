"""What follows a kernel, fused into it.

Before: `kernel (float32) -> add -> relu -> quantize` and parts of it. After: one kernel that yields the
quantized result. Residual sums write onto the other summand's memory, which export and AOT autograd cannot
express; so they are a step of their own, `fuse_sums`, taken where the graph is about to run or be compiled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from quantplug.core.graph.editing import call, replace
from quantplug.core.graph.facts import operands, tensor_value
from quantplug.core.graph.meta import absorb
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.patterns.language import Match, Op, Pattern, either, op, single_use, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.qdq.qparams import QD, QParams, dequantize, qparams, quantize
from quantplug.lowering.clamps import clamp_rules
from quantplug.lowering.open_sizes import same_shape
from quantplug.lowering.x86.kernels.images import as_images
from quantplug.lowering.x86.kernels.products import NO_SCALARS

onednn = torch.ops.onednn
CONVOLUTION, LINEAR = "onednn::qconv_pointwise", "onednn::qlinear_pointwise"
# positions in the kernels' schemas: both end in (scale, zero point, dtype, unary, scalars, algorithm)
SCALE, ZERO_POINT, DTYPE, UNARY, SCALARS, ALGORITHM = range(-6, 0)


def fuse(graph: fx.Graph) -> None:
    """Fuses unary functions, clamps and output quantization into the kernels; the graph stays functional."""
    apply(graph, UNARIES)
    apply(graph, INTEGER_CLAMPS)
    apply(graph, OUTPUTS)
    as_images(graph)


def fuse_sums(graph: fx.Graph) -> None:
    """Fuses residual sums, and what follows them, into the kernels; the kernels then write in place."""
    apply(graph, INTEGER_SUMS)
    # from the end, so that a relu is seen before the sum it follows
    apply(graph, FLOAT_SUMS, backwards=True)
    apply(graph, SUM_OUTPUTS)


def kernel(name: str, unary: str | None = "none") -> Op:
    """Returns the pattern of a static or dynamic kernel that still yields float32."""
    pattern = op(f"{name}.default", f"{name}.tensor", name="kernel", output_dtype=torch.float32)
    return pattern if unary is None else pattern.where(lambda match: _has_unary(match["kernel"], unary))


def _has_unary(node: fx.Node, unary: str) -> str | None:
    found = node.args[UNARY]
    return None if found == unary else f"the kernel already ends in {found}"


def set_args(node: fx.Node, changes: dict[int, Any]) -> None:
    """Changes operands of a node by position, counted from the end where negative."""
    args = list(node.args)
    for position, found in changes.items():
        args[position] = found
    node.args = tuple(args)


# ---- unary functions


def _unary(
    function: Op, name: str, scalars: Callable[[fx.Node], list[Any] | str], algorithm: str = "approximate"
) -> Rule:
    def rewrite(match: Match) -> str | None:
        given = operands(match.root)
        numbers = scalars(match.root)
        if isinstance(numbers, str):
            return numbers
        node: fx.Node = match["kernel"]
        reason = _unary_objection(node, name)
        if reason:
            return reason
        set_args(node, {UNARY: name, SCALARS: numbers, ALGORITHM: given.get(algorithm, "")})
        absorb(node, *match.nodes)
        replace(match.root, node)
        return None

    return Rule(function, rewrite)


def _unary_objection(kernel: fx.Node, name: str) -> str | None:
    # The kernels check the function by the number of spatial dimensions; over three they take none.
    over_volumes = len(operands(kernel).get("stride", ())) == 3
    return f"the convolution kernel over 3 dimensions does not end in {name}" if over_volumes else None


UNBOUNDED = (-3.0e38, 3.0e38)


def _nothing(function: fx.Node) -> list[Any]:
    return NO_SCALARS


def _bounds(function: fx.Node) -> list[Any] | str:
    found = clamp_bounds(function)
    if found is None:
        return "its bounds are tensors"
    return [end if bound is None else float(bound) for bound, end in zip(found, UNBOUNDED, strict=True)]


def _slope(function: fx.Node) -> list[Any]:
    return [operands(function)["negative_slope"]]


def _unaries(name: str) -> Iterator[Rule]:
    source = single_use(kernel(name))
    yield _unary(op("relu", self=source), "relu", _nothing)
    yield from (_unary(op(clamp, self=source), "hardtanh", _bounds) for clamp in CLAMPS if clamp != "relu")
    yield _unary(op("hardswish", self=source), "hardswish", _nothing)
    yield _unary(op("silu", self=source), "swish", _nothing)
    gate = op("sigmoid", self=kernel(name))
    yield _unary(
        op(
            "mul.Tensor", self=kernel(name), other=single_use(gate), commutative=("self", "other"), where=(_used_twice,)
        ),
        "swish",
        _nothing,
    )
    if name == LINEAR:
        yield _unary(op("gelu", self=source), "gelu", _nothing)
        yield _unary(op("leaky_relu", self=source), "leaky_relu", _slope)
        yield _unary(op("tanh", self=source), "tanh", _nothing)


def _used_twice(match: Match) -> str | None:
    return None if len(match["kernel"].users) == 2 else "the product is used elsewhere too"


UNARIES = (*_unaries(CONVOLUTION), *_unaries(LINEAR))


# ---- residual sums

FLOAT = QParams(1.0, 0, 0, 0, torch.float32)
LINEARS = (onednn.qlinear_pointwise.default, onednn.qlinear_pointwise.tensor)
STATIC = (onednn.qlinear_pointwise.default, onednn.qconv_pointwise.default)
IMAGE_SUMS = (onednn.qconv2d_pointwise.binary, onednn.qconv2d_pointwise.binary_tensor)


def _sum(name: str, other: Pattern) -> Op:
    return op(
        "add.Tensor", self=single_use(kernel(name)), other=other, alpha=1, commutative=("self", "other"), name="add"
    )


def _rectified(total: Op) -> Pattern:
    return single_use(either(op("relu", self=single_use(total), name="relu"), total))


def _fuse_integer_sum(match: Match) -> str | None:
    """The kernel adds onto integers of the output's dtype, in their place."""
    theirs, ours = qparams(match["dequantize"]), qparams(match.root)
    if not (theirs.is_static and ours.is_static) or theirs.dtype != ours.dtype:
        return "the sum's other input is not quantized as its output is"
    reason = _shape_objection(match, match["integers"])
    if reason is None:
        _replace_by_sum(match, match["integers"], theirs, ours)
    return reason


def _fuse_float_sum(match: Match) -> str | None:
    other = tensor_value(match["other"])
    if other is None or other.dtype != torch.float32:
        return "the sum's other input is not torch.float32"
    reason = _shape_objection(match, match["other"])
    if reason is None:
        _replace_by_sum(match, match["other"], FLOAT, FLOAT)
    return reason


def _shape_objection(match: Match, other: fx.Node) -> str | None:
    total, part = tensor_value(match["add"]), tensor_value(other)
    if total is None or part is None or not same_shape(total, part):
        return "the sum broadcasts"
    if match["kernel"].target not in LINEARS and total.dim() != 4:
        return "convolution kernels add onto images only"
    return None


def _replace_by_sum(match: Match, other: fx.Node, theirs: QParams, ours: QParams) -> None:
    product: fx.Node = match["kernel"]
    scales = (ours.scale, ours.zero_point, ours.dtype, theirs.scale, theirs.zero_point)
    unary = ("relu" if "relu" in match else "none", NO_SCALARS, "")
    is_static = product.target in STATIC
    if product.target in LINEARS:
        target = onednn.qlinear_pointwise.binary if is_static else onednn.qlinear_pointwise.binary_tensor
        # "add" reads a float tensor of any owner; "sum" accumulates in place
        how = "add" if ours is FLOAT else "sum"
        other = _contiguous(match.root, other) if how == "add" else other
        args = (*product.args[:6], other, product.args[6], *scales, how, 1.0, *unary)
    else:
        target = IMAGE_SUMS[not is_static]
        args = (*product.args[:6], other, *product.args[6:11], *scales, "sum", 1.0, *unary)
    new = call(match.root, target, args, match.root, ours.dtype)
    absorb(new, product, *match.nodes)
    replace(match.root, _clamped(new, ours))
    if "sum" in args:
        _give_own_memory(new, other)


def _contiguous(before: fx.Node, other: fx.Node) -> fx.Node:
    """The kernels take the memory of a transposed summand for that of a contiguous one."""
    if other.target in CONTIGUOUS:
        return other
    return call(before, torch.ops.aten.contiguous.default, (other,), other)


# operators whose result is new memory, and that read their inputs without keeping a view of them
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


def _give_own_memory(kernel: fx.Node, accumulator: fx.Node) -> None:
    """Copies what a kernel adds onto, unless nobody else can read that memory from then on.

    Convolutions add onto channels-last memory only, linears onto contiguous; where the producer may have another
    layout it is changed.
    """
    order = {node: position for position, node in enumerate(kernel.graph.nodes)}
    others = [user for user in accumulator.users if user is not kernel]
    is_free = accumulator.target in FRESH and accumulator is not kernel.args[0]
    is_free = is_free and all(user.target in FRESH and order[user] < order[kernel] for user in others)
    is_image = kernel.target in IMAGE_SUMS
    if is_free and accumulator.target in (CHANNELS_LAST if is_image else CONTIGUOUS):
        return
    target = torch.ops.aten.contiguous.default if is_free else torch.ops.aten.clone.default
    own = call(kernel, target, (accumulator,), accumulator)
    own.kwargs = {"memory_format": torch.channels_last if is_image else torch.contiguous_format}
    kernel.args = tuple(
        own if found is accumulator and position > 0 else found for position, found in enumerate(kernel.args)
    )


INTEGER_OTHER = dequantize(input=value("integers"), name="dequantize")


def _sums() -> Iterator[Rule]:
    for name in (CONVOLUTION, LINEAR):
        yield Rule(quantize(input=_rectified(_sum(name, INTEGER_OTHER))), _fuse_integer_sum)


INTEGER_SUMS = tuple(_sums())
FLOAT_SUMS = tuple(
    rule
    for name in (CONVOLUTION, LINEAR)
    for rule in (
        Rule(op("relu", self=single_use(_sum(name, value("other"))), name="relu"), _fuse_float_sum),
        Rule(_sum(name, value("other")), _fuse_float_sum),
    )
)


# ---- output quantization


def _fuse_output(match: Match) -> str | None:
    params = qparams(match.root)
    if not params.is_static or params.dtype not in (torch.uint8, torch.int8):
        return "the kernel's output is quantized with parameters of run time"
    node: fx.Node = match["kernel"]
    set_args(node, {SCALE: params.scale, ZERO_POINT: params.zero_point, DTYPE: params.dtype})
    node.meta["val"] = node.meta["val"].to(params.dtype)
    absorb(node, match.root)
    replace(match.root, node if _ends_at(node, params) else _clamped(node, params))
    return None


def _ends_at(kernel: fx.Node, params: QParams) -> bool:
    """Lets a kernel's function end at the bounds of a range narrower than its dtype, where it can have bounds."""
    bounds = _ENDS.get(kernel.args[UNARY], lambda scalars: None)(kernel.args[SCALARS])
    if params.is_full_range or bounds is None or _unary_objection(kernel, "hardtanh"):
        return False
    first, last = params.bounds
    set_args(kernel, {UNARY: "hardtanh", SCALARS: [min(max(bound, first), last) for bound in bounds]})
    return True


# function of a kernel -> the bounds of its results, from its scalars
_ENDS: dict[Any, Callable[[Any], tuple[float, float] | None]] = {
    "none": lambda scalars: UNBOUNDED,
    "relu": lambda scalars: (0.0, UNBOUNDED[1]),
    "hardtanh": lambda scalars: tuple(scalars),
}


def _fuse_sum_output(match: Match) -> str | None:
    """A linear with a float sum can still quantize its result: its own parameters stand before the sum's."""
    params = qparams(match.root)
    if not params.is_static or params.dtype not in (torch.uint8, torch.int8):
        return "the kernel's output is quantized with parameters of run time"
    node: fx.Node = match["kernel"]
    set_args(node, {8: params.scale, 9: params.zero_point, 10: params.dtype})
    node.meta["val"] = node.meta["val"].to(params.dtype)
    absorb(node, match.root)
    replace(match.root, _clamped(node, params))
    return None


def _clamped(kernel: fx.Node, params: QParams) -> fx.Node:
    """Returns the kernel's integers within a range narrower than their dtype; kernels only saturate."""
    if params.dtype == torch.float32 or params.is_full_range:
        return kernel
    clamp = torch.ops.aten.clamp.default
    return call(kernel.next, clamp, (kernel, params.quant_min, params.quant_max), kernel)


def _with_sum(overload: str) -> Op:
    return op(f"{LINEAR}.{overload}", name="kernel", output_dtype=torch.float32, binary_post_op="add")


INTEGER_CLAMPS = tuple(rule for name in (CONVOLUTION, LINEAR) for rule in clamp_rules(single_use(kernel(name, None))))
OUTPUTS = tuple(Rule(quantize(input=single_use(kernel(name, None))), _fuse_output) for name in (CONVOLUTION, LINEAR))
SUM_OUTPUTS = tuple(
    Rule(quantize(input=single_use(_with_sum(overload))), _fuse_sum_output) for overload in ("binary", "binary_tensor")
)
