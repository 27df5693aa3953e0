"""Rows of a kernel set: pieces of a q/dq graph, and the integer kernel that takes the place of each.

Before: `dequantize -> operator [-> clamp] -> quantize`. After: one module call from integers to integers.
A backend puts its set together from these functions, giving each the numerics and the level of its target.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import register
from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.graph.operators import ALIASES, CLAMPS, JOINS, MAXIMA, MOVES, PADS, REPEATS
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.patterns.language import (
    Match,
    Op,
    Pattern,
    anything,
    dropouts,
    each,
    either,
    op,
    optional,
    single_use,
    value,
)
from quantplug.core.patterns.rules import Rewrite, Rule
from quantplug.core.peers.torch_names import schema_of
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import IntegerWeight, QParams, dequantize, folded, integer_weight, qparams, quantize
from quantplug.core.specs.levels import Level
from quantplug.lowering.emulation.kernels import (
    Elementwise,
    Kernel,
    Lookup,
    Mean,
    Multiplication,
    Quantize,
    Slopes,
    Sum,
    float32,
    zero,
)
from quantplug.lowering.emulation.numerics import Numerics
from quantplug.lowering.emulation.products import Layer, Product, convolution_columns, integer_bias, linear_columns


@dataclass(frozen=True)
class Row:
    """One kernel of a set.

    Attributes:
        name: the operator family in words.
        rules: what becomes this kernel.
        level: how closely it agrees with the target's own kernel.
    """

    name: str
    rules: tuple[Rule, ...]
    level: Level = Level.EXACT


def substitute(
    match: Match, kernel: torch.nn.Module, inputs: Sequence[fx.Node] = (), kwargs: Mapping[str, fx.Node] | None = None
) -> fx.Node:
    """Returns a module call for the place of a match."""
    owner = match.root.graph.owning_module
    assert owner is not None
    name = register(owner, f"{match.root.name}_kernel", kernel)
    with match.root.graph.inserting_before(match.root):
        node = match.root.graph.call_module(name, tuple(inputs), dict(kwargs or {}))
    node.meta.update(match.root.meta)
    return node


# ---- around an operator

# The integers that kernels read and write; a target may have kernels for others.
DTypes = Collection[torch.dtype]
BYTES: DTypes = (torch.int8, torch.uint8)


def _operand(name: str, dtypes: DTypes = BYTES) -> Op:
    return dequantize(input=value(f"{name}_integers"), name=name).where(lambda m: _static(m[name], dtypes))


def _static(node: fx.Node, dtypes: DTypes = BYTES) -> str | None:
    params = qparams(node)
    if not params.is_static:
        return "its quantization parameters are computed at run time"
    known = " or ".join(map(str, dtypes))
    return None if params.dtype in dtypes else f"its integers are {params.dtype}, those of the kernel are {known}"


def _sandwich(inner: Pattern, dtypes: DTypes = BYTES) -> Op:
    return quantize(input=single_use(inner)).where(lambda m: _static(m.root, dtypes))


def _clamped(inner: Op) -> Pattern:
    return either(op(*CLAMPS, name="clamp", self=single_use(inner)), inner)


def _bounds(match: Match, out: QParams) -> tuple[int, int] | str | None:
    """Returns the integers between which a fused clamp keeps the output, None where there is none."""
    if "clamp" not in match:
        return None
    bounds = clamp_bounds(match["clamp"])
    if bounds is None:
        return "its bounds are tensors"
    low, high = bounds
    return (_integer(low, out) if low is not None else out.quant_min), (
        _integer(high, out) if high is not None else out.quant_max
    )


def _integer(number: float, out: QParams) -> int:
    # the quotient's ties go to even before the zero point is added (XNNPACK's `xnn_qs8_quantize`)
    return int((float32(number) / float32(out.scale)).round()) + zero(out)


def _build(make: Callable[[Match, QParams], Kernel | str], *inputs: str) -> Rewrite:
    """Returns a rewrite: makes the kernel, bounds it and puts it into the graph."""

    def rewrite(match: Match) -> fx.Node | str:
        out = qparams(match.root)
        bounds = _bounds(match, out)
        kernel = make(match, out)
        reason = next((found for found in (bounds, kernel) if isinstance(found, str)), None)
        if reason:
            return reason
        assert isinstance(kernel, Kernel)
        if isinstance(bounds, tuple):
            kernel.bound(*bounds)
        return substitute(match, kernel, [match[f"{name}_integers"] for name in inputs])

    return rewrite


# ---- convolutions and linears


def products(
    numerics: Numerics, *operators: str, dtypes: DTypes = BYTES, whole: Callable[[QParams], QParams] = lambda out: out
) -> tuple[Rule, ...]:
    """Returns the rules of convolutions and linears, with a clamp behind them.

    Args:
        numerics: of their sums.
        operators: ATen names with operands input, weight and bias.
        dtypes: integers of inputs and outputs.
        whole: from the parameters of an output to those that the kernel ends at.
    """

    def make(match: Match, out: QParams) -> Kernel | str:
        layer = _layer(match, qparams(match["x"]))
        if isinstance(layer, str):
            return layer
        if isinstance(layer.columns, str) and not numerics.is_order_free:
            return layer.columns
        return Product(layer, qparams(match["x"]), whole(out), numerics)

    entered = _operand("x", dtypes)
    layer = op(*operators, name="layer", input=entered, weight=value("weight"), bias=optional(value("bias")))
    return (Rule(_sandwich(_clamped(layer), dtypes), _build(make, "x")),)


def _layer(match: Match, entered: QParams) -> Layer | str:
    node: fx.Node = match["layer"]
    given, name = operands(node), str(schema_of(node.target).name)
    transposed = "transpose" in name
    weight = integer_weight(match["weight"], 1 if transposed else 0)
    if isinstance(weight, str):
        return weight
    if transposed and given["groups"] != 1:
        return "a transposed convolution with groups is not emulated"
    bias = _bias(match.get("bias"), entered, weight)
    if isinstance(bias, str):
        return bias
    target: Any = node.target

    def run(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = target(**{**given, "input": x, "weight": w, "bias": None})
        return found

    if "linear" in name:
        return Layer(run, weight, False, bias, -1, linear_columns)
    columns = _columns(given, weight, transposed)
    return Layer(run, weight, transposed, bias, 1, columns, given["groups"])


def _columns(given: dict[str, Any], weight: IntegerWeight, transposed: bool) -> Callable[[Tensor], Tensor] | str:
    kernel = tuple(weight.values.shape[2:])
    if transposed or len(kernel) > 2:
        return "only convolutions over one or two dimensions are emulated with an accumulator of this kind"
    return convolution_columns(given, kernel)


def _bias(node: fx.Node | None, entered: QParams, weight: IntegerWeight) -> Tensor | str | None:
    if node is None:
        return None
    stored = _stored(node, entered, weight)
    if stored is not None:
        return stored
    found = constant_value(node)
    found = folded(node) if found is None else found
    return "its bias is not a constant" if found is None else integer_bias(found, entered, weight)


def _stored(node: fx.Node, entered: QParams, weight: IntegerWeight) -> Tensor | None:
    """Returns the integers of a bias that is stored in the unit of the sums; floats hold 24 bits of them."""
    if not is_dequantize(node):
        return None
    given = operands(node)
    values, scales = (_number(given.get(name)) for name in ("input", "scales" if "scales" in given else "scale"))
    if values is None or scales is None or values.dtype != torch.int32:
        return None
    units = weight.scales * float(entered.scale)  # type: ignore[arg-type]
    is_unit = torch.allclose(scales.to(units.dtype).expand_as(units), units, rtol=1e-5, atol=0)
    return values.detach() if is_unit else None


def _number(operand: Any) -> Tensor | None:
    return constant_value(operand) if isinstance(operand, fx.Node) else torch.as_tensor(operand)


# ---- one operand or two

# From the match of an operator "inner", and the parameters of its output, to a kernel or the reason against it.
Make = Callable[[Match, QParams], Kernel | str]


def functions(make: Make, *operators: str, dtypes: DTypes = BYTES) -> tuple[Rule, ...]:
    """Returns the rules of operators of one tensor: "x" is its dequantize node.

    Args:
        make: makes the kernel.
        operators: ATen names with an operand self.
        dtypes: integers of input and output.
    """
    inner = op(*operators, name="inner", self=_operand("x", dtypes))
    return (Rule(_sandwich(inner, dtypes), _build(make, "x")),)


def pairs(make: Make, *operators: str, dtypes: DTypes = BYTES, second: str = "other", **given: Any) -> tuple[Rule, ...]:
    """Returns the rules of operators of two tensors, with a clamp behind them: "x" and "y" are their dequantize nodes.

    Args:
        make: makes the kernel.
        operators: ATen names with operands self and another.
        dtypes: integers of inputs and output.
        second: how the other operand is called.
        given: what further operands have to be.
    """
    read: dict[str, Any] = {"self": _operand("x", dtypes), second: _operand("y", dtypes), **given}
    return (Rule(_sandwich(_clamped(op(*operators, name="inner", **read)), dtypes), _build(make, "x", "y")),)


def sums(name: str, sign: int) -> tuple[Rule, ...]:
    """Returns the rules of "add" (sign 1) or "sub" (sign -1) of two tensors in fixed point."""

    def make(match: Match, out: QParams) -> Kernel | str:
        return Sum(qparams(match["x"]), qparams(match["y"]), out, sign)

    return pairs(make, f"{name}.Tensor", f"{name}_.Tensor", alpha=1)


def multiplications(numerics: Numerics) -> tuple[Rule, ...]:
    """Returns the rules of mul.Tensor."""

    def make(match: Match, out: QParams) -> Kernel | str:
        return Multiplication(qparams(match["x"]), qparams(match["y"]), out, numerics)

    return pairs(make, "mul.Tensor", "mul_.Tensor")


def through_float(*operators: str) -> tuple[Rule, ...]:
    """Returns the rules of two-operand operators that a kernel computes on dequantized operands."""

    def make(match: Match, out: QParams) -> Kernel | str:
        return Elementwise(match["inner"].target, [qparams(match["x"]), qparams(match["y"])], out)

    inner = op(*operators, name="inner", self=_operand("x"), other=_operand("y"))
    return (Rule(_sandwich(inner), _build(make, "x", "y")),)


def tables(function: Callable[[fx.Node], Callable[[Tensor], Tensor]], *operators: str) -> tuple[Rule, ...]:
    """Returns the rules of functions of one operand, tabulated.

    Args:
        function: from the operator's node to the float32 function that the kernel tabulates.
        operators: ATen names with an operand self.
    """

    def make(match: Match, out: QParams) -> Kernel | str:
        return Lookup(function(match["inner"]), qparams(match["x"]), out)

    return functions(make, *operators)


def clamps() -> tuple[Rule, ...]:
    """Returns the rules of clamps on their own, tabulated."""

    def make(match: Match, out: QParams) -> Kernel | str:
        bounds = clamp_bounds(match["inner"])
        if bounds is None:
            return "its bounds are tensors"
        return Lookup(lambda x: x.clamp(*bounds), qparams(match["x"]), out)

    return functions(make, *CLAMPS)


def slopes() -> tuple[Rule, ...]:
    """Returns the rules of leaky relu in fixed point."""

    def make(match: Match, out: QParams) -> Kernel | str:
        return Slopes(operands(match["inner"])["negative_slope"], qparams(match["x"]), out)

    return functions(make, "leaky_relu")


def means() -> tuple[Rule, ...]:
    """Returns the rules of means over given dimensions."""

    def make(match: Match, out: QParams) -> Kernel | str:
        given = operands(match["inner"])
        if not given["dim"]:
            return "a mean over everything is not emulated; give its dimensions"
        return Mean(given["dim"], given["keepdim"], qparams(match["x"]), out)

    return functions(make, "mean.dim")


# ---- data movement


def movements(dtypes: DTypes = BYTES) -> tuple[Rule, ...]:
    """Returns the rules of operators that move or compare integers: input and output share parameters."""
    moved = _operand("x", dtypes)
    inner = op(*MOVES, *REPEATS, *ALIASES, *MAXIMA, name="inner", self=moved)
    padded = op(*PADS, name="inner", self=moved, value=anything("number"))
    joined = op(*JOINS, name="inner", tensors=each(dequantize(), "sources"))
    return (
        Rule(_sandwich(inner, dtypes), _move),
        *(Rule(_sandwich(dropped, dtypes), _move) for dropped in dropouts(moved, "inner")),
        Rule(_sandwich(padded, dtypes), _pad),
        Rule(_sandwich(joined, dtypes), _join),
    )


def _rescaling(match: Match, source: fx.Node) -> str | None:
    one, other = qparams(source), qparams(match.root)
    same = (one.scale, one.zero_point, one.dtype) == (other.scale, other.zero_point, other.dtype)
    whole = other.is_full_range or one == other
    return None if same and whole else "its integers are rescaled on the way"


def _move(match: Match) -> fx.Node | str:
    args = (match["x_integers"], *match["inner"].args[1:])
    return _rescaling(match, match["x"]) or _on_integers(match, args)


def _pad(match: Match) -> fx.Node | str:
    given, params = operands(match["inner"]), qparams(match.root)
    if given.get("mode", "constant") != "constant" or given.get("value"):
        return "only padding with zeros stays on integers"
    reason = _rescaling(match, match["x"])
    if reason is not None:
        return reason
    match["inner"].target = torch.ops.aten.constant_pad_nd.default
    match["inner"].kwargs = {}
    return _on_integers(match, (match["x_integers"], given["pad"], zero(params)))


def _join(match: Match) -> fx.Node | str:
    sources = match["sources"]
    reason = next(filter(None, (_rescaling(match, source) for source in sources)), None)
    return reason or _on_integers(match, ([source.args[0] for source in sources], *match["inner"].args[1:]))


def _on_integers(match: Match, args: tuple[Any, ...]) -> fx.Node:
    inner: fx.Node = match["inner"]
    inner.args = args
    return inner


# ---- conversions


def quantizations() -> tuple[Rule, ...]:
    """Returns the rules of float tensors that become integers."""

    def rewrite(match: Match) -> fx.Node | str:
        return substitute(match, Quantize(qparams(match.root)), [match["x"]])

    return (Rule(quantize(input=value("x")).where(lambda m: _static(m.root)), rewrite),)


def conversions(make: Callable[[QParams, QParams], Kernel], dtypes: DTypes = BYTES) -> tuple[Rule, ...]:
    """Returns the rules of integers that get another scale: what is dequantized and quantized at once.

    Args:
        make: from the parameters before and behind to a kernel.
        dtypes: integers before and behind.
    """

    def rewrite(match: Match) -> fx.Node | str:
        before, behind = qparams(match["x"]), qparams(match.root)
        return substitute(match, make(before, behind), [match["x_integers"]])

    return (Rule(quantize(input=_operand("x", dtypes)).where(lambda m: _static(m.root, dtypes)), rewrite),)
