"""Weights stored in half precision: every operator with a constant weight, whatever its geometry."""

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.embedding import embedding
from quantplug.annotators.fusion import annotate_piece
from quantplug.annotators.linear import linear
from quantplug.annotators.qspecs import get_weight_qspec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.graph.facts import constant_value, operands
from quantplug.core.patterns.language import Match, any_op
from quantplug.core.specs.stored_dtypes import overflows

DIMS = (1, 2, 3)
# Vectors are biases, norms and scalings, of which a file is not made.
_LEAST_MATRIX, _LEAST_VECTOR = 256, 4096


def half_weight(match: Match | None, config: QuantizationConfig) -> str | None:
    """Holds for configs that store the weight in half precision."""
    found = config.weight.dtype if config.weight is not None else None
    return None if found == torch.float16 else f"its weight can be stored in torch.float16 alone, not in {found}"


def half_table() -> Annotator:
    """Returns the annotator of embedding tables that are stored in float16 or bfloat16."""
    return embedding().where(half_weight)


def half_constants() -> Annotator:
    """Returns the annotator of all that reads large constants: recurrent layers, `einsum`, `matmul`, tables."""

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        return annotate_piece(match, dict.fromkeys(_large(match["op"]), get_weight_qspec(config)), None)

    pattern = any_op("op", _reads_large)
    rule = Annotator("constant", (("constant", pattern),), decide, (half_weight, _holds_all), output="float")
    return rule.shown_by(_scaled)


def half_weights() -> tuple[Annotator, ...]:
    """Returns annotators of all constants that operators read in half precision, whatever the operator.

    They are for targets that widen stored halves to float32. Put them behind the other rows, which go first.
    """
    rows = (convolution(DIMS, ()), transposed_convolution(DIMS, ()), linear(()), embedding())
    return (*(row.where(half_weight).writing_float() for row in rows), half_constants())


def _large(node: fx.Node) -> dict[fx.Node, Tensor]:
    """Returns the large float32 constants that an operator reads; the statistics of norms are written in training."""
    if "running_mean" in operands(node):
        return {}
    held = ((source, constant_value(source)) for source in node.all_input_nodes if source.op == "get_attr")
    return {source: found.detach() for source, found in held if found is not None and _is_large(found)}


def _is_large(found: Tensor) -> bool:
    sides = sum(size > 1 for size in found.shape)
    least = _LEAST_MATRIX if sides > 1 else _LEAST_VECTOR
    return found.dtype == torch.float32 and found.layout == torch.strided and found.numel() >= least


def _reads_large(node: fx.Node) -> str | None:
    return None if _large(node) else "it reads no constant that is large"


def _holds_all(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for constants that float16 holds; whole numbers, which count or name something, exactly."""
    return next(filter(None, map(_objection, _large(match["op"]).values())), None)


def _objection(found: Tensor) -> str | None:
    half, limit = found.to(torch.float16), torch.finfo(torch.float16).max
    if overflows(found, half):
        largest = found[found.isfinite()].abs().max().item()
        return f"its weight has {largest:.6g}, the limit of torch.float16 is {limit:.6g}"
    if torch.equal(found, found.round()) and not torch.equal(half.float(), found):
        return "its constant is of whole numbers, of which torch.float16 holds those up to 2048"
    return None


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales


def _scaled() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _Scaled(), (torch.randn(3, 32, 16),)
