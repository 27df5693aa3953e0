"""Texts of input and output structures, checked before torch reads them.

`torch.utils._pytree.treespec_loads` imports the modules that a text names for enums and default factories, so a text
of unknown origin has to be read by somebody who imports nothing first.
"""

import json
from typing import Any

from quantplug.core.errors import ArtefactError
from quantplug.core.peers.torch_names import pytree

_FACTORIES = frozenset(["bool", "dict", "float", "int", "list", "set", "str", "tuple"])


def is_plain_structure(text: str) -> bool:
    """Tells whether a structure consists of plain containers, and of types that the running program registered."""
    try:
        protocol, tree = json.loads(text)
        return isinstance(protocol, int) and _is_plain(tree)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def structure_of(text: str) -> pytree.TreeSpec:
    """Returns the structure that a text of `treespec_dumps` describes.

    Raises:
        ValueError: it is no such text, or it would import a module.
    """
    if not is_plain_structure(text):
        raise ValueError("a structure of inputs or outputs is not of plain containers")
    return pytree.treespec_loads(text)


def structure_text(structure: pytree.TreeSpec) -> str:
    """Returns a structure as text for a file.

    Raises:
        ArtefactError: a container is of a type that was not registered under a name for files.
    """
    if (kind := _unnamed(structure)) is not None:
        raise ArtefactError(
            f"The model takes or returns a '{kind}', which a file cannot name; let it use tuples and dicts, or a "
            "dataclass registered by torch.export.register_dataclass with a serialized_type_name."
        )
    return pytree.treespec_dumps(structure)


def without_unnamed(structure: pytree.TreeSpec) -> pytree.TreeSpec:
    """Returns a structure in which containers that a file cannot name, such as named tuples, are tuples."""
    if structure.is_leaf():
        return structure
    children = [without_unnamed(child) for child in structure.children()]
    if _has_name(structure):
        return pytree.TreeSpec(structure.type, structure.context, children)
    return pytree.TreeSpec(tuple, None, children)


def _unnamed(structure: pytree.TreeSpec) -> str | None:
    if not structure.is_leaf() and not _has_name(structure):
        kind = structure.context if isinstance(structure.context, type) else structure.type
        return str(kind.__name__)
    return next(filter(None, map(_unnamed, structure.children())), None)


def _has_name(structure: pytree.TreeSpec) -> bool:
    try:
        pytree.treespec_dumps(pytree.TreeSpec(structure.type, structure.context, []))
    except (NotImplementedError, TypeError):
        return False
    return True


def _is_plain(tree: dict[str, Any]) -> bool:
    context = tree["context"]
    if tree["type"] == "collections.defaultdict":
        if context["default_factory_module"] != "builtins" or context["default_factory_name"] not in _FACTORIES:
            return False
    elif isinstance(context, str) and '"__enum__"' in json.dumps(json.loads(context)):
        return False
    return all(map(_is_plain, tree["children_spec"]))
