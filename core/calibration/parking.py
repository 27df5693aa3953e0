"""Values that wait: in memory up to a budget, the others in a file.

Before: values that nothing needs now, nested as pytrees; tensors among them may be views of one memory. After: the same
values, whose views are of one memory again. The file has no name, so that nothing of it is left however the process
ends.
"""

import bisect
import math
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from quantplug.core.errors import CalibrationError
from quantplug.core.peers.torch_names import pytree

# Bytes that wait in memory.
BUDGET = 2**27
# What the views of a memory begin at is a multiple of: so that elements of every size keep their places.
_ALIGNED = 16


@dataclass(frozen=True)
class _View:
    """A tensor whose memory is in the file: the index of its region, and how it looks at it."""

    region: int
    dtype: torch.dtype
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """Returns the tensor, given its region's bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.start // self.dtype.itemsize, self.size, self.stride)


@dataclass(frozen=True)
class _Region:
    start: int
    size: int
    device: torch.device


@dataclass(frozen=True)
class Parked:
    """Values that wait.

    Attributes:
        parking: where.
        leaves: of the values, views in the place of tensors that are in the file.
        structure: in which they are nested.
        size: bytes of them in memory that count.
        regions: of the file.
    """

    parking: "Parking"
    leaves: list[Any]
    structure: Any
    size: int
    regions: tuple[_Region, ...]

    def values(self) -> Any:
        """Returns the values; they keep waiting."""
        memories = [self.parking.read(region) for region in self.regions]
        leaves = [leaf.of(memories[leaf.region]) if isinstance(leaf, _View) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def taken(self) -> Any:
        """Returns the values, which wait no more."""
        found = self.values()
        self.parking.give_back(self)
        return found


class Parking:
    """A place for values that wait.

    Args:
        budget: bytes of tensors that are in memory; None for `BUDGET`.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._left = BUDGET if budget is None else budget
        self._file: IO[bytes] | None = None
        self._free: list[tuple[int, int]] = []
        self._end = 0

    def __enter__(self) -> "Parking":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()

    def parked(self, values: Any, held: Collection[int] = ()) -> Parked:
        """Lets values wait; who keeps none of them frees their memory.

        Args:
            values: any, nested as pytrees.
            held: addresses of memories that somebody else keeps; they count nothing and stay where they are.

        Raises:
            CalibrationError: the file cannot be written.
        """
        leaves, structure = pytree.tree_flatten(values)
        ranges = _ranges(leaves, held)
        size = sum(stop - start for start, stop in ranges.values())
        if size <= self._left:
            self._left -= size
            return Parked(self, leaves, structure, size, ())
        first = {_address(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and _address(leaf) in ranges}
        places = {address: place for place, address in enumerate(ranges)}
        regions = tuple(self._written(first[address], *ranges[address]) for address in ranges)
        waiting = [
            _view(leaf, places[_address(leaf)], ranges[_address(leaf)][0])
            if isinstance(leaf, Tensor) and _address(leaf) in ranges
            else leaf
            for leaf in leaves
        ]
        return Parked(self, waiting, structure, 0, regions)

    def read(self, region: _Region) -> Tensor:
        """Returns the bytes of a region."""
        memory = torch.empty(region.size, dtype=torch.uint8)
        with _told():
            file = self._opened()
            file.seek(region.start)
            file.readinto(memory.numpy().data)  # type: ignore[attr-defined]
        return memory.to(region.device)

    def give_back(self, parked: Parked) -> None:
        """Frees what values took."""
        self._left += parked.size
        for region in parked.regions:
            bisect.insort(self._free, (region.start, region.start + region.size))
        self._free = _merged(self._free)

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="quantplug-")  # noqa: SIM115 - closed by __exit__
        return self._file

    def _written(self, tensor: Tensor, start: int, stop: int) -> _Region:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
        region = _Region(self._space(stop - start), stop - start, tensor.device)
        with _told():
            file = self._opened()
            file.seek(region.start)
            file.write(memory.cpu().numpy().data)
        return region

    def _space(self, size: int) -> int:
        """Returns where so many bytes are free, the first such place."""
        for place, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[place] = (start + size, stop)
                return start
        self._end += size
        return self._end - size


@contextmanager
def _told() -> Iterator[None]:
    """Makes a sentence of what the system says about the file."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"Activations wait in a file in '{tempfile.gettempdir()}', which fails ({error.strerror or error}); free "
            "that place, or let the environment variable TMPDIR name a larger one."
        ) from error


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of the memories of tensors."""
    return {_address(tensor) for tensor in tensors if _is_plain(tensor)}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0


def _is_plain(tensor: Tensor) -> bool:
    """Tells whether a tensor is nothing but a view of a memory of bytes."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)


def _ranges(leaves: list[Any], held: Collection[int]) -> dict[int, tuple[int, int]]:
    """Returns by address which bytes of each memory tensors look at; a batch may be a view of all data."""
    found: dict[int, tuple[int, int]] = {}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    fixed = {0, *held, *(_address(leaf) for leaf in tensors if type(leaf) is not Tensor or _is_turned(leaf))}
    for leaf in tensors:
        address = _address(leaf)
        if address not in fixed:
            (start, stop), (low, high) = _bytes(leaf), found.get(address, (math.inf, 0))
            found[address] = (int(min(start, low)), int(max(stop, high)))
    return {address: (start - start % _ALIGNED, stop) for address, (start, stop) in found.items()}


def _is_turned(tensor: Tensor) -> bool:
    return _is_plain(tensor) and (tensor.is_conj() or tensor.is_neg())


def _bytes(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + int(last) + 1) * tensor.itemsize


def _view(tensor: Tensor, region: int, start: int) -> _View:
    own = int(tensor.storage_offset()) * tensor.itemsize - start
    return _View(region, tensor.dtype, max(own, 0), tuple(tensor.shape), tensor.stride())


def _merged(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in free:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return found
