"""What this processor has, and what its integer kernels get wrong, found by trying.

Without VNNI, oneDNN multiplies uint8 by int8 with `vpmaddubsw`, which adds two products in 16 bits and
saturates: 2 x 255 x 127 becomes 32767. Up to 127 the sum always fits.
"""

from functools import lru_cache

import torch

from quantplug.lowering.qparams import QParams

WITHOUT_SATURATION = 127


@lru_cache(maxsize=1)
def kernels_saturate() -> bool:
    """Tells whether products of uint8 beyond 127 overflow in this process (ONEDNN_MAX_CPU_ISA counts too)."""
    if torch.cpu.get_capabilities().get("architecture") != "x86_64":
        return False
    inner = 64
    x = torch.full((1, inner), 255, dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(torch.full((16, inner), 127, dtype=torch.int8), None)
    ones, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int32)
    args = (x, 1.0, 0, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [0.0], "")
    return bool((torch.ops.onednn.qlinear_pointwise(*args) != 255 * 127 * inner).any())


def highest_integer() -> int:
    """Returns up to which uint8 the products of this processor are right."""
    return WITHOUT_SATURATION if kernels_saturate() else 255


def range_objection(qmax: int, remedy: str = "reduce_range=True") -> str | None:
    """Returns why integers up to `qmax` must not be multiplied on this processor, or None.

    Args:
        qmax: the highest integer, as uint8.
        remedy: options of the config that give smaller ones.
    """
    if qmax <= highest_integer():
        return None
    return (
        f"this processor has no VNNI, and its kernels saturate beyond {highest_integer()}, "
        f"where its activation reaches {qmax}; quantize with {remedy}"
    )


def saturation(params: QParams) -> str | None:
    """Returns why activations with these parameters must not be multiplied on this processor, or None."""
    if params.dtype == torch.uint8:
        return range_objection(params.qmax)
    # The kernels take int8 as uint8 around 128.
    return range_objection(params.qmax + 128, "reduce_range=True, symmetric=False")


def has_amx() -> bool:
    """Tells whether this processor multiplies tiles."""
    return bool(torch.cpu.get_capabilities().get("amx_tile"))
