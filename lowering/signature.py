"""What a program takes: the structure of its inputs, dtype and sizes of each tensor, and values that export fixed.

A kernel given another size than it was lowered for reads what is there, and the wrong number comes out silently: an
average divides by the number of elements that it was lowered with. Every program therefore checks its inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from quantplug.core.errors import LoweringError, shown
from quantplug.core.files.structures import structure_of, structure_text
from quantplug.core.files.typed import typed
from quantplug.core.graph.calling import in_order, input_names
from quantplug.core.peers.torch_names import FakeTensor, pytree


@dataclass(frozen=True)
class TensorInput:
    """One tensor that a program takes.

    Attributes:
        dtype: the one it has.
        sizes: each a number, or the name of a size that is open; sizes of one name are equal within a call.
    """

    dtype: torch.dtype
    sizes: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.sizes))}{',' if len(self.sizes) == 1 else ''})"


@dataclass(frozen=True)
class FixedInput:
    """An input that is no tensor; export wrote its value into the graph."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Signature:
    """The inputs of a program.

    Attributes:
        inputs: each flat input; None for a number that was left open.
        structure: pytree of the positional inputs.
        names: of the positional inputs, by which they may be given as well.
    """

    inputs: tuple[TensorInput | FixedInput | None, ...]
    structure: pytree.TreeSpec
    names: tuple[str, ...] = ()

    @classmethod
    def of_graph(cls, model: fx.GraphModule, example_inputs: tuple[Any, ...]) -> "Signature":
        """Reads what a graph module takes from what export recorded of its placeholders.

        Raises:
            LoweringError: the example inputs have another number of leaves.
        """
        values = (node.meta.get("val") for node in model.graph.nodes if node.op == "placeholder")
        return cls._of_values(values, pytree.tree_structure(example_inputs), input_names(model))

    @classmethod
    def of_exported(cls, exported: torch.export.ExportedProgram) -> "Signature":
        """Reads what an exported program takes, whose graph has placeholders for weights too."""
        found = {node.name: node.meta.get("val") for node in exported.graph.nodes}
        specs = exported.graph_signature.input_specs
        values = (found[spec.arg.name] for spec in specs if spec.kind is InputKind.USER_INPUT)
        names = tuple(exported.module_call_graph[0].signature.forward_arg_names or ())
        return cls._of_values(values, exported.call_spec.in_spec.child(0), names)

    @classmethod
    def _of_values(cls, values: Iterable[Any], structure: pytree.TreeSpec, names: tuple[str, ...]) -> "Signature":
        inputs = tuple(map(_described, values))
        if len(inputs) != structure.num_leaves:
            raise LoweringError(
                f"The graph takes {len(inputs)} flat inputs, the example inputs hold {structure.num_leaves}; "
                "pass inputs as it was exported with."
            )
        return cls(inputs, structure, names)

    def flatten(self, inputs: Sequence[Any], keywords: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
        """Returns the flat inputs.

        Args:
            inputs: those given by position.
            keywords: those given by name.

        Raises:
            LoweringError: structure, dtype, size, name or value differ from the exported model's.
        """
        flat = self._leaves(inputs, keywords)
        for leaf in flat:
            if isinstance(leaf, Tensor) and (reason := _unreadable(leaf)) is not None:
                raise LoweringError(reason)
        opened: dict[str, int] = {}
        for index, (expected, value) in enumerate(zip(self.inputs, flat, strict=True)):
            if expected is not None and not _fits(expected, value, opened):
                raise LoweringError(_objection(index, expected, value, opened))
        return flat

    def _leaves(self, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        # A small model takes less time than to look for a structure in what has none.
        if self._is_flat and not keywords and len(inputs) == len(self.inputs) and set(map(type, inputs)) == {Tensor}:
            return list(inputs)
        flat, structure = pytree.tree_flatten(in_order(self.names, inputs, keywords))
        if structure != self.structure:
            raise LoweringError(
                f"The program takes inputs of structure {_text(self.structure)}, found {_text(structure)}; "
                "pass them as they were exported."
            )
        return flat

    @cached_property
    def _is_flat(self) -> bool:
        return bool(self.structure == pytree.tree_structure((0,) * len(self.inputs)))

    def nested(self, inputs: Sequence[Any], keywords: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, ...]:
        """Returns the inputs by position in their structure, for programs that are graph modules.

        Raises:
            LoweringError: as `flatten`.
        """
        checked: tuple[Any, ...] = pytree.tree_unflatten(self.flatten(inputs, keywords), self.structure)
        return checked

    def to_json(self) -> dict[str, Any]:
        """Returns the signature as what `json` writes."""
        return {
            "structure": structure_text(self.structure),
            "inputs": [_written(each) for each in self.inputs],
            "names": list(self.names),
        }

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> "Signature":
        """Returns the signature that `to_json` gave.

        Raises:
            ValueError: a value is none that `to_json` gives.
        """
        found: _Written = typed(written, _Written, "the signature")
        structure = structure_of(found.structure)
        if len(found.inputs) != structure.num_leaves:
            raise ValueError(f"the signature has {len(found.inputs)} inputs, its structure {structure.num_leaves}")
        return cls(tuple(map(_read, found.inputs)), structure, found.names)


@dataclass(frozen=True)
class _Written:
    """A signature as it stands in a file."""

    structure: str
    inputs: tuple[dict[str, Any] | None, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _WrittenTensor:
    dtype: str
    sizes: tuple[int | str, ...]


def _described(value: Any) -> TensorInput | FixedInput | None:
    if isinstance(value, Tensor):
        return TensorInput(value.dtype, tuple(size if isinstance(size, int) else str(size) for size in value.shape))
    return FixedInput(value) if value is None or isinstance(value, bool | int | float | str) else None


def _fits(expected: TensorInput | FixedInput, value: Any, opened: dict[str, int]) -> bool:
    if isinstance(expected, FixedInput):
        return type(value) is type(expected.value) and bool(value == expected.value)
    if not isinstance(value, Tensor) or value.dtype != expected.dtype:
        return False
    shape, sizes = value.shape, expected.sizes
    if shape == sizes:
        return True
    return len(shape) == len(sizes) and all(
        have == (want if isinstance(want, int) else opened.setdefault(want, have))
        for have, want in zip(shape, sizes, strict=True)
    )


def _unreadable(tensor: Tensor) -> str | None:
    if not tensor.is_cpu:
        return f"An input is on the device '{tensor.device}', programs run on the CPU; move it there."
    if tensor.layout != torch.strided:
        return f"An input is sparse ({tensor.layout}); pass its `to_dense()`."
    if isinstance(tensor, FakeTensor):
        return "An input is a fake tensor, which holds no numbers; pass real tensors."
    return None


def _objection(index: int, expected: TensorInput | FixedInput, value: Any, opened: dict[str, int]) -> str:
    if isinstance(expected, FixedInput):
        return (
            f"Input {index} of the program was {expected} when the model was exported, found {_found(value)}; "
            "export and lower it with the other value."
        )
    named = [f"{size} = {opened[size]}" for size in dict.fromkeys(expected.sizes) if size in opened]
    where = f" with {', '.join(map(str, named))}" if named else ""
    return (
        f"Input {index} of the program is {expected}{where}, found {_found(value)}; "
        "pass it so, or export with dynamic shapes."
    )


def _found(value: Any) -> str:
    return str(_described(value)) if isinstance(value, Tensor) else f"{type(value).__name__} {shown(value)}"


def _text(structure: pytree.TreeSpec) -> str:
    return shown(structure)


def _written(given: TensorInput | FixedInput | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, FixedInput):
        return {"value": given.value}
    return {"dtype": str(given.dtype).removeprefix("torch."), "sizes": list(given.sizes)}


def _read(written: dict[str, Any] | None) -> TensorInput | FixedInput | None:
    if written is None:
        return None
    if "value" in written:
        fixed = _described(written["value"])
        if fixed is None:
            raise ValueError(f"a fixed input is {shown(written['value'])}, which is no number, no text and not None")
        return fixed
    tensor: _WrittenTensor = typed(written, _WrittenTensor, "an input")
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an input has the dtype '{shown(tensor.dtype)}', which is none of torch's")
    if any(isinstance(size, int) and size < 0 for size in tensor.sizes):
        raise ValueError(f"an input has the sizes {shown(tensor.sizes)}, of which one is negative")
    return TensorInput(dtype, tensor.sizes)
