"""Operators of ATen by name: a family, its overloads and its forms that write nothing."""

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from quantplug.core.errors import PatternError

Target: TypeAlias = Callable[..., Any]


def operator_overloads(target: str | torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> frozenset[Target]:
    """Returns the overloads that a name, packet or overload stands for in a pattern.

    Raises:
        PatternError: there is no such operator; the sentence lists the nearest names.
    """
    if isinstance(target, torch._ops.OpOverload):
        return frozenset({target})
    if isinstance(target, torch._ops.OpOverloadPacket):
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


def _packet(library: str, name: str) -> torch._ops.OpOverloadPacket:
    namespace = getattr(torch.ops, library)
    packet = getattr(namespace, name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return packet
    # The one list of all registered operators is behind this name; torch.ops fills itself lazily.
    known = sorted({schema.name for schema in torch._C._jit_get_all_schemas()})
    nearest = difflib.get_close_matches(f"{library}::{name}", known, 3)
    raise PatternError(f"There is no operator '{name}' in '{library}'; the nearest names are {nearest}.")


def _overload_names(packet: torch._ops.OpOverloadPacket) -> list[str]:
    return list(packet.overloads())  # type: ignore[no-untyped-call]


def _functional(packet: torch._ops.OpOverloadPacket) -> Iterator[torch._ops.OpOverload]:
    for overload in _overload_names(packet):
        found: torch._ops.OpOverload = getattr(packet, overload)
        if not any(argument.is_out for argument in found._schema.arguments):
            yield found


MOVES = (
    *("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "contiguous", "clone"),
    *("permute", "transpose.int", "t", "movedim.int", "squeeze", "unsqueeze"),
    *("flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "select.int", "slice.Tensor", "narrow"),
)


REPEATS = ("expand", "repeat", "repeat_interleave.self_int")

# Operators that compute nothing at inference, by their names in ATen.
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
ALIASES = ("alias", "detach", "lift_fresh_copy")
IDENTITIES = (*DROPOUTS, *ALIASES)
