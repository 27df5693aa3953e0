"""How closely a kernel must agree with a reference: the level that a backend declares for each operator.

Before: what a kernel yields and what the reference yields, as integers or as floats. After: None, or the
reason in words why the kernel is not at its declared level.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantplug.core.errors import ConfigError

# A dequantized integer is (q - zero_point) * scale rounded to float32: two of them, of at most 2^16 steps each, are
# off by 2^-24 of that.
STEP_ROUNDING = 2.0**-7
_DECIBELS = 25.0


@dataclass(frozen=True)
class Deviation:
    """How far a tensor is from its reference.

    Attributes:
        elements: number of elements.
        differing: how many of them differ at all.
        steps: the largest difference, in steps of the quantization.
        decibels: signal to quantization noise ratio, infinite if nothing differs.
    """

    elements: int
    differing: int
    steps: float
    decibels: float

    @classmethod
    def between(cls, found: Tensor, expected: Tensor, step: float = 1.0) -> "Deviation":
        """Measures two tensors of one shape and dtype.

        Args:
            found: what the kernel yields.
            expected: what the reference yields.
            step: the scale of the quantization where the tensors are floats; 1 for integers.

        Raises:
            ConfigError: shape or dtype differ, or the step is not positive.
        """
        reason = _form_objection(found, expected)
        if reason or not step > 0:
            raise ConfigError(reason or f"The step is {step}; pass the positive scale of the output's quantization.")
        one, other = found.detach().double(), expected.detach().double()
        differs = (one != other) & ~(one.isnan() & other.isnan())
        steps = float(((one - other).abs() / step)[differs].max()) if bool(differs.any()) else 0.0
        return cls(found.numel(), int(differs.sum()), steps, sqnr(one, other) if bool(differs.any()) else float("inf"))

    @classmethod
    def combined(cls, deviations: Iterable["Deviation"]) -> "Deviation":
        """Returns all deviations as one: elements added up, the largest step, the lowest ratio."""
        found = list(deviations)
        return cls(
            sum(d.elements for d in found),
            sum(d.differing for d in found),
            max((d.steps for d in found), default=0.0),
            min((d.decibels for d in found), default=float("inf")),
        )

    @property
    def share(self) -> float:
        """The part of the elements that differs, 0 to 1."""
        return self.differing / self.elements if self.elements else 0.0

    @property
    def level(self) -> "Level":
        """The tightest level that this deviation keeps."""
        if not self.differing:
            return Level.EXACT
        return Level.ONE_STEP if self.steps <= 1 + STEP_ROUNDING else Level.APPROXIMATE

    def __str__(self) -> str:
        return (
            f"{self.differing} of {self.elements} elements differ, by {self.steps:.4g} steps at most, "
            f"{self.decibels:.1f} dB"
        )


class Level(enum.Enum):
    """The agreement that is promised.

    EXACT: every element is equal. ONE_STEP: every element is at most one step of the output's quantization
    away. APPROXIMATE: the signal to quantization noise ratio keeps a floor.
    """

    EXACT = "exact"
    ONE_STEP = "one step"
    APPROXIMATE = "approximate"

    def objection(
        self, found: Tensor, expected: Tensor, *, step: float | None = None, decibels: float = _DECIBELS
    ) -> str | None:
        """Returns why a kernel's output is not at this level, or None if it is.

        Args:
            found: what the kernel yields.
            expected: what the reference yields.
            step: the scale of the output's quantization; integers need none, floats need it for ONE_STEP.
            decibels: the floor of APPROXIMATE.

        Raises:
            ConfigError: ONE_STEP of floats without a step, or a step that is not positive.
        """
        reason = _form_objection(found, expected)
        if reason:
            return reason
        if step is None and self is Level.ONE_STEP and found.is_floating_point():
            raise ConfigError("One step of a float tensor has no size; pass step=scale of the output's quantization.")
        deviation = Deviation.between(found, expected, 1.0 if step is None else step)
        return None if self.admits(deviation, decibels) else f"{deviation}; declared: {self._text(decibels)}"

    def admits(self, deviation: Deviation, decibels: float = _DECIBELS) -> bool:
        """Tells whether a measured deviation is within this level."""
        if self is Level.APPROXIMATE:
            return deviation.decibels >= decibels
        return deviation.level is Level.EXACT or deviation.level is self

    def _text(self, decibels: float) -> str:
        return f"approximate, at least {decibels:.1f} dB" if self is Level.APPROXIMATE else self.value


def _form_objection(found: Tensor, expected: Tensor) -> str | None:
    if found.shape != expected.shape:
        return f"The output has shape {tuple(found.shape)}, the reference has {tuple(expected.shape)}."
    if found.dtype != expected.dtype:
        return f"The output is {found.dtype}, the reference is {expected.dtype}."
    return None


def decibels(signal: float, noise: float) -> float:
    """Returns 10 log10(signal / noise) of two energies; infinite where one of them is none."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf


def sqnr(found: Tensor, expected: Tensor) -> float:
    """Returns the signal to quantization noise ratio in decibels: 10 log10(sum expected^2 / sum error^2).

    Infinite if both are equal, minus infinity if the signal is zero and the error is not.

    Args:
        found: the quantized values, of any shape.
        expected: the float values, of the same shape.
    """
    found, expected = found.detach().double(), expected.detach().double()
    signal, noise = expected.square().sum(), (found - expected).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(signal / noise))
