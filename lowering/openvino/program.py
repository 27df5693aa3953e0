"""A q/dq graph in OpenVINO: runs, saves itself, loads, and tells which kernels OpenVINO chose."""

import io
import json
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantplug.core.errors import ArtefactError, LoweringError, first_line
from quantplug.core.whole_files import write_content
from quantplug.lowering.openvino.outputs import Outputs
from quantplug.lowering.openvino.state import Variable
from quantplug.lowering.program import LoweredOp, Program, require_folder
from quantplug.lowering.signature import Signature
from quantplug.lowering.x86.processor import pair_objection

_GRAPH, _WEIGHTS, _SETTINGS, _STATE = "model.xml", "model.bin", "settings.json", "state.npz"
_INTEGER = {"u8", "i8"}
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
        self.variables = tuple(variables)
        self._state: list[Any] = []
        self.restart()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program; takes and returns what the exported model does.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        arrays = [_array(leaf) for leaf in self._signature.flatten(inputs, keywords) if isinstance(leaf, Tensor)]
        results = self._request.infer([*arrays, *self._state], share_inputs=True)
        values = [torch.from_numpy(results[port]) for port in self.compiled.outputs]
        self._state = [values[variable.output].numpy().copy() for variable in self.variables]
        return self._outputs.of(values)

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        self._state = [_array(variable.begin).copy() for variable in self.variables]

    def place(self, recorded: tuple[LoweredOp, ...], sources: Mapping[str, str]) -> None:
        """Fills `ops` from the kernels that OpenVINO chose.

        Args:
            recorded: the operators of the q/dq graph.
            sources: for each node that OpenVINO's front end read, the node of the q/dq graph that it came from.
        """
        precisions: dict[str, set[str]] = defaultdict(set)
        for name, precision in _kernels(self.compiled):
            precisions[sources.get(name, name)].add(precision)
        self.ops = tuple(_placed(operator, precisions[operator.node]) for operator in recorded)

    def save(self, path: str | Path) -> Path:
        """Writes a zip file of OpenVINO's `model.xml` and `model.bin`, which any OpenVINO reads, and returns its path.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        path = require_folder(path)
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
        openvino = runtime()
        try:
            with zipfile.ZipFile(path) as archive:
                model = openvino.Core().read_model(archive.read(_GRAPH), archive.read(_WEIGHTS))
                settings = json.loads(archive.read(_SETTINGS))
                signature = Signature.from_json(settings["signature"])
                outputs = Outputs.from_json(settings["outputs"])
                with np.load(io.BytesIO(archive.read(_STATE)), allow_pickle=False) as state:
                    places = settings["variables"].items()
                    variables = [Variable(name, torch.from_numpy(state[name]), place) for name, place in places]
        except Exception as error:
            raise ArtefactError(
                f"'{path}' is no program of the openvino lowering ({type(error).__name__}: {error}); "
                "pass a file that `OpenVINOProgram.save` wrote."
            ) from error
        reason = pair_objection(settings["pair"])
        if reason is not None:
            raise ArtefactError(f"'{path}' would give wrong numbers here: {reason}.")
        return cls(model, signature, outputs, {**settings["options"], **(options or {})}, settings["pair"], variables)

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
                "options": self.options,
                "pair": self.pair,
                "variables": {variable.name: variable.output for variable in self.variables},
            }
            state = io.BytesIO()
            np.savez(state, **{variable.name: _array(variable.begin) for variable in self.variables})
            archive.writestr(_STATE, state.getvalue())
            archive.writestr(_SETTINGS, json.dumps(settings))
        return buffer.getvalue()


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _kernels(compiled: Any) -> Iterator[tuple[str, str]]:
    """Yields (node that the front end read, precision of its kernel) for what runs."""
    for layer in compiled.get_runtime_model().get_ordered_ops():
        info = layer.get_rt_info()
        kind, precision, names = (_text(info[key]) for key in ("layerType", "runtimePrecision", "originalLayersNames"))
        if kind not in _NOT_COMPUTED:
            yield from ((name.partition("/")[0], precision) for name in names.split(",") if "/" in name)


def _text(found: Any) -> str:
    return str(getattr(found, "value", found))


def _placed(operator: LoweredOp, precisions: set[str]) -> LoweredOp:
    if precisions & _INTEGER:
        return replace(operator, placement="int8")
    found = (
        f"runs it in {', '.join(sorted(precisions))}" if precisions else "folds it into another kernel or a constant"
    )
    return replace(operator, placement="float", reason=f"OpenVINO {found}")
