"""The x86 rows with OpenVINO's own compiler behind them, less what it computes in float.

Found by the conformance kit, with OpenVINO 2026.4 on processors with AVX512 and AMX.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.constraints import images_with_batch, whole_windows
from quantplug.annotators.matmul import matmul
from quantplug.annotators.presets import activation_spec
from quantplug.core.annotation.annotator import Annotations, Annotator, Constraint
from quantplug.core.graph.operators import PADS, operator_overloads
from quantplug.core.graph.traits import clamp_bounds
from quantplug.core.named import named
from quantplug.core.patterns.language import Match
from quantplug.core.specs.levels import Level
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.x86 import ENGINES, NO_INTEGERS, X86, readable_groups

# OpenVINO's front end reads no quantization parameters of run time.
STATIC = ("int8", "int8_per_tensor", "int8_weight_only", "int4_weight_only", "float16")


def _around_zero(annotator: Annotator) -> Annotator:
    """Returns the same annotator with operands of int8 around zero: to others OpenVINO gives a float kernel."""

    def decide(match: Match, config: QuantizationConfig) -> Annotations:
        symmetric = activation_spec(torch.int8, symmetric=True, is_qat=config.is_qat)
        return annotator.decide(match, replace(config, input_activation=symmetric))

    return replace(annotator, decide=decide)


def _no_overflow(match: Match, config: QuantizationConfig) -> str | None:
    """Holds on processors with VNNI: operands of 8 bits both overflow the sums of others."""
    from quantplug.lowering.processor import kernels_saturate  # declaring a backend imports no lowering

    return (
        "this processor has no VNNI, whose sums of products of two int8 operands overflow"
        if kernels_saturate()
        else None
    )


# Products of two activations in int8. The backend leaves them float, since OpenVINO computes a whole attention in one
# float kernel. One that wants them adds them: derive(OPENVINO, "openvino_products", add=INTEGER_PRODUCTS).
INTEGER_PRODUCTS = (
    _around_zero(matmul("bmm", "matmul", activations=("softmax", "sigmoid"))).where(_no_overflow).writing_float(),
)

_PRODUCTS = (
    "OpenVINO computes a whole attention in one float kernel; a backend derived with add=INTEGER_PRODUCTS has int8 "
    "products"
)


def _layers_summand(match: Match, config: QuantizationConfig) -> str | None:
    """Holds for sums onto what an operator yields: an input is rounded and added in one float kernel."""
    given = match["residual"]
    return f"'{given.name}' is an input, which OpenVINO adds in float" if given.op == "placeholder" else None


def _both_bounds(match: Match, config: QuantizationConfig) -> str | None:
    """Holds unless a fused clamp has one bound: OpenVINO takes that for a minimum or a maximum."""
    is_open = any(None in (clamp_bounds(node) or ()) for node in match.nodes if node.target in _CLAMPS)
    return "its clamp has one bound, which OpenVINO applies in float" if is_open else None


class _Block(nn.Module):
    """A sum onto what a layer yields, in the kernel of the next."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        found: Tensor = self.activation(self.norm(self.second(x)) + x)
        return found


def _blocks() -> Iterator[Callable[[], tuple[nn.Module, tuple[Tensor]]]]:
    """Yields functions to blocks as they are trained and after it, with an activation and without."""

    def made(norm: type[nn.Module], activation: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor]]:
        torch.manual_seed(0)
        return _Block(norm(8), activation()).eval(), (torch.randn(2, 8, 9, 9),)

    for norm in (nn.Identity, nn.BatchNorm2d):
        for activation in (nn.Identity, nn.ReLU):
            yield partial(made, norm, activation)


_CLAMPS = operator_overloads("clamp")
_LABELS = {label for row in X86.annotators for label, _ in row.patterns}
# Whole rows that are float kernels, sums onto products of matrices and clamps on their own, and of other rows
# repetitions, rolls, pads and what a clamp with one bound is fused into.
_FLOAT_ROWS = ("linear_add", "clamp")
_FLOAT_LABELS = ("repeat", "roll", *PADS, *(n for n in sorted(_LABELS) if n.endswith(("_clamp_min", "_clamp_max"))))
_ASKED: Mapping[str, tuple[Constraint, ...]] = {
    "conv_add": (_layers_summand,),
    **dict.fromkeys(("conv", "conv3d", "linear"), (_both_bounds,)),
    "max_pool2d": (whole_windows,),
    "avg_pool2d": (images_with_batch,),
}


def _compiled(row: Annotator) -> Annotator:
    """Returns a row of x86 as OpenVINO runs it: it rounds what it scales, and some clamped volumes by three steps.

    It multiplies by weights in groups of any size, with any number of output channels.
    """
    row = replace(row, constraints=tuple(found for found in row.constraints if found is not readable_groups))
    rounded = Level.ONE_STEP if row.level is Level.EXACT else row.level
    level = Level.APPROXIMATE if row.name == "conv3d" else rounded
    return row.where(*_ASKED.get(row.name, ())).within(level)


_ROWS = tuple(map(_compiled, X86.annotators))

OPENVINO = derive(
    replace(X86, annotators=tuple(row.shown_by(*_blocks()) if row.name == "conv_add" else row for row in _ROWS)),
    "openvino",
    remove=(*_FLOAT_ROWS, *_FLOAT_LABELS),
    summary="x86 through OpenVINO's compiler (needs the extra 'openvino')",
    configs={name: X86.configs[name] for name in STATIC},
    lowering="quantplug.lowering.openvino:lower",
    engines=ENGINES,
    weight_bits=named("quantplug.lowering.openvino.four_bits:stored_bits"),
    without={**dict.fromkeys(("bmm", "matmul", "scaled_dot_product_attention"), _PRODUCTS), **NO_INTEGERS},
)


class OpenVINOQuantizer(BackendQuantizer):
    """Quantizes for OpenVINO on x86, to the integers of `X86Quantizer`; the extra `openvino` lowers."""

    backend = OPENVINO
