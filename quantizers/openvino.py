"""The x86 rows with OpenVINO's own compiler behind them instead of torch's oneDNN operators."""

from dataclasses import replace

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.annotators.matmul import matmul
from quantplug.annotators.presets import activation_spec
from quantplug.core.annotation.annotator import Annotations, Annotator
from quantplug.core.patterns.language import Match
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.x86 import NO_INTEGERS, X86

# OpenVINO's front end reads no quantization parameters of run time.
STATIC = ("int8", "int8_per_tensor", "int8_weight_only", "float16")


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

OPENVINO = derive(
    X86,
    "openvino",
    summary="x86 through OpenVINO's compiler (needs the extra 'openvino')",
    configs={name: X86.configs[name] for name in STATIC},
    lowering="quantplug.lowering.openvino:lower",
    weight_bits=8,
    without={**dict.fromkeys(("bmm", "matmul", "scaled_dot_product_attention"), _PRODUCTS), **NO_INTEGERS},
)


class OpenVINOQuantizer(BackendQuantizer):
    """Quantizes for OpenVINO on x86."""

    backend = OPENVINO
