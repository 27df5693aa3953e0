"""Files that the command line reads and writes: exported models and calibration data.

Before: paths. After: exported programs and batches; every file that is missing, unreadable or of the
wrong kind is one sentence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, CalibrationError


def load_exported(path: Path) -> torch.export.ExportedProgram:
    """Returns the exported program in a `.pt2` file.

    Raises:
        ArtefactError: the file is missing or holds no exported program.
    """
    _require_file(path, "model")
    try:
        return torch.export.load(path)
    except Exception as error:
        raise ArtefactError(
            f"'{path}' holds no exported program ({type(error).__name__}); write one with "
            "torch.export.save(torch.export.export(model, inputs), path)."
        ) from error


def _require_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise ArtefactError(f"There is no {what} file '{path}'; check the path.")


def require_writable(path: Path) -> None:
    """Makes sure that a file can be written before the work for it begins.

    Raises:
        ArtefactError: its folder does not exist, or the path is a folder.
    """
    if path.is_dir():
        raise ArtefactError(f"'{path}' is a folder; give the path of a file to write.")
    if not path.absolute().parent.is_dir():
        raise ArtefactError(
            f"There is no folder '{path.absolute().parent}' to write '{path.name}' to; create it first."
        )


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Writes a file that appears whole or not at all, whatever interrupts it, and returns its path.

    Args:
        path: the file; one that is there already is replaced at the end.
        write: writes the content to the path that it is given, beside the final one.

    Raises:
        ArtefactError: the folder does not exist, or the file cannot be written.
    """
    require_writable(path)
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        write(unfinished)
        return unfinished.replace(path)
    except OSError as error:
        raise ArtefactError(
            f"'{path}' cannot be written ({error.strerror or error}); free or change its place."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True)
class ArrayBatches:
    """Batches cut from arrays whose first axis counts samples; can be read any number of times.

    Attributes:
        arrays: one tensor for each model input, in the order of the inputs.
        size: samples of a batch; what is left over at the end is not used.
    """

    arrays: tuple[Tensor, ...]
    size: int

    def __len__(self) -> int:
        return len(self.arrays[0]) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(self) * self.size, self.size):
            yield tuple(array[start : start + self.size] for array in self.arrays)


def load_batches(path: Path, program: torch.export.ExportedProgram, batch_size: int | None) -> ArrayBatches:
    """Returns calibration batches from an `.npz` file, cut to the batch size of an exported program.

    The arrays are taken by the names of the program's inputs, or in the order of the file.

    Args:
        path: the file; each array is [samples, ...].
        program: its example inputs tell how many arrays are needed and their batch size.
        batch_size: samples of a batch; None for that of the example inputs.

    Raises:
        ArtefactError: the file is missing or no `.npz` file.
        CalibrationError: it has the wrong number of arrays, or fewer samples than one batch.
    """
    _require_file(path, "calibration")
    try:
        with np.load(path) as stored:
            arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    except Exception as error:
        raise ArtefactError(f"'{path}' is no .npz file of arrays ({error}); write it with numpy.savez.") from error
    names = list(program.graph_signature.user_inputs)
    if len(arrays) != len(names):
        raise CalibrationError(f"'{path}' holds {len(arrays)} arrays {list(arrays)}, the model has inputs {names}.")
    chosen = [arrays[name] for name in names] if set(arrays) == set(names) else list(arrays.values())
    size = batch_size or _batch_size(example_inputs(program))
    samples = {name: len(array) if array.dim() else 0 for name, array in arrays.items()}
    if min(samples.values()) < size or len(set(samples.values())) > 1:
        raise CalibrationError(
            f"'{path}' holds {samples} samples, the model takes batches of {size}; every array needs as many "
            "samples as the others and at least one batch."
        )
    return ArrayBatches(tuple(chosen), size)


def _batch_size(inputs: tuple[Any, ...]) -> int:
    return next((len(value) for value in inputs if isinstance(value, Tensor) and value.dim()), 1)


def example_inputs(program: torch.export.ExportedProgram) -> tuple[Any, ...]:
    """Returns the positional example inputs that an exported program carries.

    Raises:
        ArtefactError: it carries none, or has keyword inputs.
    """
    found = program.example_inputs
    if found is None or found[1]:
        raise ArtefactError(
            "The exported program carries no positional example inputs; export it with all inputs in args."
        )
    return tuple(found[0])
