"""Observers that have found their numbers for good.

Before: an observer, of any library, and a scale and a zero point. After: the same object, which gives these numbers
whatever it sees; what else refers to it (a bias's scale is derived from its weight's) reads them too.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn

_KEPT = "frozen_qparams"


class Frozen:
    """What a frozen observer's class has before its own: numbers that no data moves."""

    def forward(self, x: Tensor) -> Tensor:
        """Lets a tensor pass."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns the scale and zero point it was frozen with."""
        found: tuple[Tensor, Tensor] = getattr(self, _KEPT)
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class was made here: who unpickles or copies it makes it again.
        return _again, (type(self).__mro__[2],), self.__dict__


def freeze(observer: nn.Module, scale: Tensor, zero_point: Tensor) -> None:
    """Gives an observer a scale and a zero point that nothing it sees changes, in place.

    Args:
        observer: a static one that has seen data.
        scale: in the shape in which it gives its own.
        zero_point: likewise.
    """
    kind: Any = type(observer)
    observer.__class__ = _frozen_class(kind)
    observer.__dict__.pop("forward", None)  # of one that waits for convert to see its constant
    observer.__dict__[_KEPT] = (scale, zero_point)


def is_frozen(observer: nn.Module) -> bool:
    """Tells whether an observer's numbers were given to it."""
    return isinstance(observer, Frozen)


@cache
def _frozen_class(kind: type) -> type:
    return kind if issubclass(kind, Frozen) else type(f"Frozen{kind.__name__}", (Frozen, kind), {})


def _again(kind: type) -> Any:
    made: Any = _frozen_class(kind)
    return made.__new__(made)
