"""Arithmetic on two tensors with optional fused activation: add, sub, mul, div, maximum, minimum."""

from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpecBase, SharedQuantizationSpec

from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import annotate_piece, with_activations
from quantplug.annotators.qspecs import get_input_act_qspec, get_output_act_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator, Decide
from quantplug.core.graph.facts import constant_value, is_constant
from quantplug.core.patterns.language import Match, Op, op, value

# The kernels of add and sub have no factor on the second operand.
_HAS_ALPHA = ("add", "sub")
# Masks of attention are minus infinity, the least float, or a thousand or more below any score.
_MASKED = 1e3


def binary(name: str, activations: tuple[str, ...] = ("relu",), *, shared_inputs: bool = False) -> Annotator:
    """Returns the annotator of one arithmetic operator on two tensors.

    Args:
        name: the ATen operator, such as "add", or an overload of it, such as "div.Tensor".
        activations: activations that the kernel fuses.
        shared_inputs: whether the kernel wants both inputs in one scale and zero point.
    """
    patterns = with_activations(name, _base(name), activations)
    return Annotator(name, patterns, _decide(shared_inputs), (static_only, _moderate_constants))


def _moderate_constants(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless an operand is a mask: its numbers leave no step of an integer range for the other operand."""
    for operand in (match["a"], match["b"]):
        value = constant_value(operand) if is_constant(operand) else None
        if value is not None and not bool((value.abs() < _MASKED).all()):
            return f"operand '{operand.name}' is a mask with numbers of {float(value.abs().max()):.3g}"
    return None


def _base(name: str) -> Op:
    alpha: dict[str, Any] = {"alpha": 1} if name in _HAS_ALPHA else {}
    return op(name, self=value("a"), other=value("b"), name="op", **alpha)


def _decide(shared_inputs: bool) -> Decide:
    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        node, first, second = match["op"], match["a"], match["b"]
        inputs: dict[fx.Node, QuantizationSpecBase | None] = {first: get_input_act_qspec(config)}
        if second is not first:
            spec = SharedQuantizationSpec((first, node)) if shared_inputs else get_input_act_qspec(config)
            inputs[second] = spec
        return annotate_piece(match, inputs, get_output_act_qspec(config))

    return decide
