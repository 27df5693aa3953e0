"""glibc's way to return memory to the system; Python has none, and other C libraries return it by themselves.

Before: objects that nobody refers to any more. After: their memory is no longer counted as this process's.
"""

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects what nobody refers to any more, such as graphs, whose nodes refer to each other, and returns it."""
    gc.collect()
    return_free()


def return_free() -> None:
    """Returns what is free; glibc keeps pieces that lie between others until it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # musl has none
        trim(0)
