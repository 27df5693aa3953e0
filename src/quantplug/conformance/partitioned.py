"""A lowering through ExecuTorch's partitioners, run in its runtime.

Before: a q/dq graph and factories of partitioners. After: a `PartitionedProgram`, loaded, that knows which operators
of the graph stayed outside of delegates.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.graph.facts import operator_name
from quantplug.core.qdq.nodes import is_conversion
from quantplug.lowering.sources import sources
from quantplug.lowering.xnnpack.runtime import Method, quiet


class PartitionedProgram:
    """A `.pte` in the runtime.

    Attributes:
        left: the operators of the q/dq graph outside of delegates, each with the portable operator that runs it.
    """

    def __init__(self, buffer: bytes, left: Mapping[str, str]) -> None:
        self.left = left
        self._method = Method(buffer)

    def __call__(self, *inputs: Tensor) -> list[Any]:
        """Runs the program; results are copies, as the next call writes over the runtime's own."""
        return [x.clone() if isinstance(x, Tensor) else x for x in self._method(inputs)]


@dataclass(frozen=True)
class Partitioned:
    """Lowers through partitioners.

    Attributes:
        factories: of the partitioners, in their order.
    """

    factories: tuple[Callable[[], Any], ...]

    def __call__(self, converted: fx.GraphModule, inputs: tuple[Any, ...]) -> PartitionedProgram:
        """Returns the program of a q/dq graph.

        Raises:
            LoweringError: the runtime does not load it.
            Exception: what ExecuTorch raised.
        """
        from executorch.exir import to_edge_transform_and_lower

        with quiet():
            exported = torch.export.export(converted, inputs)
            edge = to_edge_transform_and_lower(exported, partitioner=[make() for make in self.factories])
            left = dict(_left(edge.exported_program().graph, converted.graph))
            buffer = edge.to_executorch().buffer
        return PartitionedProgram(buffer, left)


def _left(edge: fx.Graph, converted: fx.Graph) -> Iterator[tuple[str, str]]:
    names = {node.name for node in converted.nodes if node.op == "call_function" and not is_conversion(node)}
    outside = [node for node in edge.nodes if node.op == "call_function" and "::" in operator_name(node)]
    outside = [node for node in outside if not _converts(node)]
    known = sources(outside, converted, names)
    yield from ((name, operator_name(node)) for node in outside for name in known[node.name] & names)


def _converts(node: fx.Node) -> bool:
    return any(part in operator_name(node) for part in ("quantize", "choose_qparams", "dim_order"))
