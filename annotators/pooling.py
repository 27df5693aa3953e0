"""Pooling, means and resizing: in the scale of the input, or in a scale of their own where the kernel rescales."""

from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpecBase, SharedQuantizationSpec

from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import annotate_piece
from quantplug.annotators.qspecs import get_input_act_qspec, get_output_act_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.patterns.language import Match, Pattern, item, op, value


def pooling(*names: str, own_output: bool = False, follows: tuple[str, ...] = ()) -> Annotator:
    """Returns the annotator of pooling operators.

    Args:
        names: ATen operators, such as "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "mean".
        own_output: whether the kernel rescales, so that the output keeps its own, tighter range;
            otherwise input and output share one observer.
        follows: ("x",) where pooling a float tensor is not worth quantizing it.
    """

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        source, spec = match["x"], get_input_act_qspec(config)
        shared: QuantizationSpecBase = SharedQuantizationSpec((source, match["op"]))
        return annotate_piece(match, {source: spec}, get_output_act_qspec(config) if own_output else shared)

    patterns = tuple((name, pattern) for name in names for pattern in _forms(name))
    output = "own" if own_output else "shared"
    return Annotator(names[0], patterns, decide, (static_only,), follows=follows, output=output)


def resize() -> Annotator:
    """Returns the annotator of bilinear resizing, whose output has the scale of its input: it averages neighbours."""

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        source = match["x"]
        shared = SharedQuantizationSpec((source, match["op"]))
        return annotate_piece(match, {source: get_input_act_qspec(config)}, shared)

    pattern = op("upsample_bilinear2d.vec", input=value("x"), name="op")
    return Annotator("resize", (("upsample_bilinear2d", pattern),), decide, (static_only,), output="shared")


def _forms(name: str) -> list[Pattern]:
    whole: list[Pattern] = [op(name, self=value("x"), name="op")]
    if name.startswith("max_pool"):
        # run_decompositions() leaves the form that also yields the positions of the maxima.
        whole.append(item(op(f"{name}_with_indices", self=value("x"), name="op"), 0))
    return whole
