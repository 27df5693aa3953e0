"""What is tried on a quantizer that declares nothing: small models of the operators that our backends know.

Before: the declarations of the backends that are built in. After: for each operator, and each operator with what is
fused with it, forms of it: as people write it, in several sizes, and behind an operator that quantizers take.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.conformance.forms import calls_of
from quantplug.conformance.pieces import Input, Piece, PieceError, Placed, neighbours
from quantplug.conformance.recipes import SAMPLES
from quantplug.conformance.spelling import Call, spellings
from quantplug.conformance.writings import (
    FUNCTION,
    IN_PLACE,
    METHOD,
    MODULE,
    OPERATOR,
    OVERLOAD,
    operator_names,
    written,
)
from quantplug.core.patterns.language import Pattern
from quantplug.core.peers.torch_names import OpOverload
from quantplug.quantizers.framework.names import BUILT_IN
from quantplug.quantizers.framework.registry import get_quantizer

ALONE, BEHIND, TWICE = "alone", "behind", "twice"
# Forms of an operator: who writes it how, with which of the samples, where.
_FORMS = (
    *((way, 0, ALONE) for way in (MODULE, FUNCTION, METHOD, OPERATOR, OVERLOAD)),
    *((way, 0, BEHIND) for way in (MODULE, FUNCTION, OPERATOR, IN_PLACE)),
    *((FUNCTION, sample, ALONE) for sample in (1, 2, 3)),
    (MODULE, 0, TWICE),
)
_FUSED_FORMS = tuple((way, 0, ALONE) for way in (MODULE, FUNCTION, IN_PLACE))
# Ways in which layers and activations are written in models; what has none of them is fused by nobody.
_COMMON = (MODULE, OPERATOR)


@dataclass(frozen=True)
class Form:
    """One way in which an operator occurs in models.

    Attributes:
        row: the operator, such as "conv2d", "conv2d.padding" or "conv2d-relu".
        way: how it is written, one of the `WAYS`.
        sample: the number of the sizes and data.
        context: "alone" at the model's inputs, "behind" a layer, or called "twice" with the same parameters.
    """

    row: str
    way: str
    sample: int
    context: str

    @property
    def name(self) -> str:
        """The form in the names of tests."""
        return f"{self.row}-{self.way}-{self.sample}" + (f"-{self.context}" if self.context != ALONE else "")


class Twice(nn.Module):
    """A piece that is called on its inputs and on what they are reversed."""

    def __init__(self, piece: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.piece, self.inputs = piece, inputs

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns both results along the last dimension."""
        half = len(inputs) // 2
        return torch.cat([self.piece(*inputs[:half]), self.piece(*inputs[half:])], -1)


class Behind(nn.Module):
    """A piece whose inputs come from layers, each from one of its own.

    Attributes:
        before: the layers.
    """

    def __init__(self, piece: Piece, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.piece, self.before, self._places = piece, nn.ModuleList(layers.values()), list(layers)

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the layers and the piece."""
        made = dict(zip(self._places, self.before, strict=True))
        return self.piece(*(made[i](x) if i in made else x for i, x in enumerate(inputs)))


def rows(*wanted: str) -> dict[str, Call]:
    """Returns the calls of the operators that our backends know, by their rows' names, in their plainest spelling.

    Args:
        wanted: the rows to return; all of them if none is given.
    """
    return {name: call for name, call in _all_rows().items() if not wanted or name in wanted}


@cache
def _all_rows() -> dict[str, Call]:
    found: dict[str, Call] = {}
    for call in sorted(_calls(), key=lambda call: [name.count(".") for name in operator_names(call)]):
        found.setdefault("-".join(reversed(list(operator_names(call)))), call)
    return found


def _calls() -> Iterator[Call]:
    declared = (row for name in BUILT_IN for row in get_quantizer(name).backend.rows)
    patterns: Iterator[Pattern] = (pattern for row in declared for _, pattern in row.patterns)
    for pattern in patterns:
        yield from (call for call in spellings(pattern) if isinstance(call, Call) and _is_plain(call))


def _is_plain(call: Call) -> bool:
    inner = [part for _, part in call.operands if isinstance(part, Call)]
    is_written = not str(call.target).split(".")[1].endswith("_") if isinstance(call.target, OpOverload) else False
    return is_written and all(map(_is_plain, inner))


def forms_of(row: str, call: Call) -> Iterator[tuple[Form, Placed]]:
    """Yields the forms of a row that torch has, each with its model between inputs and outputs.

    Args:
        row: its name.
        call: what `rows` has for it.
    """
    is_fused = "-" in row
    if is_fused and not all(_is_common(part) for part in calls_of(call)):
        return
    for way, sample, context in _FUSED_FORMS if is_fused else _FORMS:
        piece = _written(call, sample, way)
        placed = _placed(piece, way, context) if piece is not None else None
        if placed is not None:
            yield Form(row, way, sample, context), placed


def _is_common(call: Call) -> bool:
    operands = tuple((n, None if isinstance(part, Call) else part) for n, part in call.operands)
    alone = Call(call.target, tuple((n, part) for n, part in operands if part is not None), call.name)
    return any(_written(alone, 0, way) is not None for way in _COMMON)


def _written(call: Call, sample: int, way: str) -> Piece | None:
    try:
        return written(call, SAMPLES[sample], way)
    except PieceError:
        return None


def _placed(piece: Piece, way: str, context: str) -> Placed | None:
    inputs = tuple(piece.inputs)
    if context == TWICE:
        if not list(piece.parameters()):
            return None
        both = (*inputs, *(x.flip(0) for x in inputs))
        return Placed(Twice(piece, both), both, frozenset())
    if context == ALONE:
        changed = way == IN_PLACE and isinstance(piece.root.args[0] if piece.root.args else None, Input)
        return None if changed else Placed(piece, inputs, frozenset())
    floats = [i for i, x in enumerate(inputs) if x.is_floating_point() and x.dim() > 1]
    layers = {i: _layer(tuple(inputs[i].shape)) for i in floats}
    return Placed(Behind(piece, layers), inputs, frozenset()) if layers else None


def _layer(shape: tuple[int, ...]) -> nn.Module:
    """Returns a layer that keeps a shape."""
    return next(module for module in neighbours(shape) if isinstance(module, nn.Conv2d | nn.Linear))
