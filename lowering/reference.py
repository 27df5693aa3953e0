"""Lowering to nothing but PyTorch: the q/dq graph itself, for backends whose kernels are not at hand.

Before: a converted graph. After: a program that computes what the q/dq graph says, in float arithmetic
between dequantize and quantize, and saves it as an exported program.
"""

from pathlib import Path
from typing import Any

import torch
from torch import fx

from quantplug.core.errors import LoweringError, first_line
from quantplug.core.files.whole import exported_content, write_content
from quantplug.core.graph.facts import compute_nodes, module_path, require_graph_module
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.starting import starting

_REASON = "the reference computes in float between dequantize and quantize"


class ReferenceProgram(Program):
    """A graph that runs in PyTorch: the q/dq graph, or what rules made of it.

    Attributes:
        ops: every operator with where it runs.
        has_kernels: false for the q/dq graph itself.
    """

    def __init__(
        self, exported: torch.export.ExportedProgram, ops: tuple[LoweredOp, ...], *, has_kernels: bool = True
    ) -> None:
        self._exported = exported
        self._began = exported.module()
        self._signature = Signature.of_exported(exported)
        self._module = starting(self._began)
        self.ops, self.has_kernels = ops, has_kernels

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the graph without gradients.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        given = self._signature.nested(inputs, keywords)
        with torch.no_grad():
            return self._module(*given)

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        self._module = starting(self._began)

    def save(self, path: str | Path) -> Path:
        """Writes the exported program as a `.pt2` file and returns its path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        return write_content(path, exported_content(self._exported))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and buffers that the file holds."""
        return sum(value.nbytes for value in self._exported.state_dict.values())


def lower(
    converted: fx.GraphModule, example_inputs: tuple[Any, ...], *, dynamic_shapes: Any = None
) -> ReferenceProgram:
    """Returns a program that computes what the q/dq graph says.

    Args:
        converted: the graph module that `convert_pt2e` returned; it is not changed.
        example_inputs: positional inputs, as for `torch.export.export`.
        dynamic_shapes: as for `torch.export.export`; None for the sizes that are dynamic in the graph itself.

    Raises:
        ModelError: `converted` is no graph module.
        LoweringError: it cannot be exported with these inputs.
    """
    graph = require_graph_module(converted, "lower").graph
    shapes = open_sizes(graph, example_inputs) or dynamic_shapes
    try:
        exported = torch.export.export(starting(converted), example_inputs, dynamic_shapes=shapes)
    except Exception as error:
        raise LoweringError(
            f"The q/dq graph cannot be exported on the example inputs ({first_line(error)}); "
            "pass inputs like those it was exported with."
        ) from error
    ops = tuple(
        LoweredOp(node.name, str(node.target), module_path(node), "float", _REASON)
        for node in compute_nodes(graph)
        if str(node.target).startswith("aten.")
    )
    return ReferenceProgram(exported, ops, has_kernels=False)
