"""Calibration batches: what a loader yields -> the arguments of one forward call, checked.

Every check compares a batch with the graph's own inputs (names, shapes and dtypes as export
recorded them), so that a wrong batch is refused before any observer has seen it.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from quantplug.core.errors import CalibrationError, QuantplugError, first_line, shown
from quantplug.core.graph.calling import input_names, keyword_names
from quantplug.core.graph.facts import tensor_value
from quantplug.core.peers.torch_names import FakeTensor

Pick: TypeAlias = Callable[[Any], Any]
"""Makes the model's inputs of what a loader yields."""

PICK = "pass `inputs=` to calibrate to pick the model's inputs out of a batch, e.g. `inputs=lambda batch: batch[0]`"


@dataclass(frozen=True)
class InputSpec:
    """One tensor input of a graph.

    Attributes:
        name: name of the argument.
        shape: sizes, None where the dimension is dynamic.
        dtype: element type.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


def input_specs(model: fx.GraphModule) -> dict[str, InputSpec]:
    """Returns the tensor inputs of an exported graph by argument name, in the graph's order."""
    found = {}
    for node in model.graph.nodes:
        value = tensor_value(node) if node.op == "placeholder" else None
        if value is not None:
            shape = tuple(size if isinstance(size, int) else None for size in value.shape)
            found[str(node.target)] = InputSpec(str(node.target), shape, value.dtype)
    return found


def loader_iterator(loader: Any) -> Iterator[Any]:
    """Returns an iterator over a loader's batches.

    Raises:
        CalibrationError: the loader is no iterable of batches, or a generator that is used up.
    """
    if isinstance(loader, Tensor | Mapping | str | bytes):
        raise CalibrationError(
            f"The loader is one {type(loader).__name__}, not an iterable of batches; wrap it in a list: `[batch]`."
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise CalibrationError(
            f"The loader is of type {type(loader).__name__}, which cannot be iterated; pass a list of batches or a "
            "DataLoader."
        )
    if inspect.isgenerator(loader) and inspect.getgeneratorstate(loader) == inspect.GEN_CLOSED:
        raise CalibrationError(
            "The loader is a generator that was used up before calibration; pass a fresh one, or a list of batches."
        )
    return iter(loader)


def picked(batch: Any, pick: Pick | None) -> Any:
    """Returns the model's inputs of what a loader yields.

    Raises:
        CalibrationError: `pick` is no function.
    """
    if pick is None:
        return batch
    if not callable(pick):
        raise CalibrationError(
            f"inputs is {shown(repr(pick))}; pass a function of a batch, such as `lambda batch: batch[0]`."
        )
    return pick(batch)


class BatchReader:
    """Turns what a loader yields into the arguments of the model, or says what is wrong with it.

    Attributes:
        names: names of the model's arguments, positional ones first.
        keywords: those of them that were exported as keyword arguments.
        specs: its tensor inputs by name.
        device: where tensors are moved, or None to leave them.
    """

    def __init__(self, model: fx.GraphModule, device: torch.device | None = None) -> None:
        self.names = list(input_names(model))
        self.keywords = keyword_names(model)
        self.specs = input_specs(model)
        self.device = device

    def arguments(self, batch: Any, index: int) -> dict[str, Any]:
        """Returns the batch as {argument name: value}, on the device, after every structural check.

        Args:
            batch: a tensor, a list or tuple (positional), or a mapping (by argument name).
            index: number of the batch, for the error message.

        Raises:
            CalibrationError: number or names of inputs, a shape or a dtype differ from the model's.
        """
        named = self._by_name(batch, index)
        for name, value in named.items():
            if name in self.specs:
                self._check(self.specs[name], value, index)
        return {name: _moved(value, self.device) for name, value in named.items()}

    def call(self, model: fx.GraphModule, named: Mapping[str, Any], index: int) -> Any:
        """Runs the model on checked arguments.

        Raises:
            CalibrationError: it does not take their values, or sizes that are outside of the exported ranges.
        """
        positional = [value for name, value in named.items() if name not in self.keywords]
        try:
            return model(*positional, **{name: named[name] for name in self.keywords})
        except QuantplugError:
            raise
        except Exception as error:
            raise CalibrationError(
                f"The model does not take batch {index} ({first_line(error)}); yield batches whose sizes are in the "
                "exported ranges and whose values the model knows."
            ) from error

    def _by_name(self, batch: Any, index: int) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            wrong = sorted(set(self.names) ^ set(batch), key=str)
            if wrong:
                raise CalibrationError(
                    f"Batch {index} has the inputs {sorted(batch, key=str)} but the model takes {self.names} "
                    f"(they differ in {wrong}); name every input as the model does, or {PICK}."
                )
            return {name: batch[name] for name in self.names}
        values = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        if len(values) != len(self.names):
            raise CalibrationError(
                f"Batch {index} has {len(values)} inputs but the model takes {len(self.names)} "
                f"({', '.join(self.names)}); {PICK}."
            )
        return dict(zip(self.names, values, strict=True))

    def _check(self, spec: InputSpec, value: Any, index: int) -> None:
        where = f"Input '{spec.name}' of batch {index}"
        if not isinstance(value, Tensor):
            raise CalibrationError(f"{where} is of type {type(value).__name__}; the model takes a torch.Tensor there.")
        if value.is_meta or isinstance(value, FakeTensor):
            found = "on the device 'meta'" if value.is_meta else "a fake tensor"
            raise CalibrationError(f"{where} is {found}, which holds no numbers; yield real data.")
        if value.layout != torch.strided:
            raise CalibrationError(f"{where} is sparse ({value.layout}); yield its `to_dense()`.")
        if not _fits(spec.shape, value.shape):
            raise CalibrationError(
                f"{where} has shape {list(value.shape)}, expected {_shown(spec.shape)}; yield batches of the exported "
                "size (DataLoader: drop_last=True) or export with a dynamic dimension."
            )
        if value.dtype != spec.dtype:
            raise CalibrationError(
                f"{where} has dtype {value.dtype}, expected {spec.dtype}; convert it with `.to({spec.dtype})`."
            )


def nonfinite_input(named: Mapping[str, Any]) -> str | None:
    """Returns the name of the first argument that holds a NaN or an infinity, or None."""
    for name, value in named.items():
        for tensor in _tensors(value):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return name
    return None


def sample_count(named: Mapping[str, Any]) -> int:
    """Returns the size of the first dimension of the first tensor argument (1 for a scalar)."""
    for value in named.values():
        for tensor in _tensors(value):
            return int(tensor.shape[0]) if tensor.dim() else 1
    return 0


def batch_digest(batch: Any) -> str:
    """Returns a text that differs where the tensors of two batches do."""
    return digest(_tensors(batch))


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a text that differs where two sequences of tensors do, in a value, a shape or a dtype."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _fits(expected: Sequence[int | None], found: Sequence[int]) -> bool:
    return len(expected) == len(found) and all(e is None or e == f for e, f in zip(expected, found, strict=True))


def _shown(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _moved(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        moved = [_moved(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
