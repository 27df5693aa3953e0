"""Rows behind the outputs of other rows: what one kernel writes, another one reads.

Before: a backend's declaration, and one of its rules. After: for each way in which other rows quantize their outputs
a form of the rule that reads such an output, by rows that write alike in turn: all of them would be as many as the
square of the rows. Numbers that two specs disagree about are seen here, as they are in the first whole model.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

from quantplug.conformance.flow import Side, quantizer_of
from quantplug.conformance.forms import Form, Neighbours, operator_name, writes_input
from quantplug.conformance.pieces import Following, Led, Piece, PieceError, Placed
from quantplug.conformance.recipes import SAMPLES
from quantplug.conformance.spelling import Call, spellings
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.observers.sharing import tensor_key
from quantplug.core.patterns.language import Match, Op, Pattern
from quantplug.quantizers.framework.backend import Backend

# Sizes to try until one row's output fits another's input.
_SIZES = (SAMPLES[1], SAMPLES[0], SAMPLES[3])


def plain_label(row: Annotator) -> str:
    """Returns the rule of a row with the fewest operators: the others only fuse more onto it."""
    return min(row.patterns, key=lambda pair: _operators(pair[1]))[0]


def _operators(pattern: Pattern) -> int:
    return isinstance(pattern, Op) + sum(map(_operators, pattern.parts))


@dataclass(frozen=True)
class _Producer:
    row: Annotator
    label: str
    call: Call


class Followers:
    """Makes forms of a backend's rules that read what other rows write.

    Args:
        backend: the declaration.
        config: its config; one with static activations.
        choose: finds neighbours for rows that ask for them.
    """

    def __init__(self, backend: Backend, config: str, choose: Neighbours) -> None:
        self._backend, self._config, self._choose = backend, config, choose
        self._uses: Counter[str] = Counter()
        self._kinds: dict[Any, list[_Producer]] = {}
        for producer in self._producers():
            self._kinds.setdefault(self._kind(producer), []).append(producer)

    def forms(self, row: Annotator) -> Iterator[Form]:
        """Yields the plain rule of a row behind a row of each kind."""
        call = _plain_call(row)
        if call is None:
            return
        for kind in self._kinds.values():
            candidates = sorted(kind, key=lambda producer: self._uses[producer.label])
            made = ((p, self._behind(row, call, p, sample)) for p in candidates for sample in _SIZES)
            fitting = next(((p, placed) for p, placed in made if placed is not None), None)
            if fitting is not None:
                producer, placed = fitting
                self._uses[producer.label] += 1
                yield Form(f"{operator_name(call)}-behind-{producer.label}", placed)

    def _producers(self) -> Iterator[_Producer]:
        seen: set[str] = set()
        for row in self._backend.rows:
            call, label = _plain_call(row), plain_label(row)
            if call is not None and label not in seen:
                seen.add(label)
                yield _Producer(row, label, call)

    def _behind(self, row: Annotator, call: Call, producer: _Producer, sample: Any) -> Placed | None:
        try:
            given = _result(self._made(producer, sample))
            if not given.is_floating_point():
                return None
            piece = Piece(call, sample, given)
            producers = [self._made(producer, sample, number) for number in range(len(piece.followers))]
            after = self._choose(self._config, _result(piece)) if row.writes_float else None
        except PieceError:
            return None
        return Following(producers, piece, after) if producers else None

    def _made(self, producer: _Producer, sample: Any, number: int = 0) -> Any:
        piece = Piece(producer.call, sample, number=number)
        followed = frozenset(piece.captures[n] for n in producer.row.follows if n in piece.captures)
        before = self._choose(self._config, piece.inputs[min(followed)]) if followed else None
        return piece if before is None else Led(piece, tuple(piece.inputs), followed, before)

    def _kind(self, producer: _Producer) -> Any:
        """Returns how a row quantizes its output: rows of one kind are alike to who reads them."""
        try:
            piece = self._made(producer, _SIZES[0])
            side = Side([Placed(piece, tuple(piece.inputs), frozenset())])
            model = quantizer_of(self._backend).transform_for_annotation(side.exported())
            root = model.graph.output_node().all_input_nodes[0]
            patterns = (pattern for label, pattern in producer.row.patterns if label == producer.label)
            match = next(found for pattern in patterns if isinstance(found := pattern.match(root), Match))
            decided = producer.row.decide(match, self._backend.config(self._config))
            spec: Any = decided[root].output_qspec
            while isinstance(spec, SharedQuantizationSpec) and isinstance(spec.edge_or_node, tuple):
                source, reader = spec.edge_or_node
                spec = decided[reader].input_qspec_map[source]
            return (producer.row.output, tensor_key(spec))
        except Exception:  # a row may fail in any way, which its own trials tell
            return (producer.row.output, producer.label)


def _plain_call(row: Annotator) -> Call | None:
    patterns = [pattern for label, pattern in row.patterns if label == plain_label(row)]
    calls = (call for pattern in patterns for call in spellings(pattern) if isinstance(call, Call))
    return next((call for call in calls if not writes_input(call, row.follows)), None)


def _result(module: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(*(x.clone() for x in module.inputs))
    return found
