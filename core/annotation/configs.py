"""Which config applies to each node of a graph, and whether a piece can have one.

Before: a choice of config for a node, by scopes or a filter. After: the same choices, made once for each node, and
the reason why nodes of a piece do not agree.
"""

from collections.abc import Callable

from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.core.annotation.annotator import Choice
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.facts import describe
from quantplug.core.patterns.language import Match
from quantplug.core.specs.written import spec_value


class Configs:
    """The choice of a config for each node; it is made once."""

    def __init__(self, choose: Callable[[fx.Node], Choice]) -> None:
        self._choose = choose
        self._chosen: dict[fx.Node, Choice] = {}

    def of(self, node: fx.Node) -> Choice:
        """Returns the config of a node."""
        if node not in self._chosen:
            self._chosen[node] = self._choose(node)
        return self._chosen[node]

    def disagreement(self, match: Match) -> str | None:
        """Returns which node has another config than the operator, by a scope at least as specific, or None."""
        choice = self.of(match["op"])
        for node in match.nodes:
            other = self.of(node)
            if other.precedence and other.precedence >= choice.precedence and not _same(other.config, choice.config):
                return (
                    f"{describe(match['op'])} has its config by {choice.scope}, "
                    f"{describe(node)} another by {other.scope}"
                )
        return None


def stays_float(choice: Choice) -> str:
    """Returns in words why a choice without config leaves a node float."""
    return f"set to float by {choice.scope}" if choice.precedence else "no config scope covers it"


def _same(one: QuantizationConfig | None, other: QuantizationConfig | None) -> bool:
    """Whether two configs ask for the same; torchao's equality compares observer constructors by identity."""
    if one is None or other is None:
        return one is other
    return all(map(_same_spec, vars(one).values(), vars(other).values()))


def _same_spec(one: object, other: object) -> bool:
    if not isinstance(one, QuantizationSpec) or not isinstance(other, QuantizationSpec):
        return bool(one == other)
    try:
        return bool(one == other) or spec_value(one, str) == spec_value(other, str)
    except AnnotationError:  # an observer constructor without a name, such as a lambda
        return False
