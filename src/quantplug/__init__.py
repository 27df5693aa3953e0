"""A PT2E Quantizer plugin framework: a backend declares what its kernels can run.

    import quantplug
    artefact = quantplug.quantize(model, (x,), backend="xnnpack", calibration=loader)
    artefact(x); artefact.save("model.pte"); print(artefact.report)

or step by step, with torchao's signatures:

    prepared = quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantplug.get_quantizer("x86"))
    quantplug.calibrate(prepared, loader)
    converted = quantplug.convert_pt2e(prepared)
    print(quantplug.explain(converted))

Whoever declares a backend finds the rest in `quantplug.plugin`. These two are the public modules.

Names are imported when they are first used: torch, torchao and the runtimes are heavy, and the command
line answers `--help` without them.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import QuantizationConfig as QuantizationConfig

    from quantplug.algorithms.equalize import Equalize as Equalize
    from quantplug.algorithms.gptq import GPTQ as GPTQ
    from quantplug.algorithms.recipe import CorrectBiases as CorrectBiases
    from quantplug.algorithms.rotate import Rotate as Rotate
    from quantplug.algorithms.sensitivity import sensitivity as sensitivity
    from quantplug.algorithms.smooth import Smooth as Smooth
    from quantplug.algorithms.train_scales import TrainScales as TrainScales
    from quantplug.annotators.presets import get_symmetric_quantization_config as get_symmetric_quantization_config
    from quantplug.annotators.qspecs import get_bias_qspec as get_bias_qspec
    from quantplug.annotators.qspecs import get_input_act_qspec as get_input_act_qspec
    from quantplug.annotators.qspecs import get_output_act_qspec as get_output_act_qspec
    from quantplug.annotators.qspecs import get_weight_qspec as get_weight_qspec
    from quantplug.core.annotation.annotator import Annotator as _Annotator
    from quantplug.core.annotation.plan import Plan as Plan
    from quantplug.core.annotation.plan import plan_of as plan_of
    from quantplug.core.calibration.bias_correction import correct_biases as correct_biases
    from quantplug.core.calibration.calibrate import calibrate as calibrate
    from quantplug.core.calibration.coverage import coverage as coverage
    from quantplug.core.calibration.coverage import coverage_table as coverage_table
    from quantplug.core.errors import AnnotationError as AnnotationError
    from quantplug.core.errors import ArtefactError as ArtefactError
    from quantplug.core.errors import CalibrationError as CalibrationError
    from quantplug.core.errors import ConfigError as ConfigError
    from quantplug.core.errors import ConvertError as ConvertError
    from quantplug.core.errors import LoweringError as LoweringError
    from quantplug.core.errors import ModelError as ModelError
    from quantplug.core.errors import PatternError as PatternError
    from quantplug.core.errors import QuantplugError as QuantplugError
    from quantplug.core.errors import QuantplugWarning as QuantplugWarning
    from quantplug.core.errors import TrialError as TrialError
    from quantplug.core.observers import observer as observer
    from quantplug.core.pt2e.convert import convert_pt2e as convert_pt2e
    from quantplug.core.pt2e.prepare import prepare_pt2e as prepare_pt2e
    from quantplug.core.pt2e.prepare import prepare_qat_pt2e as prepare_qat_pt2e
    from quantplug.core.qdq.format import is_reference_quantized as is_reference_quantized
    from quantplug.core.qdq.integer_io import boundary_qparams as boundary_qparams
    from quantplug.core.qdq.integer_io import quantized_inputs as quantized_inputs
    from quantplug.core.report.boundaries import measure_boundaries as measure_boundaries
    from quantplug.core.report.compare import compare_layers as compare_layers
    from quantplug.core.report.explain import Report as Report
    from quantplug.core.report.explain import explain as explain
    from quantplug.core.specs.levels import sqnr as sqnr
    from quantplug.core.specs.written import register_for_plans as register_for_plans
    from quantplug.evaluation import Evaluation as Evaluation
    from quantplug.evaluation import evaluate as evaluate
    from quantplug.flow import Artefact as Artefact
    from quantplug.flow import quantize as quantize
    from quantplug.language.artefact import LanguageArtefact as LanguageArtefact
    from quantplug.language.artefact import load_language_model as load_language_model
    from quantplug.language.checkpoint import load_checkpoint as load_checkpoint
    from quantplug.language.checkpoint import load_tokenizer as load_tokenizer
    from quantplug.language.flow import quantize_language_model as quantize_language_model
    from quantplug.lowering.arm import ArmProgram as ArmProgram
    from quantplug.lowering.emulation import emulate as emulate
    from quantplug.lowering.joined import JoinedProgram as JoinedProgram
    from quantplug.lowering.onnx import ONNXProgram as ONNXProgram
    from quantplug.lowering.onnx.tensorrt import TensorRTProgram as TensorRTProgram
    from quantplug.lowering.openvino import OpenVINOProgram as OpenVINOProgram
    from quantplug.lowering.x86 import X86Package as X86Package
    from quantplug.lowering.x86 import X86Program as X86Program
    from quantplug.quantizers.arm import ArmQuantizer as ArmQuantizer
    from quantplug.quantizers.composition.composable import ComposableQuantizer as ComposableQuantizer
    from quantplug.quantizers.composition.region import Region as Region
    from quantplug.quantizers.cortex_m import CortexMQuantizer as CortexMQuantizer
    from quantplug.quantizers.embedding import EmbeddingQuantizer as EmbeddingQuantizer
    from quantplug.quantizers.framework.backend import Backend as Backend
    from quantplug.quantizers.framework.derived import derive as derive
    from quantplug.quantizers.framework.derived import union as union
    from quantplug.quantizers.framework.quantizer import BackendQuantizer as BackendQuantizer
    from quantplug.quantizers.framework.registry import backends as backends
    from quantplug.quantizers.framework.registry import capabilities as capabilities
    from quantplug.quantizers.framework.registry import get_quantizer as get_quantizer
    from quantplug.quantizers.importer import from_backend_config as from_backend_config
    from quantplug.quantizers.importer import from_qconfig_mapping as from_qconfig_mapping
    from quantplug.quantizers.importer import import_backend_config as import_backend_config
    from quantplug.quantizers.onnxruntime import ONNXRuntimeQuantizer as ONNXRuntimeQuantizer
    from quantplug.quantizers.openvino import OpenVINOQuantizer as OpenVINOQuantizer
    from quantplug.quantizers.tensorrt import TensorRTQuantizer as TensorRTQuantizer
    from quantplug.quantizers.x86 import X86Quantizer as X86Quantizer
    from quantplug.quantizers.x86_config import get_x86_quantization_config as get_x86_quantization_config
    from quantplug.quantizers.xnnpack import XNNPACKQuantizer as XNNPACKQuantizer
    from quantplug.trials import Job as Job
    from quantplug.trials import run_trial as run_trial
    from quantplug.tuning import tune as tune
    from quantplug.xray.flow import inspect as inspect
    from quantplug.xray.result import Inspection as Inspection

    OPENVINO_INTEGER_PRODUCTS: tuple[_Annotator, ...]
    XNNPACK_INTEGER_STATES: tuple[_Annotator, ...]
    XNNPACK_WIDE_RANGES: tuple[_Annotator, ...]

    __version__: str

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "core")):
    raise ImportError(
        f"The package in '{os.path.dirname(__file__)}' lacks its rooms, since git made text files of the symbolic "
        "links of the checkout that it is in or was built from; run `git config core.symlinks true` and `git checkout "
        "-- src/quantplug` there (on Windows in developer mode), or install a wheel."
    )

# Public name -> the module that has it, and its name there where that is another.
_HOME = {
    "AnnotationError": "quantplug.core.errors",
    "ArmProgram": "quantplug.lowering.arm",
    "ArmQuantizer": "quantplug.quantizers.arm",
    "Artefact": "quantplug.flow",
    "ArtefactError": "quantplug.core.errors",
    "Backend": "quantplug.quantizers.framework.backend",
    "BackendQuantizer": "quantplug.quantizers.framework.quantizer",
    "CalibrationError": "quantplug.core.errors",
    "ComposableQuantizer": "quantplug.quantizers.composition.composable",
    "ConfigError": "quantplug.core.errors",
    "ConvertError": "quantplug.core.errors",
    "CorrectBiases": "quantplug.algorithms.recipe",
    "CortexMQuantizer": "quantplug.quantizers.cortex_m",
    "EmbeddingQuantizer": "quantplug.quantizers.embedding",
    "Equalize": "quantplug.algorithms.equalize",
    "Evaluation": "quantplug.evaluation",
    "GPTQ": "quantplug.algorithms.gptq",
    "Inspection": "quantplug.xray.result",
    "Job": "quantplug.trials",
    "JoinedProgram": "quantplug.lowering.joined",
    "LanguageArtefact": "quantplug.language.artefact",
    "LoweringError": "quantplug.core.errors",
    "ModelError": "quantplug.core.errors",
    "ONNXProgram": "quantplug.lowering.onnx",
    "ONNXRuntimeQuantizer": "quantplug.quantizers.onnxruntime",
    "OPENVINO_INTEGER_PRODUCTS": "quantplug.quantizers.openvino:INTEGER_PRODUCTS",
    "OpenVINOProgram": "quantplug.lowering.openvino",
    "OpenVINOQuantizer": "quantplug.quantizers.openvino",
    "PatternError": "quantplug.core.errors",
    "Plan": "quantplug.core.annotation.plan",
    "QuantizationConfig": "torchao.quantization.pt2e.quantizer",
    "QuantplugError": "quantplug.core.errors",
    "QuantplugWarning": "quantplug.core.errors",
    "Region": "quantplug.quantizers.composition.region",
    "Report": "quantplug.core.report.explain",
    "Rotate": "quantplug.algorithms.rotate",
    "Smooth": "quantplug.algorithms.smooth",
    "TrainScales": "quantplug.algorithms.train_scales",
    "TensorRTProgram": "quantplug.lowering.onnx.tensorrt",
    "TensorRTQuantizer": "quantplug.quantizers.tensorrt",
    "TrialError": "quantplug.core.errors",
    "X86Package": "quantplug.lowering.x86",
    "X86Program": "quantplug.lowering.x86",
    "X86Quantizer": "quantplug.quantizers.x86",
    "XNNPACKQuantizer": "quantplug.quantizers.xnnpack",
    "XNNPACK_INTEGER_STATES": "quantplug.quantizers.xnnpack:INTEGER_STATES",
    "XNNPACK_WIDE_RANGES": "quantplug.quantizers.xnnpack:WIDE_RANGES",
    "backends": "quantplug.quantizers.framework.registry",
    "boundary_qparams": "quantplug.core.qdq.integer_io",
    "calibrate": "quantplug.core.calibration.calibrate",
    "capabilities": "quantplug.quantizers.framework.registry",
    "compare_layers": "quantplug.core.report.compare",
    "convert_pt2e": "quantplug.core.pt2e.convert",
    "correct_biases": "quantplug.core.calibration.bias_correction",
    "coverage": "quantplug.core.calibration.coverage",
    "coverage_table": "quantplug.core.calibration.coverage",
    "derive": "quantplug.quantizers.framework.derived",
    "emulate": "quantplug.lowering.emulation",
    "evaluate": "quantplug.evaluation",
    "explain": "quantplug.core.report.explain",
    "from_backend_config": "quantplug.quantizers.importer",
    "from_qconfig_mapping": "quantplug.quantizers.importer",
    "get_bias_qspec": "quantplug.annotators.qspecs",
    "get_input_act_qspec": "quantplug.annotators.qspecs",
    "get_output_act_qspec": "quantplug.annotators.qspecs",
    "get_quantizer": "quantplug.quantizers.framework.registry",
    "get_symmetric_quantization_config": "quantplug.annotators.presets",
    "get_weight_qspec": "quantplug.annotators.qspecs",
    "get_x86_quantization_config": "quantplug.quantizers.x86_config",
    "import_backend_config": "quantplug.quantizers.importer",
    "inspect": "quantplug.xray.flow",
    "is_reference_quantized": "quantplug.core.qdq.format",
    "load_checkpoint": "quantplug.language.checkpoint",
    "load_language_model": "quantplug.language.artefact",
    "load_tokenizer": "quantplug.language.checkpoint",
    "measure_boundaries": "quantplug.core.report.boundaries",
    "observer": "quantplug.core.observers",
    "plan_of": "quantplug.core.annotation.plan",
    "prepare_pt2e": "quantplug.core.pt2e.prepare",
    "prepare_qat_pt2e": "quantplug.core.pt2e.prepare",
    "quantize": "quantplug.flow",
    "quantize_language_model": "quantplug.language.flow",
    "quantized_inputs": "quantplug.core.qdq.integer_io",
    "register_for_plans": "quantplug.core.specs.written",
    "run_trial": "quantplug.trials",
    "sensitivity": "quantplug.algorithms.sensitivity",
    "sqnr": "quantplug.core.specs.levels",
    "tune": "quantplug.tuning",
    "union": "quantplug.quantizers.framework.derived",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # to look it up takes a third of the time in which `quantplug --help` answers
        return import_module("importlib.metadata").version("quantplug")
    if name not in _HOME:
        raise AttributeError(f"module 'quantplug' has no attribute '{name}'")
    module, _, inner = _HOME[name].partition(":")
    return getattr(import_module(module), inner or name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
