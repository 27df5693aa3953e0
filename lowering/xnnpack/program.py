"""The artefact: an ExecuTorch program in memory, loaded in the real runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantplug.core.files.whole import write_content
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.xnnpack.capacity import Sizes, require_within
from quantplug.lowering.xnnpack.runtime import Method


@dataclass(frozen=True)
class KernelCounts:
    """How many calls of each kind a program makes.

    Attributes:
        int8: integer compute kernels inside the delegates.
        f32: float compute kernels inside the delegates.
        converts: kernels that quantize or dequantize.
        moves: kernels that only move data (transpose, reshape, slice, concatenate).
        delegates: calls into XNNPACK.
        portable: operators outside the delegates, on the runtime's portable kernels.
    """

    int8: int
    f32: int
    converts: int
    moves: int
    delegates: int
    portable: int


class XNNPACKProgram(Program):
    """A lowered model as an ExecuTorch program whose kernels are XNNPACK's.

    Attributes:
        ops: every compute operator of the q/dq graph with its placement.
        counts: kernel calls by kind, as the serializer wrote them.
        sqnr: decibels between the program and the q/dq graph on the example inputs (inf if equal).
    """

    def __init__(
        self,
        method: Method,
        ops: Sequence[LoweredOp],
        counts: KernelCounts,
        signature: Signature,
        out_spec: pytree.TreeSpec,
        largest: Sizes,
    ) -> None:
        self.ops = tuple(ops)
        self.counts = counts
        self.sqnr = float("nan")
        self._method = method
        self._signature, self._out_spec, self._largest = signature, out_spec, largest

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program in the ExecuTorch runtime.

        Args:
            *inputs: tensors of the exported model's structure, shapes and dtypes.
            **keywords: the same by their names in the model.

        Returns:
            New tensors in the structure that the model returns.

        Raises:
            LoweringError: the inputs do not fit the program, or the runtime fails.
        """
        flat = self._signature.flatten(inputs, keywords)
        require_within(self._largest, flat)
        outputs = self._method([leaf.detach().contiguous() if isinstance(leaf, Tensor) else leaf for leaf in flat])
        return pytree.tree_unflatten(outputs, self._out_spec)

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        self._method.unload()

    @property
    def buffer(self) -> bytes:
        """The bytes of the `.pte`."""
        return self._method.buffer

    @property
    def nbytes(self) -> int:
        """Size of the `.pte` in bytes."""
        return self._method.nbytes

    @property
    def delegates(self) -> int:
        """Number of calls into XNNPACK; 1 means that nothing runs outside it."""
        return self.counts.delegates

    @property
    def threads(self) -> int | None:
        """Threads that the program asks of the runtime, None for the runtime's own number."""
        return self._method.threads

    def save(self, path: str | Path) -> Path:
        """Writes the `.pte`.

        Raises:
            ArtefactError: the file cannot be written.
        """
        return write_content(path, self._method.buffer)
