"""Whether `dynamic_shapes` is nested as the inputs are that it is about.

torch.export wants one entry for each parameter of `forward`, in which `*xs` is one, and says of others only which
numbers of elements it compared.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.export import AdditionalInputs, ShapesCollection

from quantplug.core.errors import ConfigError, shown
from quantplug.core.peers.torch_names import pytree

_OTHER_WAYS = (ShapesCollection, AdditionalInputs)


def require_nested(model: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any], sizes: Any) -> None:
    """Refuses `dynamic_shapes` of another nesting than the inputs, or of dimensions that a tensor does not have.

    Raises:
        ConfigError: it is so.
    """
    if sizes is None or isinstance(sizes, _OTHER_WAYS):
        return
    if not isinstance(sizes, dict | tuple | list):
        raise ConfigError(f"dynamic_shapes takes a dict by the names of inputs or a tuple, found {shown(sizes)}.")
    try:
        named = inspect.signature(model.forward).bind(*inputs, **keywords).arguments
    except TypeError:  # other inputs than the model takes, which export says
        return
    given = named if isinstance(sizes, dict) else type(sizes)(named.values())
    structure = pytree.tree_structure(given, is_leaf=_is_leaf)
    try:
        entries = structure.flatten_up_to(sizes) if sizes else []
    except ValueError as error:
        raise ConfigError(
            f"dynamic_shapes is {shown(sizes)}, which is not nested as the inputs of {type(model).__name__} are; "
            f"pass {_form(named)} with None or the sizes of a tensor, such as {{0: Dim('batch')}}, for each '...'."
        ) from error
    for value, entry in zip(pytree.tree_leaves(given, is_leaf=_is_leaf), entries, strict=False):
        _require_dimensions(value, entry)


def _is_leaf(value: Any) -> bool:
    return type(value) not in (dict, tuple, list)


def _form(named: Mapping[str, Any]) -> str:
    """Returns the nesting of inputs as a dict of their names."""
    form = pytree.tree_map(lambda value: ... if isinstance(value, Tensor) else None, dict(named))
    return str(form).replace("Ellipsis", "...")


def _require_dimensions(value: Any, entry: Any) -> None:
    if not (isinstance(value, Tensor) and isinstance(entry, dict)):
        return
    strange = next((dim for dim in entry if dim not in range(-value.dim(), value.dim())), None)
    if strange is not None:
        raise ConfigError(
            f"dynamic_shapes opens dimension {shown(strange)} of an input of shape {tuple(value.shape)}; "
            f"its dimensions are 0 to {value.dim() - 1}."
        )
