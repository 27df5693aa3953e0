"""How one piece of graph becomes another: rules, their application, and what each new node stands for.

Before: a graph and a family of rules in the pattern language. After: the same graph, changed in place,
where every node remembers which operators of the q/dq graph it carries out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantplug.core.graph.meta import REASON
from quantplug.core.patterns.language import Match, Miss, Op
from quantplug.core.peers.torch_names import is_erased

Rewrite = Callable[[Match], str | None]


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes:
        pattern: the piece of graph, by its last node.
        rewrite: carries the match out and returns None, or returns why it cannot be and changes nothing.
    """

    pattern: Op
    rewrite: Rewrite


def apply(graph: fx.Graph, rules: Iterable[Rule], *, backwards: bool = False) -> int:
    """Tries rules at every node once, the first that fits wins; returns how many were carried out.

    What failed at a node that no rule changed stays in its metadata as the reason for the report.
    """
    by_root: dict[Any, list[Rule]] = {}
    for rule in rules:
        for target in rule.pattern.targets:
            by_root.setdefault(target, []).append(rule)
    nodes = list(graph.nodes)
    return sum(_apply_at(node, by_root.get(node.target, ())) for node in (reversed(nodes) if backwards else nodes))


def _apply_at(node: fx.Node, rules: Sequence[Rule]) -> bool:
    furthest = Miss("", -1)
    for rule in rules:
        if is_erased(node):
            return False
        outcome = rule.pattern.match(node)
        if isinstance(outcome, Match):
            reason = rule.rewrite(outcome)
            if reason is None:
                return True
            outcome = Miss(reason, len(outcome.nodes) + 1)  # the whole pattern was there: it came further than any miss
        furthest = max(furthest, outcome, key=lambda miss: miss.matched)
    if furthest.reason:
        REASON.put(node, furthest.reason)
    return False
