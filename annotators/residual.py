"""Residual sums inside a product's kernel: convolution or linear, plus a tensor, with optional activation.

The piece `product -> add -> activation` (in training with a batch norm behind the product) is one kernel that adds
onto its accumulator: nothing is rounded between the product and the sum. The product's inputs and the last output are
quantized, and the other summand where the output is; a sum that the kernel writes in float takes the summand in float.
"""

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationConfig

from quantplug.annotators.constraints import static_only
from quantplug.annotators.fusion import with_activations
from quantplug.annotators.qspecs import get_input_act_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.patterns.language import Match, Op, op, single_use, value


def residual(product: Annotator, activations: tuple[str, ...] = ("relu",), *, in_float: bool = False) -> Annotator:
    """Returns the annotator of sums that a product's kernel takes in.

    Args:
        product: the annotator of convolutions or linear layers; its patterns without activation are the products.
        activations: activations that the kernel applies to the sum.
        in_float: whether the sum is taken and written in float whoever reads it. A row of such sums then rounds
            nothing that passes by, and layers quantize what they read of it.
    """

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        annotations = dict(product.decide(_product_of(match), config))
        output = annotations[match["op"]].output_qspec
        annotations[match["op"]].output_qspec = None
        if in_float:
            return annotations
        annotations[match["sum"]] = QuantizationAnnotation({match["residual"]: get_input_act_qspec(config)})
        root = annotations.setdefault(match.root, QuantizationAnnotation())
        root.output_qspec = output
        return annotations

    bare = [(label, p) for label, p in product.patterns if isinstance(p, Op) and p.name in ("op", "batch_norm")]
    patterns = tuple(
        labelled for label, base in bare for labelled in with_activations(f"{label}_add", _sum(base), activations)
    )
    constraints = (*product.constraints, static_only, _two_tensors)
    output = "float" if in_float else "own"
    return Annotator(f"{product.name}_add", patterns, decide, constraints, output=output, adds=("residual",))


def _sum(product: Op) -> Op:
    return op(
        "add",
        self=single_use(product),
        other=value("residual"),
        commutative=("self", "other"),
        alpha=1,
        name="sum",
    )


def _product_of(match: Match) -> Match:
    return Match(match["op"], (match["op"],), match.bindings)


def _two_tensors(match: Match, config: QuantizationConfig) -> str | None:
    """The kernel adds in place, so both summands have one shape."""
    if match["residual"] is match.bindings.get("batch_norm", match["op"]):
        return "both summands are the product itself"
    return None if _shape(match["residual"]) == _shape(match["op"]) else "the summands have different shapes"


def _shape(node: fx.Node) -> tuple[str, ...] | None:
    found = node.meta.get("val")
    return None if found is None else tuple(map(str, found.shape))
