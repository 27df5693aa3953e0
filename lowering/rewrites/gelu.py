"""GELU that a model writes out by its formula, as the one operator that kernels and patterns know.

Before: a float graph with x * (1 + erf(x / sqrt(2))) / 2, or its form with tanh, in any spelling, as models of
transformers have (GPT-2, Phi, ALBERT). After: `gelu(x)`. Source: Hendrycks and Gimpel, "Gaussian Error Linear Units",
2016, section 2. What is taken for it is computed at many points, and is the same function there.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn.functional import gelu

from quantplug.core.graph.facts import operator_name, sole_user, tensor_value
from quantplug.core.graph.operators import schema_names
from quantplug.lowering.rewrites.writing import Writer, constant_operand, done, matching

_FORMS = {"erf": "none", "tanh": "tanh"}
_STEPS = schema_names(("add", "sub", "rsub", "mul", "div", "pow", "square", "neg", "erf", "tanh"))
# Nodes of the longest spelling: before erf or tanh, behind it, and altogether.
_BEFORE, _BEHIND, _TOGETHER = 6, 4, 20
_POINTS = torch.linspace(-6.0, 6.0, 241, dtype=torch.float64)
# Factors are written with as few as four digits (0.7978 for the root of 2 / pi); float32 steps are 5e-7 at 6.
_AGREED = 1e-4


def written_gelu_is_one(model: fx.GraphModule) -> fx.GraphModule:
    """Writes what computes the GELU of a tensor by sums, products and erf or tanh as `gelu`."""
    for core, _ in matching(model, *_FORMS):
        form = _FORMS[operator_name(core).removeprefix("aten::")]
        expected = gelu(_POINTS, approximate=form)
        sources = _sources(core)
        found = ((last, source) for last in _behind(core) for source in sources if _is(last, source, expected))
        last, source = next(found, (None, None))
        if last is not None and source is not None:
            write = Writer(model, last)
            write.replace(write.call(torch.ops.aten.gelu.default, source, approximate=form))
    return done(model)


def _sources(core: fx.Node) -> list[fx.Node]:
    """Returns the tensors that steps up to a node begin with and that more reads than these, the nearest first."""
    found: dict[fx.Node, None] = {}
    frontier = [core]
    for _ in range(_BEFORE):
        frontier = [leaf for step in frontier for leaf in step.all_input_nodes if operator_name(step) in _STEPS]
        found.update(dict.fromkeys(leaf for leaf in frontier if len(leaf.users) > 1))
    return list(found)


def _behind(core: fx.Node) -> Iterator[fx.Node]:
    last = sole_user(core)
    for _ in range(_BEHIND):
        if last is None or operator_name(last) not in _STEPS:
            return
        yield last
        last = sole_user(last)


def _is(node: fx.Node, source: fx.Node, expected: Tensor) -> bool:
    """Tells whether a node is the same function of the source as what is expected at the points."""
    value, given = tensor_value(node), tensor_value(source)
    if value is None or given is None or value.shape != given.shape or value.dtype != given.dtype:
        return False
    found = _computed(node, {source: _POINTS})
    return found is not None and torch.allclose(found, expected, atol=_AGREED, rtol=0)


def _computed(node: fx.Node, known: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """Returns what a node is where the source is at the points, None where more than the source decides on that."""
    if node not in known:
        held = constant_operand(node)
        known[node] = held.double().reshape(()) if held is not None and held.numel() == 1 else None
        if operator_name(node) in _STEPS and len(known) < _TOGETHER:
            values = {read: _computed(read, known) for read in node.all_input_nodes}
            if all(value is not None for value in values.values()):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: cast(Any, values[read]))
                known[node] = cast(Callable[..., Tensor], node.target)(*args, **kwargs)
    return known[node]
