"""What annotation decided about each compute node, as plain values.

The engine leaves one `Decision` on every compute node that it looked at; reports and plans are made from
them, on the annotated graph and on every graph that is derived from it.
"""

from dataclasses import dataclass, replace

from torch import fx

from quantplug.core.graph.meta import DECISION


@dataclass(frozen=True)
class Decision:
    """Why a node is quantized, or why it stays float.

    Attributes:
        owner: the backend that decided.
        rule: label of the pattern that quantizes the node; "" if it stays float.
        root: name of the last node of the matched piece; the node's own name if it stays float.
        config: the scope that chose the config, in words.
        nearest: label of the pattern that came nearest, if the node stays float.
        reason: the first failing predicate of that pattern, if the node stays float.
        dtypes: the dtype config of the rule that the node runs under; "" if the rule declares none.
        passed_over: the preferred dtype configs that did not fit, each with the reason.
    """

    owner: str
    rule: str = ""
    root: str = ""
    config: str = ""
    nearest: str = ""
    reason: str = ""
    dtypes: str = ""
    passed_over: str = ""

    @property
    def quantized(self) -> bool:
        """Whether a rule took the node."""
        return bool(self.rule)

    @property
    def why(self) -> str:
        """Why the node stays float, in words: the reason and the rule that came nearest; "" if a rule took it."""
        return f"nearest rule '{self.nearest}': {self.reason}" if self.nearest else self.reason


def decision(node: fx.Node) -> Decision | None:
    """Returns what was decided about a node, or None if no engine of ours looked at it."""
    return DECISION.get(node)


def record(node: fx.Node, decided: Decision) -> None:
    """Leaves a decision on a node; a node that another backend quantized keeps that backend's decision."""
    before = decision(node)
    if before is None or not before.quantized:
        DECISION.put(node, replace(decided, root=decided.root or node.name))
