"""TensorRT itself, where it is installed: the one place that imports it.

Before: a program's file. After: an engine for this machine's GPU, and what TensorRT says of each of its layers.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quantplug.core.errors import LoweringError, first_line
from quantplug.core.files.whole import require_writable, write_content

if TYPE_CHECKING:
    from quantplug.lowering.onnx.tensorrt import TensorRTProgram


@dataclass(frozen=True)
class EngineLayer:
    """A layer of an engine, as TensorRT's inspector tells it.

    Attributes:
        name: of the layer, in which the names of the nodes of ONNX stand that it carries out.
        kind: what TensorRT calls it, such as "CaskConvolution".
        reads: the formats of its inputs, such as "Int8".
        writes: those of its outputs.
    """

    name: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def is_int8(self) -> bool:
        """Tells whether it reads integers; one that writes none ends the integers."""
        return any("int8" in each.lower() for each in self.reads)


Sizes: TypeAlias = Mapping[str, tuple[int, ...]]


def build(
    program: "TensorRTProgram", path: str | Path | None, smallest: Sizes | None, largest: Sizes | None
) -> tuple[EngineLayer, ...]:
    """Builds an engine of a program's file and returns its layers.

    Args:
        program: the program.
        path: where to write the engine, None for nowhere.
        smallest: the sizes of the smallest tensors by the names of the file's inputs; None where no size is open.
        largest: those of the largest.

    Raises:
        LoweringError: TensorRT is not installed, finds no GPU, or does not take the file; or a size is open and not
            given.
        ArtefactError: the engine cannot be written.
    """
    if path is not None:
        require_writable(Path(path))
    tensorrt = _tensorrt()
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    try:
        builder = tensorrt.Builder(logger)
    except Exception as error:
        raise LoweringError(
            f"TensorRT does not start ({first_line(error)}); build where it finds a GPU of NVIDIA and its driver."
        ) from error
    plan = _plan(tensorrt, logger, builder, program, (smallest, largest))
    if path is not None:
        write_content(Path(path), plan)
    return _layers(tensorrt, logger, plan)


def _tensorrt() -> Any:
    try:
        return import_module("tensorrt")
    except ImportError as error:
        raise LoweringError(
            f"An engine is built by TensorRT, which is not installed ({first_line(error)}); run pip install tensorrt "
            "on a machine with a GPU of NVIDIA, or give TensorRT the saved file there."
        ) from error


def _plan(
    tensorrt: Any, logger: Any, builder: Any, program: "TensorRTProgram", ends: tuple[Sizes | None, Sizes | None]
) -> bytes:
    # Strongly typed: each layer computes in the dtype that the file says ("Explicit Quantization").
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    with tempfile.TemporaryDirectory() as folder:
        path = program.save(Path(folder) / "model.onnx")
        if not parser.parse_from_file(str(path)):
            said = parser.get_error(0).desc() if parser.num_errors else "it gives no reason"
            raise LoweringError(f"TensorRT does not take the file ({said}); report the model.")
    config = builder.create_builder_config()
    config.profiling_verbosity = tensorrt.ProfilingVerbosity.DETAILED
    _tell_sizes(builder, network, config, ends)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise LoweringError(
            "TensorRT builds no engine of the file and says why on the error stream; keep the layer float that it "
            "names."
        )
    return bytes(plan)


def _tell_sizes(builder: Any, network: Any, config: Any, ends: tuple[Sizes | None, Sizes | None]) -> None:
    """Tells TensorRT between which sizes its engine is to work; it is the fastest with the largest."""
    given = [network.get_input(index) for index in range(network.num_inputs)]
    opened = [each for each in given if -1 in tuple(each.shape)]
    if not opened:
        return
    smallest, largest = ends
    if smallest is None or largest is None:
        raise LoweringError(
            f"Input '{opened[0].name}' has open sizes {tuple(opened[0].shape)}, and an engine is built for sizes "
            "between two ends; give inputs of the smallest and of the largest sizes."
        )
    profile = builder.create_optimization_profile()
    for each in opened:
        profile.set_shape(each.name, smallest[each.name], largest[each.name], largest[each.name])
    config.add_optimization_profile(profile)


def _layers(tensorrt: Any, logger: Any, plan: bytes) -> tuple[EngineLayer, ...]:
    engine = tensorrt.Runtime(logger).deserialize_cuda_engine(plan)
    inspector = engine.create_engine_inspector()
    told = json.loads(inspector.get_engine_information(tensorrt.LayerInformationFormat.JSON))
    return tuple(map(_layer, told["Layers"]))


def _layer(told: dict[str, Any]) -> EngineLayer:
    ends = (tuple(str(port.get("Format/Datatype", "")) for port in told.get(end, ())) for end in ("Inputs", "Outputs"))
    return EngineLayer(told["Name"], str(told.get("LayerType", "")), *ends)
