"""Files that the command line reads and writes: exported models and calibration data.

Before: paths. After: exported programs and batches; every file that is missing, unreadable or of the
wrong kind is one sentence.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from quantplug.core.errors import ArtefactError, CalibrationError, did_you_mean, first_line, shown
from quantplug.core.files.exported import read_exported
from quantplug.core.files.whole import kind_at
from quantplug.core.graph.calling import by_position, in_order, input_names
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.signature import Signature


def load_exported(path: Path, *, trust: bool = False) -> torch.export.ExportedProgram:
    """Returns the exported program in a `.pt2` file.

    Args:
        path: the file.
        trust: whether pickles in it, which can run any code, may be read too.

    Raises:
        ArtefactError: the file is missing, holds no exported program, or asks for more than a model needs.
    """
    program = read_exported(path, trust=trust)
    try:
        _require_example_inputs(program)
    except Exception as error:  # torch makes the module of whatever the file said
        raise ArtefactError(
            f"'{shown(path)}' holds a program that cannot be run on its own example inputs ({first_line(error)}); "
            "export the model again."
        ) from error
    return program


def _require_example_inputs(program: torch.export.ExportedProgram) -> None:
    """Raises an error of any type where there is no module, or where it does not take the example inputs."""
    module, given = program.module(), program.example_inputs
    if given is None:
        return
    values = in_order(input_names(module), *given)
    if all(leaf.is_cpu for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)):
        Signature.of_graph(by_position(module), values).flatten(values)


def require_apart(reads: Iterable[Path | None], writes: Iterable[Path | None]) -> None:
    """Makes sure that no file to write is one that is read, or is written twice.

    Raises:
        ArtefactError: one is, or is no path.
    """
    given, written = list(filter(None, reads)), list(filter(None, writes))
    for path in (*given, *written):
        kind_at(path)
    taken = {path.resolve() for path in given}
    for path in written:
        if path.resolve() in taken:
            raise ArtefactError(f"'{path}' would be written over an input or another output; give it another name.")
        taken.add(path.resolve())


@dataclass(frozen=True)
class ArrayBatches:
    """Batches cut from arrays whose first axis counts samples; can be read any number of times.

    Attributes:
        arrays: one tensor for each tensor that the model takes, in the order of its inputs.
        size: samples of a batch; what is left over at the end is not used.
        inputs: makes the model's inputs of one batch of the arrays.
    """

    arrays: tuple[Tensor, ...]
    size: int
    inputs: Callable[[tuple[Tensor, ...]], Any]

    def __len__(self) -> int:
        return len(self.arrays[0]) // self.size

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self) * self.size, self.size):
            yield self.inputs(tuple(array[start : start + self.size] for array in self.arrays))


class _Inputs:
    """What an exported program takes: tensors by name, in containers, beside values that export fixed.

    Raises:
        ArtefactError: the program carries no example inputs.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        if program.example_inputs is None:
            raise ArtefactError("The exported program carries no example inputs; export it again.")
        self._leaves, self._structure = pytree.tree_flatten(program.example_inputs)
        self._parameters = input_names(program.module())
        every = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.names = [every[place] for place in self._places]

    @property
    def batch_size(self) -> int:
        """Samples of the example inputs."""
        tensors = (self._leaves[place] for place in self._places)
        return next((len(tensor) for tensor in tensors if tensor.dim()), 1)

    def __call__(self, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        """Returns inputs by the names of the model's parameters."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return {**dict(zip(self._parameters, args, strict=False)), **kwargs}


def load_batches(path: Path, program: torch.export.ExportedProgram, batch_size: int | None) -> ArrayBatches:
    """Returns calibration batches from an `.npz` file, cut to the batch size of an exported program.

    The arrays are taken by the names of the program's inputs; those that were saved without names in their order.

    Args:
        path: the file; each array is [samples, ...].
        program: its example inputs tell which arrays are needed and their batch size.
        batch_size: samples of a batch; None for that of the example inputs.

    Raises:
        ArtefactError: the file is missing or no `.npz` file, or the program carries no example inputs.
        CalibrationError: it has other arrays than the program has inputs, or fewer samples than one batch.
    """
    return _batches(path, _arrays(path), program, batch_size)


def load_labelled(
    path: Path, program: torch.export.ExportedProgram, labels: str, batch_size: int | None
) -> tuple[list[tuple[Any, Tensor]], ArrayBatches]:
    """Returns batches of inputs with their labels from an `.npz` file, and whole batches of the inputs alone.

    Args:
        path: the file; each array is [samples, ...], those of inputs as for `load_batches`.
        program: as for `load_batches`.
        labels: the name of the array with a label for each sample.
        batch_size: as for `load_batches`.

    Returns:
        All samples, of which the last batch may be smaller; and what there is of whole batches.

    Raises:
        ArtefactError: as for `load_batches`.
        CalibrationError: as for `load_batches`, or there is no array of labels, or it has another length.
    """
    arrays = _arrays(path)
    if labels not in arrays:
        raise CalibrationError(
            f"'{path}' holds no array '{shown(labels)}'{did_you_mean(labels, arrays)} but {shown(list(arrays))}; name "
            "the array of labels (`--labels`)."
        )
    marks = arrays.pop(labels)
    whole = _batches(path, arrays, program, batch_size)
    count = len(marks) if marks.dim() else 0
    if count != len(whole.arrays[0]):
        raise CalibrationError(
            f"'{path}' holds {len(whole.arrays[0])} samples and {count} labels in '{labels}'; every sample needs one."
        )
    parts = (slice(start, start + whole.size) for start in range(0, count, whole.size))
    return [(whole.inputs(tuple(a[part] for a in whole.arrays)), marks[part]) for part in parts], whole


def _arrays(path: Path) -> dict[str, Tensor]:
    if kind_at(path) != "file":
        raise ArtefactError(f"There is no calibration file '{path}'; check the path.")
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    except Exception as error:
        raise ArtefactError(f"'{path}' is no .npz file of arrays ({error}); write it with numpy.savez.") from error


def _batches(
    path: Path, arrays: dict[str, Tensor], program: torch.export.ExportedProgram, batch_size: int | None
) -> ArrayBatches:
    inputs = _Inputs(program)
    if len(arrays) != len(inputs.names):
        raise CalibrationError(
            f"'{path}' holds {len(arrays)} arrays {shown(list(arrays))}, the model has inputs {inputs.names}; "
            f"write it with numpy.savez(path, {_keywords(inputs.names)})."
        )
    unnamed = [f"arr_{place}" for place in range(len(arrays))]
    if strange := set(arrays) - set(inputs.names) if list(arrays) != unnamed else set():
        raise CalibrationError(
            f"'{path}' holds the array '{shown(min(strange))}', the model's inputs are {inputs.names}; write it with "
            f"numpy.savez(path, {_keywords(inputs.names)}), or without names in this order."
        )
    chosen = list(arrays.values()) if list(arrays) == unnamed else [arrays[name] for name in inputs.names]
    size = batch_size or inputs.batch_size
    if not size:
        raise CalibrationError(
            "The example inputs that the model was exported with are empty; say how many samples make "
            "a batch (`--batch-size`)."
        )
    samples = {name: len(array) if array.dim() else 0 for name, array in arrays.items()}
    if min(samples.values()) < size or len(set(samples.values())) > 1:
        raise CalibrationError(
            f"'{path}' holds {samples} samples, the model takes batches of {size}; every array needs as many "
            "samples as the others and at least one batch."
        )
    return ArrayBatches(tuple(chosen), size, inputs)


def _keywords(names: Iterable[str]) -> str:
    return ", ".join(f"{name}=array" for name in names)
