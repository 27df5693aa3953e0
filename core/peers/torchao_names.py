"""Private names of torchao that we use, each with why, and what would take its place."""

from typing import Any

from torch import Tensor, nn
from torchao.quantization.pt2e._affine_quantization import AffineQuantizedMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

__all__ = [
    "AFFINE_OBSERVERS",
    "WRITTEN_FOR",
    "AffineQuantizedMinMaxObserver",
    "is_marked",
    "mark",
    "qparams_arithmetic",
    "qparams_of_range",
]

# Another version may rename or mend what stands here: look at each name again, then set it.
WRITTEN_FOR = (0, 18)

# The observer of blocks is exported nowhere else; a public import of it from torchao.quantization.pt2e would do.
AFFINE_OBSERVERS = AffineQuantizedMinMaxObserver.__module__


def is_marked(annotation: QuantizationAnnotation) -> bool:
    """Tells whether an annotation says that its node is taken: a field of torchao's that has no other name."""
    return bool(annotation._annotated)


def mark(annotation: QuantizationAnnotation) -> None:
    """Lets an annotation say that its node is taken; a setter of torchao's would do."""
    annotation._annotated = True


def qparams_of_range(observer: nn.Module, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point that an observer makes of a range.

    torchao has no public way from a range to them; the alternative is a second copy of its rounding. A function of
    range and dtype in torchao would do.
    """
    of_range: Any = observer._calculate_qparams
    scale, zero_point = of_range(low, high)
    return scale, zero_point


def qparams_arithmetic(kind: type[nn.Module]) -> Any:
    """Returns the function with which a class of observers makes them; the same for all that round alike."""
    return getattr(kind, "_calculate_qparams")  # noqa: B009 - the class is not known to have it
