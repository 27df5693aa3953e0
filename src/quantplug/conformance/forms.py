"""The forms in which a rule's pattern occurs: placed pieces from its patterns or its examples.

Before: an annotator, one of its labels and a config. After: for each spelling of the pattern a module between the
neighbours that the rule asks for, or in words why the kit could make none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.conformance.flow import quantizer_of
from quantplug.conformance.pieces import Piece, PieceError, Placed, neighbours
from quantplug.conformance.recipes import SAMPLES
from quantplug.conformance.spelling import Call, Operand, Spelling, spellings
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.graph.facts import compute_nodes
from quantplug.core.peers.torch_names import pytree, schema_or_none
from quantplug.core.specs.decision import decision
from quantplug.quantizers.framework.backend import Backend


@dataclass(frozen=True)
class Form:
    """One way in which a rule's pattern occurs.

    Attributes:
        name: the overload that the rule is about, and a number where several forms share it.
        placed: the module, or None where the kit could make none.
        problem: why it could make none.
    """

    name: str
    placed: Placed | None
    problem: str = ""


class Neighbours:
    """Chooses modules that keep a shape and that a backend quantizes, input and output."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[tuple[str, tuple[int, ...]], nn.Module | None] = {}

    def __call__(self, config: str, x: Tensor) -> nn.Module | None:
        """Returns a module for tensors like this one, None where the backend quantizes none that the kit knows."""
        key = (config, tuple(x.shape))
        if key not in self._known:
            self._known[key] = next((m for m in neighbours(key[1]) if self._quantizes(config, m, x)), None)
        return self._known[key]

    def _quantizes(self, config: str, module: nn.Module, x: Tensor) -> bool:
        pair = nn.Sequential(module, module)
        model = torch.export.export(pair, (x,)).module()
        quantizer_of(self._backend, config).annotate(model)
        taken = [decision(node) for node in compute_nodes(model.graph)]
        return all(decided is not None and decided.quantized for decided in taken)


@dataclass(frozen=True)
class Turn:
    """Which of the ways to write a pattern are tried, so that all of a row's rules and configs share them.

    Their product would be hundreds of models: the first rule of a row is written in every way, each further one in
    the plainest and another, and under each further config in one, in turn.

    Attributes:
        number: counts the rules and configs of a row.
        is_default: whether the config is the first that the rule is tried under.
    """

    number: int
    is_default: bool

    def choose(self, calls: int) -> list[tuple[int, int]]:
        """Returns pairs of the number of a call and of the sample of sizes and data that it is tried with."""
        samples = len(SAMPLES)
        if not calls or not self.number:
            ways = [(number % calls, number % samples) for number in range(max(samples, calls))] if calls else []
            # The plainest call comes in every size: a backend may refuse the others.
            return list(dict.fromkeys([*ways, *((0, sample) for sample in range(samples)[: len(ways)])]))
        others = max(1, calls - 1)
        if self.is_default:
            return [(0, 0), ((1 + self.number % others) % calls, 1 + self.number % (samples - 1))]
        return [(self.number % calls, self.number % samples)]


def forms_of(row: Annotator, label: str, config: str, turn: Turn, choose: Neighbours) -> tuple[Form, ...]:
    """Returns the forms of one rule under a config, under names of which each occurs once."""
    made = [*_shown(row, config, choose), *_written(row, label, config, turn, choose)]
    if not turn.is_default and all(form.placed is None for form in made):
        # The way whose turn it is cannot be called with made-up operands: the plainest way is tried again.
        made += _written(row, label, config, Turn(turn.number, is_default=True), choose)
    good = [form for form in made if form.placed is not None]
    if not good:
        problem = next((form.problem for form in made), "it has no spelling")
        return (Form("form", None, f"{problem}; show what the rule is about with .shown_by(function)."),)
    names = [form.name for form in good]
    return tuple(
        Form(n if names.count(n) == 1 else f"{n}-{names[: i + 1].count(n)}", good[i].placed)
        for i, n in enumerate(names)
    )


