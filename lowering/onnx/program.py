"""A model of ONNX in ONNX Runtime: runs, saves itself, loads, and tells which kernels ran.

The file is a plain `.onnx` that any runtime reads; what a call of the model takes and returns stands in its metadata.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, from_numpy
from typing_extensions import Self

from quantplug.core.errors import ArtefactError, LoweringError, first_line
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import kind_at, require_writable, write_content
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.onnx.engines import ONNX_RUNTIME, Engine
from quantplug.lowering.onnx.kernels import integer_kernels
from quantplug.lowering.onnx.runtime import RUNNERS, require, session
from quantplug.lowering.outputs import Outputs
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature, TensorInput

_KEY = "quantplug"
# Most bytes of weights in the `.onnx` itself, which is a protobuf of at most 2 GiB.
LARGEST = 2**31 - 2**24


@dataclass(frozen=True)
class _Settings:
    """What the metadata of a file say."""

    signature: dict[str, Any]
    outputs: dict[str, Any]
    pair: int


class ONNXProgram(Program):
    """A model that ONNX Runtime runs on this processor.

    Attributes:
        model: the `onnx_ir.Model`.
        pair: how large the sum of two products can get; beyond 16 bits the kernels need a processor with VNNI.
        session: the `onnxruntime.InferenceSession`.
        kernels: for the numbers in the names of the model's nodes the integer kernel that carries each out; a program
            that was loaded has none.
        ops: every compute operator of the q/dq graph with its placement.
        engine: what the file is for.
    """

    engine: ClassVar[Engine] = ONNX_RUNTIME

    def __init__(self, model: Any, signature: Signature, outputs: Outputs, pair: int = 0) -> None:
        self.model, self.pair = model, pair
        self._signature, self._outputs = signature, outputs
        self.ops: tuple[LoweredOp, ...] = ()
        self.kernels: dict[int, str] = {}
        with tempfile.TemporaryDirectory() as folder:
            self.session = self._started(Path(folder))
        self._names = [given.name for given in self.session.get_inputs()]

    def _started(self, folder: Path) -> Any:
        """Writes the model to a folder of its own, and reads from it what ONNX Runtime made of it."""
        path, optimized = folder / "model.onnx", folder / "optimized.onnx"
        self._write(path, LARGEST)
        if not self.engine.computes_on_integers:
            return session(str(path), as_written=True)
        found = session(str(path), str(optimized))
        self.kernels = integer_kernels(optimized)
        return found

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program; takes and returns what the exported model does.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        tensors = self.named_tensors(inputs, keywords)
        try:
            given = {name: tensor.detach().contiguous().numpy() for name, tensor in tensors.items()}
            found = self.session.run(None, given)
        except Exception as error:
            raise LoweringError(
                f"ONNX Runtime fails on the inputs ({first_line(error)}); pass them as exported."
            ) from error
        return self._outputs.of([from_numpy(array) for array in found])

    def named_tensors(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the tensors of a call by the names of the file's inputs.

        Args:
            inputs: by position.
            keywords: by name.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        tensors = [leaf for leaf in self._signature.flatten(inputs, keywords) if isinstance(leaf, Tensor)]
        return dict(zip(self._names, tensors, strict=True))

    def save(self, path: str | Path, *, largest: int = LARGEST) -> Path:
        """Writes an `.onnx` file, which any runtime of ONNX reads, and returns its path.

        Args:
            path: the file.
            largest: most bytes of weights in it; more lie in a file beside it, named after their content.

        Raises:
            ArtefactError: the folder does not exist, a file cannot be written, or the model takes or returns what a
                file cannot name.
        """
        path = Path(path)
        require_writable(path)
        self._describe()
        try:
            self._write(path, largest)
        except OSError as error:
            raise ArtefactError(f"'{path}' cannot be written ({error}); free or change its place.") from error
        return path

    def _describe(self) -> None:
        """Writes into the model's metadata what a call takes and returns."""
        settings = {"signature": self._signature.to_json(), "outputs": self._outputs.to_json(), "pair": self.pair}
        self.model.metadata_props[_KEY] = json.dumps(settings)

    def _write(self, path: Path, largest: int) -> None:
        import onnx_ir

        if self._weights > largest:
            self._write_apart(path)
        else:
            write_content(path, onnx_ir.to_proto(self.model).SerializeToString())

    def _write_apart(self, path: Path) -> None:
        """Writes the weights first: the file that names them is whole or not there."""
        import onnx_ir

        tensors = [value.const_value for value in self.model.graph.initializers.values() if value.const_value.nbytes]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.tobytes())
        name = f"weights-{digest.hexdigest()[:16]}.bin"
        held = {key: value.const_value for key, value in self.model.graph.initializers.items()}
        try:
            onnx_ir.external_data.unload_from_model(self.model, path.parent, name, size_threshold_bytes=256)
            write_content(path, onnx_ir.to_proto(self.model).SerializeToString())
        finally:
            for key, tensor in held.items():
                self.model.graph.initializers[key].const_value = tensor

    @property
    def _weights(self) -> int:
        return sum(value.const_value.nbytes for value in self.model.graph.initializers.values())

    @property
    def nbytes(self) -> int:
        """Size of the saved file in bytes; of the weights where they lie beside it."""
        import onnx_ir

        self._describe()
        if self._weights > LARGEST:
            return self._weights
        size: int = onnx_ir.to_proto(self.model).ByteSize()
        return size

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a program that `save` wrote and starts it on this machine.

        Raises:
            ArtefactError: the file is missing or is no saved program, or it needs VNNI, which this processor lacks.
            LoweringError: a package is not installed.
        """
        path = Path(path)
        require(RUNNERS, cls.engine)
        if kind_at(path) != "file":
            raise ArtefactError(f"There is no file '{path}'; pass a program that `{cls.__name__}.save` wrote.")
        try:
            model, settings = _read(path)
            reason = ONEDNN_PAIRS.objection(settings.pair) if cls.engine.computes_on_integers else None
            if reason is not None:
                raise ArtefactError(f"'{path}' would give wrong numbers here: {reason}.")
            signature, outputs = Signature.from_json(settings.signature), Outputs.from_json(settings.outputs)
            program = cls(model, signature, outputs, settings.pair)
            program.require_ports()
        except (ArtefactError, LoweringError):
            raise
        except Exception as error:
            raise ArtefactError(
                f"'{path}' is no program of the onnx lowering ({first_line(error)}); pass a file that "
                f"`{cls.__name__}.save` wrote."
            ) from error
        return program

    def require_ports(self) -> None:
        """Makes sure that the model takes and returns what its metadata say.

        Raises:
            ValueError: another number of inputs or outputs.
        """
        given = [each for each in self._signature.inputs if isinstance(each, TensorInput)]
        places = [place for place in self._outputs.computed if place is not None]
        ports = self.session.get_inputs(), self.session.get_outputs()
        if len(given) != len(ports[0]) or any(place not in range(len(ports[1])) for place in places):
            raise ValueError(f"the model has {len(ports[0])} inputs and {len(ports[1])} outputs, its metadata differ")


def _read(path: Path) -> tuple[Any, _Settings]:
    import onnx_ir

    model = onnx_ir.load(path)
    if _KEY not in model.metadata_props:
        raise ValueError("it is a model of ONNX without the metadata that `save` writes; run it in ONNX Runtime itself")
    settings: _Settings = typed(json.loads(model.metadata_props[_KEY]), _Settings, "the metadata")
    for value in model.graph.initializers.values():
        location = str(getattr(value.const_value, "location", ""))
        if Path(location).name != location:
            raise ValueError(f"its weights lie at '{location}', which leads out of its folder")
    onnx_ir.external_data.load_to_model(model)
    return model, settings
