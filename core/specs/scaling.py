"""What an observer makes of the range that it finds: whether another one's numbers can stand in for its own.

Before: the spec of a point. After: a key. Observers of the field's libraries all find a range and spread it over
the integers; two of them give numbers of one kind, whichever finds it. A class of somebody's own may know more,
such as that scales are powers of two, so that it stands for itself alone.
"""

from functools import cache, partial
from typing import Any

from torchao.quantization.pt2e.quantizer import QuantizationSpec, QuantizationSpecBase

from quantplug.core.specs.dtypes import smallest_scale

_LIBRARIES = ("torch", "torchao", "quantplug")
# What is left open in a spec stands, where at all, among the arguments of its observer.
_IN_SPEC = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis")
_ELSEWHERE = ("reduce_range",)


def constructor_key(constructor: Any) -> Any:
    """Returns a comparable form of an observer constructor.

    `MinMaxObserver.with_args(eps=1)` gives an object that equals nothing else; two such with the same
    class and arguments are the same constructor to us.
    """
    inner = getattr(constructor, "p", constructor)
    if isinstance(inner, partial):
        arguments = tuple(sorted((k, constructor_key(v)) for k, v in inner.keywords.items()))
        return (constructor_key(inner.func), inner.args, repr(arguments))
    return inner


def scaling_key(spec: QuantizationSpecBase) -> Any:
    """Returns what of a spec's observer decides its numbers beyond the range: equal for those that may stand in."""
    if not isinstance(spec, QuantizationSpec) or spec.dtype.is_floating_point or spec.is_dynamic:
        return None
    constructor = spec.observer_or_fake_quant_ctr
    if not finds_range(spec):
        return constructor_key(constructor)
    given = _given(constructor)
    open_fields = [name for name in _IN_SPEC if getattr(spec, name) is None]
    numbers = tuple((name, given[name]) for name in (*open_fields, *_ELSEWHERE) if given.get(name))
    return (smallest_scale(spec), numbers)


def finds_range(spec: QuantizationSpec) -> bool:
    """Tells whether a spec's observer spreads the range that it finds over the integers, and asks for nothing else."""
    constructor = spec.observer_or_fake_quant_ctr
    inside = _given(constructor).get("observer")
    return all(_is_of_libraries(_class(found)) for found in (constructor, inside) if found is not None)


@cache
def _is_of_libraries(found: Any) -> bool:
    if not isinstance(found, type) or found.__module__.split(".")[0] not in _LIBRARIES:
        return False
    bases = {base.__name__ for base in found.__mro__}
    return "FixedQParamsFakeQuantize" not in bases and not bases.isdisjoint(
        ("UniformQuantizationObserverBase", "FakeQuantizeBase")
    )


def _given(constructor: Any) -> dict[str, Any]:
    """Returns the arguments of a constructor, with those of the observer inside of a fake quantize."""
    inner = getattr(constructor, "p", constructor)
    own = dict(inner.keywords) if isinstance(inner, partial) else {}
    return {**_given(own["observer"]), **own} if "observer" in own else own


def _class(constructor: Any) -> Any:
    inner = getattr(constructor, "p", constructor)
    return inner.func if isinstance(inner, partial) else inner
