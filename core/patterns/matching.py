"""Finding patterns in a graph: indexed by root operator, one walk, each node claimed once.

Before: an exported graph and patterns in the order in which they were declared. After: the matches that
may be carried out, and for every other root the nearest miss. The time is linear in the nodes of the
graph: a pattern is tried only at nodes whose operator can be its root.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeAlias, TypeVar

from torch import fx

from quantplug.core.errors import PatternError
from quantplug.core.graph.facts import compute_nodes, describe
from quantplug.core.graph.operators import Target
from quantplug.core.patterns.language import Match, Miss, Pattern

Owner = TypeVar("Owner")


@dataclass(frozen=True, eq=False)
class Found(Generic[Owner]):
    """A match together with who declared its pattern and under which label; each is one of its own."""

    match: Match
    owner: Owner
    label: str


# Fewer operator nodes, later declared, later in the graph; then the match itself.
_Candidate: TypeAlias = tuple[int, int, int, Found[Owner]]


@dataclass(frozen=True)
class NearMiss:
    """The declared pattern that came nearest at a node, and its first failing predicate.

    Attributes:
        label: the label of the pattern, or "" where no pattern ends in this operator.
        reason: what failed, in words.
        matched: number of operator nodes that had matched.
    """

    label: str
    reason: str
    matched: int = 0


@dataclass(frozen=True)
class Findings(Generic[Owner]):
    """What a walk over a graph found.

    Attributes:
        found: accepted matches in the order of their roots; no node is part of two.
        misses: for each compute node that is in no accepted match, the nearest miss.
        also: the nearest misses at nodes of accepted matches, for callers that refuse a match later.
    """

    found: tuple[Found[Owner], ...]
    misses: dict[fx.Node, NearMiss]
    also: dict[fx.Node, NearMiss]


class PatternIndex(Generic[Owner]):
    """Patterns by the operator that can be their root, kept in the order of their declaration.

    Raises:
        PatternError: a pattern has no operator as its root.
    """

    def __init__(
        self, declared: Iterable[tuple[Owner, str, Pattern]], without: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Sorts patterns.

        Args:
            declared: owner, label and pattern.
            without: why no pattern ends in an operator, by its name in ATen such as "bmm".
        """
        self._without = without
        self._by_root: dict[Target, list[tuple[int, Owner, str, Pattern]]] = {}
        self._open: list[tuple[int, Owner, str, Pattern]] = []
        self._inside: dict[Target, list[str]] = {}
        for order, (owner, label, pattern) in enumerate(declared):
            if pattern.is_open:
                self._open.append((order, owner, label, pattern))
            elif not pattern.targets:
                raise PatternError(
                    f"Pattern '{label}' ({pattern.text}) ends in no operator, so it would never be tried; "
                    "make an operator its root."
                )
            for target in pattern.targets:
                self._by_root.setdefault(target, []).append((order, owner, label, pattern))
            for target in pattern.mentions() - pattern.targets:
                self._inside.setdefault(target, []).append(label)

    def find(self, graph: fx.Graph, accept: Callable[[Found[Owner]], str | None]) -> Findings[Owner]:
        """Finds what is declared, the largest piece first.

        Args:
            graph: the graph to walk; it is not changed.
            accept: the last word on a match: None, or the reason against it.
        """
        candidates: list[_Candidate[Owner]] = []
        misses: dict[fx.Node, NearMiss] = {}
        aside: dict[fx.Node, str] = {}
        operators = dict.fromkeys(compute_nodes(graph))
        # All nodes, not only operators: `getitem` can be a root, it picks one of several results.
        for position, node in enumerate(graph.nodes):
            open_ones = self._open if node in operators else ()
            for rank, owner, label, pattern in (*self._by_root.get(node.target, ()), *open_ones):
                outcome = pattern.match(node)
                found = Found(outcome, owner, label) if isinstance(outcome, Match) else None
                reason = accept(found) if found else None
                if found and reason is None:
                    candidates.append((-len(found.match.nodes), rank, position, found))
                elif not pattern.is_open:
                    miss = _near_miss(label, outcome, reason)
                    for concerned in found.match.nodes if found else (node,):
                        _keep_nearest(misses, concerned, miss)
                elif found:  # a rule about any operator comes nearest to none
                    aside[node] = f"; rule '{label}': {reason}"
        accepted, claimed = _claim(candidates, misses)
        left = (node for node in operators if node not in claimed)
        also = {node: miss for node, miss in misses.items() if node in claimed}
        return Findings(accepted, {n: misses.get(n) or self._never(n, aside.get(n, "")) for n in left}, also)

    def _never(self, node: fx.Node, aside: str) -> NearMiss:
        inside = self._inside.get(node.target, [])  # type: ignore[arg-type]
        if inside:
            whole = ", ".join(sorted(set(inside)))
            return NearMiss(inside[0], f"{node.target} is quantized only as part of {whole}{aside}")
        reason = self._without.get(str(getattr(node.target, "__name__", "")).partition(".")[0])
        return NearMiss("", f"no rule ends in {node.target}" + (f": {reason}" if reason else "") + aside)


def _claim(
    candidates: list[_Candidate[Owner]], misses: dict[fx.Node, NearMiss]
) -> tuple[tuple[Found[Owner], ...], set[fx.Node]]:
    """Takes candidates the largest first, each node once; returns them in graph order and what they claimed."""
    label_of: dict[fx.Node, str] = {}
    accepted: list[tuple[int, Found[Owner]]] = []
    for _, _, position, found in sorted(candidates, key=lambda candidate: candidate[:3]):
        nodes = found.match.nodes
        taken = next((node for node in nodes if node in label_of), None)
        if taken is None:
            label_of.update(dict.fromkeys(nodes, found.label))
            accepted.append((position, found))
        else:
            miss = NearMiss(found.label, f"{describe(taken)} is already part of '{label_of[taken]}'", len(nodes))
            for concerned in nodes:
                _keep_nearest(misses, concerned, miss)
    return tuple(found for _, found in sorted(accepted, key=lambda a: a[0])), set(label_of)


def _near_miss(label: str, outcome: Match | Miss, reason: str | None) -> NearMiss:
    if isinstance(outcome, Miss):
        return NearMiss(label, outcome.reason, outcome.matched)
    return NearMiss(label, reason or "", len(outcome.nodes))


def _keep_nearest(misses: dict[fx.Node, NearMiss], node: fx.Node, miss: NearMiss) -> None:
    if node not in misses or miss.matched > misses[node].matched:
        misses[node] = miss
