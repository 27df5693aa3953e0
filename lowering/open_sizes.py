"""Sizes that an exported graph leaves open, for exporting it again.

Before: symbolic sizes in what export recorded of the inputs. After: the `dynamic_shapes` that give them again.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantplug.core.peers.torch_names import pytree


def open_sizes(graph: fx.Graph, example_inputs: tuple[Any, ...]) -> Any:
    """Returns the sizes that a graph leaves open as `torch.export.export` takes them, or None where it leaves none.

    They are in the structure of the inputs: what the model was exported with names parameters that its graph no
    longer has, where they were `*args`.
    """
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    sizes = [_open_dims(found) if isinstance(found, Tensor) else None for found in values]
    structure = pytree.tree_structure(example_inputs)
    return pytree.tree_unflatten(sizes, structure) if any(sizes) and len(sizes) == structure.num_leaves else None


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Tells whether two tensors have one shape at every size that is open; `==` would close those that look alike."""
    alike = (statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=False))
    return one.dim() == other.dim() and all(alike)


def _open_dims(found: Tensor) -> dict[int, Any]:
    sizes: tuple[Any, ...] = tuple(found.shape)
    symbols = {dim: size.node for dim, size in enumerate(sizes) if not isinstance(size, int)}
    ranges = {dim: symbol.shape_env.bound_sympy(symbol.expr) for dim, symbol in symbols.items()}
    return {
        dim: torch.export.Dim.DYNAMIC(min=_end(given.lower), max=_end(given.upper)) for dim, given in ranges.items()
    }


def _end(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None  # torch's own infinity calls itself finite
