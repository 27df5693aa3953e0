"""Config scopes: which config applies to which node, the most specific scope first.

Before: scopes as the user set them. After: one `Choice` for each node. The order is module name (the
deepest module first), module type, operator type, filter, global; within one kind the later wins.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.annotation.annotator import Choice
from quantplug.core.errors import ConfigError, shown
from quantplug.core.graph.facts import compute_nodes, module_stack
from quantplug.core.graph.operators import Target, operator_overloads
from quantplug.core.peers.torch_names import OpOverload, OpOverloadPacket

OperatorType: TypeAlias = str | OpOverload | OpOverloadPacket | Callable[..., Any]

# One step between kinds is wider than any module nesting.
_KIND_STEP = 10_000
_KINDS = ("global", "filter", "operator type", "module type", "module name pattern", "module name", "call")


@dataclass(frozen=True)
class Scope:
    """One setting of the user's.

    Attributes:
        kind: one of `_KINDS`, the least specific first.
        wanted: what the scope names: a module path, a type, an operator, a function; "" for global.
        config: the config, or None for float.
        depth: how deep in the module stack of a node the scope applies (1 for scopes without depth),
            or 0 if it does not apply.
        names: what the scope could have named in a graph, for errors.
        optional: whether it may cover nothing.
    """

    kind: str
    wanted: str
    config: QuantizationConfig | None
    depth: Callable[[fx.Node], int]
    names: Callable[[Iterable[fx.Node]], Iterable[str]]
    optional: bool = False

    @property
    def quantizes(self) -> bool:
        """Whether the scope has a config that quantizes anything."""
        return self.config is not None and quantizes(self.config)

    @property
    def text(self) -> str:
        """The scope in words."""
        return f"{self.kind} '{self.wanted}'" if self.kind != "global" else "the global config"


def quantizes(config: QuantizationConfig) -> bool:
    """Tells whether a config quantizes anything; one without specs leaves everything float."""
    return any(spec is not None for spec in (config.input_activation, config.output_activation, config.weight))


@dataclass
class Scopes:
    """The settings of one quantizer."""

    settings: list[Scope] = field(default_factory=list)

    def set_global(self, config: QuantizationConfig | None) -> None:
        """Sets the config of every node that no other scope covers."""
        self.add(Scope("global", "", config, lambda node: 1, lambda nodes: ()))

    def set_module_name(self, name: str, config: QuantizationConfig | None) -> None:
        """Sets the config below a module path; `*`, `?` and `[...]` make it a pattern over whole paths."""
        is_pattern = any(sign in name for sign in "*?[")

        def depth(node: fx.Node) -> int:
            paths = [path for path, _ in module_stack(node)]
            hits = (i + 1 for i, path in enumerate(paths) if (fnmatchcase(path, name) if is_pattern else path == name))
            return max(hits, default=0)

        self.add(Scope("module name", name, config, depth, module_paths))

    def set_module_type(self, kind: type[nn.Module] | str, config: QuantizationConfig | None) -> None:
        """Sets the config of everything below modules of a type, given as class or (qualified) class name.

        Raises:
            ConfigError: `kind` is no module class.
        """
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ConfigError(
                f"set_module_type takes a subclass of torch.nn.Module or its name, found {shown(repr(kind))}."
            )
        wanted = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"

        def depth(node: fx.Node) -> int:
            hits = (
                i + 1 for i, (_, t) in enumerate(module_stack(node)) if t == wanted or t.rpartition(".")[2] == wanted
            )
            return max(hits, default=0)

        self.add(Scope("module type", wanted, config, depth, _module_types))

    def set_operator_type(self, operator: OperatorType, config: QuantizationConfig | None) -> None:
        """Sets the config of an operator: ATen name, overload, packet, or function such as F.linear.

        Raises:
            PatternError: there is no such operator.
        """
        overloads: frozenset[Target] = operator_overloads(_operator(operator))
        wanted = str(_operator(operator))
        self.add(Scope("operator type", wanted, config, lambda node: int(node.target in overloads), _operators))

    def set_filter(self, accepts: Callable[[fx.Node], bool], config: QuantizationConfig | None) -> None:
        """Sets the config of the nodes that a predicate accepts."""
        name = getattr(accepts, "__name__", repr(accepts))
        self.add(Scope("filter", name, config, lambda node: int(bool(accepts(node))), lambda nodes: ()))

    def add(self, scope: Scope) -> None:
        """Adds a scope; it replaces an earlier one of the same kind and name."""
        if scope.kind != "filter":
            self.settings = [s for s in self.settings if (s.kind, s.wanted) != (scope.kind, scope.wanted)]
        self.settings.append(scope)

    def choose(self, node: fx.Node) -> Choice:
        """Returns the config of the most specific scope that covers a node."""
        best = Choice()
        for scope in self.settings:
            depth = scope.depth(node)
            precedence = (_KINDS.index(scope.kind) + 1) * _KIND_STEP + depth
            if depth and precedence >= best.precedence:
                best = Choice(scope.config, scope.text, precedence, is_named=scope.kind != "global")
        return best

    def unmatched(self, model: fx.GraphModule) -> list[str]:
        """Returns, in words, each scope that covers no compute node of the model or its control flow."""
        parts = [part for part in model.modules() if isinstance(part, fx.GraphModule)]
        nodes = [node for part in parts for node in compute_nodes(part.graph)]
        silent = [s for s in self.settings if not s.optional and s.kind != "global" and not any(map(s.depth, nodes))]
        return [f"{scope.text} matches nothing in the model{_nearest(scope, nodes)}" for scope in silent]


def _nearest(scope: Scope, nodes: list[fx.Node]) -> str:
    known = sorted(set(scope.names(nodes)))
    if not known:
        return ""
    wanted = scope.wanted.rpartition(".")[2] if scope.kind == "module type" else scope.wanted
    return f" (the nearest names are {difflib.get_close_matches(wanted, known, 3, cutoff=0.3) or known[:3]})"


def module_paths(nodes: Iterable[fx.Node]) -> Iterable[str]:
    """Returns the paths of the modules that nodes were traced in, outer ones too."""
    return (path for node in nodes for path, _ in module_stack(node) if path)


def _module_types(nodes: Iterable[fx.Node]) -> Iterable[str]:
    return (kind.rpartition(".")[2] for node in nodes for _, kind in module_stack(node))


def _operators(nodes: Iterable[fx.Node]) -> Iterable[str]:
    return (str(node.target).split(".")[1] for node in nodes)


def _operator(found: OperatorType) -> str | OpOverload | OpOverloadPacket:
    if isinstance(found, str | OpOverload | OpOverloadPacket):
        return found
    # Several functions of torch.nn.functional are made by a factory and carry its name, not their own.
    same_object = (name for space in (F, torch) for name in dir(space) if getattr(space, name, None) is found)
    return next(same_object, getattr(found, "__name__", repr(found)))
