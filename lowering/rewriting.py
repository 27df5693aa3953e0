"""How one piece of graph becomes another: rules, their application, and what each new node stands for.

Before: a graph and a family of rules in the pattern language. After: the same graph, changed in place,
where every node remembers which operators of the q/dq graph it carries out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import erase_dead_code
from quantplug.core.graph.facts import attribute, tensor_value
from quantplug.core.patterns.language import Match, Miss, Op

ORIGINS = "quantplug_origins"
REASON = "quantplug_reason"

# Metadata that names an operator or a layer class, which another operator in its place is not.
_OF_ONE_OPERATOR = (REASON, "source_fn_stack", "torch_fn")

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
        if _is_erased(node):
            return False
        outcome = rule.pattern.match(node)
        if isinstance(outcome, Match):
            reason = rule.rewrite(outcome)
            if reason is None:
                return True
            outcome = Miss(reason, len(outcome.nodes) + 1)  # the whole pattern was there: it came further than any miss
        furthest = max(furthest, outcome, key=lambda miss: miss.matched)
    if furthest.reason:
        node.meta[REASON] = furthest.reason
    return False


def _is_erased(node: fx.Node) -> bool:
    return node._erased  # fx keeps no public record of what a graph has lost


def origins(node: fx.Node) -> frozenset[str]:
    """Returns the names of the q/dq graph's compute operators that a node carries out."""
    found: frozenset[str] = node.meta.get(ORIGINS, frozenset())
    return found


def absorb(kernel: fx.Node, *nodes: fx.Node) -> None:
    """Notes that a kernel now also does what other nodes did."""
    kernel.meta[ORIGINS] = origins(kernel).union(*(origins(node) for node in nodes))


def call(before: fx.Node, target: Any, args: Sequence[Any], like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """Inserts an operator call before a node.

    Args:
        before: the node that the call is inserted in front of.
        target: the operator overload.
        args: its positional operands.
        like: the node whose module path and tensor value (shape) the result has.
        dtype: the result's dtype where it differs from that node's.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, tuple(args))
    node.meta.update({k: v for k, v in like.meta.items() if k not in _OF_ONE_OPERATOR})
    node.meta[ORIGINS] = frozenset()
    value = tensor_value(like)
    if value is not None:
        node.meta["val"] = value.to(dtype) if dtype else value
    return node


def viewed(before: fx.Node, view: Any, source: fx.Node, *args: Any) -> fx.Node:
    """Inserts a view of a node's tensor before a node; its value is known where the tensor's is."""
    node = call(before, view, (source, *args), source)
    value = tensor_value(source)
    if value is not None:
        node.meta["val"] = view(value, *args)
    return node


def constant(before: fx.Node, name: str, value: Tensor) -> fx.Node:
    """Registers a tensor as a buffer under a fresh name and inserts a node that reads it before a node."""
    owner = before.graph.owning_module
    assert owner is not None
    fresh = fresh_name(owner, name)
    owner.register_buffer(fresh, value)
    with before.graph.inserting_before(before):
        node = before.graph.get_attr(fresh)
    node.meta["val"] = value
    return node


def fresh_name(owner: Any, name: str) -> str:
    """Returns a name under which a module has no attribute yet, made from a readable one."""
    stem = name.replace(".", "_")
    number = 0
    while hasattr(owner, f"{stem}_{number}"):
        number += 1
    return f"{stem}_{number}"


def replace(old: fx.Node, new: fx.Node) -> None:
    """Lets every user of a node use another one, and erases what nobody needs any more."""
    old.replace_all_uses_with(new)
    erase_unused(old)


def erase_unused(node: fx.Node) -> None:
    """Erases a node without users, and then its producers that have none left."""
    pending = [node]
    while pending:
        dead = pending.pop()
        if _is_erased(dead) or dead.users or dead.op in ("placeholder", "output"):
            continue
        pending += dead.all_input_nodes
        dead.graph.erase_node(dead)


def finish(module: fx.GraphModule) -> None:
    """Drops what nobody reads from a rewritten module, checks its graph and makes it run."""
    erase_dead_code(module.graph)
    module.graph.lint()
    drop_unread_attributes(module)
    module.recompile()


def drop_unread_attributes(module: fx.GraphModule) -> None:
    """Deletes parameters and buffers that no node reads: float weights next to their integer copies."""
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    held = [
        name
        for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    ]
    for name in held:
        if name not in read:
            owner, _, leaf = name.rpartition(".")
            delattr(attribute(module, owner) if owner else module, leaf)
