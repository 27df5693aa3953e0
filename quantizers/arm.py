"""What TOSA's integer profile expresses, and Arm's Ethos-U runs, as declarations.

Activations are int8, or int16 around zero; weights symmetric int8 by output channel; biases int32; functions tables.
"""

from functools import partial

import torch

from quantplug.annotators import constraints
from quantplug.annotators.activation import clamps, own_range
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.matmul import matmul
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import config_for
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.graph.operators import CLAMPS, IDENTITIES, MOVES, PADS, REPEATS
from quantplug.core.named import named
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.core.specs.levels import Level
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

_BYTE = DTypeWithConstraints(torch.int8, scale_min_lower_bound=2**-16)
_WIDE = DTypeWithConstraints(  # a scale of 2**-12 would leave numbers within 1 an eighth of the integers
    torch.int16, -32767, scale_min_lower_bound=2**-24, zero_point_exact_match=0, qschemes=(torch.per_tensor_symmetric,)
)
_WEIGHT = DTypeWithConstraints(torch.int8, -127, qschemes=(torch.per_channel_symmetric, torch.per_tensor_symmetric))
_INT8 = DTypeConfig("int8", input=_BYTE, output=_BYTE, weight=_WEIGHT, bias=torch.int32)
_INT16 = DTypeConfig("int16_activations", input=_WIDE, output=_WIDE, weight=_WEIGHT, bias=torch.int32)

_REWRITES = (
    *("dimensions:sample_is_batch", "movement:circular_padding_is_joined"),
    *("folding:computed_weights_are_folded", "products:products_are_linear"),
    *("constants:numbers_are_constants", "attention:attention_is_products", "norms:norms_are_rows"),
    *("means:means_are_poolings", "softmax:softmax_is_steps", "products:products_are_batches"),
)
_MOVES = (*(name for name in MOVES if name != "roll"), *REPEATS, *IDENTITIES, *PADS)
_CURVES = ("sigmoid", "tanh", "silu", "gelu", "hardswish", "hardsigmoid", "leaky_relu", "elu")

_ROWS = (
    convolution(dims=(1, 2)),
    transposed_convolution(dims=(2,)).where(
        constraints.images_with_batch, constraints.one_group_or_scale, constraints.undilated
    ),
    linear(),
    matmul("matmul", "bmm").where(constraints.activations_if_wide),
    *(binary(name, tuple(CLAMPS)) for name in ("add", "sub", "mul")),
    *(binary(name, ()) for name in ("maximum", "minimum")),
    concatenation("cat").within(Level.EXACT),
    pooling("max_pool2d").where(constraints.images_with_batch).within(Level.EXACT),
    pooling("amax", "amin").within(Level.EXACT),
    pooling("sum.dim_IntList", own_output=True),
    pooling("avg_pool2d").where(constraints.images_with_batch, constraints.plain_windows),
    own_range(*_CURVES, "exp", "log", "rsqrt", "reciprocal").within(Level.APPROXIMATE),  # between entries of tables
    clamps(*CLAMPS).within(Level.EXACT),
    movement(_MOVES).within(Level.EXACT),
)

ARM = Backend(
    name="arm",
    summary="ExecuTorch programs on Arm Ethos-U, and TOSA graphs (needs the extra 'arm')",
    annotators=tuple(
        row.where(constraints.in_integers((torch.int8, torch.int16)), constraints.around_zero_if_wide) for row in _ROWS
    ),
    configs={config.name: partial(config_for, config) for config in (_INT8, _INT16)},
    aliases={"16a8w": "int16_activations"},
    transforms=tuple(named(f"quantplug.lowering.rewrites.{rewrite}") for rewrite in _REWRITES),
    lowering="quantplug.lowering.arm:lower",
    kernels="tosa",
    weight_bits=8,
)


class ArmQuantizer(BackendQuantizer):
    """Quantizes for Arm's NPUs Ethos-U55, U65 and U85, by TOSA graphs; the extra `arm` lowers."""

    backend = ARM
