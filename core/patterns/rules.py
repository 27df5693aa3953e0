"""How one piece of graph becomes another: rules, their application, and what each new node stands for.

Before: a graph and a family of rules in the pattern language. After: the same graph, changed in place,
where every node remembers which operators of the q/dq graph it carries out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantplug.core.errors import LoweringError, shown
from quantplug.core.graph.editing import erase_unused
from quantplug.core.graph.facts import describe
from quantplug.core.graph.meta import REASON, absorb
from quantplug.core.patterns.language import Match, Miss, Op
from quantplug.core.peers.torch_names import is_erased

Rewrite = Callable[[Match], fx.Node | str]


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes:
        pattern: the piece of graph, by its last node.
        rewrite: returns the node whose result takes the place of the piece's, or why there is none. That node is a new
            one, in front of which the rewrite inserted others as it liked, or one that was there and may have been
            changed, such as the root itself. Who returns a reason has changed nothing.
    """

    pattern: Op
    rewrite: Rewrite


def apply(graph: fx.Graph, rules: Iterable[Rule], *, backwards: bool = False) -> int:
    """Tries rules at every node once, the first that fits wins; returns how many were carried out.

    All readers of a piece read the node that its rule returned, and what nobody reads any more is gone. Which
    operators of the q/dq graph were among that is noted on what the rule inserted. What failed at a node that no rule
    changed stays in its metadata as the reason for the report.

    Raises:
        LoweringError: a rule returned what is no node of the graph, or a reason after it had changed the graph.
    """
    by_root: dict[Any, list[Rule]] = {}
    for rule in rules:
        for target in rule.pattern.targets:
            by_root.setdefault(target, []).append(rule)
    nodes = list(graph.nodes)
    known = set(nodes)
    order = reversed(nodes) if backwards else nodes
    return sum(_apply_at(node, by_root.get(node.target, ()), known) for node in order if not is_erased(node))


def _apply_at(node: fx.Node, rules: Sequence[Rule], known: set[fx.Node]) -> bool:
    furthest = Miss("", -1)
    for rule in rules:
        outcome = rule.pattern.match(node)
        if isinstance(outcome, Match):
            found = _carried_out(rule, outcome)
            if isinstance(found, fx.Node):
                _splice(outcome, found, known)
                return True
            outcome = Miss(found, len(outcome.nodes) + 1)  # the whole pattern was there: it came further than any miss
        furthest = max(furthest, outcome, key=lambda miss: miss.matched)
    if furthest.reason:
        REASON.put(node, furthest.reason)
    return False


def _carried_out(rule: Rule, match: Match) -> fx.Node | str:
    graph, where = match.root.graph, f"The rule for {rule.pattern.text} at node {describe(match.root)}"
    size = len(graph.nodes)
    found = rule.rewrite(match)
    if isinstance(found, str) and len(graph.nodes) != size:
        raise LoweringError(f"{where} inserted nodes and then refused ({found}); let it decide before it inserts.")
    is_here = isinstance(found, fx.Node) and found.graph is graph and not is_erased(found)
    if not isinstance(found, str) and not is_here:
        raise LoweringError(
            f"{where} returned {shown(found)}; return the node of this graph whose result takes the piece's place, "
            "or a str that says why there is none."
        )
    return found


def _splice(match: Match, new: fx.Node, known: set[fx.Node]) -> None:
    """Puts a node in the place of a piece; nodes of the piece that others still read stay, and stay themselves."""
    if new is not match.root:
        match.root.replace_all_uses_with(new, delete_user_cb=lambda user: user in known and user is not new)
    erase_unused(node for node in match.nodes if node is not new)
    inserted = _inserted(new, known)
    known.update(inserted)
    carriers = [new, *_computing(inserted - {new})]
    for gone in filter(is_erased, match.nodes):
        again = [node for node in carriers if node.target is gone.target]
        for carrier in again or carriers:
            absorb(carrier, gone)


def _inserted(new: fx.Node, known: set[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that a rule inserted: those behind the one that it returned, and perhaps that one."""
    found: set[fx.Node] = set()
    waiting = [new, *new.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in known and node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _computing(inserted: set[fx.Node]) -> list[fx.Node]:
    """Returns the nodes that compute at every call: no constants, and nothing that is made of constants alone."""
    found: list[fx.Node] = []
    for node in sorted(inserted):
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        if any(source in found or source not in inserted for source in sources):
            found.append(node)
    return found
