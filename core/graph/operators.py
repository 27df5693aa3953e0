"""Operators of ATen by name: what they do to the numbers that they read, and the overloads of a name."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from quantplug.core.errors import PatternError
from quantplug.core.peers.torch_names import OpOverload, OpOverloadPacket, registered_operators, schema_of

Target: TypeAlias = Callable[..., Any]

# The table of traits: what operators do to the numbers of the tensor that they read, by their names in ATen. A name
# stands for its overloads and its form in place; where one of those does something else, an overload is named.
# Numbers put elsewhere, none changed: in their order, under the sizes given or others, ...
VIEWS = ("view.default", "reshape", "_unsafe_view")
RESHAPES = (*VIEWS, "flatten", "unflatten", "squeeze", "unsqueeze")
COPIES = ("contiguous", "clone")
# ... by their dimensions, of which a matrix has two to be exchanged, ...
TRANSPOSES = ("permute", "transpose", "t", "mT", "numpy_T")
PERMUTATIONS = (*TRANSPOSES, "movedim", "moveaxis", "swapaxes", "swapdims")
# ... some of them, ...
SLICES = ("slice.Tensor", "select", "narrow")
# ... in another order.
SHUFFLES = ("flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
MOVES = (*RESHAPES, *COPIES, *PERMUTATIONS, *SLICES, *SHUFFLES)
# Numbers put elsewhere, each several times.
REPEATS = ("expand", "repeat", "repeat_interleave.self_int")
# Nothing computed at inference: dropouts call their tensor `input`.
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
ALIASES = ("alias", "detach", "lift_fresh_copy")
IDENTITIES = (*DROPOUTS, *ALIASES)
# Numbers put beside others: given ones, or those of several tensors.
PADS = ("constant_pad_nd", "pad")
JOINS = ("cat", "stack")
# Numbers compared with each other, or with a lower and an upper bound: a number, or the operand that holds it.
MAXIMA = ("max_pool1d", "max_pool2d", "max_pool3d")
CLAMPS: Mapping[str, tuple[float | str | None, float | str | None]] = {
    "relu": (0.0, None),
    "relu6": (0.0, 6.0),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
    "clamp_min": ("min", None),
    "clamp_max": (None, "max"),
}
# What all of these have in common: no result has a number that no operand, padding or bound has, so that input and
# output share one scale.
KEEPERS = (*MOVES, *REPEATS, *IDENTITIES, *PADS, *JOINS, *MAXIMA, *CLAMPS)
# Composite operators whose schemas do not say that they may return a view of their tensor.
MAY_SHARE = frozenset(
    f"aten::{name}"
    for name in (
        *("reshape", "flatten", "contiguous", "unflatten", "dropout", "feature_dropout"),
        *("to", "type_as", "chunk"),
    )
)


def schema_names(names: Iterable[str]) -> frozenset[str]:
    """Returns the names that operators of the table have in schemas, "aten::name"."""
    return frozenset(f"aten::{name.partition('.')[0]}" for name in names)


def overloads_of(names: Iterable[str]) -> frozenset[Target]:
    """Returns the overloads that names of the table stand for."""
    return frozenset().union(*map(operator_overloads, names))


def operator_overloads(target: str | OpOverload | OpOverloadPacket) -> frozenset[Target]:
    """Returns the overloads that a name, packet or overload stands for in a pattern.

    Raises:
        PatternError: there is no such operator; the sentence lists the nearest names.
    """
    if isinstance(target, OpOverload):
        return frozenset({target})
    if isinstance(target, OpOverloadPacket):
        return frozenset(_functional(target))
    library, _, name = target.rpartition("::")
    name, _, overload = name.partition(".")
    packet = _packet(library or "aten", name)
    if overload:
        offered = _overload_names(packet)
        if overload not in offered:
            raise PatternError(f"Operator '{name}' has no overload '{overload}'; it has {offered}.")
        return frozenset({getattr(packet, overload)})
    namespace = getattr(torch.ops, library or "aten")
    inplace = getattr(namespace, f"{name}_", None)
    return frozenset(_functional(packet)).union(_functional(inplace) if inplace is not None else ())


def _packet(library: str, name: str) -> OpOverloadPacket:
    namespace = getattr(torch.ops, library)
    packet = getattr(namespace, name, None)
    if isinstance(packet, OpOverloadPacket):
        return packet
    known = sorted(set(registered_operators()))
    nearest = difflib.get_close_matches(f"{library}::{name}", known, 3)
    raise PatternError(f"There is no operator '{name}' in '{library}'; the nearest names are {nearest}.")


def _overload_names(packet: OpOverloadPacket) -> list[str]:
    return list(packet.overloads())  # type: ignore[no-untyped-call]


def _functional(packet: OpOverloadPacket) -> Iterator[OpOverload]:
    for overload in _overload_names(packet):
        found: OpOverload = getattr(packet, overload)
        if not any(argument.is_out for argument in schema_of(found).arguments):
            yield found
