"""Tiny8: an int8 target of eight operators as a backend of quantplug: its rows, and rules that lower to its kernels."""

from functools import partial
from typing import Any

import torch

import quantplug.plugin as qp
from tiny8.kernels import scaled, scaled_alike, scaled_by_channel


def _to_kernel(match: qp.Match, name: str, *args: Any) -> None:
    kernel = qp.add_call(match.root, getattr(torch.ops.tiny8, name).default, args, match["op"], torch.int8)
    qp.absorb(kernel, *match.nodes)  # the report knows what the kernel does
    qp.replace_node(match.root, kernel)


def _low(match: qp.Match) -> Any:
    return qp.qparams(match.root).zero_point if "relu" in match else -128


def _weighted(match: qp.Match, name: str, *geometry: str) -> str | None:
    weight, x, out = qp.integer_weight(match["w"]), qp.qparams(match["x_in"]), qp.qparams(match.root)
    if isinstance(weight, str):
        return weight
    steps = weight.scales.double() * x.scale
    bias = qp.constant_value(match["b"]) if "b" in match else torch.zeros_like(steps)
    if bias is None:
        return "its bias is not a constant"
    bias = (bias.detach() / steps).round().clamp(-(2**31), 2**31 - 1).int()
    numbers = (weight.values, bias, *scaled_by_channel(steps / out.scale))
    names = ("weight", "bias", "multipliers", "divisors")
    held = [qp.add_constant(match.root, name, number) for name, number in zip(names, numbers, strict=True)]
    sizes = [qp.operands(match["op"])[name] for name in geometry]
    _to_kernel(match, name, match["x"], *held, [x.zero_point, out.zero_point], _low(match), *sizes)
    return None


def _pair(match: qp.Match, name: str) -> None:
    one, other, out = (qp.qparams(node) for node in (match["a_in"], match["b_in"], match.root))
    product, each_one = one.scale * other.scale / out.scale, (one.scale / out.scale, other.scale / out.scale)
    numbers = scaled(product) if name == "mul" else scaled_alike(*each_one)
    zero_points = [one.zero_point, other.zero_point, out.zero_point]
    _to_kernel(match, name, match["a"], match["b"], *numbers, zero_points, _low(match))


def _mean(match: qp.Match) -> None:
    x, out, given = qp.qparams(match["x_in"]), qp.qparams(match.root), qp.operands(match["op"])
    sizes = (given.get("dim") or [], given.get("keepdim", False))
    _to_kernel(match, "mean", match["x"], *sizes, *scaled(x.scale / out.scale), [x.zero_point, out.zero_point])


def _sigmoid(match: qp.Match) -> None:
    x, out = qp.qparams(match["x_in"]), qp.qparams(match.root)
    real = torch.sigmoid((torch.arange(-128, 128) - x.zero_point) * x.scale)
    table = ((real / out.scale).round() + out.zero_point).clamp(-128, 127).to(torch.int8)
    _to_kernel(match, "sigmoid", match["x"], qp.add_constant(match.root, "table", table))


def _max_pool2d(match: qp.Match) -> None:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    _to_kernel(match, "max_pool2d", match["x"], *(qp.operands(match["op"])[name] for name in names))


def _cat(match: qp.Match) -> None:
    _to_kernel(match, "cat", [qp.operands(node)["input"] for node in match["xs"]], qp.operands(match["op"])["dim"])


def _read(name: str) -> qp.Op:
    return qp.dequantize_op(
        input=qp.value(name), name=f"{name}_in", where=(lambda m: qp.has_static_qparams(m[f"{name}_in"]),)
    )


def _rule(rewrite: Any, product: qp.Op, *, relu: bool = False) -> qp.LoweringRule:
    fused = qp.either(qp.op("relu", self=qp.single_use(product), name="relu"), product) if relu else product
    return qp.LoweringRule(qp.quantize_op(input=fused), rewrite)


_OF_X: dict[str, Any] = {"self": _read("x"), "name": "op"}
_OF_PAIR: dict[str, Any] = {"self": _read("a"), "other": _read("b"), "name": "op"}
_BIAS = qp.optional(qp.value("b"))
_WEIGHTED: dict[str, Any] = {"input": _read("x"), "weight": qp.value("w"), "bias": _BIAS, "name": "op"}
_GEOMETRY = ("stride", "padding", "dilation", "groups")
_RULES = (
    _rule(lambda m: _weighted(m, "conv2d", *_GEOMETRY), qp.op("conv2d.default", **_WEIGHTED), relu=True),
    _rule(lambda m: _weighted(m, "linear"), qp.op("linear", **_WEIGHTED), relu=True),
    _rule(lambda m: _pair(m, "add"), qp.op("add", **_OF_PAIR, alpha=1), relu=True),
    _rule(lambda m: _pair(m, "mul"), qp.op("mul", **_OF_PAIR), relu=True),
    _rule(_mean, qp.op("mean", **_OF_X)),
    _rule(_sigmoid, qp.op("sigmoid", **_OF_X)),
    _rule(_max_pool2d, qp.op("max_pool2d", **_OF_X)),
    _rule(_cat, qp.op("cat", tensors=qp.each(qp.dequantize_op(), "xs"), name="op")),
)
_INT8, _WEIGHT = qp.DTypeWithConstraints(torch.int8, scale_min_lower_bound=2**-12), qp.DTypeWithConstraints(torch.int8)
_RATIOS = (2**-32, 2**16)
_ROWS = (
    qp.convolution((2,), ("relu",)).rescaling(*_RATIOS), qp.linear(("relu",)).rescaling(*_RATIOS),
    qp.binary("add").rescaling(*_RATIOS, "each"), qp.binary("mul").rescaling(*_RATIOS), qp.known_range("sigmoid"),
    qp.pooling("mean", own_output=True).rescaling(*_RATIOS, "each"), qp.pooling("max_pool2d"), qp.concatenation("cat"),
)  # fmt: skip
TINY8 = qp.Backend(
    name="tiny8",
    summary="an int8 target of eight operators",
    annotators=tuple(row.within(qp.Level.ONE_STEP) for row in _ROWS),
    dtypes=(qp.DTypeConfig("int8", input=_INT8, output=_INT8, weight=_WEIGHT),),
    lowering=partial(qp.lower_by_rules, rules=_RULES, library="tiny8"),
)
