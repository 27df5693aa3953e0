"""A q/dq graph in OpenVINO: runs, saves itself, loads, and tells which kernels OpenVINO chose."""

import io
import json
import tempfile
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, LoweringError, first_line, first_whole, shown
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import kind_at, require_writable, write_content
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.openvino.state import Variable
from quantplug.lowering.outputs import Outputs
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature, TensorInput

_GRAPH, _WEIGHTS, _SETTINGS, _STATE = "model.xml", "model.bin", "settings.json", "state.npz"
_INTEGER = {"u8", "i8", "i4"}
_TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "boolean": torch.bool,
}
_NOT_COMPUTED = ("Const", "Input", "Output")


def runtime() -> Any:
    """Returns the `openvino` module.

    Raises:
        LoweringError: it is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise LoweringError(
            "Backend 'openvino' needs the package openvino, which is not installed; "
            "run pip install 'quantplug[openvino]', or use backend 'x86'."
        ) from error
    return openvino


# What a file may ask of OpenVINO: other options write files or load libraries.
_HARMLESS = frozenset(
    ["DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "PERFORMANCE_HINT"]
)


@dataclass(frozen=True)
class _Settings:
    """What a file says beside the model."""

    signature: dict[str, Any]
    outputs: dict[str, Any]
    options: dict[str, str | int | float | bool]
    pair: int
    variables: dict[str, int]


class OpenVINOProgram(Program):
    """A model compiled by OpenVINO for this processor.

    Attributes:
        model: the `openvino.Model`; its rounding of activations is `FakeQuantize`.
        options: properties of the CPU plugin that were asked for.
        pair: how large the sum of two products can get; beyond 16 bits the kernels need a processor with VNNI.
        variables: the buffers that the model writes; OpenVINO takes them as last inputs and returns their next values.
        compiled: the `openvino.CompiledModel`; its runtime model shows every kernel.
        ops: every compute operator of the q/dq graph with its placement.
    """

    def __init__(
        self,
        model: Any,
        signature: Signature,
        outputs: Outputs,
        options: Mapping[str, Any] | None = None,
        pair: int = 0,
        variables: Sequence[Variable] = (),
    ) -> None:
        self.model, self.pair = model, pair
        self._signature, self._outputs = signature, outputs
        self.options = dict(options or {})
        defaults = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self.compiled = runtime().compile_model(model, "CPU", {**defaults, **self.options})
        self.ops: tuple[LoweredOp, ...] = ()
        self._request = self.compiled.create_infer_request()
        self._turn = threading.Lock()  # a request that several threads use mixes their inputs up
        self.variables = tuple(variables)
        self._state: list[Tensor] = []
        self.restart()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program; takes and returns what the exported model does.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        tensors = [leaf for leaf in self._signature.flatten(inputs, keywords) if isinstance(leaf, Tensor)]
        with self._turn:
            results = self._infer([_given(tensor) for tensor in (*tensors, *self._state)])
            values = [_tensor(results[port], port) for port in self.compiled.outputs]
            self._state = [values[variable.output].clone() for variable in self.variables]
        return self._outputs.of(values)

    def _infer(self, given: list[Any]) -> Any:
        try:
            return self._request.infer(given, share_inputs=True)
        except RuntimeError as error:
            raise LoweringError(
                f"OpenVINO fails on the inputs ({first_line(error)}); pass them as exported."
            ) from error

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        self._state = [variable.begin.detach().clone() for variable in self.variables]

    def place(self, recorded: tuple[LoweredOp, ...], sources: Mapping[str, frozenset[str]]) -> None:
        """Fills `ops` from the kernels that OpenVINO chose.

        Args:
            recorded: the operators of the q/dq graph.
            sources: for each node that OpenVINO's front end read, the operators of the q/dq graph that it carries out.
        """
        precisions: dict[str, set[str]] = defaultdict(set)
        for name, precision in _kernels(self.compiled):
            for operator in sources.get(name, (name,)):
                precisions[operator].add(precision)
        self.ops = tuple(_placed(op, precisions[op.node]) for op in recorded)

    def save(self, path: str | Path) -> Path:
        """Writes a zip file of OpenVINO's `model.xml` and `model.bin`, which any OpenVINO reads, and returns its path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        path = Path(path)
        require_writable(path)
        try:
            content = self._archive()
        except (OSError, RuntimeError) as error:  # OpenVINO writes to files, here to temporary ones
            reason = f"File too large or disk full: {first_line(error)}"
            raise ArtefactError(f"'{path}' cannot be written ({reason}); free or change its place.") from error
        return write_content(path, content)

    @classmethod
    def load(cls, path: str | Path, options: Mapping[str, Any] | None = None) -> "OpenVINOProgram":
        """Reads a program that `save` wrote and compiles it for this machine.

        Args:
            path: the file.
            options: properties of the CPU plugin, in the place of those that the program was saved with.

        Raises:
            ArtefactError: the file is missing or is no saved program, or it needs VNNI, which this processor lacks.
            LoweringError: openvino is not installed.
        """
        path = Path(path)
        if kind_at(path) != "file":
            raise ArtefactError(f"There is no file '{path}'; pass a program that `OpenVINOProgram.save` wrote.")
        try:
            model, settings, parts = _read(path)
            asked = dict(options or {})
            refused = next((name for name in settings.options if name not in (*_HARMLESS, *asked)), None)
            if refused is not None:
                raise ArtefactError(
                    f"'{path}' sets OpenVINO's option '{shown(refused)}', which a file may not; pass it to "
                    f"`OpenVINOProgram.load` as one of the options if you want it. A file may set {sorted(_HARMLESS)}."
                )
            reason = ONEDNN_PAIRS.objection(settings.pair)
            if reason is not None:
                raise ArtefactError(f"'{path}' would give wrong numbers here: {reason}.")
            return cls(model, parts[0], parts[1], {**settings.options, **asked}, settings.pair, parts[2])
        except (ArtefactError, LoweringError):
            raise
        except Exception as error:
            raise ArtefactError(
                f"'{path}' is no program of the openvino lowering, or has options that OpenVINO does not take "
                f"({said(error)}); pass a file that `OpenVINOProgram.save` wrote."
            ) from error

    @property
    def nbytes(self) -> int:
        """Size of the saved file in bytes."""
        return len(self._archive())

    def _archive(self) -> bytes:
        buffer = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(buffer, "w") as archive:
            files = [Path(folder) / name for name in (_GRAPH, _WEIGHTS)]
            runtime().serialize(self.model, *files)
            for file in files:
                archive.write(file, file.name)
            settings = {
                "signature": self._signature.to_json(),
                "outputs": self._outputs.to_json(),
                "options": {name: value for name, value in self.options.items() if name in _HARMLESS},
                "pair": self.pair,
                "variables": {variable.name: variable.output for variable in self.variables},
            }
            state = io.BytesIO()
            np.savez(state, **{variable.name: _array(variable.begin) for variable in self.variables})
            archive.writestr(_STATE, state.getvalue())
            archive.writestr(_SETTINGS, json.dumps(settings))
        return buffer.getvalue()


