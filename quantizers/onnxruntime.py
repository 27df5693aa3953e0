"""What ONNX Runtime's CPU kernels run in integers, as declarations.

Activations are uint8 with one scale (int8 in config "int8_signed", which the lowering moves to uint8), weights int8
around zero with one scale for each output channel; beside float activations those of a linear may have four bits, with
one scale for a group of input channels. Found by reading the graphs that ONNX Runtime 1.32 runs.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.activation import clamps, known_range, own_range
from quantplug.annotators.constraints import (
    in_integers,
    not_dynamic,
    one_group_or_scale,
    padding_counts,
    weights_alone,
    whole_windows,
)
from quantplug.annotators.convolution import convolution, transposed_convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.groupwise import groups_beside_floats, in_groups, no_groups, whole_groups
from quantplug.annotators.half import half_weights
from quantplug.annotators.linear import linear
from quantplug.annotators.matmul import matmul
from quantplug.annotators.pooling import pooling
from quantplug.annotators.presets import get_float16_quantization_config, int32_bias_spec
from quantplug.annotators.shape import concatenation, movement
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.graph.operators import CLAMPS, IDENTITIES, MOVES, REPEATS
from quantplug.core.named import named
from quantplug.core.specs.levels import Level
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.x86 import ENGINES, NO_INTEGERS
from quantplug.quantizers.x86_config import get_x86_quantization_config

# 435 against 95 us for 12 heads of 128 x 128, on a Xeon with AMX.
_SOFTMAX = "its kernel of integers takes several times as long as that of floats"
_REWRITES = "quantplug.lowering.rewrites"


def _static(*, is_qat: bool = False, **options: Any) -> QuantizationConfig:
    """Returns a config with biases as the kernels hold them: int32, or float in training."""
    found = get_x86_quantization_config(is_qat, **options)
    return found if is_qat else _with_integer_bias(found)


@cache
def _with_integer_bias(config: QuantizationConfig) -> QuantizationConfig:
    """Returns the very same object for equal arguments, so that configs can be compared."""
    return replace(config, bias=int32_bias_spec())


def _in_training(row: Annotator) -> tuple[Annotator, Annotator]:
    """Returns a row without batch norms, and that with them: the kernels round the float bias that training leaves."""
    parts = [tuple(pair for pair in row.patterns if ("_bn" in pair[0]) is trained) for trained in (False, True)]
    plain, trained = (replace(row, patterns=part) for part in parts)
    return plain, trained.within(Level.APPROXIMATE)


_weight_only = partial(get_x86_quantization_config, is_weight_only=True)
_INTEGERS = in_integers((torch.uint8, torch.int8))

_LINEAR = linear().where(whole_groups, groups_beside_floats)
# With a float result the kernel ends in no clamp, which would be computed in float.
_OPEN, _CLAMPED = (
    replace(_LINEAR, patterns=tuple(pair for pair in _LINEAR.patterns if (pair[0] in ("linear", "linear_bn")) is plain))
    for plain in (True, False)
)

_ROWS = (
    # A kernel of a convolution reads and writes integers: with a float result ONNX Runtime computes in float.
    *_in_training(convolution(dims=(1, 2, 3)).where(no_groups, not_dynamic)),
    transposed_convolution(dims=(1, 2, 3), activations=()).where(no_groups, weights_alone, one_group_or_scale),
    *_in_training(_CLAMPED),
    *_in_training(_OPEN.writing_float()),
    matmul("matmul", "bmm").writing_float(),
    binary("add", tuple(CLAMPS)).needing_company(),
    binary("mul", tuple(CLAMPS)).needing_company(),
    concatenation("cat").needing_company().within(Level.EXACT),
    pooling("max_pool2d").needing_company().within(Level.EXACT),
    pooling("avg_pool2d", own_output=True).where(whole_windows, padding_counts).needing_company(),
    known_range("sigmoid").needing_company(),
    own_range("leaky_relu").needing_company(),
    clamps(*CLAMPS).within(Level.EXACT),
    movement((*MOVES, *REPEATS, *IDENTITIES)).writing_float().within(Level.EXACT),
    *half_weights(),
)

ONNXRUNTIME = Backend(
    name="onnxruntime",
    summary="ONNX files on ONNX Runtime's CPU kernels (needs the extra 'onnx')",
    annotators=tuple(row.where(_INTEGERS).adding_pairs(ONEDNN_PAIRS) for row in _ROWS),
    configs={
        "int8": _static,
        "int8_per_tensor": partial(_static, per_channel=False),
        "int8_signed": partial(_static, symmetric=True),
        "int8_dynamic": partial(get_x86_quantization_config, is_dynamic=True),
        "int8_weight_only": _weight_only,
        "int4_weight_only": partial(in_groups, _weight_only),
        "float16": get_float16_quantization_config,
    },
    lowering="quantplug.lowering.onnx:lower",
    transforms=(
        named(f"{_REWRITES}.folding:computed_weights_are_folded"),
        named(f"{_REWRITES}.products:products_are_linear"),
        named(f"{_REWRITES}.attention:attention_is_products"),
        named(f"{_REWRITES}.activations:silu_is_product"),
        named(f"{_REWRITES}.movement:split_is_slices"),
        named(f"{_REWRITES}.means:means_are_poolings"),
    ),
    without={"softmax": _SOFTMAX, **NO_INTEGERS},
    engines=ENGINES,
)


class ONNXRuntimeQuantizer(BackendQuantizer):
    """Quantizes for ONNX Runtime's kernels on CPUs, for `.onnx` files; the extra `onnx` lowers."""

    backend = ONNXRUNTIME
