"""Integer, float32 or bfloat16 kernel, decided for each layer by measuring on this machine.

Before: a cleaned q/dq graph and example inputs. After: a function that says for one layer why it should stay
float, or that it should not, and one that says of a float product why it should not compute in bfloat16. Candidates
start and end in what their neighbours have: uint8, and float32. Equal layers are measured once, so that they end alike,
and only a clear gain counts: other work on the machine changes times too.
"""

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from quantplug.core.graph.facts import likely_sizes, tensor_value

HALF = torch.bfloat16

# Of the time that a candidate must stay below to be chosen, and the share of calls that take no longer than the time.
CLEAR, QUANTILE = 0.9, 0.25
Shapes = dict[str, torch.Size]
Run = Callable[[Tensor], Tensor]
Choice = Callable[[fx.Node, fx.Node, Run, Callable[[Tensor, Tensor], Tensor], Tensor], str | None]


def always_integer(node: fx.Node, activation: fx.Node, integer: Any, floating: Any, weight: Any) -> str | None:
    """The choice without measuring."""
    return None


def measured(module: fx.GraphModule, example_inputs: tuple[Any, ...], repeats: int = 30) -> Choice:
    """Returns a choice that times the kernels on the shapes of the example inputs.

    Args:
        module: the cleaned q/dq graph; it runs once.
        example_inputs: real inputs.
        repeats: calls of each candidate, taken alternately; their lower quartiles are compared.
    """
    shapes = _shapes(module, example_inputs)
    known: dict[Hashable, str | None] = {}

    def choose(
        node: fx.Node, activation: fx.Node, integer: Run, floating: Callable[[Tensor, Tensor], Tensor], weight: Tensor
    ) -> str | None:
        key = (node.target, shapes[activation.name], weight.shape, _literals(node))
        if key not in known:
            x = torch.randint(0, 256, shapes[activation.name], dtype=torch.uint8)
            known[key] = _beaten(integer, floating, x, weight, repeats)
        return known[key]

    return choose


def _beaten(
    integer: Run, floating: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, repeats: int
) -> str | None:
    """Returns by which float kernel an integer kernel is clearly beaten, or None."""
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    half = weight.to(HALF)
    floats = (lambda q: _through_float(floating, q, weight), lambda q: _through_float(floating, q, half))
    ours, *theirs = _alternating((integer, *floats), x, repeats)
    if min(theirs) >= CLEAR * ours:
        return None
    name = "bfloat16" if theirs[1] < theirs[0] else "float"
    return f"measured: the {name} kernel takes {min(theirs) * 1e6:.0f} us, the integer kernel {ours * 1e6:.0f} us"


def measured_half(is_free: Callable[[fx.Node], bool], repeats: int = 30) -> Callable[[fx.Node], str | None]:
    """Returns a choice that times a float product on float32 and on bfloat16.

    Args:
        is_free: tells whether an operand can be bfloat16 without a conversion; the others and the result get one.
        repeats: calls of each candidate, taken alternately; their lower quartiles are compared.
    """
    known: dict[Hashable, str | None] = {}

    def choose(node: fx.Node) -> str | None:
        sources = tuple((likely_sizes(source), is_free(source)) for source in node.all_input_nodes)
        key = (node.target, sources, _literals(node))
        if key not in known:
            known[key] = _half_objection(node, is_free, repeats)
        return known[key]

    return choose


def _half_objection(node: fx.Node, is_free: Callable[[fx.Node], bool], repeats: int) -> str | None:
    runs = tuple(_product(node, is_free, dtype) for dtype in (torch.float32, HALF))
    whole, half = _alternating(runs, torch.empty(0), repeats)
    return (
        None if half < CLEAR * whole else f"measured: bfloat16 takes {half * 1e6:.0f} us, float32 {whole * 1e6:.0f} us"
    )


def _product(node: fx.Node, is_free: Callable[[fx.Node], bool], dtype: torch.dtype) -> Run:
    """Returns a float product whose result is converted from a dtype, and to it those operands that cost time."""
    values = {
        source: _converted(_example(source), dtype) if is_free(source) else _example(source)
        for source in node.all_input_nodes
    }

    def run(_: Tensor) -> Tensor:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _converted(values[source], dtype))
        found: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return found.to(torch.float32)

    return run


def _converted(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _literals(node: fx.Node) -> str:
    """Returns the operands that are no tensors, as text."""
    return str(fx.node.map_arg((node.args, node.kwargs), lambda source: None))


def _example(node: fx.Node) -> Any:
    found = tensor_value(node)
    if found is None:
        return optimization_hint(node.meta["val"])
    return torch.ones(likely_sizes(node), dtype=found.dtype)


class _Shapes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: Shapes = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.found[n.name] = result.shape
        return result


def _shapes(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> Shapes:
    interpreter = _Shapes(module)
    with torch.no_grad():
        interpreter.run(*example_inputs)
    return interpreter.found


def _through_float(floating: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    y = floating(x.to(torch.float32).sub_(128).mul_(0.02).to(weight.dtype), weight).to(torch.float32)
    return y.mul_(50.0).round_().add_(128).clamp_(0, 255).to(torch.uint8)


@torch.no_grad()
def _alternating(candidates: tuple[Run, ...], x: Tensor, repeats: int) -> list[float]:
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats + 3):
        for run, taken in zip(candidates, times, strict=True):
            start = time.perf_counter()
            run(x)
            taken.append(time.perf_counter() - start)
    return [sorted(taken[3:])[int(repeats * QUANTILE)] for taken in times]
