"""What this processor has, and what its integer kernels get wrong, found by trying.

Without VNNI, oneDNN multiplies uint8 by int8 with `vpmaddubsw`, which adds two neighbouring products in 16 bits and
saturates: 2 x 255 x 127 becomes 32767. Activations of 7 bits (2 x 127 x 128) and weights of 7 bits (2 x 255 x 64) fit.
`ONEDNN_PAIRS` in `core/specs/limits.py` is that limit, which declarations name and lowerings hold.
"""

from functools import lru_cache

import torch

from quantplug.core.qdq.qparams import QParams


@lru_cache(maxsize=1)
def kernels_saturate() -> bool:
    """Tells whether sums of two products overflow in this process (ONEDNN_MAX_CPU_ISA counts too)."""
    if torch.cpu.get_capabilities().get("architecture") != "x86_64":
        return False
    inner = 64
    x = torch.full((1, inner), 255, dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(torch.full((16, inner), 127, dtype=torch.int8), None)
    ones, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int32)
    args = (x, 1.0, 0, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [0.0], "")
    return bool((torch.ops.onednn.qlinear_pointwise(*args) != 255 * 127 * inner).any())


def highest_integer() -> int:
    """Returns up to which uint8 the products with any int8 are right on this processor."""
    return 127 if kernels_saturate() else 255


def as_unsigned(params: QParams) -> int:
    """Returns the highest integer as uint8; the kernels take int8 as uint8 around 128."""
    return params.quant_max + (128 if params.dtype == torch.int8 else 0)


def has_amx() -> bool:
    """Tells whether this processor multiplies tiles."""
    return bool(torch.cpu.get_capabilities().get("amx_tile"))
