"""A q/dq graph made ready for the rules.

Before: a graph from `convert_pt2e`, with guards, assertions, inference no-ops and quantization of
constants. After: only computation; every node has a tensor value; static activations are uint8, which is
the one activation dtype that all integer kernels of oneDNN in torch take (x - 128 in int8 is x in uint8).
"""

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.editing import erase_unused, replace
from quantplug.core.graph.facts import operands
from quantplug.core.graph.meta import REASON, absorb
from quantplug.core.graph.operators import ALIASES
from quantplug.core.patterns.language import Match, dropouts, op, value
from quantplug.core.patterns.rules import Rule, apply
from quantplug.core.peers.torch_names import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    enable_python_dispatcher,
    pytree,
    schema_of,
)
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import QD, is_static, qparams, quantize
from quantplug.lowering.rewrites.functional import make_functional
from quantplug.lowering.starting import store_conversions


def clean(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> None:
    """Removes what computes nothing, folds constants, gives every node a value, makes activations uint8."""
    remove_guards(module.graph)
    make_functional(module.graph)
    _pass_by_no_ops(module.graph)
    # Biases: the kernels read them in float.
    store_conversions(module.graph, lambda node, held: is_dequantize(node) and held.dtype == torch.int32)
    _give_values(module, example_inputs)
    apply(module.graph, LAYOUT_FREE)
    apply(module.graph, TO_UNSIGNED)


def remove_guards(graph: fx.Graph) -> None:
    """Erases assertions, and constants that nobody reads."""
    for node in reversed(list(graph.nodes)):
        is_guard = node.op == "call_module" and not node.users
        if is_guard or _schema_name(node).startswith("aten::_assert"):
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr":
            erase_unused((node,))


def _schema_name(node: fx.Node) -> str:
    return schema_of(node.target).name if isinstance(node.target, OpOverload) else ""


_NO_OPS = (*dropouts(value("x")), op(*ALIASES, self=value("x")))


def _pass_by_no_ops(graph: fx.Graph) -> None:
    """Takes operators out that compute nothing; of those between integers it is noted that integers pass by."""
    for node, pattern in itertools.product(list(graph.nodes), _NO_OPS):
        found = pattern.match(node)
        if isinstance(found, Match):
            if is_dequantize(found["x"]):
                absorb(found["x"].all_input_nodes[0], node)
            replace(node, found["x"])
        elif node.target in pattern.targets:
            REASON.put(node, found.reason)


def _reshape(match: Match) -> fx.Node:
    """The kernels yield channels-last memory, which a view cannot always regroup; a reshape copies then."""
    match.root.target = torch.ops.aten.reshape.default
    return match.root


LAYOUT_FREE = (Rule(op("view.default", "_unsafe_view", self=value("x")), _reshape),)


class _Values(fx.Interpreter):
    """Runs a graph on fake tensors and writes each node's value into its metadata."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.op == "get_attr" and isinstance(found, Tensor):
            found = self.mode.from_tensor(found, static_shapes=True)
        if n.op != "output":
            n.meta["val"] = found
        return found


def _give_values(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> None:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    recorded = [node.meta.get("val") for node in placeholders]
    fakes = [v for v in recorded if isinstance(v, FakeTensor)]
    if all(v is not None for v in recorded) and fakes:
        mode, inputs = fakes[0].fake_mode, recorded
    else:
        mode = FakeTensorMode()
        leaves = pytree.tree_leaves(example_inputs)
        inputs = [mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    give_values(module, mode, inputs)


def give_values(module: fx.GraphModule, mode: FakeTensorMode, inputs: Iterable[Any]) -> None:
    """Gives every node of a graph the value that it has on fake inputs."""
    # Recurrences know symbolic sizes only by way of the dispatcher that export uses.
    # What kernels ask of the example's sizes is no condition of the model's.
    unchanged = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
    with mode, torch.no_grad(), enable_python_dispatcher(), unchanged:
        _Values(module, mode).run(*inputs, enable_io_processing=False)


def _to_unsigned(match: Match) -> fx.Node | str:
    node = match.root
    users = list(node.users)
    strangers = [user for user in users if user.target not in DEQUANTIZE_STATIC or is_static(user)]
    if strangers:
        return "integers are also read directly"
    if any(qparams(user) != qparams(node) for user in users):
        return "it is dequantized with other parameters"
    # from 0 on, so that a reduced range stays within 127 (see processor.py)
    params = qparams(node).shifted(-qparams(node).quant_min, torch.uint8)
    node.target = QD.quantize_per_tensor.default
    node.args, node.kwargs = (operands(node)["input"], *params.args()), {}
    node.meta["val"] = node.meta["val"].to(torch.uint8)
    for user in users:
        user.target, user.args, user.kwargs = QD.dequantize_per_tensor.default, (node, *params.args()), {}
    return node


DEQUANTIZE_STATIC = (
    QD.dequantize_per_tensor.default,
    QD.dequantize_per_tensor.tensor,
    QD.dequantize_per_tensor.tensor2,
)
TO_UNSIGNED = (Rule(quantize(input=value("x"), dtype=torch.int8).where(lambda m: is_static(m.root)), _to_unsigned),)
