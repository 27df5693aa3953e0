"""A lowered model on oneDNN kernels: runs, saves itself, loads.

Before: the lowered graph, weights as int8 constants behind prepack nodes. After: the same graph with the
weights packed for this machine, called like the model. The saved file keeps the unpacked form, since the
packed layout depends on the processor.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import ArtefactError, LoweringError, first_line, shown
from quantplug.core.files.blank import blank, forget_source, shrunk
from quantplug.core.files.exported import read_exported
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import exported_content, kind_at, require_writable, write_content
from quantplug.core.graph.meta import origins
from quantplug.core.peers.torch_names import FakeTensorMode, pytree
from quantplug.core.specs.limits import ONEDNN_PAIRS
from quantplug.lowering.open_sizes import open_sizes
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.starting import starting, state_of
from quantplug.lowering.timing import KernelTime, node_times
from quantplug.lowering.x86.running.compiled import compiled, package
from quantplug.lowering.x86.running.inductor import for_compilers
from quantplug.lowering.x86.running.packing import pack, register_fakes
from quantplug.lowering.x86.running.single_rows import is_single, of_single_rows, share_state
from quantplug.lowering.x86.running.straight_line import straight

OPS_FILE = "quantplug_x86.json"


@dataclasses.dataclass(frozen=True)
class _Described:
    """What a file says beside the graph."""

    ops: tuple[LoweredOp, ...]
    pair: int
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Packaged:
    """What a package says of itself.

    Attributes:
        ops: every compute operator of the q/dq graph with its placement.
        pair: how large the sum of two products can get.
        signature: what it takes.
        platform: the system that it was compiled on, and for.
        features: what its processor has, all of which the compiler may use.
    """

    ops: tuple[LoweredOp, ...]
    pair: int
    signature: dict[str, Any]
    platform: str
    features: tuple[str, ...]

    def objection(self) -> str | None:
        """Returns why the package cannot run here, or None."""
        platform, features = _machine()
        if self.platform != platform:
            return f"it was compiled on {shown(self.platform)}, and this is {platform}"
        lacking = sorted(set(self.features).difference(features))
        if lacking:
            return f"it was compiled for a processor with {shown(', '.join(lacking))}, which this one lacks"
        return ONEDNN_PAIRS.objection(self.pair)


def _machine() -> tuple[str, tuple[str, ...]]:
    """Returns the system, and what its processor has."""
    found = torch.cpu.get_capabilities()
    features = tuple(sorted(name for name, has in found.items() if has is True))
    return f"{sys.platform} {found.get('architecture')}", features


class X86Program(Program):
    """A model lowered to oneDNN quantized kernels.

    Attributes:
        example_inputs: zeros of the shapes and dtypes of those that the model was lowered with; their data is not kept.
        portable: the lowered graph with unpacked int8 weights; what is saved and compiled.
        module: the same with weights packed for this machine; what runs.
        single: what runs instead where every open size is 1, over the same state; None where there is none of these.
        pair: how large the sum of two products can get; beyond 16 bits the kernels need a processor with VNNI.
        ops: every compute operator of the q/dq graph with its placement.
        constants: what it carries along, by name.
    """

    def __init__(
        self,
        portable: fx.GraphModule,
        example_inputs: tuple[Any, ...],
        dynamic_shapes: Any,
        ops: tuple[LoweredOp, ...] = (),
        pair: int = 0,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        self.portable = portable
        self.example_inputs = blank(example_inputs)
        self.dynamic_shapes = dynamic_shapes
        self.ops = ops
        self.pair = pair
        self.constants = dict(constants or {})
        self._signature = Signature.of_graph(portable, example_inputs)
        packed: dict[str, Tensor] = {}
        self.module = pack(starting(portable), packed)
        single = of_single_rows(portable, self._signature)
        self.single = single and share_state(pack(single, packed), self.module)
        self._run, self._run_single = straight(self.module), self.single and straight(self.single)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the program without autograd; takes and returns what the exported model does.

        The tensors that it returns are those of `torch.inference_mode`: `clone()` gives ones to train behind or to
        write into.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
            ArtefactError: an input is empty and an output is not.
        """
        flat = self._signature.flatten(inputs, keywords)
        if any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in flat):
            return self.module.graph.process_outputs(_of_nothing(self.portable, flat))
        with torch.inference_mode():
            run = self._run_single if self._run_single and is_single(self._signature, flat) else self._run
            return self.module.graph.process_outputs(run(*flat))

    def kernel_times(self, *inputs: Any) -> tuple[KernelTime, ...]:
        """Returns how long each kernel takes, run one by one; what stands between them in a call is left out.

        Raises:
            LoweringError: the inputs do not fit, as for a call.
        """
        times = node_times(self.module, self._signature.flatten(inputs))
        self.restart()
        return tuple(KernelTime(str(node.target), origins(node), taken) for node, taken in times.items())

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        began = state_of(self.portable)
        for path, buffer in state_of(self.module).items():
            buffer.copy_(began[path])

    def compile(self) -> Callable[..., Any]:
        """Returns the program under `torch.compile`, with the same kernels and fused loops between them.

        It checks its inputs as the program does.

        Raises:
            LoweringError: there is no C++ compiler.
        """
        register_fakes()
        return compiled(for_compilers(self.portable), self._signature)

    def package(self, path: str | Path) -> Path:
        """Compiles the program ahead of time (AOTInductor) into a `.pt2` package and returns its path.

        `torch._inductor.aoti_load_package(path)` loads and runs it, without quantplug and without the
        model's code; sizes that `dynamic_shapes` left open stay open. The package is bound to this
        machine's instruction set, and checks its inputs only with AOTI_RUNTIME_CHECK_INPUTS=1 in the environment.

        Raises:
            ArtefactError: the path cannot be written.
            LoweringError: there is no C++ compiler, or the model writes a buffer, which a package would not keep.
        """
        written = next(iter(state_of(self.portable)), None)
        if written is not None:
            raise LoweringError(
                f"A package keeps no state, and the model writes buffer '{written}'; save the program instead (engine "
                "'onednn'), or pass the state as an input and return it."
            )
        described = Packaged(self.ops, self.pair, self._signature.to_json(), *_machine())
        return package(
            self._exported(for_compilers(self.portable)), Path(path), json.dumps(dataclasses.asdict(described))
        )

    def exported(self) -> torch.export.ExportedProgram:
        """Returns the portable form as an exported program."""
        return self._exported(self.portable)

    def _exported(self, module: fx.GraphModule) -> torch.export.ExportedProgram:
        register_fakes()
        shapes = open_sizes(module.graph, self.example_inputs) or self.dynamic_shapes
        with torch.no_grad():
            exported = torch.export.export(module, self.example_inputs, dynamic_shapes=shapes, strict=False)
        exported.example_inputs = (shrunk(self.example_inputs), {})
        forget_source(exported.graph_module)  # AOTInductor writes it into comments
        return exported

    def save(self, path: str | Path) -> Path:
        """Writes the portable form as a `.pt2` archive that `X86Program.load` reads on any x86 machine.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        require_writable(Path(path))
        return write_content(path, self._archive())

    def _archive(self) -> bytes:
        described = dataclasses.asdict(_Described(self.ops, self.pair, self.constants))
        return exported_content(self.exported(), {OPS_FILE: json.dumps(described)})

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> "X86Program":
        """Reads a program that `save` wrote and packs its weights for this machine.

        Args:
            path: the file.
            trust: whether pickles in it, which can run any code, may be read too.

        Raises:
            ArtefactError: the file is missing, is no saved program, or needs VNNI, which this processor lacks.
        """
        path = Path(path)
        if kind_at(path) != "file":
            raise ArtefactError(f"There is no file '{path}'; pass a program that `X86Program.save` wrote.")
        register_fakes()
        extra = {OPS_FILE: ""}
        try:
            exported = read_exported(path, trust=trust, extra_files=extra)
            described: _Described = typed(json.loads(extra[OPS_FILE]), _Described, f"'{OPS_FILE}'")
            reason = ONEDNN_PAIRS.objection(described.pair)
            if reason:
                raise ArtefactError(
                    f"'{path}' would give wrong numbers here: {reason}, or lower the model on this machine."
                )
            args = _sample_inputs(exported)
            return cls(starting(exported.module()), args, None, described.ops, described.pair, described.constants)
        except ArtefactError:
            raise
        except Exception as error:
            raise ArtefactError(
                f"'{shown(path)}' is no program of the x86 lowering ({first_line(error)}); "
                "pass a file that `X86Program.save` wrote."
            ) from error

    @property
    def nbytes(self) -> int:
        """Size of the saved program in bytes."""
        return len(self._archive())


def _sample_inputs(exported: torch.export.ExportedProgram) -> tuple[Any, ...]:
    """Returns the sample inputs of a file.

    Raises:
        LoweringError: they are none that its graph takes.
    """
    given: Any = exported.example_inputs or ((), {})
    if pytree.tree_structure(given) != exported.call_spec.in_spec:
        raise LoweringError("its sample inputs have another structure than its graph takes")
    args: tuple[Any, ...] = given[0]
    Signature.of_exported(exported).flatten(args)
    return args


def _of_nothing(module: fx.GraphModule, inputs: Iterable[Any]) -> Any:
    """Returns the empty outputs of a graph on an empty batch, which the kernels give other shapes or fail at."""
    register_fakes()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in inputs]
        outputs = fx.Interpreter(starting(module)).run(*fakes, enable_io_processing=False)
    shapes = [tuple(leaf.shape) for leaf in outputs if isinstance(leaf, Tensor)]
    if any(0 not in shape for shape in shapes):
        raise ArtefactError(f"An input is empty and the outputs have shapes {shapes}; pass at least one sample.")
    return pytree.tree_map_only(Tensor, lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), outputs)
