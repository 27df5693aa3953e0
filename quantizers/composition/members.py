"""The quantizers of a composition, as they were added.

Before: quantizers of anybody's, with regions, precedences and names where the user gave some. After: the same by
precedence, under names of which each occurs once, in an order that does not depend on the order of adding where
precedence is declared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.core.errors import ConfigError
from quantplug.quantizers.composition.region import Region
from quantplug.quantizers.framework.quantizer import BackendQuantizer


@dataclass(frozen=True, eq=False)
class Member:
    """A quantizer of a composition.

    Attributes:
        quantizer: the quantizer.
        region: what it may annotate.
        precedence: the greater one wins where regions overlap.
        name: how errors, decisions and reports call it.
    """

    quantizer: Quantizer
    region: Region
    precedence: int
    name: str

    def leaves_float(self, node: fx.Node) -> str | None:
        """Returns which scope leaves a node float, in words; None if it has a config or the quantizer does not say."""
        return self.quantizer.leaves_float(node) if isinstance(self.quantizer, BackendQuantizer) else None


class Members:
    """What was added to one composition; it is checked one by one as it comes."""

    def __init__(self) -> None:
        self._added: list[Member] = []
        self._declared: bool | None = None

    def add(self, quantizer: Any, region: Any, precedence: int | None, name: str | None) -> None:
        """Adds a quantizer.

        Args:
            quantizer: anybody's, except a composition.
            region: what it may annotate; None for the whole graph.
            precedence: the greater one wins; None where the order of adding decides.
            name: how it is called; None for the name of its backend or class.

        Raises:
            ConfigError: it is no quantizer, or precedence is declared for some quantizers only.
        """
        _check(quantizer, region)
        if self._declared not in (None, precedence is not None):
            raise ConfigError("A composition declares the precedence of all of its quantizers or of none, found both.")
        self._declared = precedence is not None
        called = quantizer.backend.name if isinstance(quantizer, BackendQuantizer) else type(quantizer).__name__
        rank = -len(self._added) if precedence is None else precedence
        self._added.append(Member(quantizer, region or Region(), rank, name or called))

    def __iter__(self) -> Iterator[Member]:
        return iter(self._added)

    def ranked(self) -> tuple[Member, ...]:
        """Returns the members, the greatest precedence first, under names of which each occurs once.

        Raises:
            ConfigError: there are none, or some cannot be told apart.
        """
        if not self._added:
            raise ConfigError("The composition has no quantizers; add one with add(quantizer, region).")
        ordered = sorted(self._added, key=lambda m: (m.name, -m.precedence, m.region.text))
        named = [_told_apart(tuple(group)) for _, group in groupby(ordered, key=lambda m: m.name)]
        return tuple(sorted((m for group in named for m in group), key=lambda m: (-m.precedence, m.name)))


def _check(quantizer: Any, region: Any) -> None:
    if not isinstance(quantizer, Quantizer):
        found = quantizer.__name__ if isinstance(quantizer, type) else type(quantizer).__name__
        raise ConfigError(f"A composition takes instances of torchao's Quantizer, found {found}.")
    if not isinstance(region, Region | None):
        raise ConfigError(f"region takes a Region, found {region!r}; pass Region(module={region!r}).")


def _told_apart(same_name: tuple[Member, ...]) -> tuple[Member, ...]:
    """Numbers quantizers of one name by what does not depend on the order of adding."""
    if len(same_name) == 1:
        return same_name
    if len({(member.precedence, member.region.text) for member in same_name}) < len(same_name):
        raise ConfigError(
            f"Several quantizers of the composition are called '{same_name[0].name}' and have the same precedence and "
            "region; pass a name for each, or declare different precedences."
        )
    return tuple(replace(member, name=f"{member.name} {i}") for i, member in enumerate(same_name, 1))
