"""Data types with constraints: which numbers a kernel takes at each of its ports.

The names are those of torch.ao's BackendConfig (`DTypeWithConstraints`, `DTypeConfig`), whose constraints
these values carry over; here they are enforced for every spec kind and again on calibrated numbers.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import torch
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
)

from quantplug.core.errors import ConfigError
from quantplug.core.specs.stored_dtypes import stored_range

_SIGNED_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


@dataclass(frozen=True)
class Refusal:
    """One constraint that a spec or its numbers break.

    Attributes:
        constraint: its name, such as "quant_max_upper_bound".
        value: what was found.
        limit: what the constraint allows.
    """

    constraint: str
    value: Any
    limit: Any


@dataclass(frozen=True)
class DTypeWithConstraints:
    """A dtype and what a kernel asks of the numbers in it; None asks nothing.

    Attributes:
        dtype: of the stored numbers, such as torch.int8.
        quant_min_lower_bound: the least integer that the kernel can hold.
        quant_max_upper_bound: the greatest integer that the kernel can hold.
        scale_min_lower_bound: the least scale; an observer's `eps` has to keep it.
        scale_max_upper_bound: the greatest scale.
        scale_exact_match: the only scale; the spec has to be one of fixed qparams.
        zero_point_exact_match: the only zero point; the spec has to be symmetric or of fixed qparams.
        qschemes: the schemes that the kernel knows; empty for all of them.
    """

    dtype: torch.dtype
    quant_min_lower_bound: int | None = None
    quant_max_upper_bound: int | None = None
    scale_min_lower_bound: float | None = None
    scale_max_upper_bound: float | None = None
    scale_exact_match: float | None = None
    zero_point_exact_match: int | None = None
    qschemes: tuple[torch.qscheme, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"A dtype with constraints has dtype {self.dtype!r}; give a torch.dtype.")
        wrong = next((scheme for scheme in self.qschemes if not isinstance(scheme, torch.qscheme)), None)
        if wrong is not None:
            raise ConfigError(
                f"A dtype with constraints has the scheme {wrong!r}; give one like torch.per_tensor_affine."
            )
        _ordered(
            "quant_min_lower_bound", self.quant_min_lower_bound, "quant_max_upper_bound", self.quant_max_upper_bound
        )
        _ordered(
            "scale_min_lower_bound", self.scale_min_lower_bound, "scale_max_upper_bound", self.scale_max_upper_bound
        )
        for name in ("scale_min_lower_bound", "scale_max_upper_bound", "scale_exact_match"):
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < math.inf:
                raise ConfigError(f"The constraint {name} is {bound}; scales are positive and finite.")
        if not self.dtype.is_floating_point:
            self._within_dtype()

    def _within_dtype(self) -> None:
        limits = torch.iinfo(self.dtype)
        for name in ("quant_min_lower_bound", "quant_max_upper_bound", "zero_point_exact_match"):
            bound = getattr(self, name)
            if bound is not None and not limits.min <= bound <= limits.max:
                raise ConfigError(
                    f"The constraint {name} is {bound}, outside of {self.dtype} ({limits.min}..{limits.max})."
                )

    @property
    def range(self) -> tuple[int, int]:
        """The least and the greatest integer that the kernel holds."""
        limits = torch.iinfo(self.dtype)
        low, high = self.quant_min_lower_bound, self.quant_max_upper_bound
        return (limits.min if low is None else low), (limits.max if high is None else high)

    def refuses(self, spec: QuantizationSpecBase) -> Iterator[Refusal]:
        """Yields the constraints that a spec breaks before any data is seen.

        Args:
            spec: one with a dtype and range of its own; shared and derived specs get their numbers elsewhere.
        """
        if not isinstance(spec, QuantizationSpec | FixedQParamsQuantizationSpec):
            return
        if spec.dtype != self.dtype:
            yield Refusal("dtype", spec.dtype, self.dtype)
            return
        yield from self._refuses_range(spec)
        if self.qschemes and spec.qscheme is not None and spec.qscheme not in self.qschemes:
            yield Refusal("qschemes", spec.qscheme, self.qschemes)
        if isinstance(spec, FixedQParamsQuantizationSpec):
            yield from self.refuses_qparams(spec.scale, spec.zero_point)
        else:
            yield from self._refuses_observer(spec)

    def _refuses_range(self, spec: QuantizationSpec | FixedQParamsQuantizationSpec) -> Iterator[Refusal]:
        if spec.dtype.is_floating_point:
            return
        least, greatest = stored_range(spec)
        if self.quant_min_lower_bound is not None and least < self.quant_min_lower_bound:
            yield Refusal("quant_min_lower_bound", least, self.quant_min_lower_bound)
        if self.quant_max_upper_bound is not None and greatest > self.quant_max_upper_bound:
            yield Refusal("quant_max_upper_bound", greatest, self.quant_max_upper_bound)

    def _refuses_observer(self, spec: QuantizationSpec) -> Iterator[Refusal]:
        if self.scale_exact_match is not None:
            yield Refusal("scale_exact_match", "an observed scale", self.scale_exact_match)
        symmetric = self.dtype.is_signed and spec.qscheme in _SIGNED_SYMMETRIC
        if self.zero_point_exact_match is not None and not (symmetric and self.zero_point_exact_match == 0):
            yield Refusal("zero_point_exact_match", "an observed zero point", self.zero_point_exact_match)
        least = smallest_scale(spec)
        if self.scale_min_lower_bound is not None and least < self.scale_min_lower_bound:
            yield Refusal("scale_min_lower_bound", f"an eps of {least:g}", self.scale_min_lower_bound)

    def refuses_qparams(self, scale: Any, zero_point: Any) -> Iterator[Refusal]:
        """Yields the constraints that calibrated numbers break.

        Args:
            scale: a number, or a tensor of one a channel.
            zero_point: a number, or a tensor of one a channel.
        """
        scales = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
        zeros = torch.as_tensor(zero_point).reshape(-1)
        if self.scale_min_lower_bound is not None and scales.min() < _float32(self.scale_min_lower_bound):
            yield Refusal("scale_min_lower_bound", float(scales.min()), self.scale_min_lower_bound)
        if self.scale_max_upper_bound is not None and scales.max() > _float32(self.scale_max_upper_bound):
            yield Refusal("scale_max_upper_bound", float(scales.max()), self.scale_max_upper_bound)
        wrong = scales[scales != _float32(self.scale_exact_match)] if self.scale_exact_match is not None else scales[:0]
        if len(wrong):
            yield Refusal("scale_exact_match", float(wrong[0]), self.scale_exact_match)
        moved = zeros[zeros != self.zero_point_exact_match] if self.zero_point_exact_match is not None else zeros[:0]
        if len(moved):
            yield Refusal("zero_point_exact_match", int(moved[0]), self.zero_point_exact_match)

    def __str__(self) -> str:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "dtype"}
        asked = [f"{name}={value}" for name, value in named.items() if value not in (None, ())]
        return " ".join(filter(None, (_dtype_of(self), f"({', '.join(asked)})" if asked else "")))


DTypes: TypeAlias = DTypeWithConstraints | torch.dtype | None


@dataclass(frozen=True)
class DTypeConfig:
    """The dtypes of one way to run an operator, a name for each port; None is float.

    Attributes:
        name: how reports call it, such as "int8".
        input: of input activations.
        output: of output activations.
        weight: of weights.
        bias: torch.int32 for an integer bias with derived scale, None for float.
        is_dynamic: whether activation scales are computed at run time.
    """

    name: str
    input: DTypes = None
    output: DTypes = None
    weight: DTypes = None
    bias: torch.dtype | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        if self.bias not in (None, torch.float, torch.int32):
            raise ConfigError(
                f"Dtype config '{self.name}' has bias {self.bias}; choose torch.int32 or None, which is float."
            )
        if self.is_dynamic and (self.input is None or self.output is not None):
            raise ConfigError(
                f"Dtype config '{self.name}' is dynamic, which quantizes the input and leaves the output float; "
                "give an input dtype and no output dtype."
            )

    @property
    def mode(self) -> str:
        """What the config is for: "static", "dynamic" or "weight_only"."""
        return mode_of(self.input is not None, self.is_dynamic)

    def at(self, port: str) -> DTypeWithConstraints | None:
        """Returns what a port takes, "input", "output", "weight" or "bias"; None is float."""
        found: DTypes = getattr(self, port) if getattr(self, port) != torch.float else None
        return DTypeWithConstraints(found) if isinstance(found, torch.dtype) else found

    def refuses(self, asked: Iterable[tuple[str, QuantizationSpecBase | None]]) -> list[tuple[str, Refusal]]:
        """Returns the constraints that the specs asked for break, each with its port."""
        return [(port, refusal) for port, spec in asked for refusal in self._refuses(port, spec)]

    def _refuses(self, port: str, spec: QuantizationSpecBase | None) -> Iterator[Refusal]:
        taken = self.at(port)
        if taken is not None and spec is not None:
            yield from taken.refuses(spec)
        elif taken is not None or spec is not None:
            yield Refusal("dtype", _dtype_of(spec), _dtype_of(taken))

    def __str__(self) -> str:
        ports = ", ".join(f"{port} {self.at(port) or 'float'}" for port in ("input", "weight", "output"))
        return f"'{self.name}': {ports}{', dynamic' if self.is_dynamic else ''}"


def mode_of(quantizes_input: bool, is_dynamic: bool) -> str:
    """Returns "static", "dynamic" or "weight_only"."""
    return "dynamic" if is_dynamic else "static" if quantizes_input else "weight_only"


def group_size(spec: object) -> int | None:
    """Returns how many input channels share a scale in a spec of weights in groups, None for other specs."""
    constructor = getattr(getattr(spec, "observer_or_fake_quant_ctr", None), "p", None)
    granularity = getattr(constructor, "keywords", {}).get("granularity")
    found: int | None = getattr(granularity, "group_size", None)
    return found


def smallest_scale(spec: QuantizationSpec) -> float:
    """Returns the scale that a spec's observer never goes below: its `eps`, given or by default."""
    constructor = getattr(spec.observer_or_fake_quant_ctr, "p", spec.observer_or_fake_quant_ctr)
    given = dict(constructor.keywords) if isinstance(constructor, partial) else {}
    made = constructor.func if isinstance(constructor, partial) else constructor
    inner = getattr(given.get("observer"), "p", None)
    if isinstance(inner, partial):
        given = {**inner.keywords, **given}
    if given.get("eps") is not None:
        return float(given["eps"])
    default = signature(made).parameters.get("eps")
    known = default is not None and isinstance(default.default, float)
    return float(default.default) if default is not None and known else torch.finfo(torch.float32).eps


def _dtype_of(found: Any) -> str:
    return "float" if found is None else str(getattr(found, "dtype", found)).removeprefix("torch.")


def _float32(number: float) -> torch.Tensor:
    """Scales are float32 in kernels: a bound such as 0.1 is compared as it is stored."""
    return torch.tensor(number, dtype=torch.float32)


def _ordered(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise ConfigError(f"The constraint {low_name} is {low}, above {high_name}, which is {high}; exchange them.")
