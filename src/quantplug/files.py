"""Files that the command line reads and writes: exported models and calibration data.

Before: paths. After: exported programs and batches; every file that is missing, unreadable or of the
wrong kind is one sentence.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, CalibrationError, shown
from quantplug.core.exported_files import read_exported


def load_exported(path: Path, *, trust: bool = False) -> torch.export.ExportedProgram:
    """Returns the exported program in a `.pt2` file.

    Args:
        path: the file.
        trust: whether pickles in it, which can run any code, may be read too.

    Raises:
        ArtefactError: the file is missing, holds no exported program, or asks for more than a model needs.
    """
    return read_exported(path, trust=trust)


def _require_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise ArtefactError(f"There is no {what} file '{path}'; check the path.")


def require_apart(reads: Iterable[Path | None], writes: Iterable[Path | None]) -> None:
    """Makes sure that no file to write is one that is read, or is written twice.

    Raises:
        ArtefactError: one is.
    """
    taken = {path.resolve() for path in reads if path is not None}
    for path in filter(None, writes):
        if path.resolve() in taken:
            raise ArtefactError(f"'{path}' would be written over an input or another output; give it another name.")
        taken.add(path.resolve())


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
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    except Exception as error:
        raise ArtefactError(f"'{path}' is no .npz file of arrays ({error}); write it with numpy.savez.") from error
    names = list(program.graph_signature.user_inputs)
    if len(names) == 1 and len(arrays) == 1 and not set(arrays) <= {*names, "arr_0"}:
        raise CalibrationError(
            f"'{path}' holds the array '{shown(next(iter(arrays)))}', the model's input is '{names[0]}'; "
            f"write it with numpy.savez(path, {names[0]}=array), or without a name."
        )
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
