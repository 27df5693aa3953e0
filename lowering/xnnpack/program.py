"""The artefact: an ExecuTorch program in memory, loaded in the real runtime."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantplug.core.errors import ArtefactError, LoweringError
from quantplug.lowering.program import LoweredOp, Program
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
        signature: "Signature",
    ) -> None:
        self.ops = tuple(ops)
        self.counts = counts
        self.sqnr = float("nan")
        self._method = method
        self._signature = signature

    def __call__(self, *inputs: Any) -> Any:
        """Runs the program in the ExecuTorch runtime.

        Args:
            *inputs: tensors of the exported model's structure, shapes and dtypes.

        Returns:
            New tensors in the structure that the model returns.

        Raises:
            LoweringError: the inputs do not fit the program, or the runtime fails.
        """
        return self._signature.pack(self._method(self._signature.flatten(inputs)))

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        self._method = Method(self._method.buffer, self._method.threads)

    @property
    def buffer(self) -> bytes:
        """The bytes of the `.pte`."""
        return self._method.buffer

    @property
    def nbytes(self) -> int:
        """Size of the `.pte` in bytes."""
        return len(self._method.buffer)

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
        target = Path(path)
        try:
            target.write_bytes(self._method.buffer)
        except OSError as error:
            raise ArtefactError(f"The program cannot be written to '{target}': {error.strerror}.") from error
        return target


@dataclass(frozen=True)
class Signature:
    """Structure, dtypes and shapes that a program takes, and the structure it returns.

    Attributes:
        inputs: (dtype, sizes) of each flat input, None for what is no tensor; a dynamic size is None.
        in_spec: pytree of the positional inputs.
        pack: from flat outputs to the model's structure.
    """

    inputs: tuple[tuple[torch.dtype, tuple[int | None, ...]] | None, ...]
    in_spec: pytree.TreeSpec
    pack: Callable[[list[Any]], Any]

    def flatten(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs flat and contiguous.

        Raises:
            LoweringError: number, dtype or shape differ from the exported model's.
        """
        flat, spec = pytree.tree_flatten(tuple(inputs))
        if len(flat) != len(self.inputs) or spec != self.in_spec:
            raise LoweringError(
                f"The program takes inputs of structure {self.in_spec}, found {spec}; pass them as they were exported."
            )
        return [self._checked(i, value) for i, value in enumerate(flat)]

    def _checked(self, index: int, value: Any) -> Any:
        expected = self.inputs[index]
        if expected is None:
            return value
        dtype, sizes = expected
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if (
            not isinstance(value, Tensor)
            or value.dtype != dtype
            or value.dim() != len(sizes)
            or any(want is not None and have != want for have, want in zip(value.shape, sizes, strict=True))
        ):
            shape = tuple("dynamic" if s is None else s for s in sizes)
            raise LoweringError(
                f"Input {index} of the program is {dtype} {shape}, found {found}; "
                "pass it so, or export with dynamic shapes."
            )
        return value.detach().contiguous()
