"""Whether a model of ONNX is what TensorRT's explicit quantization reads, rule by rule.

Before: a model of QuantizeLinear and DequantizeLinear. After: nothing, or one sentence that names a node and the rule
that it breaks. What TensorRT refuses is refused here: other integers than int8 and int4, zero points beside 0, scales
that are no positive constants, and operators on integers (its parser, onnx-tensorrt, `QuantDequantLinearHelper`; issues
2774 of NVIDIA/TensorRT and 850 of onnx/onnx-tensorrt show zero points and int32 biases that fail). And where its
developer's guide places quantization is held too ("Working with Quantized Types", "Q/DQ Layer-Placement
Recommendations"): all inputs of products are quantized, nothing is rounded between a product and the sum or relu that
its kernel takes in, and what commutes with quantization has one scale on both sides.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from quantplug.core.errors import LoweringError
from quantplug.lowering.onnx.export import number_of

# Weights of each scale of int4; TensorRT has no others ("Quantization Schemes").
BLOCKS = (64, 128)
_STEPS = ("QuantizeLinear", "DequantizeLinear")
PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
# What their kernels apply on the way out, so that nothing is rounded before.
_CLAMPS = frozenset(("Relu", "Clip", "Min", "Max"))
_EPILOGUES = _CLAMPS | {"Add"}
_OF_SEVERAL = frozenset(("Add", "Concat"))
# Layers without weights write integers where they read them ("Q/DQ Layer-Placement Recommendations").
_ROUNDED_ON_BOTH_SIDES = frozenset(("Add", "AveragePool", "GlobalAveragePool"))
_COMMUTING = frozenset(
    (
        *("MaxPool", "Concat", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Expand"),
        *("Tile", "Gather", "Identity", "DepthToSpace", "SpaceToDepth", "Pad"),
        *_CLAMPS,
    )
)
_INTEGER_OPERATORS = frozenset(
    (
        *("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearConv", "QLinearMatMul"),
        *("MatMulNBits", "DynamicQuantizeLSTM"),
    )
)

Node: TypeAlias = Any  # onnx_ir.Node
Value: TypeAlias = Any  # onnx_ir.Value


@dataclass(frozen=True)
class Rule:
    """A rule of explicit quantization.

    Attributes:
        objection: returns what is wrong with a node, or None.
        of_declared: whether it is about nodes that a plan calls quantized, which a file by itself does not tell.
    """

    objection: Callable[[Node], str | None]
    of_declared: bool = False


def require_explicit(model: Any, declared: Collection[int] = ()) -> None:
    """Makes sure that a model is what TensorRT's explicit quantization reads.

    Args:
        model: the `onnx_ir.Model`.
        declared: the numbers in the names of the nodes that carry out what is declared int8.

    Raises:
        LoweringError: a node breaks a rule.
    """
    for node, rule, reason in objections(model, declared):
        raise LoweringError(
            f"{node.op_type} '{_name(node)}' {reason}, which TensorRT's explicit quantization does not "
            f"take (rule '{rule}'); quantize with the configs of backend 'tensorrt', or keep it float."
        )


def objections(model: Any, declared: Collection[int] = ()) -> Iterator[tuple[Node, str, str]]:
    """Yields each node that breaks a rule, with the rule's name and what is wrong.

    Args:
        model: the `onnx_ir.Model`.
        declared: as for `require_explicit`.
    """
    for node in model.graph.all_nodes():
        is_declared = number_of(node.name or "") in declared
        for name, rule in RULES.items():
            reason = rule.objection(node) if is_declared or not rule.of_declared else None
            if reason is not None:
                yield node, name, reason


def is_int8(node: Node) -> bool:
    """Tells whether a node is a layer of integers as a file says it.

    It is a product of what DequantizeLinear yields, or taken in by the kernel of one, or stands between
    DequantizeLinear and QuantizeLinear.

    Args:
        node: any node of a model.
    """
    if node.op_type in PRODUCTS:
        return all(_dequantized(value) is not None for value in node.inputs[:2]) or _has_blocks(node)
    if node.op_type in _EPILOGUES and any(map(_is_behind_product, _given(node))):
        return True
    return all(map(_dequantized, _data(node))) and all(map(_is_rounded, node.outputs))


def _given(node: Node) -> list[Value]:
    return [value for value in node.inputs if value is not None]


def _data(node: Node) -> tuple[Value, ...]:
    """Returns what a node computes with, without sizes and axes."""
    return tuple(node.inputs) if node.op_type in _OF_SEVERAL else tuple(node.inputs[:1])


def _is_behind_product(value: Value) -> bool:
    """Tells whether a value is that of an integer product which nothing but one node reads, or of its sum or relu."""
    node = value.producer()
    while node is not None and len(value.uses()) == 1:
        if node.op_type in PRODUCTS:
            return is_int8(node)
        value = next((v for v in _given(node) if v.producer() is not None and _dequantized(v) is None), None)
        if node.op_type not in _EPILOGUES or value is None:
            return False
        node = value.producer()
    return False


def _dequantized(value: Value | None) -> Node | None:
    """Returns the DequantizeLinear that yields a value, also through operators that move it; None for another value."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity"):
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _is_rounded(value: Value) -> bool:
    """Tells whether all that reads a value rounds it, behind clamps at most."""
    readers = value.consumers()
    if len(readers) == 1 and readers[0].op_type in _CLAMPS:
        return _is_rounded(readers[0].outputs[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _constant(value: Value | None) -> Any:
    """Returns the array of a constant, None for what is computed."""
    found = _tensor(value)
    return None if found is None else found.numpy()


def _is_constant(value: Value | None) -> bool:
    return _tensor(value) is not None


def _tensor(value: Value | None) -> Any:
    from onnx_ir import convenience

    return None if value is None else convenience.get_const_tensor(value)


def _attribute(node: Node, name: str, otherwise: int) -> int:
    found = node.attributes.get(name)
    return otherwise if found is None else int(found.as_int())


def _type(value: Value | None) -> str:
    found = getattr(value, "dtype", None) or getattr(getattr(value, "const_value", None), "dtype", None)
    return "" if found is None else str(found.name)


def _has_blocks(node: Node) -> bool:
    dequantize = _dequantized(node.inputs[1])
    return dequantize is not None and _attribute(dequantize, "block_size", 0) > 0


def _of_integers(node: Node) -> str | None:
    if node.op_type in _INTEGER_OPERATORS:
        return "computes on integers"
    if node.op_type not in _STEPS:
        return None
    is_rounding = node.op_type == "QuantizeLinear"
    given = node.inputs[2] if is_rounding and len(node.inputs) > 2 else node.inputs[0] if not is_rounding else None
    found = _type(given) or "UINT8"  # as ONNX has it without a zero point
    known = ("INT8", "INT4") if not is_rounding and _is_constant(node.inputs[0]) else ("INT8",)
    return None if found in known else f"has integers of {found.lower()}, not of int8"


def _zero_points(node: Node) -> str | None:
    if node.op_type not in _STEPS or len(node.inputs) < 3:
        return None
    found = _constant(node.inputs[2])
    if found is None:
        return "has a zero point of run time"
    moved = found[found != 0]
    return f"has zero point {int(moved.flat[0])}, not 0" if moved.size else None


def _scales(node: Node) -> str | None:
    if node.op_type not in _STEPS:
        return None
    found = _constant(node.inputs[1])
    if found is None:
        return "has a scale of run time"
    wrong = found[~((found > 0) & np.isfinite(found))]
    return f"has scale {float(wrong.flat[0]):g}, which is not positive" if wrong.size else None


def _granularity(node: Node) -> str | None:
    """Activations have one scale, weights one for each output channel, those of four bits one for each block."""
    if node.op_type not in _STEPS:
        return None
    scales = _constant(node.inputs[1])
    if scales is None:
        return None
    if not _is_constant(node.inputs[0]):
        return None if scales.size == 1 else f"has {scales.size} scales for an activation, not one"
    if _type(node.inputs[0]) == "INT4" or _attribute(node, "block_size", 0):
        return _blocks(node)
    return None if scales.size == 1 else next(filter(None, (_axis(node, use) for use in node.outputs[0].uses())), None)


def _blocks(node: Node) -> str | None:
    if _type(node.inputs[0]) != "INT4":
        return "has scales of blocks for integers that are not of four bits"
    size, axis = _attribute(node, "block_size", 0), _attribute(node, "axis", 1)
    if size not in BLOCKS:
        return f"has a scale for each {size} weights of four bits, not for each 64 or 128"
    read = all(use.node.op_type == "MatMul" and use.idx == 1 for use in node.outputs[0].uses())
    return None if read and axis == 0 else "has blocks of weights that are no input channels of a MatMul"


def _axis(node: Node, use: Any) -> str | None:
    """The scales of a weight lie along its output channels: axis 0, of a transposed convolution 1, of a matrix last."""
    reader, found = use.node, _attribute(node, "axis", 1) % len(node.outputs[0].shape)
    if reader.op_type not in PRODUCTS:
        return f"has {_constant(node.inputs[1]).size} scales and is read by {reader.op_type}, not as a weight"
    turned = reader.op_type == "Gemm" and _attribute(reader, "transB", 0)
    wanted = 0 if reader.op_type == "Conv" or turned else 1
    is_weight = use.idx == 1
    return None if is_weight and found == wanted else f"has scales along axis {found} of a weight of {reader.op_type}"


def _ends(node: Node) -> str | None:
    """Integers lie between QuantizeLinear and DequantizeLinear, and no other operator reads them."""
    if node.op_type == "QuantizeLinear":
        other = next((r.op_type for r in node.outputs[0].consumers() if r.op_type != "DequantizeLinear"), None)
        return None if other is None else f"is read by {other}, not by DequantizeLinear"
    if node.op_type == "DequantizeLinear":
        maker = node.inputs[0].producer()
        is_known = maker is None or maker.op_type == "QuantizeLinear" or _is_constant(node.inputs[0])
        return None if is_known else f"reads the integers of {maker.op_type}, not of QuantizeLinear"
    return None


def _weights_alone(node: Node) -> str | None:
    """A product reads integer weights beside integers; beside floats those in blocks of four bits."""
    if node.op_type not in PRODUCTS:
        return None
    weight, activation = (_dequantized(node.inputs[index]) for index in (1, 0))
    if _has_blocks(node):
        return None if activation is None else "reads weights of four bits beside integers, not beside floats"
    is_constant = weight is not None and _is_constant(weight.inputs[0])
    return "reads integer weights beside floats" if is_constant and activation is None else None


def _all_inputs(node: Node) -> str | None:
    """All inputs of a product are quantized."""
    if node.op_type not in PRODUCTS or _has_blocks(node):
        return None
    missing = next((value for value in node.inputs[:2] if _dequantized(value) is None), None)
    return None if missing is None else f"is declared int8 and reads '{_said(missing)}' in float"


def _biases(node: Node) -> str | None:
    bias = node.inputs[2] if node.op_type in PRODUCTS and len(node.inputs) > 2 else None
    return None if _dequantized(bias) is None else "has a bias behind DequantizeLinear, not a float one"


def _fusion(node: Node) -> str | None:
    """Nothing is rounded between a layer and the relu or the sum that its kernel takes in."""
    if node.op_type not in _EPILOGUES:
        return None
    rounded = next(filter(None, map(_rounded_layer, _given(node))), None)
    if rounded is None or (node.op_type == "Add" and not _is_sum_of_rounded(node)):
        return None
    return f"reads {rounded.op_type} '{_name(rounded)}' rounded, whose kernel would take it in"


def _is_sum_of_rounded(node: Node) -> bool:
    """Tells whether both summands are rounded activations of one shape: a kernel takes in no other sum."""
    rounded = [_dequantized(value) for value in node.inputs]
    shapes = {str(value.shape) for value in node.inputs}
    is_activation = all(found is not None and not _is_constant(found.inputs[0]) for found in rounded)
    return is_activation and len(shapes) == 1 and node.inputs[0] is not node.inputs[1]


def _rounded_layer(value: Value) -> Node | None:
    """Returns the layer whose result a value is, rounded on the way, if nothing else reads it."""
    dequantize = value.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    quantize = dequantize.inputs[0].producer()
    made = None if quantize is None else quantize.inputs[0].producer()
    if made is None or any(len(step.outputs[0].uses()) != 1 for step in (made, quantize, dequantize)):
        return None
    if made.op_type == "Add":  # of the bias of a linear layer
        made = next((m for v in made.inputs if (m := v.producer()) is not None and m.op_type == "MatMul"), made)
    weight = _dequantized(made.inputs[1]) if made.op_type in PRODUCTS else None
    return made if weight is not None and _is_constant(weight.inputs[0]) else None


def _both_sides(node: Node) -> str | None:
    """A layer without weights that reads integers writes integers."""
    if node.op_type not in _ROUNDED_ON_BOTH_SIDES or any(map(_is_behind_product, _given(node))):
        return None
    missing = next((value for value in _data(node) if _dequantized(value) is None), None)
    if missing is not None:
        return f"is declared int8 and reads '{_said(missing)}' in float"
    is_rounded = all(_is_rounded(value) for value in node.outputs)
    return None if is_rounded else "is declared int8 and its result is not rounded"


def _one_scale(node: Node) -> str | None:
    """What commutes with quantization has equal scales on both sides, or none."""
    if node.op_type not in _COMMUTING:
        return None
    steps = [value.producer() for value in _data(node)]
    steps += [reader for value in node.outputs for reader in value.consumers()]
    found = {scale for step in steps if (scale := _scale_of(step)) is not None}
    return None if len(found) < 2 else f"has integers of scale {min(found):g} and of scale {max(found):g} on its sides"


def _scale_of(node: Node | None) -> float | None:
    scale = _constant(node.inputs[1]) if node is not None and node.op_type in _STEPS else None
    return float(scale.flat[0]) if scale is not None and scale.size == 1 else None


def _said(value: Value) -> str:
    node = value.producer()
    return str(value.name if node is None else _name(node))


def _name(node: Node) -> str:
    """Returns the name of the node of torch's graph that a node comes from."""
    return (node.name or "").partition("@")[0]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "integers": Rule(_of_integers),
        "zero points": Rule(_zero_points),
        "scales": Rule(_scales),
        "granularity": Rule(_granularity),
        "ends": Rule(_ends),
        "weights alone": Rule(_weights_alone),
        "biases": Rule(_biases),
        "fusion": Rule(_fusion),
        "all inputs": Rule(_all_inputs, of_declared=True),
        "both sides": Rule(_both_sides, of_declared=True),
        "one scale": Rule(_one_scale, of_declared=True),
    }
)
