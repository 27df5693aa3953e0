"""Tensors in files without a name, which the system reads when they are needed and forgets in between.

Before: values that stay for long and are read seldom, such as the weights of a checkpoint. After: the same values in a
mapped file, whose pages can be let go. The file is gone with the tensor, whatever becomes of the process.
"""

import os
import tempfile
from typing import Any

import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError
from quantplug.core.peers.linux import IS_HERE, let_go


def in_scratch(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor of the same values in a file of its own in the folder of temporary files, on Linux.

    Args:
        values: they may be a file's too, whose pages are let go.
        dtype: that the values are converted to; by default theirs.

    Raises:
        ArtefactError: the file has no room.
    """
    dtype = dtype or values.dtype
    if not IS_HERE or not values.numel():
        return values.to(dtype)
    size = values.numel() * dtype.itemsize
    try:
        with tempfile.NamedTemporaryFile(prefix="quantplug-") as file:
            # Where a disk is full, a write to a mapped file would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            storage: Any = torch.UntypedStorage.from_file(file.name, True, size)
    except OSError as error:
        raise ArtefactError(
            f"The folder of temporary files '{tempfile.gettempdir()}' has no room for weights of {size / 1e6:.1f} MB "
            f"({error.strerror or error}); make room there, or set TMPDIR to another folder."
        ) from error
    found = torch.empty(0, dtype=dtype).set_(storage).reshape(values.shape)
    found.copy_(values)
    let_go(values)
    let_go(found)
    return found
