"""Texts in a model's description, each checked against what a model needs under its key.

Before: a description of unknown origin, read from JSON. After: the same without metadata that nobody needs, or a
`RefusedError`: torch evaluates some of its texts, and imports what others name.
"""

import math
import operator
import re
from typing import Any

import torch

from quantplug.core.errors import shown
from quantplug.core.files.size_texts import PLAIN, SIZES_OF_TORCH, is_guard, is_size
from quantplug.core.files.structures import is_plain_structure
from quantplug.core.peers.torch_names import HigherOrderOperator, OpOverload

MODEL = "models/model.json"
_OPERATORS = frozenset(
    [
        "abs",
        "add",
        "and_",
        "eq",
        "floordiv",
        "ge",
        "getitem",
        "gt",
        "inv",
        "le",
        "lshift",
        "lt",
        "mod",
        "mul",
        "ne",
        "neg",
        "not_",
        "or_",
        "pos",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    ]
)
_HIGHER_ORDER = frozenset(
    [
        "associative_scan",
        "cond",
        "invoke_subgraph",
        "map",
        "map_impl",
        "scan",
        "while_loop",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    ]
)
_FILE_OPERATORS = frozenset({"aten.from_file", "aten.save", "aten.load"})
_KEPT_METADATA = frozenset({"nn_module_stack", "source_fn_stack", "torch_fn"})
_DOTTED = re.compile(r"\w+(\.\w+)*")


class RefusedError(Exception):
    """A record that asks for more than a model needs."""


def check_texts(value: Any, key: str) -> None:
    """Checks all text in a model's description by the key that it stands under.

    Args:
        value: a value of JSON; metadata that is not needed is deleted in place.
        key: where the value stands, "" at the top.

    Raises:
        RefusedError: a text asks for more than a model needs.
    """
    if isinstance(value, dict):
        if key == "metadata" and all(isinstance(text, str) for text in value.values()):  # else an input of that name
            for name in [name for name, text in value.items() if not _is_kept(name, text)]:
                del value[name]
            return
        for name, inner in value.items():
            _check_text(name, "")
            check_texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            check_texts(inner, key)
    elif isinstance(value, str):
        _check_text(value, key)


def _is_kept(name: str, text: str) -> bool:
    return name in _KEPT_METADATA and text.isprintable() and (name != "torch_fn" or text.count(";") == 1)


def _check_text(text: str, key: str) -> None:
    accepts = _ACCEPTS.get(key, _is_plain)
    if not accepts(text):
        raise RefusedError(f"record '{MODEL}' holds {f'as {key} ' if key else ''}the text {shown(text)!r}")


def _is_plain(text: str) -> bool:
    return PLAIN.fullmatch(text) is not None and "__import__" not in text


def _is_message(text: str) -> bool:
    """Tells whether a text may be an operator's argument (an assertion's words) or a path; nothing evaluates these."""
    return "__" not in text and text.isprintable()


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\w*", text) is not None


def _is_operator(text: str) -> bool:
    """Tells whether a target is an operator, and not any function that torch's modules lead to."""
    if not text:
        return True
    if _DOTTED.fullmatch(text) is None or "__" in text.replace("__and__", "").replace("__or__", ""):
        return False
    module, _, name = text.partition(".")
    if module == "_operator":
        return name in _OPERATORS
    if module == "math":
        return callable(getattr(math, name, None))
    if module != "torch" or not name.startswith("ops."):
        return name in SIZES_OF_TORCH
    namespace, _, rest = name.removeprefix("ops.").partition(".")
    if f"{namespace}.{rest.partition('.')[0]}" in _FILE_OPERATORS:
        return False
    try:
        found = operator.attrgetter(name)(torch)
    except (AttributeError, RuntimeError):
        return False
    return isinstance(found, OpOverload) or (isinstance(found, HigherOrderOperator) and rest in _HIGHER_ORDER)


def _is_tree(text: str) -> bool:
    return not text or is_plain_structure(text)


_ACCEPTS = {
    "as_string": _is_message,
    "parameter_name": _is_message,
    "buffer_name": _is_message,
    "fqn": _is_message,
    "name": _is_name,
    "forward_arg_names": _is_name,
    "target": _is_operator,
    "as_operator": _is_operator,
    "expr_str": is_size,
    "guards_code": is_guard,
    "in_spec": _is_tree,
    "out_spec": _is_tree,
}
