"""A model on TOSA, which runs here on TOSA's reference model and saves a `.pte` for Ethos-U, or a `.tosa`."""

import copy
import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.errors import ArtefactError
from quantplug.core.files.whole import write_content
from quantplug.core.peers.torch_names import pytree
from quantplug.lowering.arm.reference_model import TosaDelegate, delegates_of
from quantplug.lowering.arm.target import TOSA, Target
from quantplug.lowering.arm.vela import Estimate, compiled
from quantplug.lowering.executorch_names import unchecked
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.signature import Signature
from quantplug.lowering.starting import own_state, starting_from_state


class _OnReferenceModel(fx.Interpreter):
    """Runs an edge program: delegates on TOSA's reference model, what stands between them on PyTorch's kernels."""

    def __init__(self, module: fx.GraphModule, delegates: Mapping[str, TosaDelegate]) -> None:
        super().__init__(module)
        self._delegates = delegates

    def fetch_attr(self, target: str) -> Any:
        """Returns a delegate, or what the module holds."""
        return self._delegates[target] if target in self._delegates else super().fetch_attr(target)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator, or the delegate that is its first operand."""
        if args and isinstance(args[0], TosaDelegate):
            return args[0](*args[1:])
        return super().call_function(target, args, kwargs)


class ArmProgram(Program):
    """A lowered model.

    Attributes:
        target: the NPU, such as "ethos-u85-256", or "tosa".
        ops: every operator with where it runs: "int8" in a TOSA graph (its integers may have 16 bits), "portable" on
            ExecuTorch's own float kernels, on the processor beside the NPU.
        exported: the edge program, whose delegates are TOSA graphs.
        estimate: what Vela expects of one inference on the NPU, without what is portable; None for "tosa".
    """

    def __init__(self, exported: torch.export.ExportedProgram, target: Target) -> None:
        self.exported, self.target = exported, target.name
        self.ops: tuple[LoweredOp, ...] = ()
        lowered = delegates_of(exported)
        self._delegates = {
            name: TosaDelegate(each.processed_bytes, each.original_module) for name, each in lowered.items()
        }
        self.estimate: Estimate | None = None
        self._buffer = b"" if target.npu is None else self._for_hardware(target.npu)
        self._signature = Signature.of_exported(exported)
        self.restart()

    def _for_hardware(self, spec: Any) -> bytes:
        """Returns the `.pte`, in which each TOSA graph is a command stream."""
        import executorch.kernels.quantized  # noqa: F401  (registers how the runtime calls conversions)
        from executorch.backends.arm.ethosu import EthosUBackend, EthosUPartitioner
        from executorch.exir import EdgeProgramManager
        from executorch.exir.lowered_backend_module import LoweredBackendModule

        program, settings = copy.deepcopy(self.exported), EthosUPartitioner(spec).delegation_spec.compile_specs
        estimates = [Estimate(0, 0.0, 0, 0)]
        for name, each in delegates_of(program).items():
            stream, expected = compiled(each.processed_bytes, spec)
            estimates.append(expected)
            made = LoweredBackendModule(each.original_module, EthosUBackend.__name__, stream, settings)
            made.meta = each.meta
            setattr(program.graph_module, name, made)
        self.estimate = functools.reduce(operator.add, estimates)
        manager = EdgeProgramManager(program, compile_config=unchecked(()))
        return bytes(manager.to_executorch(starting_from_state(program)).buffer)

    @property
    def tosa(self) -> tuple[bytes, ...]:
        """The TOSA graphs, in the order in which they run."""
        return tuple(delegate.flatbuffer for delegate in self._delegates.values())

    def restart(self) -> None:
        """Puts the buffers that the program writes (a cache, a counter) back to what the model began with."""
        module = self.exported.module(check_guards=False)
        own_state(module)
        self._runner = _OnReferenceModel(module, self._delegates)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the TOSA graphs on TOSA's reference model.

        Raises:
            LoweringError: the inputs have another structure, dtype or size than the model was exported for.
        """
        given = contiguous(self._signature.nested(inputs, keywords))
        with torch.no_grad():
            returned = self._runner.run(*pytree.tree_leaves(given))
        # What is a state too would be overwritten by the next call.
        return pytree.tree_map_only(Tensor, Tensor.clone, returned)

    def save(self, path: str | Path) -> Path:
        """Writes the `.pte` with the NPU's command streams, or, for a path that ends in `.tosa`, the TOSA graph.

        Raises:
            ArtefactError: the folder does not exist, the file cannot be written, or the program has no such form.
        """
        path = Path(path)
        if path.suffix == ".tosa":
            return write_content(path, self._only_graph(path))
        if self.target == TOSA:
            raise ArtefactError(
                f"A program for TOSA alone has no '{path.suffix}' file, found '{path}'; save it as '.tosa', or lower "
                "it with target='ethos-u55-128' or another NPU."
            )
        return write_content(path, self._buffer)

    def _only_graph(self, path: Path) -> bytes:
        if len(self.tosa) != 1:
            portable = [each.node for each in self.ops if each.placement == "portable"]
            raise ArtefactError(
                f"The program has {len(self.tosa)} TOSA graphs, and '{path}' holds one; save it as '.pte', or change "
                f"what is portable: {portable}."
            )
        return self.tosa[0]

    @property
    def nbytes(self) -> int:
        """Size of the `.pte` in bytes; of the TOSA graphs where there is none."""
        return len(self._buffer) or sum(map(len, self.tosa))


def contiguous(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns inputs whose elements lie in memory in the order of their dimensions, as the program reads them."""
    moved: tuple[Any, ...] = pytree.tree_map_only(Tensor, Tensor.contiguous, inputs)
    return moved
