"""Arithmetic on two tensors with optional fused activation: add, sub, mul, div, maximum, minimum."""

from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpecBase, SharedQuantizationSpec

from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import annotate_piece, with_activations
from quantplug.annotators.qspecs import get_input_act_qspec, get_output_act_qspec
from quantplug.core.annotator import Annotations, Annotator, Decide
from quantplug.core.pattern import Match, Op, op, value

# The kernels of add and sub have no factor on the second operand.
_HAS_ALPHA = ("add", "sub")


def binary(name: str, activations: tuple[str, ...] = ("relu",), *, shared_inputs: bool = False) -> Annotator:
    """Returns the annotator of one arithmetic operator on two tensors.

    Args:
        name: the ATen operator, such as "add".
        activations: activations that the kernel fuses.
        shared_inputs: whether the kernel wants both inputs in one scale and zero point.
    """
    return Annotator(name, with_activations(name, _base(name), activations), _decide(shared_inputs), (static_only,))


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
