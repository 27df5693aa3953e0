"""XNNPACK's 8-bit kernels, as the ExecuTorch runtime runs them.

Levels hold for the runtime in the executorch wheel on x86 (AVX512, AVX2); other processors have other
microkernels, which round in the same places but need not agree in ties. Facts are from XNNPACK's source
(github.com/google/XNNPACK, the files named at each kernel), each confirmed against the runtime.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from quantplug.core.graph.facts import operands
from quantplug.core.specs.levels import Level
from quantplug.lowering.emulation.emulate import KernelSet, Prepared
from quantplug.lowering.emulation.numerics import Numerics
from quantplug.lowering.emulation.rows import (
    Row,
    clamps,
    means,
    movements,
    multiplications,
    products,
    quantizations,
    slopes,
    sums,
    tables,
    through_float,
)
from quantplug.lowering.emulation.run_time import run_time_products
from quantplug.lowering.rewrites.control import submodels_are_inlined
from quantplug.lowering.spelling import spell_plainly
from quantplug.lowering.xnnpack.legalize import legalize
from quantplug.lowering.xnnpack.run_time import as_kernels_choose

_NUMERICS = Numerics()


def _legalized(module: fx.GraphModule, example_inputs: tuple[Any, ...]) -> Prepared:
    submodels_are_inlined(module)
    spell_plainly(module.graph)
    as_kernels_choose(module)
    return Prepared(module, legalize(module).floats)


def _as_declared(node: fx.Node) -> Callable[[Tensor], Tensor]:
    """Returns an operator with its literal operands, of one tensor."""
    given, target = operands(node), node.target
    return lambda x: target(**{**given, "self": x})  # type: ignore[operator]


def _rounded_once(node: fx.Node) -> Callable[[Tensor], Tensor]:
    """Returns an operator computed in float64: what a C library's float32 function rounds to."""
    run = _as_declared(node)
    return lambda x: run(x.to(torch.float64)).to(torch.float32)


def _hardswish(node: fx.Node) -> Callable[[Tensor], Tensor]:
    return lambda x: (x / 6) * (x + 3).clamp(0, 6)


def _gelu(node: fx.Node) -> Callable[[Tensor], Tensor]:
    # There is one kernel for both forms, and it computes the exact one.
    return lambda x: F.gelu(x.to(torch.float64)).to(torch.float32)


XNNPACK = KernelSet(
    name="xnnpack",
    rows=(
        Row("convolution", products(_NUMERICS, "conv1d", "conv2d")),
        Row("transposed convolution", products(_NUMERICS, "conv_transpose2d.input")),
        Row("linear", products(_NUMERICS, "linear")),
        Row("linear, scales of run time", run_time_products("linear"), Level.APPROXIMATE),
        Row("convolution, scales of run time", run_time_products("conv2d"), Level.APPROXIMATE),
        Row("add", sums("add", 1)),
        Row("sub", sums("sub", -1)),
        Row("mul", multiplications(_NUMERICS)),
        Row("maximum, minimum, div", through_float("maximum", "minimum", "div.Tensor", "div_.Tensor")),
        Row("leaky_relu", slopes()),
        Row("clamp", clamps()),
        Row("hardswish", tables(_hardswish, "hardswish")),
        Row("gelu", tables(_gelu, "gelu")),
        Row("sigmoid, tanh", tables(_rounded_once, "sigmoid", "tanh")),
        Row("elu, exp, log, sin, cos", tables(_rounded_once, "elu", "exp", "log", "sin", "cos")),
        Row(
            "abs, neg, floor, ceil, square, sqrt", tables(_as_declared, "abs", "neg", "floor", "ceil", "square", "sqrt")
        ),
        Row("rsqrt", tables(_as_declared, "rsqrt")),
        Row("mean", means()),
        Row("data movement, max_pool2d", movements()),
    ),
    conversions=(Row("quantize", quantizations()),),
    prepare=_legalized,
)
