"""Functions without a kernel as those that have one: a delegate that knows exponentials and roots is not cut by them.

Before: a float graph with reciprocals, powers, softplus and mish. After: the same numbers by quotients, products,
square roots and exponentials, in the type of the input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.lowering.rewrites.writing import Writer, done, matching

_ATEN = torch.ops.aten
# Behind it the next number of float32 is more than 1 away: exp(x) + 1 is exp(x).
_LARGE = 20.0
# Of 2 * atanh(s) for s up to 1 / 3: the terms behind are less than half a rounding of float32.
_TERMS = 7


def functions_have_kernels(model: fx.GraphModule, taken: Callable[[fx.Node], bool] | None = None) -> fx.GraphModule:
    """Writes functions of float32 that have no kernel as others that have.

    Args:
        model: a graph module; it is changed in place and returned.
        taken: which nodes may be written so, None for all.
    """
    for node, values in matching(model, *_WRITTEN):
        source = tensor_value(values["self"])
        if source is None or source.dtype != torch.float32 or (taken is not None and not taken(node)):
            continue
        write = _Arithmetic(model, node, source)
        written = _WRITTEN[operator_name(node).removeprefix("aten::").rstrip("_")](write, values["self"], values)
        if written is not None:
            write.replace(written)
    return done(model)


class _Arithmetic(Writer):
    """Writes functions of one tensor before a node."""

    def __init__(self, model: fx.GraphModule, node: fx.Node, source: Tensor) -> None:
        super().__init__(model, node)
        self._source = source

    def of(self, name: str, *operands: fx.Node | float) -> fx.Node:
        """Writes an operator of tensors and numbers."""
        target = getattr(getattr(_ATEN, name), "default" if name in _OF_ONE or len(operands) == 1 else "Tensor")
        return self.call(target, *(self._node(operand) for operand in operands))

    def _node(self, operand: fx.Node | float) -> fx.Node:
        return operand if isinstance(operand, fx.Node) else self.number(operand, self._source, "number")

    def log1p(self, y: fx.Node) -> fx.Node:
        """Writes log(1 + y) for y from 0 to 1, exactly where log of the sum would lose y."""
        ratio = self.of("div", y, self.of("add", y, 2.0))
        square = self.of("mul", ratio, ratio)
        series: fx.Node | float = 2.0 / (2 * _TERMS - 1)
        for term in reversed(range(_TERMS - 1)):
            series = self.of("add", self.of("mul", square, series), 2.0 / (2 * term + 1))
        return self.of("mul", ratio, series)


def _reciprocal(write: _Arithmetic, x: fx.Node, values: dict[str, Any]) -> fx.Node:
    if operator_name(x) == "aten::sqrt":
        return write.of("rsqrt", x.all_input_nodes[0])
    return write.of("div", 1.0, x)


def _power(write: _Arithmetic, x: fx.Node, values: dict[str, Any]) -> fx.Node | None:
    """Writes a power of quarters as a product of roots and of the number itself."""
    exponent = values["exponent"]
    if not isinstance(exponent, int | float) or exponent in (0, 1, 2) or not 4 * abs(exponent) <= _MOST_QUARTERS:
        return None
    quarters = 4 * abs(exponent)
    if quarters != int(quarters):
        return None
    factors = [x] * (int(quarters) // 4)
    if int(quarters) % 4:
        root = write.of("sqrt", x)
        factors += [root] if int(quarters) & 2 else []
        factors += [write.of("sqrt", root)] if int(quarters) & 1 else []
    product = factors[0]
    for factor in factors[1:]:
        product = write.of("mul", product, factor)
    return product if exponent > 0 else write.of("div", 1.0, product)


def _softplus(write: _Arithmetic, x: fx.Node, values: dict[str, Any]) -> fx.Node | None:
    """Writes softplus as relu(x) + log(1 + exp(-|x|)), where no exponential overflows."""
    beta = float(values["beta"])
    if beta <= 0 or values["threshold"] < _LARGE - 5:
        return None  # where the function is the number itself earlier, with a step
    scaled = x if beta == 1 else write.of("mul", x, beta)
    found = write.of("add", write.of("relu", scaled), _tail(write, scaled))
    return found if beta == 1 else write.of("mul", found, 1 / beta)


def _log_sigmoid(write: _Arithmetic, x: fx.Node, values: dict[str, Any]) -> fx.Node:
    return write.of("sub", write.of("minimum", x, 0.0), _tail(write, x))


def _tail(write: _Arithmetic, x: fx.Node) -> fx.Node:
    """Returns log(1 + exp(-|x|))."""
    return write.log1p(write.of("exp", write.of("neg", write.of("abs", x))))


def _softshrink(write: _Arithmetic, x: fx.Node, values: dict[str, Any]) -> fx.Node | None:
    limit = values["lambd"]
    return write.of("sub", x, write.call(_ATEN.hardtanh.default, x, -limit, limit)) if limit > 0 else None


def _mish(write: _Arithmetic, x: fx.Node, values: dict[str, Any]) -> fx.Node:
    """Writes x * tanh(log(1 + e^x)) as x * n / (n + 2) with n = e^x * (e^x + 2).

    The function is of Misra, arXiv:1908.08681; for tanh(log(z)) = (z * z - 1) / (z * z + 1).
    """
    grown = write.of("exp", write.of("minimum", x, _LARGE))
    n = write.of("mul", grown, write.of("add", grown, 2.0))
    return write.of("mul", x, write.of("div", n, write.of("add", n, 2.0)))


# Operators of two tensors whose overload has no name.
_OF_ONE = {"minimum"}
_MOST_QUARTERS = 16
_WRITTEN: dict[str, Callable[[_Arithmetic, fx.Node, dict[str, Any]], fx.Node | None]] = {
    "reciprocal": _reciprocal,
    "pow": _power,
    "softplus": _softplus,
    "log_sigmoid": _log_sigmoid,
    "mish": _mish,
    "softshrink": _softshrink,
}
