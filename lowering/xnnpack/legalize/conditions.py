"""What holds of a q/dq graph after the steps of legalization: None for a node, or what is wrong with it."""

from torch import fx

from quantplug.core.graph.facts import constant_value, operands, operator_name
from quantplug.core.qdq.calls import QuantizedCall
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import folded, static_qparams
from quantplug.lowering.xnnpack.legalize.movement import lies_by_itself
from quantplug.lowering.xnnpack.legalize.products import GEMMS

_NUMBERS = ("aten::add", "aten::sub", "aten::mul")


def plain(node: fx.Node) -> str | None:
    """One spelling of convolutions, with a number for each dimension, and of poolings."""
    name = operator_name(node)
    if name == "aten::convolution":
        return "is no convolution of one dimension"
    if name in ("aten::max_pool2d", "aten::avg_pool2d") and len(operands(node)["stride"]) != 2:
        return "has no stride for each dimension"
    return None


def contiguous(node: fx.Node) -> str | None:
    """Constants lie in memory as their sizes say, and by themselves."""
    value = constant_value(node) if node.op == "get_attr" else None
    return None if value is None or lies_by_itself(value) else "is no contiguous constant of its own"


def signed(node: fx.Node) -> str | None:
    """Unsigned integers that all readers dequantize are none."""
    params = static_qparams(node) if is_quantize(node) else None
    if params is None or params.dtype.is_signed or not node.users:
        return None
    inside = all(static_qparams(user) == params for user in node.users)
    return f"writes {params.dtype} that only dequantize nodes read" if inside else None


def one_integer_reader(node: fx.Node) -> str | None:
    """A dequantize node has one reader that yields integers, or readers that yield none."""
    readers = list(node.users) if is_dequantize(node) else []
    integer = [reader.name for reader in readers if QuantizedCall.of(reader).output is not None]
    return f"is read by {integer} and others" if integer and len(readers) > 1 else None


def whole_range(node: fx.Node) -> str | None:
    """Integers of int8 take all of its values, as kernels saturate there."""
    params = static_qparams(node) if is_quantize(node) else None
    narrow = params is not None and params.dtype.is_signed and params.dtype.itemsize == 1 and not params.is_int8
    return "has fewer integers than int8" if narrow else None


def float_bias(node: fx.Node) -> str | None:
    """No product reads a dequantized bias that is a constant."""
    bias = QuantizedCall.of(node).bias if operator_name(node) in GEMMS else None
    return "has a bias in integers" if isinstance(bias, fx.Node) and folded(bias) is not None else None


def quantized_operands(node: fx.Node) -> str | None:
    """No number stands beside a quantized operand of an operator that yields integers."""
    if operator_name(node) not in _NUMBERS:
        return None
    call = QuantizedCall.of(node)
    plain_number = not isinstance(call.operands.get("other"), fx.Node) and call.operands.get("alpha", 1) == 1
    return "has a number beside integers" if plain_number and call.entered and call.output else None


def joined(node: fx.Node) -> str | None:
    """What an integer concatenation reads has the numbers of what it yields."""
    call = QuantizedCall.of(node) if operator_name(node) in ("aten::cat", "aten::stack") else None
    if call is None or call.yielded is None or not call.yielded.is_int8:
        return None
    entered = [static_qparams(value) for value in call.input if is_dequantize(value)]
    others = any(params not in (None, call.yielded) for params in entered)
    return "joins integers of several scales" if others and len(entered) == len(call.input) else None


def product(node: fx.Node) -> str | None:
    """A product that reads integers yields them and has an integer weight, or its weight is no constant."""
    call = QuantizedCall.of(node) if operator_name(node) in GEMMS else None
    if call is None or not is_dequantize(call.weight) or not call.is_known or not is_dequantize(call.input):
        return None
    return None if call.is_dynamic or call.output is not None else "has integers for operands and yields floats"


def own_constants(working: fx.GraphModule) -> str | None:
    """No two products read one constant."""
    seen: dict[str, str] = {}
    for node in working.graph.nodes:
        call = QuantizedCall.of(node) if operator_name(node) in GEMMS else None
        held = call.weight.args[0] if call and is_dequantize(call.weight) else call and call.weight
        if isinstance(held, fx.Node) and constant_value(held) is not None:
            if str(held.target) in seen:
                return f"'{node.name}' and '{seen[str(held.target)]}' read '{held.target}'"
            seen[str(held.target)] = node.name
    return None
