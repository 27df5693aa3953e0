"""TOSA's reference model: what a TOSA program computes, by the specification, on any machine.

Before: a delegate that ExecuTorch lowered to TOSA. After: its outputs for inputs. The arithmetic of integers is exact
there (TOSA specification, "Operator definitions"), and hardware that conforms yields the same bits.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantplug.core.errors import LoweringError


class TosaDelegate:
    """A part of a program that is one TOSA graph.

    Attributes:
        flatbuffer: the graph, as `.tosa` files hold it.
    """

    def __init__(self, flatbuffer: bytes, program: torch.export.ExportedProgram) -> None:
        self.flatbuffer = flatbuffer
        # Outputs lie in memory as the delegate's have to: channels last where the graph around it says so.
        (returned,) = program.graph.output_node().args
        self._outputs: list[Tensor] = [node.meta["val"] for node in returned]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Returns what the graph computes.

        Raises:
            LoweringError: the reference model does not run it.
        """
        import tosa_reference_model

        arrays = [x.permute(x.dim_order()).contiguous().numpy() for x in inputs]
        with _without_its_warnings():
            found, status = tosa_reference_model.run(self.flatbuffer, arrays)
        if status != tosa_reference_model.GraphStatus.TOSA_VALID:
            raise LoweringError(f"TOSA's reference model does not run the program ({status}); report the model.")
        return [_laid_out(torch.from_numpy(array), like) for array, like in zip(found, self._outputs, strict=True)]


def _laid_out(found: Tensor, like: Tensor) -> Tensor:
    """Returns a dense tensor of the reference model's as the sizes and the layout say."""
    order: Sequence[int] = like.dim_order()
    back = [order.index(axis) for axis in range(len(order))]
    return found.reshape([int(like.shape[axis]) for axis in order]).permute(back).to(like.dtype)


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """Keeps back what the model (2026.5) prints at every call: that it knows a later version than the program is of."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def delegates_of(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Returns the lowered modules of a program by their names in it."""
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    found = program.graph_module.named_children()
    return {name: module for name, module in found if isinstance(module, LoweredBackendModule)}
