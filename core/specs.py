"""Quantization specs as plain JSON values, and back.

Before: a spec of torchao's, which holds nodes, classes and constructors. After: a dictionary of strings
and numbers that names them; points of the graph stand as text that the caller chooses. Classes and
functions are named "module:qualified name", so a spec can be read back only where the same names exist and are known.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from quantplug.core.errors import AnnotationError, first_line, shown

SpecValue: TypeAlias = dict[str, Any]

_KINDS: dict[str, type[QuantizationSpecBase]] = {
    "own": QuantizationSpec,
    "fixed": FixedQParamsQuantizationSpec,
    "derived": DerivedQuantizationSpec,
}
_FIELDS = ("dtype", "scale", "zero_point", "quant_min", "quant_max", "qscheme", "ch_axis", "is_dynamic")


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
    if value["kind"] == "shared":
        return SharedQuantizationSpec(find_point(value["with"]))
    arguments = {name: named_value(found) for name, found in value.items() if name in _FIELDS}
    if value["kind"] == "own":
        arguments["observer_or_fake_quant_ctr"] = named_value(value["observer"])
    if value["kind"] == "derived":
        arguments["derived_from"] = [find_point(point) for point in value["from"]]
        arguments["derive_qparams_fn"] = named_value(value["function"])
    return _KINDS[value["kind"]](**arguments)


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
        return remembered(f"{type(found).__module__}:{type(found).__qualname__}.{found.name}", found)
    inner = getattr(found, "p", found)
    if isinstance(inner, partial):
        values = {name: plain_value(value) for name, value in sorted(inner.keywords.items())}
        return {"call": plain_value(inner.func), "with": values}
    module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", "<nothing>")
    if module is None or "<" in name:
        raise AnnotationError(f"A plan cannot name {found!r}; give it as a function or class of a module.")
    return remembered(f"{module}:{name}", inner)


def named_value(value: Any) -> Any:
    """Returns what `plain_value` wrote.

    A name is followed only to what this process has registered or named itself, and to classes, functions and members
    of enums that quantplug, torchao and ExecuTorch define: reading a plan imports and calls nothing else.

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
            return made(**{name: named_value(v) for name, v in value["with"].items()})
        if "call" in value:
            made = _found(value["call"], lambda found: hasattr(found, "with_args"), "an observer")
            return made.with_args(**{name: named_value(v) for name, v in value["with"].items()})
        return _resolved(value["name"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AnnotationError(f"The plan holds a value that no plan has ({first_line(error)}); plan again.") from error


_REGISTERED: dict[str, Any] = {}
_TRUSTED = ("quantplug", "torchao", "executorch")


def register_for_plans(*found: Any) -> None:
    """Lets plans that are read name classes and functions: observers and rewrites of one's own.

    What a plan made in this process names is known already; a plan from a file may name others than those of
    quantplug, torchao and ExecuTorch only if they are registered before.

    Raises:
        AnnotationError: one of them has no name to find it by.
    """
    for each in found:
        plain_value(each)


def remembered(name: str, found: Any) -> dict[str, str]:
    """Returns the JSON value of a name, which plans may name from now on in this process."""
    _REGISTERED[name] = found
    return {"name": name}


def _of_torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype | torch.qscheme):
        raise AnnotationError(f"The plan names torch's {name!r}, which is no dtype and no qscheme; plan again.")
    return found


def _found(value: Any, accepts: Callable[[Any], Any], kind: str) -> Any:
    found = _resolved(value["name"])
    if not isinstance(found, type) or not accepts(found):
        raise AnnotationError(f"The plan calls '{value['name']}', which is not {kind}; plan again.")
    return found


def _resolved(name: str) -> Any:
    if name in _REGISTERED:
        return _REGISTERED[name]
    module = name.partition(":")[0]
    if module.partition(".")[0] in _TRUSTED:
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise AnnotationError(f"The plan names '{name}', which is not here ({error}); install it.") from error
        # What a module has imported from elsewhere is not its own.
        owner = type(found) if isinstance(found, Enum) else found
        if isinstance(owner, type | FunctionType) and owner.__module__.partition(".")[0] in _TRUSTED:
            return found
    raise AnnotationError(
        f"The plan names '{shown(name)}', which is not known here and so is not imported; if it is yours, call "
        "quantplug.core.specs.register_for_plans with it before."
    )
