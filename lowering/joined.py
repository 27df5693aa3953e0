"""Programs of several engines that follow one another, as one program.

Before: a q/dq graph, and the engine of each of its modules. After: a `JoinedProgram` that has computed what the graph
computes. Its file holds those of the pieces, each as its engine writes it.
"""

import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import ArtefactError, LoweringError, first_line
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import kind_at, require_writable, write_content
from quantplug.core.graph.editing import finish
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.named import resolved
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.cutting import Piece, cut
from quantplug.lowering.outputs import Outputs, make_distinct
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.starting import starting
from quantplug.lowering.yardstick import Yardstick

VERSION = 1
_SETTINGS = "joined.json"
# What may be part of a file, with what reads it; and what is read otherwise where its author is known.
_KINDS = {
    "X86Program": "quantplug.lowering.x86:X86Program",
    "X86Package": "quantplug.lowering.x86:X86Package",
    "OpenVINOProgram": "quantplug.lowering.openvino:OpenVINOProgram",
    "ONNXProgram": "quantplug.lowering.onnx:ONNXProgram",
}
_TRUSTING = ("X86Program", "X86Package")


@dataclass(frozen=True)
class Part:
    """One piece that runs.

    Attributes:
        engine: its name.
        program: the piece on that engine.
        takes: which of the values known so far are its inputs: those of the program, then what pieces before it gave.
        gives: how many values it adds to them.
    """

    engine: str
    program: Program
    takes: tuple[int, ...]
    gives: int


@dataclass(frozen=True)
class _WrittenPart:
    engine: str
    kind: str
    takes: tuple[int, ...]
    gives: int


@dataclass(frozen=True)
class _Settings:
    """What a file says beside the pieces."""

    version: int
    signature: dict[str, Any]
    outputs: dict[str, Any]
    parts: tuple[_WrittenPart, ...]


class JoinedProgram(Program):
    """A model whose modules run on several engines, one after the other.

    Attributes:
        parts: the pieces in the order in which they run.
        ops: every compute operator of the q/dq graph with its placement; `how` has its engine. A program that was
            loaded has those that its parts keep.
    """

    def __init__(self, parts: Sequence[Part], signature: Signature, outputs: Outputs) -> None:
        self.parts = tuple(parts)
        self._signature, self._outputs = signature, outputs
        self.ops = tuple(_on(part.engine, op) for part in self.parts for op in part.program.ops)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program; takes and returns what the exported model does.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        values = self._signature.flatten(inputs, keywords)
        for part in self.parts:
            values += map(_plain, part.program(*(values[place] for place in part.takes)))
        return self._outputs.of(values)

    def restart(self) -> None:
        """Puts the buffers that the program writes back to what the model began with."""
        for part in self.parts:
            part.program.restart()

    def save(self, path: str | Path) -> Path:
        """Writes a zip file of the pieces, each as its engine writes it, and returns the path.

        Raises:
            ArtefactError: the folder does not exist, the file cannot be written, or an engine's programs are not read
                again.
        """
        path = Path(path)
        require_writable(path)
        return write_content(path, self._archive())

    @property
    def nbytes(self) -> int:
        """Size of the saved file in bytes."""
        return len(self._archive())

    def _archive(self) -> bytes:
        written = tuple(_WrittenPart(p.engine, type(p.program).__name__, p.takes, p.gives) for p in self.parts)
        unread = next((part for part in written if part.kind not in _KINDS), None)
        if unread is not None:
            raise ArtefactError(
                f"Programs of engine '{unread.engine}' are not read again, so that no file can hold one; lower with "
                "another engine."
            )
        settings = _Settings(VERSION, self._signature.to_json(), self._outputs.to_json(), written)
        buffer = BytesIO()
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(buffer, "w") as archive:
            for place, part in enumerate(self.parts):
                archive.write(part.program.save(Path(folder) / f"part{place}"), f"part{place}")
            archive.writestr(_SETTINGS, json.dumps(asdict(settings)))
        return buffer.getvalue()

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> "JoinedProgram":
        """Reads a program that `save` wrote and makes each piece ready for this machine.

        Args:
            path: the file.
            trust: whether machine code in it (a piece of engine 'onednn_package'), and pickles, may run.

        Raises:
            ArtefactError: the file is missing or is no saved program, it is not trusted, or a piece cannot run on this
                processor.
            LoweringError: an engine is not installed.
        """
        path = Path(path)
        if kind_at(path) != "file":
            raise ArtefactError(f"There is no file '{path}'; pass a program that `JoinedProgram.save` wrote.")
        try:
            return cls(*_read(path, trust))
        except (ArtefactError, LoweringError):
            raise
        except Exception as error:
            raise ArtefactError(
                f"'{path}' is no program of several engines ({first_line(error)}); pass a file that "
                "`JoinedProgram.save` wrote."
            ) from error


