"""oneDNN's quantized products, as torch's x86 operators call them.

Before: a graph of `onednn.qconv_pointwise` and `qlinear_pointwise` calls, which the x86 lowering made. After:
the same graph with integer arithmetic in their place; quantize and dequantize nodes are torch's own in both.

The order of the steps was found by comparing bits with the kernels of torch 2.13 (2 million elements for
each form, AVX512-VNNI): sum * input scale * weight scale + bias, + the residual in one fused
multiply-add, the function, * (1 / output scale) + zero point, rounded to even. All in float32.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from quantplug.core.graph.facts import operands
from quantplug.core.patterns.language import Match, op
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import FULL_RANGE
from quantplug.core.specs.levels import Level
from quantplug.lowering.emulation.cases import INTEGER_OPERATORS
from quantplug.lowering.emulation.emulate import KernelSet, Prepared
from quantplug.lowering.emulation.kernels import float32
from quantplug.lowering.emulation.rows import Row, substitute
from quantplug.lowering.x86.kernels.calls import ending
from quantplug.lowering.x86.kernels.sums import fuse_sums
from quantplug.lowering.x86.lower import lower

CONVOLUTIONS = ("onednn::qconv_pointwise", "onednn::qconv2d_pointwise", "onednn::qconv2d_pointwise.binary")
LINEARS = ("onednn::qlinear_pointwise", "onednn::qlinear_pointwise.binary", "onednn::qlinear_pointwise.binary_tensor")


def _hardswish(x: Tensor, options: list[Any], form: str) -> Tensor:
    return x * (x * float32(1 / 6) + 0.5).clamp(0, 1)


_UNARY: Mapping[str, Callable[[Tensor, list[Any], str], Tensor]] = {
    "none": lambda x, options, form: x,
    "relu": lambda x, options, form: x.relu(),
    "hardtanh": lambda x, options, form: x.clamp(*options),
    "leaky_relu": lambda x, options, form: F.leaky_relu(x, options[0]),
    "hardswish": _hardswish,
    "swish": lambda x, options, form: F.silu(x),
    "gelu": lambda x, options, form: F.gelu(x, approximate=form),
    "tanh": lambda x, options, form: x.tanh(),
}
# oneDNN approximates these by polynomials of its own: a unit or two in the last place of float32 away
_APPROXIMATED = ("swish", "gelu", "tanh")


class OneDNNProduct(nn.Module):
    """One call of a quantized convolution or linear; operands that are tensors are given when it is called."""

    def __init__(self, literals: Mapping[str, Any]) -> None:
        super().__init__()
        self.literals = dict(literals)

    def forward(self, **tensors: Tensor) -> Tensor:
        """Returns the operator's result; tensors go by the names of its schema, the weight unpacked."""
        given = {**self.literals, **tensors}
        channels_last = "stride" not in given
        y = _sums(given).to(torch.float32) * torch.as_tensor(given["x_scale"], dtype=torch.float32)
        y = y * _along(given["w_scale"], y, channels_last)
        if given["bias"] is not None:
            y = y + _along(given["bias"], y, channels_last)
        y = _residual(y, given)
        name, options, form = ending(given)
        return _quantized(_UNARY[name](y, options, form), given)

    def extra_repr(self) -> str:
        """Shows the literal operands."""
        return ", ".join(f"{name}={found}" for name, found in self.literals.items())


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next(given[name] for name in names if name in given)


def _sums(given: Mapping[str, Any]) -> Tensor:
    # float64 holds every integer below 2^53, so this is the int32 sum in any order
    x, weight = given["qx"].to(torch.float64) - given["x_zero_point"], given["qw"].to(torch.float64)
    if "stride" not in given:
        return F.linear(x, weight)
    geometry = (given["stride"], given["padding"], given["dilation"])
    return torch.convolution(x, weight, None, *geometry, False, [0], given["groups"])


def _along(found: Tensor, like: Tensor, channels_last: bool) -> Tensor:
    return found if channels_last else found.reshape(-1, *(1,) * (like.dim() - 2))


def _residual(y: Tensor, given: Mapping[str, Any]) -> Tensor:
    other = given.get("qaccum", given.get("other"))
    if other is None:
        return y
    scale, zero = _first(given, "accum_scale", "other_scale"), _first(given, "accum_zero_point", "other_zp")
    # float64 holds the product of two float32 exactly, so the sum is rounded once, as by a fused multiply-add
    added: Tensor = (other.to(torch.float64) - zero) * float32(scale).to(torch.float64)
    return (y.to(torch.float64) + added).to(torch.float32)


def _quantized(y: Tensor, given: Mapping[str, Any]) -> Tensor:
    dtype = given["output_dtype"]
    if dtype == torch.float32:
        return y
    steps: Tensor = y * (float32(1.0) / float32(given["output_scale"])) + given["output_zero_point"]
    return steps.round().clamp(*FULL_RANGE[dtype]).to(dtype)


def _emulated(match: Match) -> fx.Node:
    given = operands(match.root)
    given["qw"] = operands(given["qw"])["weight"]
    tensors = {name: found for name, found in given.items() if isinstance(found, fx.Node)}
    literals = {name: found for name, found in given.items() if name not in tensors}
    return substitute(match, OneDNNProduct(literals), kwargs=tensors)


def _rule(names: tuple[str, ...], approximated: bool, floats: bool) -> Rule:
    def holds(match: Match) -> str | None:
        given = operands(match.root)
        is_approximated = ending(given)[0] in _APPROXIMATED
        is_float = given["output_dtype"] == torch.float32
        return None if (is_approximated, is_float) == (approximated, floats) else "it is another row's"

    return Rule(op(*names).where(holds), _emulated)


def _rows(what: str, names: tuple[str, ...]) -> tuple[Row, ...]:
    functions = f"{what} then silu, gelu or tanh"
    return (
        # Exact on AVX512-VNNI. On AMX and on AVX2 some scale the sum in another order: the last bit of a float32,
        # 144 dB, and with it one integer in some thousands, where a result lies between two.
        Row(what, (_rule(names, False, False),), Level.ONE_STEP),
        Row(f"{what}, float output", (_rule(names, False, True),), Level.APPROXIMATE),
        Row(functions, (_rule(names, True, False),), Level.ONE_STEP),
        Row(f"{functions}, float output", (_rule(names, True, True),), Level.APPROXIMATE),
    )


def _lowered(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> Prepared:
    program = lower(module, example_inputs)
    portable = fx.GraphModule(program.portable, copy.deepcopy(program.portable.graph))
    fuse_sums(portable.graph)
    floats = {operator.node: operator.reason for operator in program.ops if operator.placement != "int8"}
    integers = frozenset(operator.node for operator in program.ops if operator.placement == "int8")
    return Prepared(portable, floats, integers)


ONEDNN = KernelSet(
    name="x86",
    rows=(
        *_rows("convolution", CONVOLUTIONS),
        *_rows("linear", LINEARS),
        Row(INTEGER_OPERATORS, ()),
    ),
    prepare=_lowered,
)
