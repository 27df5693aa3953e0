"""A lowered model compiled ahead of time, as a program: AOTInductor's package with the checks that it lacks.

Before: an `X86Program`. After: the same kernels with fused loops between them, bound to the instruction set of the
machine and the number of threads that compiled it.
"""

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, first_line, shown
from quantplug.core.files.exported import silenced
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import kind_at, require_writable, write_content
from quantplug.core.peers.torch_names import PACKAGE_LOGGERS, inductor, pytree
from quantplug.lowering.program import Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.x86.running.compiled import DESCRIPTION
from quantplug.lowering.x86.running.packing import register_fakes
from quantplug.lowering.x86.running.program import Packaged, X86Program


class X86Package(Program):
    """A package of AOTInductor that runs in this process.

    Attributes:
        ops: every compute operator of the q/dq graph with its placement.
    """

    def __init__(self, package: bytes) -> None:
        """Starts a package.

        Args:
            package: the content of its file, which is machine code.

        Raises:
            ArtefactError: it is none, or was compiled for another processor.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "package.pt2"
        self._path.write_bytes(package)
        described = _described(self._path)
        reason = described.objection()
        if reason:
            raise ArtefactError(f"The package cannot run here: {reason}; lower the model on this machine.")
        self.ops, self._signature = described.ops, Signature.from_json(described.signature)
        register_fakes()
        with silenced(PACKAGE_LOGGERS):
            self._run = inductor().aoti_load_package(str(self._path))

    @classmethod
    def of(cls, program: X86Program) -> "X86Package":
        """Compiles a program, which takes from seconds to minutes.

        Raises:
            LoweringError: there is no C++ compiler, or the model writes a buffer, which a package would not keep.
        """
        with tempfile.TemporaryDirectory() as folder:
            return cls(program.package(Path(folder) / "package.pt2").read_bytes())

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> "X86Package":
        """Reads a package that `save`, or `X86Program.package`, wrote on a machine like this one.

        Args:
            path: the file.
            trust: whether the machine code in it may run, which has all rights that you have.

        Raises:
            ArtefactError: the file is missing, is no such package, is not trusted, or was compiled for another
                processor.
        """
        path = Path(path)
        if kind_at(path) != "file":
            raise ArtefactError(f"There is no file '{path}'; pass a package that `X86Package.save` wrote.")
        if not trust:
            raise ArtefactError(
                f"'{path}' holds compiled code, which would run here with all your rights; pass trust=True if you know "
                "who wrote it."
            )
        try:
            return cls(path.read_bytes())
        except ArtefactError:
            raise
        except Exception as error:
            raise ArtefactError(
                f"'{shown(path)}' is no package of the x86 lowering ({first_line(error)}); pass a file that "
                "`X86Package.save` wrote."
            ) from error

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


def _described(path: Path) -> Packaged:
    """Returns what a package says of itself, which is read without running any of it.

    Raises:
        Exception: it says nothing of the kind.
    """
    with zipfile.ZipFile(path) as archive:
        record = next(name for name in archive.namelist() if name.endswith("wrapper_metadata.json"))
        found = json.loads(archive.read(record))
    described: Packaged = typed(json.loads(found[DESCRIPTION]), Packaged, "the package's description")
    return described
