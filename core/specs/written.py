"""Quantization specs as plain JSON values, and back.

Before: a spec of torchao's, which holds nodes, classes and constructors. After: a dictionary of strings
and numbers that names them; points of the graph stand as text that the caller chooses. Classes and
functions are named "module:qualified name", so a spec can be read back only where the same names exist and are known.
Those of this package are named "quantplug:qualified name": where they stand in it is nobody's business.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from types import NoneType
from typing import Any, TypeAlias

import torch
from torchao.quantization.pt2e import (
    AffineQuantizedObserverBase,
    FakeQuantizeBase,
    Granularity,
    MappingType,
    ObserverBase,
    TorchAODType,
    ZeroPointDomain,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.core.errors import AnnotationError, first_line, shown
from quantplug.core.files.typed import typed
from quantplug.core.peers.torchao_names import AFFINE_OBSERVERS

SpecValue: TypeAlias = dict[str, Any]

_KINDS: dict[str, type[QuantizationSpecBase]] = {
    "own": QuantizationSpec,
    "fixed": FixedQParamsQuantizationSpec,
    "derived": DerivedQuantizationSpec,
}
_FIELDS = {
    "dtype": torch.dtype,
    "scale": float,
    "zero_point": int,
    "quant_min": int | None,
    "quant_max": int | None,
    "qscheme": torch.qscheme | None,
    "ch_axis": int | None,
    "is_dynamic": bool,
}
# What observers of the libraries take; those of somebody's own check their arguments themselves.
_ARGUMENTS = {
    **_FIELDS,
    "averaging_constant": float,
    "batch_axis": int | None,
    "bins": int,
    "compute_dtype": torch.dtype | None,
    "custom_op_name": str,
    "eps": float | None,
    "factory_kwargs": NoneType,
    "granularity": Granularity,
    "mapping_type": MappingType,
    "nonfinite": str,
    "observer": Any,
    "percentile": float,
    "power_of_two": bool,
    "preserve_zero": bool,
    "reduce_range": bool,
    "scale_dtype": torch.dtype | None,
    "stride": int,
    "target_dtype": torch.dtype | TorchAODType,
    "use_grad_scaling": bool,
    "zero_point_domain": ZeroPointDomain | None,
    "zero_point_dtype": torch.dtype | None,
}
_MOST_BINS = 2**20


def spec_value(spec: QuantizationSpecBase, name_point: Callable[[Any], str]) -> SpecValue:
    """Returns a spec as a JSON value.

    Args:
        spec: one of torchao's four kinds.
        name_point: gives the text of an edge or node that the spec refers to.

    Raises:
        AnnotationError: the spec holds a function or object that has no name to find it by.
    """
    if isinstance(spec, SharedQuantizationSpec):
        return {"kind": "shared", "with": name_point(spec.edge_or_node)}
    kind = next((name for name, known in _KINDS.items() if type(spec) is known), None)
    if kind is None:
        raise AnnotationError(
            f"A plan has no place for specs of type {type(spec).__name__}; use one of torchao's four."
        )
    value: SpecValue = {"kind": kind}
    value |= {name: plain_value(getattr(spec, name)) for name in _FIELDS if getattr(spec, name, None) is not None}
    if isinstance(spec, QuantizationSpec):
        value["observer"] = plain_value(spec.observer_or_fake_quant_ctr)
    if isinstance(spec, DerivedQuantizationSpec):
        value["from"] = [name_point(point) for point in spec.derived_from]
        value["function"] = plain_value(spec.derive_qparams_fn)
    return value


def spec_of(value: SpecValue, find_point: Callable[[str], Any]) -> QuantizationSpecBase:
    """Returns the spec that `spec_value` wrote.

    Args:
        value: the JSON value.
        find_point: gives the edge or node of a text.

    Raises:
        AnnotationError: a class or function that the value names does not exist here or is not known.
        KeyError, TypeError, ValueError: the value is none that `spec_value` writes.
    """
    kind = typed(value["kind"], str, "'kind'")
    if kind == "shared":
        return SharedQuantizationSpec(find_point(typed(value["with"], str, "'with'")))
    if kind not in _KINDS:
        raise ValueError(f"'kind' is '{shown(kind)}', the kinds are {', '.join(('shared', *_KINDS))}")
    names = {field.name for field in fields(_KINDS[kind])} & _FIELDS.keys() & value.keys()
    arguments = {name: typed(named_value(value[name]), _FIELDS[name], f"'{name}'") for name in names}
    if kind == "own":
        arguments["observer_or_fake_quant_ctr"] = _observer(value["observer"])
    if kind == "derived":
        arguments["derived_from"] = [find_point(point) for point in typed(value["from"], tuple[str, ...], "'from'")]
        arguments["derive_qparams_fn"] = known_function(typed(value["function"], dict[str, str], "'function'")["name"])
    return _KINDS[kind](**arguments)


def plain_value(found: Any) -> Any:
    """Returns numbers, types, functions, members of enums, tuples and dataclasses of such as a JSON value.

    Raises:
        AnnotationError: something in it has no name to find it by.
    """
    if found is None or isinstance(found, bool | int | float | str):
        return found
    if isinstance(found, torch.dtype | torch.qscheme):
        return {"torch": str(found).removeprefix("torch.")}
    if isinstance(found, tuple):
        return {"tuple": [plain_value(element) for element in found]}
    if is_dataclass(found) and not isinstance(found, type):
        values = {field.name: plain_value(getattr(found, field.name)) for field in fields(found)}
        return {"make": plain_value(type(found)), "with": values}
    if isinstance(found, Enum):
        return remembered(type(found).__module__, f"{type(found).__qualname__}.{found.name}", found)
    inner = getattr(found, "p", found)
    if isinstance(inner, partial):
        values = {name: plain_value(value) for name, value in sorted(inner.keywords.items())}
        return {"call": plain_value(inner.func), "with": values}
    module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", "<nothing>")
    if module is None or "<" in name:
        raise AnnotationError(f"A plan cannot name {found!r}; give it as a function or class of a module.")
    return remembered(module, name, inner)


def named_value(value: Any) -> Any:
    """Returns what `plain_value` wrote.

    Names are followed to observers, dataclasses and enums of the libraries and to what this process knows; see
    `register_for_plans`. Reading a plan imports and calls nothing else.

    Raises:
        AnnotationError: a class or function that the value names does not exist here or is not known, or the value
            is none that `plain_value` writes.
    """
    if not isinstance(value, dict):
        return value
    try:
        if "torch" in value:
            return _of_torch(value["torch"])
        if "tuple" in value:
            return tuple(map(named_value, value["tuple"]))
        if "make" in value:
            made = _found(value["make"], is_dataclass, "a dataclass")
            return typed({name: named_value(v) for name, v in value["with"].items()}, made, f"'{made.__name__}'")
        if "call" in value:
            return _observer(value)
        return _resolved(value["name"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AnnotationError(f"The plan holds a value that no plan has ({first_line(error)}); plan again.") from error


def _observer(value: Any) -> Any:
    """Returns the constructor of an observer, with its arguments checked."""
    if not isinstance(value, dict) or not {"call", "name"} & value.keys():
        raise ValueError(f"'observer' is {shown(repr(value))}, which names no observer")
    made = _found(value.get("call", value), _is_observer, "an observer")
    if "call" not in value:
        return made
    written = typed(value["with"], dict[str, Any], "'with'")
    given = {name: _observer(v) if name == "observer" else named_value(v) for name, v in written.items()}
    return made.with_args(**(_checked(given, made) if made.__module__ in _LIBRARIES else given))


def _checked(given: dict[str, Any], made: type) -> dict[str, Any]:
    unknown = next((name for name in given if name not in _ARGUMENTS), None)
    if unknown is not None:
        raise ValueError(f"the argument '{shown(unknown)}' is none that '{made.__name__}' takes")
    checked = {name: typed(v, _ARGUMENTS[name], f"'{name}' of '{made.__name__}'") for name, v in given.items()}
    if checked.get("bins", 0) > _MOST_BINS:
        raise ValueError(f"'bins' of '{made.__name__}' is {checked['bins']}, the most are {_MOST_BINS}")
    return checked


def _is_observer(found: type) -> bool:
    return issubclass(found, ObserverBase | FakeQuantizeBase | AffineQuantizedObserverBase)


_OWN = "quantplug"
_REGISTERED: dict[str, Any] = {}
# The modules whose observers, dataclasses and enums a plan may name; their functions it may not.
_LIBRARIES = frozenset(
    [
        "quantplug.core.specs.dtypes",
        "quantplug.core.observers.groups",
        "quantplug.core.observers.learned_step",
        "quantplug.core.specs.limits",
        "quantplug.core.observers.histogram",
        "quantplug.core.observers.minmax",
        "quantplug.core.observers.rowwise",
        "torchao.quantization.granularity",
        AFFINE_OBSERVERS,
        "torchao.quantization.pt2e.fake_quantize",
        "torchao.quantization.pt2e.learnable_fake_quantize",
        "torchao.quantization.pt2e.observer",
        "torchao.quantization.quant_primitives",
    ]
)


def register_for_plans(*found: Any) -> None:
    """Lets plans that are read name classes and functions: observers and rewrites of one's own.

    A plan from a file may name observers of torchao and quantplug, the rewrites that backends declare, built-in ones
    and those of installed packages, and what was registered here; what a plan made in this process names is known too.

    Args:
        found: classes and functions at the top of an imported module.

    Raises:
        AnnotationError: one of them has no name to find it by.
    """
    for each in found:
        plain_value(each)


def remembered(module: str, qualified: str, found: Any) -> dict[str, str]:
    """Returns the JSON value of a name, which plans may name from now on in this process."""
    package = module.partition(".")[0]
    name = f"{package if package == _OWN else module}:{qualified}"
    _REGISTERED[name] = found
    return {"name": name}


def _of_torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype | torch.qscheme):
        raise AnnotationError(f"The plan names torch's {name!r}, which is no dtype and no qscheme; plan again.")
    return found


def known_function(name: Any) -> Callable[..., Any]:
    """Returns a function that a plan names: a rewrite of a backend, or what derives qparams from those of others.

    Raises:
        AnnotationError: no backend and nobody in this process has made it known.
    """
    if name not in _REGISTERED:
        pkgutil.resolve_name("quantplug:backends")()  # declaring a backend makes its functions known
    found: Callable[..., Any] = _resolved(name)
    if not callable(found) or isinstance(found, type):
        raise AnnotationError(f"The plan names '{shown(name)}' as a function, which it is not; plan again.")
    return found


def _found(value: Any, accepts: Callable[[Any], Any], kind: str) -> Any:
    found = _resolved(value["name"])
    if not isinstance(found, type) or not accepts(found):
        raise AnnotationError(f"The plan names '{shown(value['name'])}', which is not {kind}; plan again.")
    return found


def _resolved(name: str) -> Any:
    if name in _REGISTERED:
        return _REGISTERED[name]
    module, _, path = name.partition(":")
    kind, _, member = path.partition(".")
    places = {place for place in _LIBRARIES if place == module or (module == _OWN and place.startswith(f"{_OWN}."))}
    offered = (getattr(import_module(place), kind, None) for place in sorted(places))
    # What a module has imported from elsewhere is not its own.
    found = next((each for each in offered if isinstance(each, type) and each.__module__ in _LIBRARIES), None)
    if found is not None:
        if not member:
            return found
        if issubclass(found, Enum) and member in found.__members__:
            return found[member]
    raise AnnotationError(
        f"The plan names '{shown(name)}', which is not known here and so is not imported; if it is yours, call "
        "quantplug.register_for_plans with it before."
    )
