"""Observers and fake quantizes: made from specs, told apart, asked for what they know.

Before: a concrete quantization spec. After: an observer (PTQ) or fake quantize (QAT) module, and the
numbers that a q/dq pair needs from it once it has seen data.
"""

from collections.abc import Callable, Mapping, Set
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import (
    AffineQuantizedObserverBase,
    DerivedObserverOrFakeQuantize,
    FixedQParamsObserver,
    PartialWrapper,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
)

from quantplug.core.errors import AnnotationError
from quantplug.core.observers.sharing import Group, Point, Sharing, creation_order, describe_point
from quantplug.core.observers.training import fake_quantize
from quantplug.core.specs.stored_dtypes import STORAGE_DTYPES, dtype_range, stored_range


def create_observers(
    sharing: Sharing, is_qat: bool, constants: Set[fx.Node] = frozenset()
) -> dict[Point, nn.Module | None]:
    """Returns the observer of every annotated point, one instance for each sharing group.

    Args:
        sharing: the groups, each with its spec.
        is_qat: whether fake quantizes are to stand for the observers of the specs.
        constants: the nodes whose tensors depend on parameters alone; in training their ranges are of the moment.

    Raises:
        AnnotationError: an observer rejects the arguments of its spec or has no form for training, or derived
            specs form a cycle.
    """
    made: dict[int, nn.Module | None] = {}
    for index in creation_order(sharing):
        group = sharing.groups[index]
        found = _create(group.spec, group.members[0], sharing, made)
        if is_qat and found is not None:
            found = _in_training(found, group, constants)
        made[index] = found
    return {point: made[sharing.group_of[point]] for point in sharing.group_of}


