"""Pieces side by side in one model, through torchao's flow with somebody's quantizer, and through a lowering.

Before: a `Candidate` and placed pieces. After: the stages, each made when it is first asked for and once for all
pieces: notes of the annotations, the q/dq graph, the same by our own core, and the program.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.conformance.candidate import Candidate
from quantplug.conformance.flow import Side, Stages, stage
from quantplug.conformance.noted import Notes, Noting, Operator
from quantplug.conformance.pieces import Placed
from quantplug.core.errors import AnnotationError, QuantplugWarning, first_line
from quantplug.core.peers.torch_names import pytree
from quantplug.core.pt2e.convert import convert_pt2e as convert_by_ours
from quantplug.core.pt2e.prepare import prepare_pt2e as prepare_by_ours
from quantplug.core.qdq.format import differences


class NotExportedError(Exception):
    """torch.export does not take a model in this way, which is nothing of the quantizer's."""


class CandidateFlow(Stages):
    """The stages of one model under a candidate.

    Attributes:
        candidate: the quantizer and its lowering.
    """

    def __init__(self, candidate: Candidate, side: Side) -> None:
        super().__init__(side)
        self.candidate = candidate
        self._quantizer = candidate.make()

    @stage
    def exported(self) -> fx.GraphModule:
        """The float graph."""
        return self.side.exported(guarded=False)

    @stage
    def _first(self) -> tuple[Notes, fx.GraphModule | None, Exception | None]:
        return self._prepared(self._quantizer)

    @property
    def notes(self) -> Notes:
        """What the quantizer annotated.

        Raises:
            AnnotationError: it cannot be carried out.
            Exception: what the quantizer raised.
        """
        return self._first[0]

    def require_prepared(self) -> fx.GraphModule:
        """Returns the calibrated graph, before it is converted.

        Raises:
            Exception: what torchao's `prepare_pt2e` raised.
        """
        _, prepared, error = self._first
        if prepared is None:
            assert error is not None
            raise error.with_traceback(None)
        return prepared

    @stage
    def converted(self) -> fx.GraphModule:
        """The q/dq graph by torchao's `convert_pt2e`."""
        return _converted_by_torchao(self.require_prepared())

    def _prepared(self, quantizer: Quantizer, **how: bool) -> tuple[Notes, fx.GraphModule | None, Exception | None]:
        """Returns the notes, and either the calibrated graph or why there is none."""
        try:
            model = self.side.exported(guarded=False, **how)
        except Exception as error:  # export may refuse in any way
            raise NotExportedError(first_line(error)) from error
        noting = Noting(quantizer, self.side.inputs, self._pieces)
        try:
            prepared = _quietly(lambda: prepare_pt2e(model, noting))
            with torch.no_grad():
                prepared(*self._inputs())
        except Exception as error:
            if noting.notes is None:
                raise noting.problem or error from None
            return noting.notes, None, error
        if noting.notes is None:
            raise noting.problem or AnnotationError(f"Quantizer '{self.candidate.name}' was not asked to annotate.")
        return noting.notes, prepared, None

    def _inputs(self) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in self.side.inputs)

    def _pieces(self, model: fx.GraphModule) -> dict[Placed, list[fx.Node]]:
        found = {placed: self.own_nodes(model, placed) for placed in self.side.placed}
        self.forget(model)  # what comes of the graph is another one
        return found

    @stage
    def strict(self) -> Notes:
        """What is annotated on a graph from strict export."""
        return self._prepared(self.candidate.make(), strict=True)[0]

    @stage
    def training(self) -> Notes:
        """What is annotated on a graph of the model in training mode."""
        return self._prepared(self.candidate.make(), training=True)[0]

    @stage
    def open(self) -> tuple[Notes, list[Any], list[Any]]:
        """What is annotated where first dimensions are open; what both graphs yield of twice as many samples."""
        notes, prepared, error = self._prepared(self.candidate.make(), dynamic=True)
        if prepared is None:
            assert error is not None
            raise error
        model = self.side.exported(dynamic=True)
        sizes = [node.meta["val"].shape for node in model.graph.find_nodes(op="placeholder")]
        more = [
            x if not shape or isinstance(shape[0], int) else torch.cat([x, x])
            for x, shape in zip(self.side.inputs, sizes, strict=True)
        ]
        converted = _converted_by_torchao(prepared)
        with torch.no_grad():
            found, expected = ([*one(*(x.clone() for x in more))] for one in (converted, model))
        return notes, found, expected

    @stage
    def again(self) -> tuple[str, ...]:
        """In what a second run of the same quantizer, and a run of another one, differ from the first, in words."""
        found: list[str] = []
        for whose, quantizer in (("the same", self._quantizer), ("a new", self.candidate.make())):
            notes, prepared, _ = self._prepared(quantizer)
            differing = [n for n, one in self.notes.operators.items() if notes.operators.get(n) != one]
            found += [f"{whose} quantizer annotates '{name}' in another way" for name in differing]
            if prepared is not None and not differing:
                found += [
                    f"{whose} quantizer, {d}" for d in differences(_converted_by_torchao(prepared), self.converted)
                ]
        return tuple(found)

    @stage
    def by_ours(self) -> fx.GraphModule:
        """The q/dq graph of the same quantizer by quantplug's own core."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QuantplugWarning)
            prepared = prepare_by_ours(self.side.exported(guarded=False), self.candidate.make())
            with torch.no_grad():
                prepared(*(x.clone() for x in self.side.inputs))
            return convert_by_ours(prepared)

    @stage
    def program(self) -> Callable[..., Any]:
        """What the lowering gives."""
        lower = self.candidate.lowering
        assert lower is not None
        made: Callable[..., Any] = _quietly(lambda: lower(self.converted, self.side.inputs))
        return made

    def own(self, placed: Placed) -> tuple[Operator, ...]:
        """Returns the operators of a piece as they are annotated, the last first, without those before the piece."""
        return self.notes.pieces[placed]

    def own_nodes(self, model: fx.GraphModule, placed: Placed) -> list[fx.Node]:
        """Returns the operators of a piece in a graph, the last first, without those before the piece."""
        return [node for node in self.operators(model, placed) if not self.is_before(node, placed)]

    def of(self, found: Sequence[Any], placed: Placed) -> Tensor:
        """Returns a piece's result among those of a model."""
        result: Tensor = pytree.tree_leaves(found[self.side.starts[placed]])[0]
        return result


def _converted_by_torchao(prepared: fx.GraphModule) -> fx.GraphModule:
    converted: fx.GraphModule = _quietly(lambda: convert_pt2e(prepared))
    return converted


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()
