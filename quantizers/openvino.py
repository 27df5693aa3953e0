"""The x86 rows with OpenVINO's own compiler behind them instead of torch's oneDNN operators."""

from quantplug.quantizers.backend import derive
from quantplug.quantizers.quantizer import BackendQuantizer
from quantplug.quantizers.x86 import X86

# OpenVINO's front end reads no quantization parameters of run time.
STATIC = ("int8", "int8_weight_only")

OPENVINO = derive(
    X86,
    "openvino",
    summary="x86 through OpenVINO's compiler (needs the extra 'openvino')",
    configs={name: X86.configs[name] for name in STATIC},
    lowering="quantplug.lowering.openvino:lower",
)


class OpenVINOQuantizer(BackendQuantizer):
    """Quantizes for OpenVINO on x86."""

    backend = OPENVINO
