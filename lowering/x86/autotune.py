"""Integer, float32 or bfloat16 kernel, decided for each layer by measuring on this machine.

Before: a cleaned q/dq graph and example inputs. After: a function that says for one layer why it should stay
float, or that it should not, and one that says of a float product why it should not compute in bfloat16. Candidates
start and end in what their neighbours have: uint8, and float32.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from quantplug.core.graph import tensor_value

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
        repeats: calls of each candidate, taken alternately; their medians are compared.
    """
    shapes = _shapes(module, example_inputs)

    def choose(
        node: fx.Node, activation: fx.Node, integer: Run, floating: Callable[[Tensor, Tensor], Tensor], weight: Tensor
    ) -> str | None:
        x = torch.randint(0, 256, shapes[activation.name], dtype=torch.uint8)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        half = weight.to(torch.bfloat16)
        ours, *theirs = _alternating(
            (integer, lambda q: _through_float(floating, q, weight), lambda q: _through_float(floating, q, half)),
            x,
            repeats,
        )
        if ours <= min(theirs):
            return None
        name = "bfloat16" if theirs[1] < theirs[0] else "float"
        return f"measured: the {name} kernel takes {min(theirs) * 1e6:.0f} us, the integer kernel {ours * 1e6:.0f} us"

    return choose


def measured_half(node: fx.Node, repeats: int = 30) -> str | None:
    """Times a float product on float32 and on bfloat16, both from float32 to float32.

    Returns:
        Why it should stay float32, or None.
    """
    values = fx.node.map_arg((node.args, node.kwargs), _example)

    def run(dtype: torch.dtype) -> Tensor:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda x: _converted(x, dtype), values)
        found: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return found.to(torch.float32)

    whole, half = _alternating((lambda x: run(torch.float32), lambda x: run(torch.bfloat16)), torch.empty(0), repeats)
    if half < whole:
        return None
    return f"measured: bfloat16 takes {half * 1e6:.0f} us, float32 {whole * 1e6:.0f} us"


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _example(node: fx.Node) -> Any:
    found = tensor_value(node)
    if found is None:
        return optimization_hint(node.meta["val"])
    return torch.ones([optimization_hint(size) for size in found.shape], dtype=found.dtype)


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
    return [median(taken[3:]) for taken in times]
