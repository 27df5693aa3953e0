"""Pieces side by side in one model, through the whole flow of a backend.

Before: placed pieces and a config. After: the stages (annotated, prepared, converted, lowered, emulated), each made
when it is first asked for and once for all pieces, and what each piece is at each of them.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.conformance.pieces import Batch, Piece, Placed
from quantplug.core.annotation.plan import plan_of
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.constants import constant_nodes
from quantplug.core.graph.facts import module_path
from quantplug.core.graph.meta import LIMITS, VIOLATIONS
from quantplug.core.peers.torch_names import OpOverload, pytree
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from quantplug.core.qdq.format import differences
from quantplug.core.qdq.limits import qparam_violations
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS, QUANTIZE_OPS, is_qdq
from quantplug.core.specs.decision import Decision, decision
from quantplug.core.specs.limits import Rescale, Violation
from quantplug.lowering.emulation import EmulatedProgram
from quantplug.lowering.program import Program
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

Made = TypeVar("Made")


def _other(x: Tensor) -> Tensor:
    """The same numbers at other places: the range stays, and no result of the first call holds any more."""
    return x.flip(tuple(range(x.dim())))


def _louder(x: Tensor) -> Tensor:
    return x * 1.25 if x.is_floating_point() else x.clone()


# What inputs are made of those that a model was calibrated on, by how a finding about them is told.
CALIBRATED = "on the calibration data"
DATA: Mapping[str, Callable[[Tensor], Tensor]] = {
    CALIBRATED: torch.clone,
    "on other data of its range": _other,
    "on inputs beyond the calibrated range": _louder,
}


def quantizer_of(backend: Backend, config: QuantizationConfig | str | None = None) -> BackendQuantizer:
    """Returns a quantizer of a declaration that reports broken limits instead of raising."""
    made: BackendQuantizer = type(f"{backend.name}Quantizer", (BackendQuantizer,), {"backend": backend})(strict=False)
    return made.set_global(config) if config is not None else made


class stage(Generic[Made]):  # noqa: N801, a decorator as `cached_property` is
    """A property that is made once; what goes wrong is kept as well, and raised for everyone who asks."""

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self._make, self.__doc__ = make, make.__doc__
        self._kept = f"_{make.__name__}"

    def __get__(self, flow: Any, owner: type) -> Made:
        """Returns what was made.

        Raises:
            Exception: what making it raised.
        """
        if self._kept not in flow.__dict__:
            flow.__dict__[self._kept] = self._attempt(flow)
        made, error = flow.__dict__[self._kept]
        if error is not None:
            raise error.with_traceback(None)
        found: Made = made
        return found

    def _attempt(self, flow: Any) -> tuple[Made | None, Exception | None]:
        try:
            return self._make(flow), None
        except Exception as error:
            return None, error


class Side:
    """Pieces side by side in a model that is exported once in each way.

    Attributes:
        placed: the pieces.
        inputs: of the model.

    Args:
        placed: the pieces.
        loudness: by what their inputs are multiplied.
    """

    def __init__(self, placed: Sequence[Placed], loudness: float = 1.0) -> None:
        self.placed = tuple(placed)
        self._batch = Batch(list(placed)).eval()
        self.inputs = tuple(x * loudness if x.is_floating_point() else x for x in self._batch.inputs)
        self._programs: dict[tuple[bool, bool, bool], torch.export.ExportedProgram] = {}
        sizes = [one.results for one in placed]
        self.places = {one: i for i, one in enumerate(placed)}
        self.starts = {one: sum(sizes[:i]) for i, one in enumerate(placed)}

    def exported(
        self, *, guarded: bool = True, strict: bool = False, training: bool = False, dynamic: bool = False
    ) -> fx.GraphModule:
        """Returns a new graph of the model.

        Args:
            guarded: whether the graph checks its inputs, by a call of a module.
            strict: whether export reads bytecode.
            training: whether the model is in training mode.
            dynamic: whether first dimensions are open, as far as the pieces allow.
        """
        key = (strict, training, dynamic)
        if key not in self._programs:
            shapes = {"inputs": tuple({0: torch.export.Dim.AUTO} if x.dim() else None for x in self.inputs)}
            self._batch.train(training)
            try:
                self._programs[key] = torch.export.export(
                    self._batch, self.inputs, strict=strict, dynamic_shapes=shapes if dynamic else None
                )
            finally:
                self._batch.eval()
        module = self._programs[key].module(check_guards=guarded)
        assert isinstance(module, fx.GraphModule)
        return module


class Stages:
    """The stages of one model, each made once, and what each piece is at each of them.

    Attributes:
        side: the pieces.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self._results: dict[tuple[str, str, int], list[Tensor]] = {}
        self._constants: dict[fx.GraphModule, set[fx.Node]] = {}

    def result(self, stage: str, placed: Placed, *, data: str = CALIBRATED, run: int = 0) -> Tensor:
        """Returns what a piece yields at a stage, without what its neighbours make of it.

        Args:
            stage: "prepared", "converted", "program" or another one.
            placed: the piece.
            data: on which inputs, one of `DATA`.
            run: a stage is run once for each number.
        """
        key = (stage, data, run)
        if key not in self._results:
            inputs = tuple(map(DATA[data], self.side.inputs))
            with torch.no_grad():
                found = getattr(self, stage)(*inputs)
            self._results[key] = [pytree.tree_leaves(result)[0] for result in found]
        return self._results[key][self.side.places[placed]]

    def root(self, model: fx.GraphModule, placed: Placed) -> fx.Node:
        """Returns the last operator of a piece."""
        return behind_conversions(self.output(model, placed))

    def output(self, model: fx.GraphModule, placed: Placed) -> fx.Node:
        """Returns the node that yields a piece's result."""
        leaves = pytree.tree_leaves(model.graph.output_node().args)
        found = leaves[self.side.starts[placed]]
        assert isinstance(found, fx.Node)
        return found

    def operators(self, model: fx.GraphModule, placed: Placed) -> list[fx.Node]:
        """Returns the compute operators that a piece's result depends on, without those on constants."""
        if model not in self._constants:
            self._constants[model] = constant_nodes(model.graph)
        constants = self._constants[model]
        return [node for node in _upstream(self.root(model, placed), constants) if _computes(node)]

    def forget(self, model: fx.GraphModule) -> None:
        """Forgets what is known of a graph that is about to change."""
        self._constants.pop(model, None)

    def is_before(self, node: fx.Node, placed: Placed) -> bool:
        """Tells whether a node belongs to the producer that was put before a piece, or before what it holds."""
        around = f"branches.{self.side.places[placed]}."
        path = module_path(node)
        return path.startswith(around) and "before" in path.removeprefix(around).split(".")[:2]


