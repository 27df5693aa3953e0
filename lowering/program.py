"""What every lowering returns: something that runs, saves itself, and tells where each operator went."""

import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantplug.core.errors import ArtefactError, LoweringError, QuantplugError, first_line, shown

if TYPE_CHECKING:
    from quantplug.core.report.engines import EngineTimes
    from quantplug.lowering.timing import KernelTime


@dataclass(frozen=True)
class LoweredOp:
    """Where one compute operator of the q/dq graph runs in the artefact.

    Attributes:
        node: name of the operator's node in the q/dq graph (or of the kernel call it became).
        target: the operator as text, e.g. "aten.conv2d.default".
        module_path: dotted path of the module it was traced in, "" for the root.
        placement: "int8" (an integer kernel, or one that reads a weight in integers), "float" (a float kernel of
            the backend), "portable" (outside the backend, on the runtime's own kernels) or "delegate" (in another
            delegate of the same program).
        reason: why it is not an integer kernel; else empty. What the report of the q/dq graph calls float has its
            reason from there.
        how: how it runs otherwise than the q/dq graph says, such as in bfloat16, or where; else empty.
    """

    node: str
    target: str
    module_path: str
    placement: str
    reason: str = ""
    how: str = ""


def require_float_dtype(dtype: torch.dtype) -> None:
    """Checks the dtype of products that stay float.

    Raises:
        LoweringError: it is neither float32 nor bfloat16.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16):
        raise LoweringError(f"float_dtype is {shown(dtype)}; choose torch.float32 or torch.bfloat16.")


def refusal(target: str, error: Exception) -> LoweringError:
    """Returns what a lowering raises where an exporter or a compiler gave up."""
    if isinstance(error, ArtefactError) and isinstance(error.__cause__, OSError):  # of a file on the way
        error = error.__cause__
    if isinstance(error, OSError):
        return LoweringError(
            f"Lowering to {target} cannot write to the folder of temporary files '{tempfile.gettempdir()}' "
            f"({error.strerror or error}); make room there, or set TMPDIR to another folder."
        )
    if isinstance(error, QuantplugError):  # a sentence of ours, with its remedy
        return LoweringError(str(error))
    return LoweringError(
        f"The q/dq graph cannot be lowered to {target}: {first_line(error)}; keep the operator it names float."
    )


class Program(ABC):
    """A lowered model that runs on real kernels.

    Attributes:
        ops: every compute operator with its placement.
        has_kernels: whether the artefact runs on kernels of its own; a q/dq graph is for an engine to read, which
            chooses them.
        engines: the times of all engines where this one was chosen as the fastest (`engine="auto"`); else None.
    """

    ops: tuple[LoweredOp, ...]
    has_kernels: bool = True
    engines: "EngineTimes | None" = None

    @abstractmethod
    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program on tensors of the exported model's shapes; the structure of its outputs is kept.

        Keywords are the model's own names of inputs. A program that knows none takes `*inputs` alone.
        """

    def restart(self) -> None:  # noqa: B027  programs without a state have nothing to do
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""

    def kernel_times(self, *inputs: Any) -> "tuple[KernelTime, ...]":
        """Returns how long each call of a kernel takes on these inputs, in order; none where the runtime tells none.

        Args:
            inputs: as for a call, by position.
        """
        return ()

    @abstractmethod
    def save(self, path: str | Path) -> Path:
        """Writes the artefact to a file and returns its path."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises, since kernels, their packed weights and their state live in a runtime that copies neither.

        Raises:
            ArtefactError: always.
        """
        raise ArtefactError(
            f"'{type(self).__name__}' can be neither copied nor pickled, its kernels belong to this process; write it "
            "to a file with `save`, and read that with `load` where the class has it, or lower the model again."
        )

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the saved artefact in bytes."""
