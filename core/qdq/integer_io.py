"""Integer inputs and outputs: a converted graph without the conversions at its ends.

Before: float inputs that are quantized first, outputs that are dequantized last. After: the graph takes and
returns the integers themselves, for callers that hold integers anyway (sensors, a neighbouring program).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from quantplug.core.errors import ConvertError
from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import describe, operands, tensor_value
from quantplug.core.graph.meta import IO_DTYPES
from quantplug.core.peers.torch_names import pytree

_OPS = torch.ops.quantized_decomposed
_QUANTIZE, _DEQUANTIZE = _OPS.quantize_per_tensor.default, _OPS.dequantize_per_tensor.default
QArgs: TypeAlias = tuple[float, int, int, int, torch.dtype]


@dataclass(frozen=True)
class IODTypes:
    """The dtypes of a graph's float inputs and outputs; None leaves them float."""

    input: torch.dtype | None = None
    output: torch.dtype | None = None


def apply_io_dtypes(model: fx.GraphModule) -> None:
    """Removes the conversions at the ends of a converted graph, in place, as its quantizer asked for.

    Raises:
        ConvertError: an input or output is read or computed in float, or in integers of another dtype; no input is
            float.
    """
    asked = IO_DTYPES.get(model, IODTypes())
    if asked.input is not None:
        inputs = list(_float_inputs(model.graph))
        if not inputs:
            raise ConvertError(
                f"No input of the model can be {asked.input}: none is float and read by an operator; call `set_io` "
                "without `input`."
            )
        for node in inputs:
            _integer_input(node, asked.input)
    if asked.output is not None:
        _integer_outputs(model.graph, asked.output)
    if asked != IODTypes():
        model.graph.lint()
        model.recompile()


def _float_inputs(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.find_nodes(op="placeholder"):
        value = tensor_value(node)
        if value is not None and value.is_floating_point() and _readers(node):
            yield node


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op == "call_function"]


def _integer_input(node: fx.Node, dtype: torch.dtype) -> None:
    readers = _readers(node)
    floats = next((user for user in readers if user.target is not _QUANTIZE), None)
    if floats is not None:
        raise ConvertError(
            f"Input '{node.name}' cannot be {dtype}: {describe(floats)} reads it in float; quantize that operator or "
            "leave the inputs float."
        )
    found = {_qargs(user) for user in readers}
    if len(found) > 1 or next(iter(found))[-1] != dtype:
        raise ConvertError(
            f"Input '{node.name}' cannot be {dtype}: it is quantized to {sorted(map(str, found))}; give its "
            "readers one spec of that dtype or leave the inputs float."
        )
    for user in readers:
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    value = tensor_value(node)
    node.meta["val"] = None if value is None else value.to(dtype)


def _integer_outputs(graph: fx.Graph, dtype: torch.dtype) -> None:
    output = graph.output_node()
    leaves, structure = pytree.tree_flatten(output.args[0])
    output.args = (pytree.tree_unflatten([_integer_output(leaf, dtype) for leaf in leaves], structure),)
    erase_dead_code(graph)


def _integer_output(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    found = _qargs(leaf)[-1] if leaf.target is _DEQUANTIZE else None
    if found != dtype:
        raise ConvertError(
            f"The output of {describe(leaf)} cannot be {dtype}: it is {found or 'computed in float'}; quantize the "
            "last operator so or leave the outputs float."
        )
    return leaf.args[0]


def _qargs(node: fx.Node) -> QArgs:
    values = operands(node)
    return (values["scale"], values["zero_point"], values["quant_min"], values["quant_max"], values["dtype"])


def boundary_qparams(model: fx.GraphModule) -> tuple[list[QArgs | None], list[QArgs | None]]:
    """Returns scale, zero point, range and dtype of every integer input and output of a converted graph.

    None stands for an input or output that is no quantized tensor.

    Args:
        model: a converted graph.
    """
    inputs = [_read_as(node) for node in model.graph.find_nodes(op="placeholder")]
    leaves = pytree.tree_leaves(model.graph.output_node().args[0])
    written = [isinstance(leaf, fx.Node) and leaf.target is _QUANTIZE for leaf in leaves]
    return inputs, [_qargs(leaf) if is_integer else None for leaf, is_integer in zip(leaves, written, strict=True)]


def _read_as(node: fx.Node) -> QArgs | None:
    return next((_qargs(user) for user in node.users if user.target is _DEQUANTIZE), None)


def quantized_inputs(model: fx.GraphModule, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns float inputs as the integers that a converted graph takes; all others as they are.

    Args:
        model: a converted graph, of which inputs may be integers (`set_io`).
        inputs: positional float inputs, as the float model takes them.
    """
    leaves, structure = pytree.tree_flatten(inputs)
    read = boundary_qparams(model)[0]
    if len(read) != len(leaves):
        return inputs
    integers = [_quantized(*pair) for pair in zip(leaves, read, strict=True)]
    return tuple(pytree.tree_unflatten(integers, structure))


def _quantized(value: Any, qargs: QArgs | None) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return _QUANTIZE(value, *qargs) if is_float and qargs is not None else value


def dequantized_outputs(model: fx.GraphModule, result: Any) -> Any:
    """Returns what a converted graph, or a program of it, returned, with floats in the place of its integers."""
    leaves, structure = pytree.tree_flatten(result)
    written = boundary_qparams(model)[1]
    if len(written) != len(leaves):
        return result
    pairs = zip(leaves, written, strict=True)
    floats = [leaf if qargs is None else _DEQUANTIZE(leaf, *qargs) for leaf, qargs in pairs]
    return pytree.tree_unflatten(floats, structure)
