"""What quantized values are stored in, and the values that it holds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

STORAGE_DTYPES: Mapping[torch.dtype, torch.dtype] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.uint16: torch.uint16,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.float8_e5m2: torch.float8_e5m2,
    torch.float8_e4m3fn: torch.float8_e4m3fn,
}
HALF_DTYPES = (torch.float16, torch.bfloat16)


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Returns the least and the greatest quantized value that a storage dtype can hold."""
    stored = STORAGE_DTYPES.get(dtype, dtype)
    info = torch.finfo(stored) if stored.is_floating_point else torch.iinfo(stored)
    return int(info.min), int(info.max)


def stored_range(found: Any) -> tuple[int, int]:
    """Returns the least and the greatest stored number of a spec or an observer, its dtype's where it names none."""
    least, greatest = dtype_range(found.dtype)
    low, high = getattr(found, "quant_min", None), getattr(found, "quant_max", None)
    return least if low is None else int(low), greatest if high is None else int(high)


def overflows(value: Tensor, stored: Tensor) -> bool:
    """Tells whether a tensor has finite numbers beyond the range of the dtype that it was cast to."""
    return bool(stored.isinf().sum() > value.isinf().sum())