class Flow(Stages):
    """The stages of one model under a backend's declaration.

    Attributes:
        backend: the declaration.
        quantizer: a quantizer of it that reports broken limits instead of raising.
        side: the pieces.
    """

    def __init__(self, backend: Backend, config: QuantizationConfig, side: Side, *, is_qat: bool) -> None:
        super().__init__(side)
        self.backend, self.is_qat = backend, is_qat
        self.quantizer = quantizer_of(backend, config)

    @stage
    def annotated(self) -> fx.GraphModule:
        """The graph with annotations, nothing inserted."""
        return self.annotate()

    def annotate(self) -> fx.GraphModule:
        """Returns a new annotated graph."""
        return self.quantizer.annotate(self.quantizer.transform_for_annotation(self.side.exported()))

    @stage
    def prepared(self) -> fx.GraphModule:
        """The calibrated graph."""
        return self.prepare()

    def prepare(self) -> fx.GraphModule:
        """Returns a new calibrated graph, in evaluation mode."""
        prepare = prepare_qat_pt2e if self.is_qat else prepare_pt2e
        prepared = prepare(self.side.exported(), self.quantizer)
        prepared.eval()
        with torch.no_grad():
            results = prepared(*self.side.inputs)
            for placed, result in zip(self.side.placed, results, strict=True):
                observer = self.output(prepared, placed)
                if placed.is_wide and observer.op == "call_module":
                    prepared.get_submodule(str(observer.target))(-pytree.tree_leaves(result)[0])
        return prepared

    @stage
    def converted(self) -> fx.GraphModule:
        """The q/dq graph."""
        return convert_pt2e(self.prepare())

    @stage
    def program(self) -> Program:
        """The lowered model."""
        return self.backend.lower(self.converted, self.side.inputs)

    @stage
    def emulated(self) -> EmulatedProgram:
        """The q/dq graph on the arithmetic of the backend's kernels."""
        return self.backend.emulate(self.converted, self.side.inputs)

    @stage
    def reloaded(self) -> Any:
        """The q/dq graph after it was saved and loaded."""
        written = io.BytesIO()
        torch.export.save(torch.export.export(self.converted, self.side.inputs), written)
        written.seek(0)
        return torch.export.load(written).module()

    @stage
    def artefact_bytes(self) -> int:
        """Bytes of the file that the program writes."""
        with tempfile.TemporaryDirectory() as folder:
            return self.program.save(Path(folder) / "artefact.pt2").stat().st_size

    @stage
    def again(self) -> tuple[str, ...]:
        """In what a second run over the same model differs from the first, in words."""
        plans = plan_of(self.annotate()).differences(plan_of(self.annotated))
        return (*plans, *differences(convert_pt2e(self.prepare()), self.converted))

    @stage
    def violations(self) -> tuple[Violation, ...]:
        """The declared limits that the config and the calibrated numbers break."""
        early = VIOLATIONS.get(self.annotated, ())
        with contextlib.suppress(AnnotationError):  # what cannot be carried out has no numbers
            return (*early, *(broken for broken, _ in qparam_violations(self.converted)))
        return tuple(early)

    def decided(self, placed: Placed) -> Decision | None:
        """Returns what was decided about the last operator of a piece."""
        return decision(self.root(self.annotated, placed))

    def is_limited(self, placed: Placed, rescale: Rescale | None) -> bool:
        """Tells whether a piece was taken under this limit on its ratios of scales, None being one of its own."""
        found = (
            LIMITS.get(node) for node in self.operators(self.annotated, placed) if not self.is_before(node, placed)
        )
        return rescale in (limits.rescale for limits in found if limits is not None)

    def is_rewritten(self, placed: Placed) -> bool:
        """Tells whether the backend's own transforms replaced the piece, and rules of it took what came."""
        written = placed.piece.root.target if isinstance(placed.piece, Piece) else None
        found = self.operators(self.annotated, placed)
        taken = all((decided := decision(node)) is not None and decided.quantized for node in found)
        return written is not None and taken and all(node.target is not written for node in found)


def behind_conversions(node: fx.Node) -> fx.Node:
    """Returns what a quantize/dequantize pair was put behind."""
    while node.target in (*QUANTIZE_OPS, *DEQUANTIZE_OPS):
        node = node.all_input_nodes[0]
    return node


def _upstream(root: fx.Node, constants: Set[fx.Node]) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if node not in found and node not in constants:
            found[node] = None
            pending += node.all_input_nodes
    return found


def _computes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not is_qdq(node)
