"""The packages that write and run ONNX, asked for where they are needed."""

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from quantplug.core.errors import LoweringError
from quantplug.lowering.onnx.engines import Engine
from quantplug.lowering.onnx.kernels import dequantizes_constants, runs

WRITERS, RUNNERS = ("onnx", "onnxscript", "onnx_ir", "onnxruntime"), ("onnx", "onnx_ir", "onnxruntime")
# ONNX Runtime 1.32 fuses a sum and the layer norm behind it to a kernel that takes several times as long as both.
_SLOWER = ("SkipLayerNormFusion",)
# Convolutions fused before their weights are constants keep the layout of their tensors, in which they are slow.
_TOO_EARLY = ("ConvActivationFusion", "ConvAddActivationFusion")
# A product fused with its sum, between two relus, no longer becomes MatMulNBits; one of integers does become QGemm.
_OF_SUMS, _KERNEL_OF_SUMS = "MatMulAddFusion", "QGemm"


def require(names: tuple[str, ...], engine: Engine) -> None:
    """Makes sure that packages are installed.

    Args:
        names: of the packages.
        engine: what the file is for.

    Raises:
        LoweringError: one is not.
    """
    try:
        for name in names:
            import_module(name)
    except ImportError as error:
        raise LoweringError(
            f"Backend '{engine.backend}' needs the package {error.name}, which is not installed; "
            f"run pip install 'quantplug[onnx]'{engine.remedy}."
        ) from error


def session(path: str, optimized: str | None = None, *, as_written: bool = False) -> Any:
    """Returns ONNX Runtime's session of a file.

    Args:
        path: the model; weights beside it are found by its folder.
        optimized: where to write the graph that runs, with its weights in a file beside it. Constants that operators
            read in float are dequantized once then, and not at every call.
        as_written: whether what stands between DequantizeLinear and QuantizeLinear is computed in float, as the file
            says, and not in integer kernels.
    """
    if as_written or optimized is None:
        return _started(path, optimized, folds=as_written)
    found = _started(path, optimized)
    return _folded(path, optimized) if dequantizes_constants(Path(optimized)) else found


def _folded(path: str, optimized: str) -> Any:
    """Starts from the graph in which integer kernels are chosen: what is dequantized there is for operators in float.

    ONNX Runtime computes such constants when it starts only where it is to choose no integer kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        chosen = str(Path(folder) / "chosen.onnx")
        of_sums = () if runs(Path(optimized), _KERNEL_OF_SUMS) else (_OF_SUMS,)
        _started(path, chosen, (*_SLOWER, *_TOO_EARLY, *of_sums))
        return _started(chosen, optimized, folds=True)


def _started(path: str, optimized: str | None, without: tuple[str, ...] = _SLOWER, *, folds: bool = False) -> Any:
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what fails is raised as well
    # By default ONNX Runtime rounds the activations of layers whose weights alone are integers too, to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(without))
    if folds:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if optimized is not None:
        options.optimized_model_filepath = optimized
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