def _read(path: str | Path) -> tuple[Any, _Settings, tuple[Signature, Outputs, list[Variable]]]:
    """Returns what a file holds.

    Raises:
        LoweringError: openvino is not installed.
        Exception: the file is missing, or none that `save` wrote.
    """
    openvino = runtime()
    with zipfile.ZipFile(path) as archive:
        _require_stored(archive, Path(path).stat().st_size)
        model = openvino.Core().read_model(archive.read(_GRAPH), archive.read(_WEIGHTS))
        settings: _Settings = typed(json.loads(archive.read(_SETTINGS)), _Settings, f"'{_SETTINGS}'")
        signature, outputs = Signature.from_json(settings.signature), Outputs.from_json(settings.outputs)
        places = [*settings.variables.values(), *(place for place in outputs.computed if place is not None)]
        wrong = next((place for place in places if place not in range(len(model.outputs))), None)
        if wrong is not None:
            raise ValueError(f"the model has {len(model.outputs)} outputs, and the settings read output {wrong}")
        begun = archive.read(_STATE)
        _require_stored(zipfile.ZipFile(io.BytesIO(begun)), len(begun))
        with np.load(io.BytesIO(begun), allow_pickle=False) as state:
            variables = [
                Variable(name, _tensor(state[name], model.output(place)), place)
                for name, place in settings.variables.items()
            ]
    begins = [TensorInput(variable.begin.dtype, tuple(variable.begin.shape)) for variable in variables]
    given = [each for each in signature.inputs if isinstance(each, TensorInput)]
    _require_ports(model.inputs, [*given, *begins])
    return model, settings, (signature, outputs, variables)


