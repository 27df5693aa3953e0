"""A lowered model compiled ahead of time, as a program: AOTInductor's package with the checks that it lacks.

Before: an `X86Program`. After: the same kernels with fused loops between them, bound to the instruction set of the
machine and the number of threads that compiled it.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantplug.core.files.whole import require_writable, write_content
from quantplug.core.peers.torch_names import inductor, pytree
from quantplug.lowering.program import Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.x86.running.program import X86Program


class X86Package(Program):
    """A package of AOTInductor that runs in this process.

    Attributes:
        ops: every compute operator of the q/dq graph with its placement.
    """

    def __init__(self, program: X86Program) -> None:
        """Compiles a program, which takes from seconds to minutes.

        Raises:
            LoweringError: there is no C++ compiler, or the model writes a buffer, which a package would not keep.
        """
        self.ops = program.ops
        self._signature = Signature.of_graph(program.portable, program.example_inputs)
        self._folder = tempfile.TemporaryDirectory()
        self._path = program.package(Path(self._folder.name) / "package.pt2")
        self._run = inductor().aoti_load_package(str(self._path))

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the package; takes and returns what the exported model does.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        given = self._signature.nested(inputs, keywords)
        # It reads memory as that of the example inputs, which lay in the order of their dimensions.
        plain = pytree.tree_map_only(Tensor, Tensor.contiguous, given)
        with torch.no_grad():
            return self._run(*plain)

    def save(self, path: str | Path) -> Path:
        """Writes the package, which `torch._inductor.aoti_load_package` loads without quantplug; returns the path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        require_writable(Path(path))
        return write_content(path, self._path.read_bytes())

    @property
    def nbytes(self) -> int:
        """Size of the package in bytes."""
        return self._path.stat().st_size
