"""What oneDNN's int8 kernels run on x86, as declarations.

Activations are uint8 with one scale, weights symmetric int8 with one scale for each output channel; beside float
activations those of a linear may have four bits, with one scale for a group of input channels.
"""

from dataclasses import replace
from functools import partial

import torch

from quantplug.annotators.activation import clamps
from quantplug.annotators.constraints import (
    enough_work,
    equal_windows,
    in_integers,
    known_number,
    not_dynamic,
    padding_counts,
    unsigned_if_dynamic,
    weights_alone,
    whole_windows,
)
from quantplug.annotators.convolution import convolution
from quantplug.annotators.embedding import embedding
from quantplug.annotators.groupwise import groups_beside_floats, in_groups, no_groups, whole_groups
from quantplug.annotators.half import half_weights
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import get_float16_quantization_config
from quantplug.annotators.residual import residual
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.graph.operators import CLAMPS, IDENTITIES, JOINS, MOVES, PADS, REPEATS
from quantplug.core.named import named
from quantplug.core.specs.levels import Level
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.engines import Engine
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.x86_config import get_x86_quantization_config

__all__ = ["X86", "X86Quantizer", "get_x86_quantization_config"]

_PRODUCTS = "torch has no oneDNN operator for two int8 activations"
# Operators with weights that have no kernel of integers; half precision has them all.
NO_INTEGERS = {
    **dict.fromkeys(
        ("gru", "lstm", "rnn_tanh", "rnn_relu", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        "it has no kernel of integers; backend 'xnnpack' takes recurrent layers as linear ones",
    ),
    "einsum": "it has no kernel of integers; `F.linear` reads a weight in fewer bits",
}

# A vision transformer's patches and head gain it 1.4 dB in float, for 0.7 % of its multiplications.
SMALL_SHARE = 0.01
# Measured: from here on a convolution gains more than it takes to find the range of its input and to quantize it.
AT_RUN_TIME = (no_groups, unsigned_if_dynamic, enough_work(512))

_right_shapes = named("quantplug.lowering.x86.geometry:right_shapes")
readable_groups = named("quantplug.lowering.x86.kernels.four_bits:readable_groups")
# The kernel over volumes ends in no function: a clamp behind it is one of its integers, so those it has to write.
_VOLUMES = convolution((3,), label="conv3d").where(no_groups, not_dynamic, _right_shapes)
CLAMPED_VOLUMES = replace(
    _VOLUMES, patterns=tuple(pair for pair in _VOLUMES.patterns if pair[0] not in ("conv3d", "conv3d_bn"))
)


_INTEGERS = in_integers((torch.uint8, torch.int8))  # both are uint8 there, zero points moved
_weight_only = partial(get_x86_quantization_config, is_weight_only=True)

_ROWS = (
    residual(convolution(dims=(2,))).where(no_groups, _right_shapes).writing_float(),
    residual(linear(), in_float=True).where(no_groups),
    convolution(dims=(1, 2), activations=(*CLAMPS, "hardswish", "silu"))
    .where(*AT_RUN_TIME, _right_shapes)
    .writing_float()
    .sparing_ends(SMALL_SHARE),
    convolution((3,), (), "conv3d").where(*AT_RUN_TIME, _right_shapes).writing_float().sparing_ends(SMALL_SHARE),
    CLAMPED_VOLUMES,
    linear(activations=(*CLAMPS, "hardswish", "silu", "gelu", "leaky_relu", "tanh"))
    .where(whole_groups, groups_beside_floats, readable_groups)
    .writing_float()
    .sparing_ends(SMALL_SHARE),
    concatenation(*JOINS).writing_float().within(Level.EXACT),
    pooling("max_pool2d").within(Level.EXACT),
    # Averages of float tensors stay float: to quantize the tensor takes longer than to average it.
    pooling("avg_pool2d", own_output=True, follows=("x",)).where(whole_windows, padding_counts).writing_float(),
    pooling("adaptive_avg_pool2d", own_output=True, follows=("x",)).where(equal_windows).writing_float(),
    pooling("mean", own_output=True, follows=("x",)).where(known_number).writing_float(),
    # A table of integers is a fourth of the memory, not faster, and costs a BERT half a decibel or more.
    embedding().where(weights_alone, no_groups).within(Level.EXACT),
    clamps(*CLAMPS).within(Level.EXACT),
    movement((*MOVES, *REPEATS, *IDENTITIES, *PADS)).writing_float().within(Level.EXACT),
    *half_weights(),
)

# What runs q/dq graphs on x86, whichever quantizer made them, the preferred one first.
ENGINES = {
    "onednn": Engine("quantplug.lowering.x86:lower", halves_products_alone=True),
    "onednn_package": Engine("quantplug.lowering.x86:lower_to_package", halves_products_alone=True),
    "openvino": Engine("quantplug.lowering.openvino:lower", ("openvino",), "quantplug[openvino]"),
    "onnxruntime": Engine(
        "quantplug.lowering.onnx:lower", ("onnx", "onnx_ir", "onnxscript", "onnxruntime"), "quantplug[onnx]"
    ),
}

X86 = Backend(
    name="x86",
    summary="oneDNN kernels through torch, eager or compiled (VNNI, AMX)",
    annotators=tuple(row.where(_INTEGERS).adding_pairs(ONEDNN_PAIRS) for row in _ROWS),
    configs={
        "int8": get_x86_quantization_config,
        "int8_per_tensor": lambda **options: get_x86_quantization_config(per_channel=False, **options),
        "int8_dynamic": lambda **options: get_x86_quantization_config(is_dynamic=True, **options),
        "int8_weight_only": _weight_only,
        "int4_weight_only": partial(in_groups, _weight_only),
        "float16": get_float16_quantization_config,
    },
    lowering="quantplug.lowering.x86:lower",
    transforms=(
        named("quantplug.lowering.rewrites.folding:computed_weights_are_folded"),
        named("quantplug.lowering.rewrites.products:products_are_linear"),
        named("quantplug.lowering.rewrites.gelu:written_gelu_is_one"),
        named("quantplug.lowering.rewrites.movement:split_is_slices"),
    ),
    kernels="x86",
    weight_bits=named("quantplug.lowering.x86.kernels.four_bits:stored_bits"),
    without={**dict.fromkeys(("bmm", "matmul", "scaled_dot_product_attention"), _PRODUCTS), **NO_INTEGERS},
    engines=ENGINES,
)


class X86Quantizer(BackendQuantizer):
    """Quantizes for oneDNN's kernels in torch on x86: uint8 activations per tensor, int8 weights per channel."""

    backend = X86
