"""Integer kernel or float kernel, decided for each convolution and linear by measuring on this machine.

Before: a cleaned q/dq graph and example inputs. After: a function that says for one layer why it should stay
float, or that it should not. Both candidates start and end in uint8, since their neighbours do.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

Shapes = dict[str, torch.Size]
Choice = Callable[[fx.Node, fx.Node, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], str | None]


def always_integer(node: fx.Node, activation: fx.Node, integer: Any, floating: Any) -> str | None:
    """The choice without measuring."""
    return None


def measured(module: fx.GraphModule, example_inputs: tuple[Any, ...], repeats: int = 30) -> Choice:
    """Returns a choice that times both kernels on the shapes of the example inputs.

    Args:
        module: the cleaned q/dq graph; it runs once.
        example_inputs: real inputs.
        repeats: calls of each candidate, taken alternately; their medians are compared.
    """
    shapes = _shapes(module, example_inputs)

    def choose(
        node: fx.Node, activation: fx.Node, integer: Callable[[Tensor], Tensor], floating: Callable[[Tensor], Tensor]
    ) -> str | None:
        x = torch.randint(0, 256, shapes[activation.name], dtype=torch.uint8)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        ours, theirs = _alternating((integer, lambda q: _through_float(floating, q)), x, repeats)
        if ours <= theirs:
            return None
        return f"measured: the float kernel takes {theirs * 1e6:.0f} us, the integer kernel {ours * 1e6:.0f} us"

    return choose


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


def _through_float(floating: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = floating(x.to(torch.float32).sub_(128).mul_(0.02))
    return y.mul_(50.0).round_().add_(128).clamp_(0, 255).to(torch.uint8)


@torch.no_grad()
def _alternating(candidates: tuple[Callable[[Tensor], Tensor], ...], x: Tensor, repeats: int) -> list[float]:
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats + 3):
        for run, taken in zip(candidates, times, strict=True):
            start = time.perf_counter()
            run(x)
            taken.append(time.perf_counter() - start)
    return [median(taken[3:]) for taken in times]
