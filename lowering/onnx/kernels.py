"""Which kernels ONNX Runtime chose, read from the graph that it runs.

Before: the optimized graph, as ONNX Runtime writes it. After: the numbers of the model's nodes that an integer kernel
carries out. A node is one because such a kernel has its name, never because nothing else has it.
"""

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from quantplug.lowering.onnx.export import number_of

# Kernels of products, sums and functions of integers. MatMulNBits reads a weight in integers.
_INTEGER = frozenset(
    (
        *("QLinearConv", "QLinearMatMul", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul"),
        *("MatMulIntegerToFloat", "DynamicQuantizeLSTM", "MatMulNBits", "QLinearAdd", "QLinearMul", "QLinearSigmoid"),
        *("QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearConcat"),
        *("QLinearWhere", "QLinearReduceMean"),
    )
)
# Kernels that move or compare what they are given; they are of integers where that is.
_OF_ANY = frozenset(
    (
        *("MaxPool", "NhwcMaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather"),
        *("Expand", "Tile", "Concat", "Split", "Clip", "Identity", "DepthToSpace", "SpaceToDepth", "Resize", "Pad"),
        *("Min", "Max"),
    )
)
_BYTES = (2, 3, 21, 22)  # uint8, int8, uint4, int4, as ONNX numbers them


def integer_kernels(path: Path) -> dict[int, str]:
    """Returns the numbers of nodes that integer kernels carry out, each with the kernel.

    Args:
        path: the optimized model.
    """
    return dict(_kernels(_read(path)))


def runs(path: Path, kernel: str) -> bool:
    """Tells whether the graph that ONNX Runtime runs has a kernel.

    Args:
        path: the optimized model.
        kernel: its operator.
    """
    return any(node.op_type == kernel for node in _read(path).node)


def dequantizes_constants(path: Path) -> bool:
    """Tells whether the graph that ONNX Runtime runs dequantizes constants at every call.

    Args:
        path: the optimized model.
    """
    graph = _read(path)
    held = {value.name for value in graph.initializer}
    return any(node.op_type == "DequantizeLinear" and node.input[0] in held for node in graph.node)


def _read(path: Path) -> Any:
    import onnx

    return onnx.load(str(path), load_external_data=False).graph


def _kernels(graph: Any) -> Iterator[tuple[int, str]]:
    integers = {value.name for value in (*graph.input, *graph.initializer) if _type(value) in _BYTES}
    for node in graph.node:
        is_of_integers = node.op_type in _OF_ANY and next(iter(node.input), None) in integers
        if is_of_integers or node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
            integers.update(node.output[:1])
        elif node.op_type.startswith("QLinear") or (node.op_type == "QGemm" and len(node.input) > 7):
            integers.update(node.output)
        number = number_of(node.name)
        if number is not None and (is_of_integers or node.op_type in _INTEGER):
            yield number, node.op_type


def _type(value: Any) -> int:
    found: int = getattr(value, "data_type", 0) or value.type.tensor_type.elem_type
    return found


def carried_out(
    kernels: Mapping[int, str], sources: Mapping[int, frozenset[str]], products: Set[str]
) -> dict[str, str]:
    """Returns the operators of the q/dq graph that integer kernels carry out, each with its kernel.

    Args:
        kernels: what `integer_kernels` returned.
        sources: the operators of each of the model's nodes.
        products: those that multiply. A kernel that moves what they read is none of theirs.
    """
    found = ((name, kernel) for number, kernel in kernels.items() for name in sources.get(number, ()))
    return {name: kernel for name, kernel in found if name not in products or kernel in _INTEGER}
