"""The packages that write and run ONNX, asked for where they are needed."""

from importlib import import_module
from typing import Any

from quantplug.core.errors import LoweringError
from quantplug.lowering.onnx.engines import Engine

WRITERS, RUNNERS = ("onnx", "onnxscript", "onnx_ir", "onnxruntime"), ("onnx", "onnx_ir", "onnxruntime")


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
        optimized: where to write the graph that runs, with its weights in a file beside it.
        as_written: whether what stands between DequantizeLinear and QuantizeLinear is computed in float, as the file
            says, and not in integer kernels.
    """
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what fails is raised as well
    # By default ONNX Runtime rounds the activations of layers whose weights alone are integers too, to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if as_written:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if optimized is not None:
        options.optimized_model_filepath = optimized
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
