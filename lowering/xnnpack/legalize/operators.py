"""Operators of a q/dq graph by what XNNPACK does with them, and how they are found and given constants."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx

from quantplug.core.graph.editing import add_constant
from quantplug.core.graph.facts import operator_name, sole_user
from quantplug.core.graph.operators import CLAMPS, schema_names

_CONVOLUTIONS = {"aten::conv1d", "aten::conv2d", "aten::conv_transpose1d", "aten::conv_transpose2d"}
TRANSPOSED = {"aten::conv_transpose1d", "aten::conv_transpose2d"}
GEMMS = _CONVOLUTIONS | {"aten::linear"}
FUSING = GEMMS | {"aten::add", "aten::sub", "aten::mul"}
# Clamps that the serializer fuses into the kernel before them; it drops those that are called clamps.
_FUSED = [name for name in CLAMPS if not name.startswith("clamp")]
ACTIVATIONS = {f"{name}{in_place}" for name in schema_names(_FUSED) for in_place in ("", "_")}


def calls(working: fx.GraphModule, names: Iterable[str]) -> list[fx.Node]:
    """Returns the calls of some operators, in graph order."""
    wanted = set(names)
    return [n for n in working.graph.nodes if operator_name(n) in wanted]


def first_input(node: fx.Node) -> Any:
    """Returns the first argument of a node, None if it has none."""
    return node.args[0] if node.args else None


def after_activation(node: fx.Node) -> fx.Node:
    """Returns the activation that alone reads a node, or the node itself."""
    user = sole_user(node)
    return user if user is not None and operator_name(user) in ACTIVATIONS else node


def replace_operand(working: fx.GraphModule, user: fx.Node, old: Any, value: Tensor, name: str) -> None:
    """Gives one operand of an operator a constant of its own."""
    with working.graph.inserting_before(user):
        user.replace_input_with(old, add_constant(working, working.graph, value.detach().clone(), name))
