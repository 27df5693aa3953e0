"""Operators of ATen by name: a family, its overloads and its forms that write nothing."""

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from quantplug.core.errors import PatternError
from quantplug.core.peers.torch_names import OpOverload, OpOverloadPacket, registered_operators, schema_of

Target: TypeAlias = Callable[..., Any]

# Operators that put numbers elsewhere and change none, by their names in ATen.
MOVES = (
    *("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "contiguous", "clone"),
    *("permute", "transpose.int", "t", "movedim.int", "squeeze", "unsqueeze"),
    *("flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "select.int", "slice.Tensor", "narrow"),
)
# Those that also write a number several times.
REPEATS = ("expand", "repeat", "repeat_interleave.self_int")
# Operators that compute nothing at inference, by their names in ATen.
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
ALIASES = ("alias", "detach", "lift_fresh_copy")
IDENTITIES = (*DROPOUTS, *ALIASES)


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
