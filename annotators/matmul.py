"""Products of two activations: bmm and matmul, with an activation fused onto the product."""

from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpecBase

from quantplug.annotators.activation import KNOWN_RANGES
from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import annotate_piece, with_activations
from quantplug.annotators.qspecs import fixed_qspec, get_input_act_qspec, get_output_act_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.patterns.language import Match, Op, op, value

# How ATen calls the second operand.
_SECOND = {"bmm": "mat2", "mm": "mat2", "matmul": "other"}


def matmul(*names: str, activations: tuple[str, ...] = ()) -> Annotator:
    """Returns the annotator of products of two activations.

    An activation of known range, such as softmax or sigmoid, gives the output fixed qparams.

    Args:
        names: ATen operators: "bmm", "mm", "matmul".
        activations: activations that the kernel applies to the product before it writes.
    """
    patterns = tuple(labelled for name in names for labelled in with_activations(name, _product(name), activations))
    return Annotator(names[0], patterns, _decide, (static_only,))


def _product(name: str) -> Op:
    operands: dict[str, Any] = {"self": value("a"), _SECOND[name]: value("b")}
    return op(name, name="op", **operands)


def _decide(match: Match, config: QuantizationConfig) -> Annotations:
    inputs: dict[fx.Node, QuantizationSpecBase | None] = dict.fromkeys(
        (match["a"], match["b"]), get_input_act_qspec(config)
    )
    return annotate_piece(match, inputs, _output(match, config))


def _output(match: Match, config: QuantizationConfig) -> QuantizationSpecBase | None:
    spec = get_output_act_qspec(config)
    fused = match.get("activation")
    known = KNOWN_RANGES.get(str(fused.target).split(".")[1]) if fused is not None else None
    return fixed_qspec(spec, *known) if known else spec
