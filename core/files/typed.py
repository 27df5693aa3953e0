"""JSON values as what a reader expects of them: the first thing that is done to a file of unknown origin.

Before: what `json.loads` gave. After: the same value, with dataclasses in the place of dictionaries and tuples in the
place of lists, or one error that says where which value is not of its type.
"""

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantplug.core.errors import shown

_INTEGERS = range(-(2**63), 2**63)


def typed(value: Any, hint: Any, where: str) -> Any:
    """Returns a value as a type says it.

    Args:
        value: a JSON value; dataclasses that stand in it already are taken as they are.
        hint: a class, a dataclass, Any, a union, tuple[X, ...], list[X] or dict[str, X]. A float is finite and may be
            written as an integer, an integer has 64 bits, a bool is no integer.
        where: how errors name the value.

    Raises:
        ValueError: the value is not of that type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(value, arguments, where)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return tuple(typed(each, arguments[0], f"{where}[{place}]") for place, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: typed(each, arguments[1], f"{where}['{shown(name)}']") for name, each in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        return _made(value, hint, where)
    if origin is None and _is_a(value, hint):
        return value
    raise ValueError(f"{where} is {shown(repr(value))}, which is no {_text(hint)}")


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value in _INTEGERS
    return isinstance(value, kind)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond every float
        return False


def _one_of(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and NoneType in options:
        return None
    known = [option for option in options if option is not NoneType]
    return typed(value, next((option for option in known[:-1] if _fits(value, option)), known[-1]), where)


def _fits(value: Any, option: Any) -> bool:
    try:
        typed(value, option, "")
    except ValueError:
        return False
    return True


def _made(value: dict[str, Any], kind: Any, where: str) -> Any:
    hints = _hints(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    wrong = next((f"no '{name}'" for name in sorted(needed - value.keys())), None)
    wrong = wrong or next((f"a '{shown(name)}'" for name in value if name not in hints), None)
    if wrong is not None:
        raise ValueError(f"{where} has {wrong}, its keys are {', '.join(hints)}")
    return kind(**{name: typed(each, hints[name], f"'{name}' of {where}") for name, each in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
