"""Activations on their own: a range of their own, a range known beforehand, or the range of the input."""

from collections.abc import Mapping

from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import activation, annotate_piece, in_scale_of_input
from quantplug.annotators.qspecs import fixed_qspec, get_input_act_qspec, get_output_act_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.patterns.language import Match, op, value

# The open end of the range is one step above the largest integer: sigmoid never reaches 1.
KNOWN_RANGES: Mapping[str, tuple[float, float]] = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "_softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
}


def known_range(name: str) -> Annotator:
    """Returns the annotator of an activation whose output range is known: its output gets fixed qparams.

    Only the output is fixed; the input keeps the range that calibration finds.

    Args:
        name: an operator whose results lie between known numbers, such as "sigmoid".
    """
    low, high = KNOWN_RANGES[name]

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        output = fixed_qspec(get_output_act_qspec(config), low, high)
        return annotate_piece(match, {match["x"]: get_input_act_qspec(config)}, output)

    return Annotator(name, ((name, op(name, self=value("x"), name="op")),), decide, (static_only,), output="fixed")


def own_range(*names: str) -> Annotator:
    """Returns the annotator of functions of one tensor whose output range calibration finds.

    Args:
        names: the functions, such as "gelu"; each is a rule.
    """

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        return annotate_piece(match, {match["x"]: get_input_act_qspec(config)}, get_output_act_qspec(config))

    return Annotator(names[0], tuple((n, op(n, self=value("x"), name="op")) for n in names), decide, (static_only,))


def clamps(*names: str) -> Annotator:
    """Returns the annotator of lone clamp-like activations, which stay in the scale of their producer.

    A clamp in the producer's scale is a comparison of integers; it is annotated only where the producer
    is quantized.

    Args:
        names: the activations, such as "relu"; each is a rule.
    """
    patterns = tuple((name, activation(name, value("x"), bind="op")) for name in names)
    return Annotator("clamp", patterns, in_scale_of_input, (static_only,), follows=("x",), output="shared")