def _in_training(observer: nn.Module, group: Group, constants: Set[fx.Node]) -> nn.Module:
    """Returns what trains in place of a group's observer; derived ones read those that they derive from."""
    if isinstance(group.spec, DerivedQuantizationSpec):
        return observer
    producers = (point[0] if isinstance(point, tuple) else point for point in group.members)
    try:
        return fake_quantize(observer, all(producer in constants for producer in producers))
    except (AssertionError, AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise AnnotationError(
            f"The {describe_point(group.members[0])} cannot be trained with {group.spec}: "
            f"{' '.join(str(error).split()) or type(error).__name__}; give it a spec of an observer of integers with "
            "one range for a tensor or a channel, or of a fake quantize."
        ) from error


def _create(
    spec: QuantizationSpecBase | None,
    point: Point,
    sharing: Sharing,
    made: Mapping[int, nn.Module | None],
) -> nn.Module | None:
    if spec is None:
        return None
    try:
        if isinstance(spec, DerivedQuantizationSpec):
            sources = [made[sharing.group_of[source]] for source in spec.derived_from]
            return _derived(spec, sources)
        if isinstance(spec, FixedQParamsQuantizationSpec):
            return _fixed(spec)
        return _observed(spec)
    except (AssertionError, AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise AnnotationError(
            f"No observer can be made for the {describe_point(point)} from {spec}: "
            f"{' '.join(str(error).split()) or type(error).__name__}; "
            "change the spec or its observer."
        ) from error


def _range(spec: Any) -> dict[str, int]:
    """Returns the quantized range of a fixed or derived spec as arguments of an observer."""
    return dict(zip(("quant_min", "quant_max"), stored_range(spec), strict=True))


def _derived(spec: DerivedQuantizationSpec, sources: list[nn.Module | None]) -> nn.Module:
    observer: nn.Module = DerivedObserverOrFakeQuantize(
        dtype=spec.dtype,
        obs_or_fqs=sources,
        derive_qparams_fn=spec.derive_qparams_fn,
        qscheme=spec.qscheme,
        ch_axis=spec.ch_axis,
        **_range(spec),
    )
    return observer


def _fixed(spec: FixedQParamsQuantizationSpec) -> nn.Module:
    observer: nn.Module = FixedQParamsObserver(
        dtype=spec.dtype,
        scale=spec.scale,
        zero_point=spec.zero_point,
        qscheme=spec.qscheme or torch.per_tensor_affine,
        **_range(spec),
    )
    return observer


def _observed(spec: QuantizationSpecBase) -> nn.Module:
    if not isinstance(spec, QuantizationSpec):
        raise TypeError(f"{type(spec).__name__} is no spec that this core knows")
    constructor = spec.observer_or_fake_quant_ctr
    observer: nn.Module = constructor.with_args(**_arguments(spec, constructor))()
    return observer


def _arguments(spec: QuantizationSpec, constructor: Any) -> dict[str, Any]:
    """Returns a spec's fields as arguments of its observer.

    A field that the spec leaves open does not override what the constructor was given already. Only
    per-channel observers take an axis.
    """
    given = _given_arguments(constructor)
    arguments = {
        "dtype": spec.dtype,
        "quant_min": spec.quant_min,
        "quant_max": spec.quant_max,
        "qscheme": spec.qscheme,
        "ch_axis": spec.ch_axis,
        "is_dynamic": spec.is_dynamic,
    }
    if spec.dtype.is_floating_point and spec.dtype in STORAGE_DTYPES and spec.quant_min is None:
        # torchao's default range for float8 is that of a 4-bit integer.
        arguments |= dict(zip(("quant_min", "quant_max"), dtype_range(spec.dtype), strict=True))
    if not _takes_axis(constructor):
        del arguments["ch_axis"]
    for name in ("quant_min", "quant_max", "qscheme", "ch_axis"):
        if arguments.get(name, 0) is None and (name in given or name in ("qscheme", "ch_axis")):
            del arguments[name]
    return arguments


def _takes_axis(constructor: Any) -> bool:
    """Tells whether an observer, or the one inside a fake quantize, can work per channel.

    torchao 0.18 asks for "PerChannel" in the outer name, and so loses the axis of every fake quantize: the
    weights of transposed convolutions (axis 1) are trained along axis 0.
    """
    inside = _given_arguments(constructor).get("observer")
    return any(_names_axis(_observer_class(found)) for found in (constructor, inside) if found is not None)


@cache
def _names_axis(observer_class: Any) -> bool:
    return "PerChannel" in observer_class.__name__ or "ch_axis" in signature(observer_class).parameters


def _given_arguments(constructor: Any) -> Mapping[str, Any]:
    inner = constructor.p if isinstance(constructor, PartialWrapper) else constructor
    return inner.keywords if isinstance(inner, partial) else {}


def _observer_class(constructor: Any) -> Any:
    inner = constructor.p if isinstance(constructor, PartialWrapper) else constructor
    return inner.func if isinstance(inner, partial) else inner


def unchanged(value: Tensor) -> Tensor:
    """Stands in for an observer of constants, which are observed once at convert, or of what another one sees."""
    return value


def defer(observer: nn.Module) -> None:
    """Makes an observer let its input pass in forward, so that a weight is not observed in every batch."""
    observer.forward = unchanged


def waits_for_constants(observer: nn.Module) -> bool:
    """Tells whether convert is to show an observer its constants, which it has not seen as they are by then."""
    is_deferred = observer.__dict__.get("forward") is unchanged
    return is_deferred or needs_data(observer) or bool(getattr(observer, "of_the_moment", False))


def observe_constant(observer: nn.Module, value: Tensor) -> None:
    """Lets an observer see a constant, also if its forward was deferred."""
    forward: Callable[..., Any] = type(observer).forward
    with torch.no_grad():
        forward(observer, value)


def is_derived(observer: nn.Module) -> bool:
    """Tells whether an observer computes its parameters from those of others, whatever passes through it."""
    return isinstance(observer, DerivedObserverOrFakeQuantize)


def needs_data(observer: nn.Module) -> bool:
    """Tells whether an observer's quantization parameters come from data that it has not seen yet."""
    statistics = getattr(observer, "activation_post_process", observer)
    if isinstance(statistics, (FixedQParamsObserver, DerivedObserverOrFakeQuantize)):
        return False
    if getattr(observer, "is_dynamic", False):
        return False
    known = getattr(observer, "has_data", None)
    if isinstance(known, bool):
        return not known
    if isinstance(statistics, AffineQuantizedObserverBase):
        return statistics.block_size is None
    least, greatest = getattr(statistics, "min_val", None), getattr(statistics, "max_val", None)
    if not isinstance(least, Tensor) or not isinstance(greatest, Tensor):
        return False
    # Per-tensor observers start at (inf, -inf), per-channel observers with empty tensors.
    return bool((least > greatest).all())
