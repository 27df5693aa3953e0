"""A model on ExecuTorch's `cortex_m` operators, which runs here on their Python kernels and saves a `.pte`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.files.whole import write_content
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.starting import own_state


class _Kernels(fx.Interpreter):
    """Runs the Python form of the kernels.

    That of max-pool calls PyTorch's, which takes maps of at most 127 pixels in int8, so it is given int32. Those of
    convolutions call PyTorch's, which dilates no integers, so that zeros between the weights do it.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "quantized_max_pool2d" in str(target):
            args = (args[0].to(torch.int32), *args[1:])
        if "conv2d" in str(target) and "cortex_m" in str(target) and set(args[5]) != {1}:
            args = (args[0], _spread(args[1], args[5]), *args[2:5], [1, 1], *args[6:])
        return super().call_function(target, args, kwargs)


class CortexMProgram(Program):
    """A lowered model.

    Attributes:
        ops: every operator with where it runs: "int8" on CMSIS-NN, "portable" on ExecuTorch's own float kernels.
        exported: the program in terms of `cortex_m` operators.
    """

    def __init__(self, exported: torch.export.ExportedProgram, buffer: bytes, ops: tuple[LoweredOp, ...]) -> None:
        self.exported, self.ops = exported, ops
        self._buffer = buffer
        self._signature = Signature.of_exported(exported)
        self.restart()

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        module = self.exported.module()
        own_state(module)
        self._kernels = _Kernels(module)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the Python form of the kernels, which follows CMSIS-NN bit by bit; 4-D inputs go channels-last.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        given = self._signature.nested(inputs, keywords)
        with torch.no_grad():
            returned = self._kernels.run(*channels_last(given))
        # What is a state too would be overwritten by the next call.
        return pytree.tree_map_only(Tensor, Tensor.clone, returned)

    def save(self, path: str | Path) -> Path:
        """Writes the `.pte` and returns its path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        return write_content(path, self._buffer)

    @property
    def nbytes(self) -> int:
        """Size of the `.pte` in bytes."""
        return len(self._buffer)


def _spread(weight: Tensor, dilation: Sequence[int]) -> Tensor:
    """Returns a weight (first, height, width, last) with zeros in the steps that a window skips."""
    height, width = (step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[1:3], strict=True))
    spread = weight.new_zeros(weight.shape[0], height, width, weight.shape[3])
    spread[:, :: dilation[0], :: dilation[1]] = weight
    return spread


def channels_last(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns inputs with every 4-D tensor in the memory format of the kernels."""
    moved: tuple[Any, ...] = pytree.tree_map(_channels_last, inputs)
    return moved


def _channels_last(value: Any) -> Any:
    is_map = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_map else value
