"""The forms in which a rule's pattern occurs: placed pieces from its patterns or its examples.

Before: an annotator, one of its labels and a config. After: for each spelling of the pattern a module between the
neighbours that the rule asks for, or in words why the kit could make none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantplug.conformance.flow import quantizer_of
from quantplug.conformance.pieces import Piece, PieceError, Placed, neighbours
from quantplug.conformance.recipes import SAMPLES
from quantplug.conformance.spelling import Call, Operand, Spelling, spellings
from quantplug.core.annotator import Annotator
from quantplug.core.decision import decision
from quantplug.core.graph import compute_nodes
from quantplug.quantizers.backend import Backend


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

    def choose(self, calls: int) -> list[int]:
        """Returns the numbers of the ways; each has a size and a sign of data of its own, so one call makes two."""
        ways = max(2, calls) if calls else 0
        if not ways or not self.number:
            return list(range(ways))
        return [0, 1 + self.number % (ways - 1)] if self.is_default else [self.number % ways]


def forms_of(row: Annotator, label: str, config: str, turn: Turn, choose: Neighbours) -> tuple[Form, ...]:
    """Returns the forms of one rule under a config, under names of which each occurs once."""
    made = list(_shown(row)) or list(_written(row, label, config, turn, choose))
    good = [form for form in made if form.placed is not None]
    if not good:
        problem = next((form.problem for form in made), "it has no spelling")
        return (Form("form", None, f"{problem}; show what the rule is about with .shown_by(function)."),)
    names = [form.name for form in good]
    return tuple(
        Form(n if names.count(n) == 1 else f"{n}-{names[: i + 1].count(n)}", good[i].placed)
        for i, n in enumerate(names)
    )


def _shown(row: Annotator) -> Iterator[Form]:
    for example in row.examples:
        module, inputs = example()
        yield Form(getattr(example, "__name__", "example").strip("<>"), Placed(module, inputs, frozenset()))


def _written(row: Annotator, label: str, config: str, turn: Turn, choose: Neighbours) -> Iterator[Form]:
    for pattern in (pattern for name, pattern in row.patterns if name == label):
        calls = [call for call in spellings(pattern) if isinstance(call, Call) and not _writes_input(call, row.follows)]
        for number in turn.choose(len(calls)):
            call = calls[number % len(calls)]
            try:
                placed = _place(row, config, Piece(call, SAMPLES[number % len(SAMPLES)]), choose)
            except PieceError as error:
                yield Form(_operator(call), None, str(error).rstrip("."))
            else:
                yield Form(_operator(call), placed)


def _writes_input(spelling: Spelling, follows: tuple[str, ...]) -> bool:
    """Tells whether an operator changes an input of the model in place, which is the caller's tensor."""
    if not isinstance(spelling, Call):
        return False
    schema = getattr(spelling.target, "_schema", None)
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write} if schema else set()
    own = any(
        name in written and isinstance(part, Operand) and part.kind == "a tensor" and part.name not in follows
        for name, part in spelling.operands
    )
    return own or any(_writes_input(part, follows) for _, part in spelling.operands if part is not None)


def _operator(call: Call) -> str:
    """Returns the overload that the pattern binds to "op"."""
    found = next((c for c in _calls(call) if c.name == "op"), call)
    return str(found.target)


def _calls(call: Call) -> Iterator[Call]:
    yield call
    for _, part in call.operands:
        if isinstance(part, Call):
            yield from _calls(part)


def _place(row: Annotator, config: str, piece: Piece, choose: Neighbours) -> Placed:
    """Puts a piece between the neighbours that its rule asks for."""
    followed = frozenset(piece.captures[name] for name in row.follows if name in piece.captures)
    inputs = tuple(piece.inputs)
    before = choose(config, inputs[min(followed)]) if followed else None
    with torch.no_grad():
        result = piece(*(x.clone() for x in inputs))
    after = choose(config, result) if row.writes_float else None
    return Placed(piece, inputs, followed, before, after)
