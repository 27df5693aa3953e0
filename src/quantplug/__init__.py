"""A PT2E Quantizer plugin framework: a backend declares what its kernels can run.

    import quantplug
    artefact = quantplug.quantize(model, (x,), backend="xnnpack", calibration=loader)
    artefact(x); artefact.save("model.pte"); print(artefact.report)

or step by step, with torchao's signatures:

    prepared = quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantplug.get_quantizer("x86"))
    quantplug.calibrate(prepared, loader)
    converted = quantplug.convert_pt2e(prepared)
    print(quantplug.explain(converted))

Names are imported when they are first used: torch, torchao and the runtimes are heavy, and the command
line answers `--help` without them.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import QuantizationConfig as QuantizationConfig

    from quantplug.annotators.presets import get_symmetric_quantization_config as get_symmetric_quantization_config
    from quantplug.annotators.qspecs import get_bias_qspec as get_bias_qspec
    from quantplug.annotators.qspecs import get_input_act_qspec as get_input_act_qspec
    from quantplug.annotators.qspecs import get_output_act_qspec as get_output_act_qspec
    from quantplug.annotators.qspecs import get_weight_qspec as get_weight_qspec
    from quantplug.core.bias_correction import correct_biases as correct_biases
    from quantplug.core.calibrate import calibrate as calibrate
    from quantplug.core.convert import convert_pt2e as convert_pt2e
    from quantplug.core.errors import QuantplugError as QuantplugError
    from quantplug.core.prepare import prepare_pt2e as prepare_pt2e
    from quantplug.core.prepare import prepare_qat_pt2e as prepare_qat_pt2e
    from quantplug.core.reference import is_reference_quantized as is_reference_quantized
    from quantplug.core.report import Report as Report
    from quantplug.core.report import explain as explain
    from quantplug.flow import Artefact as Artefact
    from quantplug.flow import quantize as quantize
    from quantplug.quantizers.backend import Backend as Backend
    from quantplug.quantizers.backend import derive as derive
    from quantplug.quantizers.backend import union as union
    from quantplug.quantizers.composable import ComposableQuantizer as ComposableQuantizer
    from quantplug.quantizers.cortex_m import CortexMQuantizer as CortexMQuantizer
    from quantplug.quantizers.embedding import EmbeddingQuantizer as EmbeddingQuantizer
    from quantplug.quantizers.importer import from_backend_config as from_backend_config
    from quantplug.quantizers.importer import from_qconfig_mapping as from_qconfig_mapping
    from quantplug.quantizers.quantizer import BackendQuantizer as BackendQuantizer
    from quantplug.quantizers.region import Region as Region
    from quantplug.quantizers.registry import backends as backends
    from quantplug.quantizers.registry import capabilities as capabilities
    from quantplug.quantizers.registry import get_quantizer as get_quantizer
    from quantplug.quantizers.tensorrt import TensorRTQuantizer as TensorRTQuantizer
    from quantplug.quantizers.x86 import X86Quantizer as X86Quantizer
    from quantplug.quantizers.x86_config import get_x86_quantization_config as get_x86_quantization_config
    from quantplug.quantizers.xnnpack import XNNPACKQuantizer as XNNPACKQuantizer

__version__ = version("quantplug")

_HOME = {
    "Artefact": "quantplug.flow",
    "Backend": "quantplug.quantizers.backend",
    "BackendQuantizer": "quantplug.quantizers.quantizer",
    "ComposableQuantizer": "quantplug.quantizers.composable",
    "CortexMQuantizer": "quantplug.quantizers.cortex_m",
    "EmbeddingQuantizer": "quantplug.quantizers.embedding",
    "QuantizationConfig": "torchao.quantization.pt2e.quantizer",
    "QuantplugError": "quantplug.core.errors",
    "Region": "quantplug.quantizers.region",
    "Report": "quantplug.core.report",
    "TensorRTQuantizer": "quantplug.quantizers.tensorrt",
    "X86Quantizer": "quantplug.quantizers.x86",
    "XNNPACKQuantizer": "quantplug.quantizers.xnnpack",
    "backends": "quantplug.quantizers.registry",
    "calibrate": "quantplug.core.calibrate",
    "capabilities": "quantplug.quantizers.registry",
    "convert_pt2e": "quantplug.core.convert",
    "correct_biases": "quantplug.core.bias_correction",
    "derive": "quantplug.quantizers.backend",
    "explain": "quantplug.core.report",
    "from_backend_config": "quantplug.quantizers.importer",
    "from_qconfig_mapping": "quantplug.quantizers.importer",
    "get_bias_qspec": "quantplug.annotators.qspecs",
    "get_input_act_qspec": "quantplug.annotators.qspecs",
    "get_output_act_qspec": "quantplug.annotators.qspecs",
    "get_quantizer": "quantplug.quantizers.registry",
    "get_symmetric_quantization_config": "quantplug.annotators.presets",
    "get_weight_qspec": "quantplug.annotators.qspecs",
    "get_x86_quantization_config": "quantplug.quantizers.x86_config",
    "is_reference_quantized": "quantplug.core.reference",
    "prepare_pt2e": "quantplug.core.prepare",
    "prepare_qat_pt2e": "quantplug.core.prepare",
    "quantize": "quantplug.flow",
    "union": "quantplug.quantizers.backend",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quantplug' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