def _shown(row: Annotator, config: str, choose: Neighbours) -> Iterator[Form]:
    for example in row.examples:
        name = getattr(example, "__name__", "example").strip("<>")
        module, inputs = example()
        yield Form(name, _read(row, config, module, inputs, choose))
        again, _ = example()
        above = pytree.tree_map_only(Tensor, _above_zero, inputs)
        if _is_finite(again, above):
            yield Form(f"{name}-positive", _read(row, config, again, above, choose))


def _read(row: Annotator, config: str, module: nn.Module, inputs: tuple[Any, ...], choose: Neighbours) -> Placed:
    """Puts an example before the quantized reader that its rule asks for."""
    if not row.writes_float:
        return Placed(module, inputs, frozenset())
    with torch.no_grad():
        result = pytree.tree_leaves(module(*pytree.tree_map_only(Tensor, torch.clone, inputs)))[0]
    return Placed(module, inputs, frozenset(), after=choose(config, result))


def _above_zero(x: Tensor) -> Tensor:
    """Moves data to one side of zero: about zero a kernel without zero points is nearly right."""
    return x.abs() + 0.1 * x.abs().max() if x.is_floating_point() and x.numel() else x


def _is_finite(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Tells whether a module takes inputs that its author did not choose."""
    try:
        with torch.no_grad():
            found = pytree.tree_leaves(module(*pytree.tree_map_only(Tensor, torch.clone, inputs)))
    except Exception:  # an example may refuse other data in any way
        return False
    return all(bool(x.isfinite().all()) for x in found if isinstance(x, Tensor))


def _written(row: Annotator, label: str, config: str, turn: Turn, choose: Neighbours) -> Iterator[Form]:
    for pattern in (pattern for name, pattern in row.patterns if name == label):
        calls = [call for call in spellings(pattern) if isinstance(call, Call) and not writes_input(call, row.follows)]
        for number, sample in turn.choose(len(calls)):
            call = calls[number]
            try:
                placed = _place(
                    row, config, Piece(call, SAMPLES[sample]), choose, is_wide=_ends_behind(call) and sample > 0
                )
            except PieceError as error:
                yield Form(operator_name(call), None, str(error).rstrip("."))
            else:
                yield Form(operator_name(call), placed)


def writes_input(spelling: Spelling, follows: tuple[str, ...]) -> bool:
    """Tells whether an operator changes an input of the model in place, which is the caller's tensor."""
    if not isinstance(spelling, Call):
        return False
    schema = schema_or_none(spelling.target)
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write} if schema else set()
    own = any(
        name in written and isinstance(part, Operand) and part.kind == "a tensor" and part.name not in follows
        for name, part in spelling.operands
    )
    return own or any(writes_input(part, follows) for _, part in spelling.operands if part is not None)


def operator_name(call: Call) -> str:
    """Returns the overload that the pattern binds to "op"."""
    found = next((c for c in calls_of(call) if c.name == "op"), call)
    return str(found.target)


def calls_of(call: Call) -> Iterator[Call]:
    """Yields a call of a pattern and those that it is given the results of."""
    yield call
    for _, part in call.operands:
        if isinstance(part, Call):
            yield from calls_of(part)


def _ends_behind(call: Call) -> bool:
    """Tells whether a pattern ends in another operator than the one that it is about: an activation."""
    return call.name != "op" and any(inner.name == "op" for inner in calls_of(call))


def _place(row: Annotator, config: str, piece: Piece, choose: Neighbours, *, is_wide: bool) -> Placed:
    """Puts a piece between the neighbours that its rule asks for."""
    followed = frozenset(piece.captures[name] for name in row.follows if name in piece.captures)
    inputs = tuple(piece.inputs)
    before = choose(config, inputs[min(followed)]) if followed else None
    with torch.no_grad():
        result = piece(*(x.clone() for x in inputs))
    after = choose(config, result) if row.writes_float else None
    return Placed(piece, inputs, followed, before, after, is_wide=is_wide)