def _require_stored(archive: zipfile.ZipFile, size: int) -> None:
    """Refuses records that grow when they are read, which `save` does not write.

    Raises:
        ValueError: there are such.
    """
    entries = archive.infolist()
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError("its records are compressed, or claim to be larger than the file")


def _require_ports(ports: Sequence[Any], given: Sequence[TensorInput]) -> None:
    """Makes sure that a model takes whatever its signature lets pass.

    Raises:
        ValueError: another number of inputs, another dtype or another size.
    """
    if len(ports) != len(given):
        raise ValueError(f"the model has {len(ports)} inputs, the signature and the state {len(given)}")
    shape = runtime().PartialShape
    for place, (port, each) in enumerate(zip(ports, given, strict=True)):
        sizes = shape([size if isinstance(size, int) else -1 for size in each.sizes])
        kind = port.get_element_type().get_type_name()
        if not sizes.refines(port.get_partial_shape()) or _TYPES.get(kind) != each.dtype:
            raise ValueError(
                f"input {place} of the model is {kind} {port.get_partial_shape()}, the settings say {each}"
            )


# Lines in which OpenVINO tells where in its sources an error was raised and passed on.
_TRACES = ("Exception ", "Check '", "FrontEnd API failed with ", "Model wasn't fully converted")


def said(error: Exception) -> str:
    """Returns what an error says: the first operator that was not converted and why, else its first line."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(_TRACES)]
    if not told:
        return first_line(error)
    operator = next((place for place, line in enumerate(told) if line.startswith("-- ")), 0)
    sentence = first_whole(told[operator:]).replace(" with a message:", ":").replace("[PyTorch Frontend] ", "")
    return shown(sentence.removeprefix("-- "))


def _array(tensor: Tensor) -> Any:
    """Returns a tensor as an array; numpy knows no bfloat16, whose bits stand for it."""
    own = tensor.detach().contiguous()
    return (own.view(torch.int16) if own.dtype is torch.bfloat16 else own).numpy()


def _given(tensor: Tensor) -> Any:
    """Returns a tensor as OpenVINO takes it."""
    if tensor.dtype is not torch.bfloat16:
        return _array(tensor)
    openvino = runtime()
    return openvino.Tensor(_array(tensor), list(tensor.shape), openvino.Type.bf16)


def _tensor(array: Any, port: Any) -> Tensor:
    """Returns an array of a port as a tensor; OpenVINO says float16 of arrays with the bits of bfloat16."""
    if port.get_element_type().get_type_name() != "bf16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _kernels(compiled: Any) -> Iterator[tuple[str, str]]:
    """Yields (node that the front end read, precision of its kernel) for what runs.

    A kernel is named after what it ends in. Among what it is said to carry out OpenVINO 2026.4 names its input instead
    where a kernel of compressed weights gets no bias; that one has a kernel by its own name.
    """
    layers = compiled.get_runtime_model().get_ordered_ops()
    computed = [layer for layer in layers if _text(layer.get_rt_info()["layerType"]) not in _NOT_COMPUTED]
    ends = {layer.get_friendly_name() for layer in computed}
    for layer in computed:
        info, end = layer.get_rt_info(), layer.get_friendly_name()
        carried = {name for name in _text(info["originalLayersNames"]).split(",") if name not in ends}
        for name in sorted({end, *carried}):
            if "/" in name:
                yield name.partition("/")[0], _text(info["runtimePrecision"])


def _text(found: Any) -> str:
    return str(getattr(found, "value", found))


def _placed(operator: LoweredOp, precisions: set[str]) -> LoweredOp:
    if precisions & _INTEGER:
        return replace(operator, placement="int8")
    found = (
        f"runs it in {', '.join(sorted(precisions))}" if precisions else "folds it into another kernel or a constant"
    )
    return replace(operator, placement="float", reason=f"OpenVINO {found}")
