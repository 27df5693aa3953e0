"""TOSA's integer operators as a kernel set: what the reference model and hardware that conforms compute, bit by bit."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operands
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.graph.traits import clamp_bounds, per_dimension
from quantplug.core.patterns.language import Match
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import QParams, qparams
from quantplug.lowering.arm import kernels
from quantplug.lowering.arm.forms import write_forms
from quantplug.lowering.emulation.emulate import KernelSet, Prepared
from quantplug.lowering.emulation.kernels import Kernel
from quantplug.lowering.emulation.rows import Row, conversions, functions, movements, pairs, products
from quantplug.lowering.spelling import spell_plainly

_DTYPES = ((torch.int8,), (torch.int16,))
_NUMERICS = {(torch.int8,): kernels.BYTES, (torch.int16,): kernels.WIDE}


def _of_both(rules: Callable[..., tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """Returns rules of 8 and of 16 bits: no TOSA operator reads both."""
    return tuple(rule for dtypes in _DTYPES for rule in rules(dtypes))


def _products(*names: str) -> tuple[Rule, ...]:
    return _of_both(lambda dtypes: products(_NUMERICS[dtypes], *names, dtypes=dtypes, whole=kernels.whole))


def _pairs(make: Callable[..., Kernel], *names: str, second: str = "other", **given: Any) -> tuple[Rule, ...]:
    def made(match: Match, out: QParams) -> Kernel:
        return make(qparams(match["x"]), qparams(match["y"]), out)

    return _of_both(lambda dtypes: pairs(made, *names, dtypes=dtypes, second=second, **given))


def _tables(*names: str) -> tuple[Rule, ...]:
    def made(match: Match, out: QParams) -> Kernel:
        return kernels.Table(_function(match["inner"]), qparams(match["x"]), out)

    return _of_both(lambda dtypes: functions(made, *names, dtypes=dtypes))


def _function(node: fx.Node) -> Callable[[Tensor], Tensor]:
    given, target = operands(node), node.target
    return lambda x: target(**{**given, "self": x})  # type: ignore[operator]


def _averages(match: Match, out: QParams) -> Kernel | str:
    given, entered = operands(match["inner"]), qparams(match["x"])
    if (entered.scale, entered.zero_point) != (out.scale, out.zero_point):
        return "its integers are rescaled on the way"
    if given["ceil_mode"] or given["divisor_override"]:
        return "only averages of whole windows over their number are emulated"
    window = tuple(per_dimension(given[name], 2) for name in ("kernel_size", "stride", "padding"))
    return kernels.Averages(window, given["count_include_pad"], entered, out)


def _along(node: fx.Node) -> tuple[Any, bool]:
    given = operands(node)
    return given["dim"], given["keepdim"]


def _total(match: Match, out: QParams) -> Kernel:
    return kernels.Total(_along(match["inner"]), qparams(match["x"]), out)


def _extreme(match: Match, out: QParams) -> Kernel | str:
    entered, node = qparams(match["x"]), match["inner"]
    if (entered.scale, entered.zero_point) != (out.scale, out.zero_point):
        return "its integers are rescaled on the way"
    return kernels.Extreme(node.target, _along(node), out)


def _bounds(match: Match, out: QParams) -> Kernel | str:
    bounds, entered = clamp_bounds(match["inner"]), qparams(match["x"])
    if bounds is None or (entered.scale, entered.zero_point) != (out.scale, out.zero_point):
        return "its bounds are tensors, or its integers are rescaled on the way"
    return kernels.Bounds(bounds, out)


def _prepared(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> Prepared:
    spell_plainly(module.graph)
    before = _clamps(module.graph.nodes)
    write_forms(module.graph)
    return Prepared(module, integers=before - _clamps(module.graph.nodes))


def _clamps(nodes: Iterable[fx.Node]) -> frozenset[str]:
    names = {*CLAMPS}
    return frozenset(node.name for node in nodes if str(node.target).split(".")[-2:-1] and _plain(node) in names)


def _plain(node: fx.Node) -> str:
    return str(node.target).split(".")[-2].removesuffix("_")


_SUMS = {"add": operator.add, "sub": operator.sub}

TOSA = KernelSet(
    name="tosa",
    rows=(
        Row("convolution", _products("conv1d", "conv2d")),
        Row("transposed convolution", _products("conv_transpose2d.input")),
        Row("linear", _products("linear")),
        Row(
            "bmm, matmul",
            (*_pairs(kernels.MatrixProduct, "bmm", second="mat2"), *_pairs(kernels.MatrixProduct, "matmul")),
        ),
        *(
            Row(
                name,
                _pairs(
                    lambda one, other, out, o=o: kernels.sum_or_difference(o, (one, other), out),
                    f"{name}.Tensor",
                    f"{name}_.Tensor",
                    alpha=1,
                ),
            )
            for name, o in _SUMS.items()
        ),
        Row("mul", _pairs(kernels.Multiplication, "mul.Tensor", "mul_.Tensor")),
        *(
            Row(name, _pairs(lambda one, other, out, o=o: kernels.comparison(o, (one, other), out), name))
            for name, o in (("maximum", torch.maximum), ("minimum", torch.minimum))
        ),
        Row("avg_pool2d", _of_both(lambda dtypes: functions(_averages, "avg_pool2d", dtypes=dtypes))),
        Row("sum", _of_both(lambda dtypes: functions(_total, "sum.dim_IntList", dtypes=dtypes))),
        Row("amax, amin", _of_both(lambda dtypes: functions(_extreme, "amax", "amin", dtypes=dtypes))),
        Row("clamp", _of_both(lambda dtypes: functions(_bounds, *CLAMPS, dtypes=dtypes))),
        Row("sigmoid, tanh, silu, gelu", _tables("sigmoid", "tanh", "silu", "gelu")),
        Row("hardswish, hardsigmoid, leaky_relu, elu", _tables("hardswish", "hardsigmoid", "leaky_relu", "elu")),
        Row("exp, log, rsqrt, reciprocal", _tables("exp", "log", "rsqrt", "reciprocal")),
        Row("data movement, max_pool2d", movements((torch.int8, torch.int16))),
    ),
    conversions=(Row("rescale", _of_both(lambda dtypes: conversions(lambda x, out: kernels.Rescale(x, out), dtypes))),),
    prepare=_prepared,
)