def lower_joined(
    converted: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    engine_of: Callable[[fx.Node], str],
    lower: Callable[[str, fx.GraphModule, tuple[Any, ...]], Program],
) -> JoinedProgram:
    """Lowers each piece of a q/dq graph with its engine.

    Args:
        converted: what `convert_pt2e` returned; it is not changed.
        example_inputs: inputs by position; the program is run on them.
        engine_of: the engine of an operator.
        lower: from an engine, a piece of the graph and the piece's inputs to its program.

    Raises:
        LoweringError: an engine does not run its piece, two pieces share a buffer that the model writes, or the program
            does not compute what the graph computes.
    """
    yardstick = Yardstick(require_graph_module(converted, "lower"), example_inputs)
    module = starting(converted)
    signature, outputs = Signature.of_graph(module, example_inputs), make_distinct(module)
    finish(module)
    pieces, names = cut(module, engine_of), [node.name for node in module.graph.find_nodes(op="placeholder")]
    values, parts = dict(zip(names, pytree.tree_leaves(example_inputs), strict=True)), []
    for piece in pieces:
        given = tuple(values[name] for name in piece.takes)
        parts.append(_part(piece, lower(piece.engine, piece.module, given), names))
        names += piece.gives
        values |= _run(piece, given)
    returned = [names.index(node.name) for node in module.graph.output_node().all_input_nodes]
    program = JoinedProgram(parts, signature, outputs.moved(returned))
    yardstick.decibels(program)
    return program


def _part(piece: Piece, program: Program, names: list[str]) -> Part:
    return Part(piece.engine, program, tuple(map(names.index, piece.takes)), len(piece.gives))


def _run(piece: Piece, given: tuple[Any, ...]) -> dict[str, Any]:
    """Returns what a piece computes, by name."""
    with torch.no_grad():
        return dict(zip(piece.gives, map(_plain, starting(piece.module)(*given)), strict=True))


def _plain(value: Any) -> Any:
    """Returns a tensor in the order of its dimensions, whatever the engine likes: compiled pieces rely on it."""
    return value.contiguous() if isinstance(value, Tensor) else value


def _on(engine: str, operator: LoweredOp) -> LoweredOp:
    return replace(operator, how=", ".join(filter(None, (operator.how, f"on engine '{engine}'"))))


def _read(path: Path, trust: bool) -> tuple[list[Part], Signature, Outputs]:
    """Returns what a file holds.

    Raises:
        Exception: it is none that `save` wrote.
    """
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or size > path.stat().st_size:
            raise ValueError("its records are compressed, or claim to be larger than the file")
        settings: _Settings = typed(json.loads(archive.read(_SETTINGS)), _Settings, f"'{_SETTINGS}'")
        if settings.version != VERSION:
            raise ValueError(f"it has version {settings.version}, this release reads {VERSION}")
        signature, outputs = Signature.from_json(settings.signature), Outputs.from_json(settings.outputs)
        known, parts = len(signature.inputs), []
        for place, part in enumerate(settings.parts):
            _require_known(part.takes, known)
            held = Path(folder) / f"part{place}"
            held.write_bytes(archive.read(held.name))
            parts.append(Part(part.engine, _loaded(part.kind, held, path, trust), part.takes, part.gives))
            known += part.gives
        _require_known([place for place in outputs.computed if place is not None], known)
    return parts, signature, outputs


def _loaded(kind: str, held: Path, path: Path, trust: bool) -> Program:
    """Returns a piece that lies in a file of its own for a moment, which no message names."""
    if kind not in _KINDS:
        raise ValueError(f"it holds a '{kind}', which is none of {sorted(_KINDS)}")
    options = {"trust": trust} if kind in _TRUSTING else {}
    try:
        program: Program = resolved(_KINDS[kind], f"program '{kind}'").load(held, **options)
    except ArtefactError as error:
        raise ArtefactError(str(error).replace(str(held), f"{path}/{held.name}")) from error
    return program


def _require_known(places: Sequence[int], known: int) -> None:
    wrong = next((place for place in places if place not in range(known)), None)
    if wrong is not None:
        raise ValueError(f"a piece reads value {wrong} of {known}")
