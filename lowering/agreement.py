"""Whether a program computes what its q/dq graph computes.

Before: what both return for the example inputs. After: decibels between them, or the error that tells where the
program is wrong. A graph that one step of a few integers changes beyond recognition, as deep networks of random
weights are, is no yardstick: its program may differ from it as much as the graph differs from itself. Of an output that
takes few of its integers, one step is many decibels: there the step counts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import LoweringError
from quantplug.core.graph.facts import operator_name, sole_user
from quantplug.core.peers.linux import let_go
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.by_rows import computed_by_rows, has_rows_apart, in_rows
from quantplug.core.qdq.nodes import is_quantize
from quantplug.core.qdq.qparams import DEQUANTIZE_PER_TENSOR, qparams
from quantplug.core.specs.levels import STEP_ROUNDING, Deviation, sqnr
from quantplug.lowering.starting import state_of, twin

_DECIBELS = 25.0
# Fewest decibels of an output that is nowhere more than one step of its own quantization away.
_COARSE = 12.0
# Sums and leaky relu differ from the graph in more of their elements than this, products in far fewer.
_SHARE = 2.0**-6
# Elements of a weight that is never there in floats as a whole: the head of a language model.
_LARGE = 2**24
# Decibels by which a program may keep less than such runs of its graph, beside what these differ from each other:
# hardly in a single layer, by 3.5 in the thirty of SmolLM2, which add up.
_MARGIN = 3.0
_DRAWS = 3
_OF_HALVES = (
    "float16 holds numbers from 6e-8 to 65504 only: scale the model's inputs or weights, or take another config"
)


def agreement(
    found: Any, expected: Any, graph: fx.GraphModule, inputs: tuple[Any, ...], minimum_sqnr: float | None = None
) -> float:
    """Returns the worst signal-to-noise ratio over the outputs in decibels.

    Args:
        found: what the program returned.
        expected: what the q/dq graph returned.
        graph: the q/dq graph.
        inputs: what both were run on.
        minimum_sqnr: decibels that the program must keep; None for 25, or fewer where the graph does not keep them
            of itself.

    Raises:
        LoweringError: an output has another shape, is not finite where the reference is, or is below the minimum.
    """
    ratios = _ratios(found, expected)
    limits = [_DECIBELS if minimum_sqnr is None else minimum_sqnr] * len(ratios)
    rounds = any(is_quantize(node) for node in graph.graph.nodes)
    if rounds and minimum_sqnr is None and not all(ratio >= _DECIBELS for ratio in ratios):
        limits = [least_kept(kept) for kept in _own_ratios(graph, inputs, expected)]
    if minimum_sqnr is None:
        near = (step <= 1 + STEP_ROUNDING for step in _steps(found, expected, graph.graph))
        limits = [min(limit, _COARSE) if one else limit for one, limit in zip(near, limits, strict=True)]
    for index, (ratio, limit) in enumerate(zip(ratios, limits, strict=True)):
        _require(index, ratio, limit, "keep the operators before it float" if rounds else _OF_HALVES)
    return min(ratios, default=float("inf"))


def _own_ratios(graph: fx.GraphModule, inputs: tuple[Any, ...], expected: Any) -> list[tuple[float, ...]]:
    """Returns what each output keeps of itself in several runs in which a few integers are one step off."""
    module = twin(graph)
    state = state_of(module)
    began = {path: value.clone() for path, value in state.items()}
    found = []
    for seed in range(_DRAWS):
        for path, value in state.items():
            value.copy_(began[path])
        found.append(_ratios(_Unsettled(module, seed).run(*inputs), expected))
    return list(zip(*found, strict=True))


def least_kept(kept: tuple[float, ...]) -> float:
    """Returns what a program must keep of a graph that keeps so much of itself.

    Runs that differ by more than the margin excuse no more than that: of few integers one may move none, and of a graph
    that chooses the lowest says enough.
    """
    lowest = min(kept)
    spread = min(max(kept) - lowest, _MARGIN) if math.isfinite(lowest) else 0.0
    return min(_DECIBELS, lowest - spread - _MARGIN)


def _ratios(found: Any, expected: Any) -> list[float]:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return [_ratio(i, *pair) for i, pair in enumerate(pairs) if isinstance(pair[1], Tensor)]


def _steps(found: Any, expected: Any, graph: fx.Graph) -> list[float]:
    """Returns how far each tensor is off, in steps of its quantization; infinite where it has none."""
    sources = pytree.tree_leaves(graph.output_node().args)
    values = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return [_step(*pair, source) for pair, source in zip(values, sources, strict=True) if isinstance(pair[1], Tensor)]


def _step(value: Tensor, reference: Tensor, source: Any) -> float:
    params = qparams(source) if getattr(source, "target", None) in DEQUANTIZE_PER_TENSOR else None
    if params is None or isinstance(params.scale, fx.Node) or value.dtype != reference.dtype:
        return float("inf")
    return Deviation.between(value, reference, params.scale).steps


def _ratio(index: int, value: Tensor, reference: Tensor) -> float:
    if value.shape != reference.shape:
        raise LoweringError(
            f"Output {index} of the program has shape {tuple(value.shape)}, the q/dq graph's has "
            f"{tuple(reference.shape)}; report the model."
        )
    finite = reference.isfinite()
    return sqnr(value[finite], reference[finite])


def _require(index: int, decibels: float, minimum_sqnr: float, remedy: str) -> None:
    if not decibels >= minimum_sqnr:  # NaN is refused too
        raise LoweringError(
            f"Output {index} of the program keeps {decibels:.1f} dB of the q/dq graph on the example inputs, "
            f"less than {minimum_sqnr:.1f} dB; {remedy}."
        )


class Sparing(fx.Interpreter):
    """Runs a q/dq graph with few floats at a time.

    Weights are dequantized by rows, those of the largest linear layers while the layer computes, and pages of their
    integers go.
    """

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node."""
        if not has_rows_apart(n) or n.all_input_nodes[0].op != "get_attr":
            return super().run_node(n)
        values = {source: self.env[source] for source in n.all_input_nodes}
        integers = values[n.all_input_nodes[0]]
        if integers.dim() == 2 and integers.numel() > _LARGE and _is_for_one_linear(n):
            return _Rows(n, values)
        found = computed_by_rows(n, values.__getitem__)
        _let_go(values)
        return found

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator; a linear layer of a weight that waits yields its channels one after the other."""
        if len(args) < 2 or not isinstance(args[1], _Rows):
            return super().call_function(target, args, kwargs)
        x, weight, *bias = args
        channels = torch.cat([target(x, rows) for rows in in_rows(weight.node, weight.values.__getitem__)], -1)
        _let_go(weight.values)
        return channels if not bias or bias[0] is None else channels + bias[0]


@dataclass(frozen=True)
class _Rows:
    """A weight that is yet to be dequantized."""

    node: fx.Node
    values: dict[fx.Node, Any]


def _is_for_one_linear(node: fx.Node) -> bool:
    reader = sole_user(node)
    if reader is None or operator_name(reader) != "aten::linear":
        return False
    return reader.args[1] is node and not reader.kwargs


def _let_go(values: dict[fx.Node, Any]) -> None:
    for value in values.values():
        let_go(value)


class _Unsettled(Sparing):
    """Runs a q/dq graph of which a few integers, the same ones for a seed, are one step higher."""

    def __init__(self, module: fx.GraphModule, seed: int) -> None:
        super().__init__(module)
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node and moves some of the integers that it yields."""
        value = super().run_node(n)
        if not is_quantize(n):
            return value
        moved = torch.rand(value.shape, generator=self._generator) < _SHARE
        integers = value.long()  # of unsigned ones of more than 8 bits torch 2.13 computes nothing
        return torch.where(moved & (integers < torch.iinfo(value.dtype).max), integers + 1, integers).to(value.dtype)
