"""The limits of a backend's kernels, enforced in three phases.

1. When annotating: the specs that a rule asks for have to fit one of its dtype configs.
2. When sharing is known: a spec that comes from elsewhere has to fit every member of its group.
3. When qparams are known, see `core/qdq/limits.py`.

Before: the dtype configs of a rule, and the specs that it asks for. After: a `Violation` for each
constraint that does not hold, which is an error in strict mode and stands in the report otherwise.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
)

from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import module_path
from quantplug.core.named import resolved
from quantplug.core.specs.dtypes import DTypeConfig, Refusal, mode_of
from quantplug.core.specs.stored_dtypes import stored_range

PortSpec: TypeAlias = tuple[str, QuantizationSpecBase | None]
Resolve: TypeAlias = Callable[[QuantizationSpecBase], QuantizationSpecBase | None]


@dataclass(frozen=True)
class Rescale:
    """Which ratios of scales a kernel's requantization can express.

    Attributes:
        low: the least ratio, included.
        high: the greatest ratio, not included.
        of: "product" for (s_in * s_w) / s_out, "each" for s_in / s_out of each input.
        or_float: whether the lowering computes in float, between the conversions, what lies outside; if not, such
            a ratio is an error.
    """

    low: float
    high: float
    of: str = "product"
    or_float: bool = False

    def __post_init__(self) -> None:
        if self.of not in ("product", "each") or not 0 <= self.low < self.high:
            raise ConfigError(
                f"A rescale limit goes from a positive ratio to a greater one, of 'product' or 'each', found "
                f"{self.low}..{self.high} of '{self.of}'."
            )

    def outside(self, scales: Sequence[Any], output: Any) -> Iterator[float]:
        """Yields the worst ratio of each kind that lies outside.

        Args:
            scales: of what the kernel reads, one for each operand, each a number or one for each channel.
            output: the scale of what it writes.
        """
        numbers = [torch.as_tensor(scale, dtype=torch.float64) for scale in scales]
        for numerator in numbers if self.of == "each" else [math.prod(numbers)]:
            low, high = (float(end) for end in (numerator / output).detach().aminmax())
            if low < self.low or high >= self.high:
                yield low if low < self.low else high

    def objection(self, scales: Sequence[Any], output: Any) -> str | None:
        """Returns why a kernel does not take operands of these scales, or None; see `outside`."""
        ratio = next(self.outside(scales, output), None)
        if ratio is None:
            return None
        return f"the ratio {ratio:.3g} of its scales is outside of the kernel's [{self.low:.3g}, {self.high:.3g})"


# Outside of these XNNPACK refuses to create the operator (its operator sources, "scale ratio must be in"). The
# declaration tells them of calibrated models; the lowering holds them against graphs that others quantized.
XNNPACK_RATIOS: Mapping[str, Rescale] = {
    "add": Rescale(2.0**-10, 2.0**8, "each", or_float=True),
    "mul": Rescale(2.0**-16, 2.0**8, or_float=True),
    "convert": Rescale(2.0**-8, 2.0**7, or_float=True),
    "gemm": Rescale(0.0, 2.0**8, or_float=True),
}


# What tells whether this processor lacks something; plans name it by its key, since they call no function.
_LACKS_HERE: Mapping[str, Callable[[], bool]] = {
    "VNNI": lambda: bool(resolved("quantplug.lowering.processor:kernels_saturate", "check of this processor")())
}


@dataclass(frozen=True)
class Pairs:
    """How large the sum of two neighbouring products may get, of kernels that add them in few bits.

    It is a limit of a processor: the model keeps its integers for others. What lies beyond is computed in float between
    the conversions, which reports tell: of configs that may lead there, and of the converted operators.

    Attributes:
        most: the greatest sum.
        because: what the kernels do with greater ones, in words.
        remedy: what to do.
        lacking: what processors lack whose kernels are such, "VNNI"; "" for all of them.
    """

    most: int
    because: str
    remedy: str
    lacking: str = ""

    def __post_init__(self) -> None:
        if self.lacking not in ("", *_LACKS_HERE):
            raise ConfigError(f"A limit of pairs is of processors lacking {self.lacking!r}; choose {[*_LACKS_HERE]}.")

    def breaks(self, pair: int) -> bool:
        """Tells whether a sum is too large for the kernels of this processor."""
        return pair > self.most and (not self.lacking or _LACKS_HERE[self.lacking]())

    def objection(self, pair: int) -> str | None:
        """Returns why a kernel must not add products of which two come up to a sum, or None."""
        if not self.breaks(pair):
            return None
        return f"{self.because}: the limit is {self.most}, here they come up to {pair}; {self.remedy}"


# `lowering/processor.py` has the arithmetic. The declaration tells it; the lowering holds it against every graph.
ONEDNN_PAIRS = Pairs(
    2**15 - 1,
    "this processor has no VNNI, and its kernels add two products in 16 bits",
    "quantize with weight_bits=7",
    lacking="VNNI",
)


@dataclass(frozen=True)
class Limits:
    """What the kernel that runs a piece asks of its numbers.

    Attributes:
        owner: the backend.
        dtypes: the dtype config that was chosen, or None if the rule declares none.
        rescale: the ratios of scales that it can express, or None for all.
        strict: whether a violation is an error.
        pairs: how large the sum of two products may get, or None for any.
    """

    owner: str
    dtypes: DTypeConfig | None
    rescale: Rescale | None
    strict: bool
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Violation:
    """A constraint that does not hold.

    Attributes:
        node: the operator's name.
        module_path: where it was traced.
        owner: the backend that declares the constraint.
        port: "input", "weight", "bias" or "output".
        constraint: its name.
        value: what was found, in words.
        limit: what is allowed, in words.
        remedy: what to do; the nearest legal dtype config where there is one.
    """

    node: str
    module_path: str
    owner: str
    port: str
    constraint: str
    value: str
    limit: str
    remedy: str

    def __str__(self) -> str:
        where = f"'{self.node}'" + (f" (module '{self.module_path}')" if self.module_path else "")
        return (
            f"The {self.port} of {where} breaks {self.constraint} of backend '{self.owner}': found {self.value}, "
            f"the limit is {self.limit}; {self.remedy}"
        )


@dataclass(frozen=True)
class Selection:
    """Which dtype config of a rule a piece runs under.

    Attributes:
        chosen: the first that fits, or None.
        passed_over: for each one before it, its name and why it did not fit.
        violation: if none fits, what keeps the piece from the nearest.
        reason: if none is of the mode that was asked for, that in words.
    """

    chosen: DTypeConfig | None = None
    passed_over: tuple[str, ...] = ()
    violation: Violation | None = None
    reason: str = ""


def select_dtypes(declared: Sequence[DTypeConfig], node: fx.Node, asked: Sequence[PortSpec], owner: str) -> Selection:
    """Selects the first dtype config that the specs of a piece fit (phase 1).

    Args:
        declared: the dtype configs of a rule, in the order of preference.
        node: the operator that the piece is about.
        asked: (port, spec) pairs; None is float.
        owner: the backend's name.
    """
    inputs = [spec for port, spec in asked if port == "input" and spec is not None]
    mode = mode_of(bool(inputs), any(getattr(spec, "is_dynamic", False) for spec in inputs))
    alike = [dtypes for dtypes in declared if dtypes.mode == mode]
    if not alike:
        return Selection(reason=f"it has no {mode} kernel, only {', '.join(map(str, declared))}")
    refused = [(dtypes, dtypes.refuses(asked)) for dtypes in alike]
    chosen = next((dtypes for dtypes, refusals in refused if not refusals), None)
    if chosen is not None:
        before = refused[: alike.index(chosen)]
        return Selection(chosen, tuple(f"'{d.name}': {_words(*refusals[0])}" for d, refusals in before))
    nearest, refusals = min(refused, key=lambda pair: len(pair[1]))
    port, refusal = refusals[0]
    remedy = f"the nearest legal dtype config is {nearest}."
    return Selection(violation=violation(node, owner, port, refusal, remedy))


def _words(port: str, refusal: Refusal) -> str:
    return f"{port} {refusal.constraint} is {_plain(refusal.limit)}, found {_plain(refusal.value)}"


def violation(node: fx.Node, owner: str, port: str, refusal: Refusal, remedy: str) -> Violation:
    """Returns a refusal at a port of a node in words that a user can act on."""
    value, limit = _plain(refusal.value), _plain(refusal.limit)
    return Violation(node.name, module_path(node), owner, port, refusal.constraint, value, limit, remedy)


def _plain(found: Any) -> str:
    if isinstance(found, tuple):
        return " or ".join(map(_plain, found))
    return f"{found:.6g}" if isinstance(found, float) else str(found).removeprefix("torch.")


def asked_ports(
    annotations: Mapping[fx.Node, QuantizationAnnotation], is_weight: Callable[[fx.Node], bool], resolve: Resolve
) -> list[PortSpec]:
    """Returns (port, spec) of every point that the annotations of one piece quantize.

    An input or output that none of them quantizes is there with None, for float.

    Args:
        annotations: what a rule decided about the nodes of its piece.
        is_weight: tells constants from activations.
        resolve: gives what stands for a spec that may refer to another point.
    """
    asked: list[PortSpec] = []
    for annotation in annotations.values():
        specs = {source: spec for source, spec in (annotation.input_qspec_map or {}).items() if spec is not None}
        asked += [(_port(source, spec, is_weight), resolve(spec)) for source, spec in specs.items()]
        if annotation.output_qspec is not None:
            asked.append(("output", resolve(annotation.output_qspec)))
    present = {port for port, _ in asked}
    return asked + [(port, None) for port in ("input", "output") if port not in present]


def _port(source: fx.Node, spec: QuantizationSpecBase, is_weight: Callable[[fx.Node], bool]) -> str:
    if isinstance(spec, DerivedQuantizationSpec):
        return "bias"
    return "weight" if is_weight(source) else "input"


def pairs_violation(node: fx.Node, owner: str, limit: Pairs, asked: Sequence[PortSpec]) -> Violation | None:
    """Returns how far the products of the integers that specs allow go beyond a limit of their sums, or None."""
    highest = {"input": 0, "weight": 0}
    for port, spec in asked:
        if isinstance(spec, QuantizationSpec | FixedQParamsQuantizationSpec) and not spec.dtype.is_floating_point:
            least, greatest = stored_range(spec)
            highest[port] = highest_from_zero(least, greatest) if port == "input" else max(-least, greatest)
    pair = 2 * highest["input"] * highest["weight"]
    if not limit.breaks(pair):
        return None
    refusal = Refusal("the sum of two products", f"up to {pair}", limit.most)
    return violation(node, owner, "weight", refusal, f"{limit.because}; {limit.remedy}.")


def highest_from_zero(least: int, greatest: int) -> int:
    """Returns the highest integer of a range whose least is shifted to 0, as int8 becomes uint8 before kernels."""
    return greatest - min(least, 0)


def shared_violation(node: fx.Node, owner: str, dtypes: DTypeConfig, resolved: Sequence[PortSpec]) -> Violation | None:
    """Returns the first constraint that specs break which a piece shares with others (phase 2), or None."""
    refused = next(iter(dtypes.refuses(resolved)), None)
    remedy = "it shares its numbers with another operator: set one of the two to float."
    return violation(node, owner, *refused, remedy) if refused else None
