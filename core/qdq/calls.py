"""One operator of a q/dq graph with the conversions around it, read once.

Before: a graph of quantize, dequantize and operators between them. After: for one of those its operands, the numbers of
the integers that it reads and yields, and the activation that a kernel computes with it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from quantplug.core.graph.constants import is_expression
from quantplug.core.graph.facts import constant_value, operands, operator_name, sole_user
from quantplug.core.graph.operators import CLAMPS, schema_names
from quantplug.core.qdq.nodes import is_dequantize, is_dynamic
from quantplug.core.qdq.qparams import StaticQParams, folded, quantized_output, static_qparams

_ACTIVATIONS = schema_names(name for name in CLAMPS if not name.startswith("clamp"))


def is_activation(node: fx.Node) -> bool:
    """Tells whether a node is an activation that kernels compute with the operator before it."""
    return operator_name(node).removesuffix("_") in _ACTIVATIONS


@dataclass(frozen=True)
class QuantizedCall:
    """An operator with what is around it.

    Attributes:
        node: the operator.
        operands: its operands by their names in the schema.
        input: what it reads first, None for an operator without operands.
        weight: its operand of that name, None for others.
        bias: the same of its bias.
        activation: the activation that alone reads the operator.
        output: the numbers of the one quantize node that alone reads the operator, or its activation.
    """

    node: fx.Node
    operands: Mapping[str, Any]
    input: Any
    weight: Any
    bias: Any
    activation: fx.Node | None
    output: StaticQParams | None

    @classmethod
    def of(cls, node: fx.Node) -> "QuantizedCall":
        """Returns an operator with what is around it now; an edit of that is not followed."""
        given, user = operands(node), sole_user(node)
        activation = user if user is not None and is_activation(user) else None
        first = node.args[0] if node.args else None
        output = quantized_output(activation or node)
        return cls(node, given, first, given.get("weight"), given.get("bias"), activation, output)

    @cached_property
    def entered(self) -> StaticQParams | None:
        """The numbers of the integers that the operator reads first; None for floats and scales of run time."""
        return static_qparams(self.input) if is_dequantize(self.input) else None

    @cached_property
    def yielded(self) -> StaticQParams | None:
        """The numbers of the integers that the operator itself yields, without an activation."""
        return self.output if self.activation is None else None

    @cached_property
    def is_dynamic(self) -> bool:
        """Tells whether the scale of what the operator reads first is found at run time."""
        return is_dequantize(self.input) and is_dynamic(self.input)

    @cached_property
    def stored(self) -> Tensor | None:
        """The constant that the file has for the weight, in integers if it is quantized."""
        held = self.weight.args[0] if is_dequantize(self.weight) else self.weight
        return constant_value(held) if isinstance(held, fx.Node) else None

    @cached_property
    def is_known(self) -> bool:
        """Tells whether the weight is the same at every call; `kernel` then computes it."""
        return is_expression(self.weight) if is_dequantize(self.weight) else self.stored is not None

    @cached_property
    def kernel(self) -> Tensor | None:
        """What the weight computes with, in floats; None if that is known at run time only."""
        return folded(self.weight) if is_dequantize(self.weight) else self.stored


def quantized_calls(graph: fx.Graph, names: Iterable[str]) -> Iterator[QuantizedCall]:
    """Yields the calls of some operators in graph order, each read when the edits of those before it are done."""
    wanted = set(names)
    for node in [node for node in graph.nodes if operator_name(node) in wanted]:
        yield QuantizedCall.of(node)
