"""Fused activations: an operator followed by a clamp-like activation that its kernel applies on the way out.

The piece `op -> activation` has no quantization between the two: the operator's inputs and the
activation's output are quantized.
"""

from numbers import Number
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.core.annotation.annotator import Annotations
from quantplug.core.graph.operators import CLAMPS
from quantplug.core.patterns.language import Match, Op, Pattern, anything, op, optional, single_use


def _number(found: Any) -> str | None:
    return None if found is None or isinstance(found, Number) else f"the bound {found} is no number"


def activation(name: str, inner: Pattern, bind: str = "activation") -> Op:
    """Returns the pattern of an activation on top of another pattern.

    The bounds of a clamp have to be numbers: kernels take no tensors there.

    Raises:
        PatternError: the activation is no operator with an operand `self`.
    """
    number = anything(None, _number)
    number = optional(number) if name == "clamp" else number  # the others have no bound to leave out
    bounds: dict[str, Any] = {bound: number for bound in CLAMPS.get(name, ()) if isinstance(bound, str)}
    targets = (f"{name}.default", f"{name}_.default") if name.startswith("clamp") else (name,)
    return op(*targets, self=inner, name=bind, **bounds)


def with_activations(label: str, base: Pattern, activations: tuple[str, ...]) -> tuple[tuple[str, Pattern], ...]:
    """Returns the labelled patterns of an operator alone and with each of the activations fused.

    Args:
        label: the name of the rule of the operator alone.
        base: a pattern that binds the operator as "op".
        activations: activations that the kernel fuses, such as "relu".

    Raises:
        PatternError: the operator does not bind "op", or an activation is no operator.
    """
    if not activations:
        return ((label, base),)
    fused = tuple((f"{label}_{name}", activation(name, single_use(base))) for name in activations)
    return (*fused, (label, base))


def with_batch_norm(label: str, base: Pattern, activations: tuple[str, ...]) -> tuple[tuple[str, Pattern], ...]:
    """Returns the labelled patterns of operator, batch norm and activation, as training graphs have them.

    Only whole batch norms are fused for training; a graph that was decomposed before keeps them float.
    """
    whole = op("batch_norm", input=single_use(base), name="batch_norm")
    return with_activations(f"{label}_bn", whole, activations)


def in_scale_of_input(match: Match, config: QuantizationConfig) -> Annotations:
    """Decides that "op" stays in the integers of "x": input and output share the scale of what yields "x"."""
    source = match["x"]
    shared = SharedQuantizationSpec((source, match["op"]))
    return annotate_piece(match, {source: SharedQuantizationSpec(source)}, shared)


def annotate_piece(
    match: Match,
    inputs: dict[fx.Node, QuantizationSpecBase | None],
    output: QuantizationSpecBase | None,
) -> Annotations:
    """Returns the annotations of a fused piece: inputs at the operator "op", the output at the last node.

    Args:
        match: a match that binds "op", the operator that reads the inputs.
        inputs: for each node that it reads a spec; None leaves that one float.
        output: the spec of what the whole piece yields, or None for float.
    """
    known = {node: spec for node, spec in inputs.items() if spec is not None}
    if match.root is match["op"]:
        return {match.root: QuantizationAnnotation(input_qspec_map=known, output_qspec=output)}
    return {
        match["op"]: QuantizationAnnotation(input_qspec_map=known),
        match.root: QuantizationAnnotation(output_qspec=output),
    }
