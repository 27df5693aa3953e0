"""What XNNPACK's int8 kernels run, as declarations.

Activations are int8 with one scale, weights symmetric int8 with one scale or one for each output channel;
those of linear may have four bits, with one scale for each output channel or for groups of input channels.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators import constraints, embedding, groupwise
from quantplug.annotators.activation import clamps, known_range, own_range
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling, resize
from quantplug.annotators.presets import (
    get_float16_quantization_config,
    get_symmetric_quantization_config,
    get_xnnpack_quantization_config,
    per_row,
)
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.graph.operators import CLAMPS, IDENTITIES, MOVES, PADS, SHUFFLES
from quantplug.core.named import NamedFunction, named
from quantplug.core.specs.levels import Level
from quantplug.core.specs.limits import XNNPACK_RATIOS as RATIOS
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

_LOWERING = "quantplug.lowering.xnnpack"

__all__ = ["INTEGER_STATES", "WIDE_RANGES", "XNNPACK", "XNNPACKQuantizer", "get_symmetric_quantization_config"]


def _limits(*names: str) -> Iterator[NamedFunction]:
    """Yields what legalization says of operators, in the q/dq graphs of others too."""
    return (named(f"{_LOWERING}.legalize:{name}") for name in names)


# Kernels that exist, of functions that 256 steps of their input or output seldom do justice: a quotient by a
# number near 0, a logarithm, a whole number that lies between two steps. A backend that wants them adds them:
# derive(XNNPACK, "xnnpack_wide", add=WIDE_RANGES).
WIDE_RANGES = (
    binary("div.Tensor", activations=()),
    own_range("exp", "log", "sqrt", "rsqrt", "square", "floor", "ceil", "sin", "cos"),
)

# There is no kernel that turns numbers around or repeats them, and what shuffles them is written as views.
_MOVES = tuple(name for name in MOVES if name not in SHUFFLES)

# All operators without weights. The backend leaves those float that carry the state of a recurrent layer. One that
# wants them in integers too adds the rows as they are: derive(XNNPACK, "xnnpack_states", add=INTEGER_STATES).
INTEGER_STATES = (
    binary("add", tuple(CLAMPS)).held_to(RATIOS["add"]).where(constraints.has_dimensions).needing_company(),
    binary("sub", tuple(CLAMPS)).held_to(RATIOS["add"]).where(constraints.has_dimensions).needing_company(),
    binary("mul", tuple(CLAMPS)).held_to(RATIOS["mul"]).where(constraints.has_dimensions).needing_company(),
    *(binary(n, activations=()).where(constraints.has_dimensions).needing_company() for n in ("maximum", "minimum")),
    concatenation("cat").needing_company().within(Level.EXACT),
    # The max-pool kernel compares integers in one scale; the mean kernel rescales.
    pooling("max_pool2d").within(Level.EXACT),
    resize().where(*_limits("resizes_by_ratios")).within(Level.APPROXIMATE),
    pooling("adaptive_avg_pool2d", "mean", own_output=True)
    .held_to(RATIOS["convert"])
    .where(constraints.whole_map, *_limits("means_of_one_size")),
    known_range("sigmoid"),
    # The kernel of tanh takes any scale, and of small numbers that of -1..1 would leave little.
    own_range("tanh", "hardswish", "gelu", "elu", "abs", "neg").needing_company(),
    own_range("leaky_relu").held_to(RATIOS["convert"]).needing_company(),
    clamps(*CLAMPS).needing_company(),
    movement((*_MOVES, "expand", *IDENTITIES, *PADS))
    .where(constraints.repeats_nothing, *_limits("reshapes_one_open_size"))
    .within(Level.EXACT),
)


def _dynamic(**options: Any) -> QuantizationConfig:
    return per_row(get_symmetric_quantization_config(True, is_dynamic=True, **options))


_INTEGERS = constraints.in_integers((torch.int8, torch.uint8))  # both are int8 there, zero points moved
_weight_only = partial(get_symmetric_quantization_config, True, is_weight_only=True)
_four_bits = {"weight_qmin": groupwise.FOUR_BITS[0], "weight_qmax": groupwise.FOUR_BITS[1]}

_ROWS = (
    convolution(dims=(1, 2))
    .held_to(RATIOS["gemm"])
    .where(groupwise.whole_bytes, groupwise.no_groups)
    .where(*_limits("yields_integers_if_static", "small_if_depthwise", "patches_if_float", "takes_run_time_scales"))
    .where(*_limits("reshapes_one_open_size", "activation_of_integers")),
    transposed_convolution(dims=(2,))
    .held_to(RATIOS["gemm"])
    .where(groupwise.whole_bytes, groupwise.no_groups, constraints.static_only, constraints.one_group_or_scale)
    .where(*_limits("yields_integers_if_static", "adds_less_than_a_step")),
    linear()
    .held_to(RATIOS["gemm"])
    .where(groupwise.whole_groups, groupwise.groups_beside_run_time, groupwise.pairs_of_channels)
    .where(*_limits("yields_integers_if_static", "activation_of_integers")),
    embedding.embedding()
    .where(embedding.half_or_groups, embedding.rows_of_groups, embedding.asked_at_each_call)
    .shown_by(embedding.table_of_groups),
    *(row.where(named("quantplug.lowering.rewrites.recurrence:outside_of_states")) for row in INTEGER_STATES),
)

XNNPACK = Backend(
    name="xnnpack",
    summary="ExecuTorch programs on XNNPACK kernels (ARM, x86, WebAssembly)",
    annotators=tuple(row.where(_INTEGERS) for row in _ROWS),
    configs={
        "int8": get_xnnpack_quantization_config,
        "int8_per_tensor": lambda **options: get_xnnpack_quantization_config(False, **options),
        "int8_dynamic": _dynamic,
        "int8_weight_only": _weight_only,
        "int4_dynamic": lambda **options: _dynamic(**{**_four_bits, **options}),
        "int4_dynamic_groups": partial(groupwise.in_groups, _dynamic),
        "int4_weight_only": lambda **options: _weight_only(**{**_four_bits, **options}),
        "int4_groups": partial(groupwise.in_groups, _weight_only),
        "int8_groups": partial(groupwise.in_groups, _weight_only, limits=groupwise.EIGHT_BITS),
        "float16": get_float16_quantization_config,
    },
    aliases={"8da4w": "int4_dynamic_groups"},  # what torchao and ExecuTorch call it
    lowering="quantplug.lowering.xnnpack:lower",
    kernels="xnnpack",
    weight_bits=groupwise.bits_beside,
    transforms=(named(f"{_LOWERING}.rewrites:rewrite_for_xnnpack"),),
    without=dict.fromkeys(("bmm", "matmul"), "XNNPACK multiplies two activations in float only"),
)


class XNNPACKQuantizer(BackendQuantizer):
    """Quantizes for XNNPACK in ExecuTorch programs (`.pte`): int8 activations per tensor, weights per channel."""

    backend = XNNPACK
