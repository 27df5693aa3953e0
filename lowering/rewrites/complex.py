"""Complex numbers as pairs of real ones, for runtimes that have none.

Before: a graph in which rotary positions are complex, as Llama's first code has them (Su et al., "RoFormer",
arXiv:2104.09864). After: the same products of real and imaginary parts.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx

from quantplug.core.graph.facts import operator_name, tensor_value
from quantplug.core.graph.operators import ALIASES, COPIES, RESHAPES, SLICES, TRANSPOSES, schema_names
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done

_ATEN = torch.ops.aten
_Pair: TypeAlias = tuple[fx.Node, fx.Node]
# Done to both parts alike: none of them counts the parts among its dimensions.
_TO_BOTH = schema_names((*RESHAPES, *COPIES, *TRANSPOSES, *SLICES, *ALIASES, "expand"))
_CAST = "aten::to"


def complex_numbers_are_pairs(model: fx.GraphModule) -> fx.GraphModule:
    """Writes complex tensors as a real and an imaginary part; all of them or, where one cannot be, none.

    Args:
        model: a graph module; it is changed in place and returned.
    """
    nodes = [node for node in model.graph.nodes if operator_name(node) == "aten::view_as_real"]
    if nodes and all(_is_known(node.all_input_nodes[0]) for node in nodes):
        pairs: dict[fx.Node, _Pair] = {}
        for node in nodes:
            write = Writer(model, node)
            write.replace(write.call(_ATEN.stack.default, list(_parts(model, node.all_input_nodes[0], pairs)), -1))
    return done(model)


def _is_known(node: fx.Node) -> bool:
    """Tells whether the parts of a tensor can be computed."""
    name = operator_name(node)
    if not _is_complex(node) or constant_operand(node) is not None or name in _FROM_REAL:
        return True
    is_written = name == _CAST or ((name in _TO_BOTH or name in _WRITTEN) and not node.kwargs)
    return is_written and all(map(_is_known, node.all_input_nodes))


def _parts(model: fx.GraphModule, node: fx.Node, pairs: dict[fx.Node, _Pair]) -> _Pair:
    """Returns the real and the imaginary part of a complex tensor, written once."""
    if node not in pairs:
        pairs[node] = _written(model, node, pairs)
    return pairs[node]


def _written(model: fx.GraphModule, node: fx.Node, pairs: dict[fx.Node, _Pair]) -> _Pair:
    write, name, held = Writer(model, node), operator_name(node), constant_operand(node)
    if held is not None:
        return write.constant(held.real.contiguous(), "real"), write.constant(held.imag.contiguous(), "imaginary")
    if name in _FROM_REAL:
        return _FROM_REAL[name](write, *node.args)
    if name == _CAST:  # between devices, or to what it is
        return _parts(model, node.all_input_nodes[0], pairs)
    given: list[Any] = [_parts(model, one, pairs) if _is_complex(one) else one for one in node.args]
    if name in _TO_BOTH:
        target: Any = node.target
        real, imaginary = (write.call(target, part, *given[1:]) for part in given[0])
        return real, imaginary
    return _WRITTEN[name](write, *given)


def _is_complex(node: Any) -> TypeGuard[fx.Node]:
    value = tensor_value(node) if isinstance(node, fx.Node) else None
    return value is not None and value.is_complex()


def _of_pairs(write: Writer, pairs: fx.Node) -> _Pair:
    return write.call(_ATEN.select.int, pairs, -1, 0), write.call(_ATEN.select.int, pairs, -1, 1)


def _polar(write: Writer, length: fx.Node, angle: fx.Node) -> _Pair:
    turned = (write.call(function, angle) for function in (_ATEN.cos.default, _ATEN.sin.default))
    real, imaginary = (write.call(_ATEN.mul.Tensor, length, part) for part in turned)
    return real, imaginary


def _product(write: Writer, one: Any, other: Any) -> _Pair:
    """Writes (a + bi)(c + di) as ac - bd and ad + bc, or a real number times both parts."""
    if not isinstance(one, tuple):
        one, other = other, one

    def times(left: Any, right: Any) -> fx.Node:
        return write.call(_ATEN.mul.Tensor, left, right)

    if not isinstance(other, tuple):
        return times(one[0], other), times(one[1], other)
    (a, b), (c, d) = one, other
    real = write.call(_ATEN.sub.Tensor, times(a, c), times(b, d))
    return real, write.call(_ATEN.add.Tensor, times(a, d), times(b, c))


_FROM_REAL: dict[str, Callable[..., _Pair]] = {
    "aten::view_as_complex": _of_pairs,
    "aten::complex": lambda write, real, imaginary: (real, imaginary),
    "aten::polar": _polar,
}
_WRITTEN: dict[str, Callable[..., _Pair]] = {"aten::mul": _product}
