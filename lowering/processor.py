"""What this processor has, and what its integer kernels get wrong, found by trying.

Without VNNI, oneDNN multiplies uint8 by int8 with `vpmaddubsw`, which adds two neighbouring products in 16 bits and
saturates: 2 x 255 x 127 becomes 32767. Activations of 7 bits (2 x 127 x 128) and weights of 7 bits (2 x 255 x 64) fit.
`ONEDNN_PAIRS` in `core/specs/limits.py` is that limit, which declarations name and lowerings hold.
"""

from functools import lru_cache

import torch
from torch import fx

from quantplug.core.graph.facts import constant_value, is_constant, operands
from quantplug.core.qdq.limits import largest_pair
from quantplug.core.qdq.nodes import is_dequantize, is_quantize
from quantplug.core.qdq.qparams import FULL_RANGE, QD, QParams, qparams
from quantplug.lowering.program import require_float_dtype


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


def largest_factors(graph: fx.Graph, otherwise: int = 0) -> tuple[int, int]:
    """Returns the highest integer of activations, as uint8, and the largest sum of two neighbours in weights of int8.

    Args:
        graph: a q/dq graph.
        otherwise: the highest integer of activations whose parameters are of run time or of channels.
    """
    activations, weights = [0], [0]
    for node in graph.nodes:
        given = operands(node)
        integers = constant_value(given["input"]) if is_dequantize(node) else None
        if integers is not None and integers.dtype == torch.int8:
            weights.append(largest_pair(1, integers))
        elif is_quantize(node) and not is_constant(given["input"]):
            params = qparams(node) if node.target is QD.quantize_per_tensor.default else None
            is_byte = params is not None and params.dtype in FULL_RANGE
            activations.append(otherwise if params is None else as_unsigned(params) if is_byte else 0)
    return max(activations), max(weights)


def has_amx() -> bool:
    """Tells whether this processor multiplies tiles."""
    return bool(torch.cpu.get_capabilities().get("amx_tile"))


def has_bfloat16() -> bool:
    """Tells whether this processor multiplies bfloat16."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def float_dtypes(asked: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """Returns the dtypes in which products that stay float may compute: the one asked for, or those worth a try.

    Raises:
        LoweringError: neither float32 nor bfloat16 is asked for.
    """
    if asked is None:
        return (torch.float32, torch.bfloat16) if has_bfloat16() else (torch.float32,)
    require_float_dtype(asked)
    return (asked,)
