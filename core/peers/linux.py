"""Linux's pages of mapped files: whose they are, and a way to let them go; torch maps files and has neither.

Before: a tensor that lies in a mapped file, such as a weight of a checkpoint. After: its pages no longer count as this
process's; the next read brings them back.
"""

import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

IS_HERE = sys.platform == "linux"
_PAGEMAP = Path("/proc/self/pagemap")
_PRESENT, _SWAPPED, _OF_A_FILE = 63, 62, 61
_DONT_NEED = 4


def let_go(tensor: Tensor) -> bool:
    """Lets the pages of a tensor go if all of them hold what a mapped file holds, and tells whether they were such.

    Memory of the process's own stays, and so does a mapped tensor of which a page was written to: Linux says of each
    page whose it is.

    Args:
        tensor: in the memory of the processor.
    """
    if not IS_HERE or tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return False
    # What the strides reach; a tensor of another layout in the same storage may lie between.
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.data_ptr() // mmap.PAGESIZE
    count = -(-(tensor.data_ptr() + reach * tensor.element_size()) // mmap.PAGESIZE) - first
    if not _are_of_a_file(first, count):
        return False
    start, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(count * mmap.PAGESIZE)
    return bool(ctypes.CDLL(None).madvise(start, length, _DONT_NEED) == 0)


def let_all_go(module: nn.Module) -> None:
    """Lets the pages of a module's parameters and buffers go that lie in mapped files."""
    for held in (*module.parameters(), *module.buffers()):
        let_go(held)


def _are_of_a_file(first: int, count: int) -> bool:
    """Tells whether some of these pages are there, and all that are there are a file's."""
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            file.seek(first * 8)
            words = torch.frombuffer(bytearray(file.read(count * 8)), dtype=torch.int64)
    except (OSError, ValueError):  # a system that does not tell
        return False
    is_there, is_swapped, is_of_a_file = ((words >> bit & 1).bool() for bit in (_PRESENT, _SWAPPED, _OF_A_FILE))
    return bool(is_there.any() and not is_swapped.any() and is_of_a_file[is_there].all())
