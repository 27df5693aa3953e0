"""Memory that was freed goes back to the system.

Before: objects that nobody refers to any more. After: their memory is no longer counted as this process's.
"""

import ctypes
import gc
import sys


def give_back() -> None:
    """Collects what is free; glibc keeps it, in pieces between others, until it is asked."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
