"""How people write an operator: as a function, a method, an operator of Python's, a module, in place.

Before: a call of ATen overloads with operands. After: the same computation in another of these ways. Which ways an
operator has is found by its name in torch, and by what they compute: a way that yields other numbers is none.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantplug.conformance.pieces import Held, Piece, PieceError, Resolved
from quantplug.conformance.recipes import Sample
from quantplug.conformance.spelling import Call
from quantplug.core.peers.torch_names import OpOverload, schema_of

OVERLOAD, FUNCTION, METHOD, OPERATOR, MODULE, IN_PLACE = (
    *("overload", "function", "method", "operator", "module", "in_place"),
)
WAYS = (FUNCTION, MODULE, METHOD, OPERATOR, IN_PLACE, OVERLOAD)

_OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "neg")},
    "div": operator.truediv,
}
_MODULES = {name.lower(): kind for name, kind in vars(nn).items() if inspect.isclass(kind)}
_USUAL = ("default", "Tensor", "dim", "int", "input", "vec", "self_int")
# Operands of ATen's that choose an implementation.
_UNSAID = {"cudnn_enabled", "cudnn_enable"}


def written(call: Call, sample: Sample, way: str) -> Piece | None:
    """Returns a pattern's piece in one of the `WAYS`, None where none of its calls can be written so.

    Raises:
        PieceError: its operators do not accept made-up operands.
    """
    piece = Piece(call, sample).eval()
    if way == OVERLOAD:
        return piece
    expected = _result(piece)
    rewriting = _Rewriting(piece, way)
    piece.root = rewriting.call(piece.root)
    _drop_unread(piece)
    same = rewriting.found and _is_same(_attempt(lambda: _result(piece)), expected)
    return piece if same else None


def _drop_unread(piece: Piece) -> None:
    """Removes constants that modules hold now."""
    read, pending = set(), [piece.root]
    while pending:
        part: Any = pending.pop()
        if isinstance(part, Held):
            read.add(part.name)
        elif isinstance(part, Resolved):
            pending += [*part.args, *part.kwargs.values()]
        elif isinstance(part, list):
            pending += part
    own = [*dict(piece.named_parameters(recurse=False)), *dict(piece.named_buffers(recurse=False))]
    for name in own:
        if name not in read:
            delattr(piece, name)


class _Rewriting:
    """The calls of a piece in another way; those that do not have it are functions."""

    def __init__(self, piece: Piece, way: str) -> None:
        self._piece, self._way, self.found = piece, way, False

    def call(self, call: Resolved) -> Resolved:
        inner = Resolved(call.target, tuple(map(self._operand, call.args)), call.kwargs)
        others = (MODULE, FUNCTION) if self._way == IN_PLACE else (FUNCTION,)  # what is in place stands behind layers
        for way in dict.fromkeys((self._way, *others)):
            for made in self._candidates(inner, way):
                if made is not None and self._computes(made, inner):
                    self.found |= way == self._way
                    return self._shortened(made)
        return inner

    def _operand(self, operand: Any) -> Any:
        if isinstance(operand, list):
            return [self._operand(element) for element in operand]
        return self.call(operand) if isinstance(operand, Resolved) else operand

    def _candidates(self, call: Resolved, way: str) -> Iterator[Resolved | None]:
        if not isinstance(call.target, OpOverload):
            return
        name = str(call.target).split(".")[1].rstrip("_")
        makers: Mapping[str, Callable[[], Resolved | None]] = {
            FUNCTION: lambda: self._as_function(call, name),
            METHOD: lambda: _as_called(call, getattr(Tensor, name, None)),
            OPERATOR: lambda: _as_called(call, _OPERATORS.get(name), 2),
            MODULE: lambda: self._as_module(call, name),
            IN_PLACE: lambda: self._as_module(call, name, inplace=True),
        }
        yield _attempt(makers[way])
        if way == IN_PLACE:
            yield _as_called(call, getattr(Tensor, f"{name}_", None))

    def _as_function(self, call: Resolved, name: str) -> Resolved | None:
        found = next((getattr(room, name) for room in (F, torch, torch.special) if hasattr(room, name)), None)
        if found is None:
            return None
        named = {n: v for n, v in _by_name(call).items() if n not in _UNSAID}
        parameters = _parameters(found)
        return (
            Resolved(found, (), named) if named.keys() <= parameters.keys() else Resolved(found, call.args, call.kwargs)
        )

    def _as_module(self, call: Resolved, name: str, **options: Any) -> Resolved | None:
        given = _by_name(call)
        held = {n: getattr(self._piece, v.name) for n, v in given.items() if isinstance(v, Held)}
        tensors = [v for n, v in given.items() if n not in held and _is_tensor(call, n) and v is not None]
        kind = _module_of(name, self._piece.value(tensors[0]))
        parameters = _parameters(kind.__init__) if kind is not None else {}
        if kind is None or not options.keys() <= parameters.keys():
            return None
        plain = {n: v for n, v in given.items() if not _is_tensor(call, n)}
        wanted = {**plain, **_sizes(held, given), **options}
        module = kind(**{n: wanted[n] for n in parameters if n in wanted})
        for own, tensor in held.items():
            setattr(module, own, tensor)
        self._piece.add_module(f"written_{name}{len(list(self._piece.children()))}", module.eval())
        return Resolved(module, tuple(tensors), {})

    def _computes(self, made: Resolved, call: Resolved) -> bool:
        return _is_same(_attempt(lambda: self._piece.value(made)), self._piece.value(call))

    def _shortened(self, call: Resolved) -> Resolved:
        """Leaves out operands that say what is so without them, from the last on, as people do."""
        expected = self._piece.value(call)
        shorter = [
            Resolved(call.target, call.args, {m: v for m, v in call.kwargs.items() if m != n}) for n in call.kwargs
        ]
        shorter += [Resolved(call.target, call.args[:-1], call.kwargs)] if len(call.args) > 1 else []
        for one in shorter:
            if _is_same(_attempt(lambda one=one: self._piece.value(one)), expected):  # type: ignore[misc]
                return self._shortened(one)
        return call


def _as_called(call: Resolved, function: Any, most: int | None = None) -> Resolved | None:
    return None if function is None else Resolved(function, call.args[:most], call.kwargs if most is None else {})


def _by_name(call: Resolved) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(call.target).arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _is_tensor(call: Resolved, name: str) -> bool:
    kinds = {argument.name: str(argument.type) for argument in schema_of(call.target).arguments}
    return "Tensor" in kinds[name]


def _parameters(function: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # built in
        return {}


def _module_of(name: str, x: Any) -> Any:
    plain = name.replace("_", "")
    dims = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}.get(getattr(x, "dim", int)(), "")
    return _MODULES.get(plain, _MODULES.get(f"{plain}{dims}"))


def _sizes(held: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a layer is told of its parameters' sizes: convolutions, linear layers, tables, norms."""
    weight = held.get("weight")
    if weight is None:
        return {"bias": False}
    made, read = (weight.shape[0], weight.shape[1]) if weight.dim() > 1 else (weight.shape[0],) * 2
    groups = given.get("groups", 1)
    crossed = "output_padding" in given
    channels = (made, read * groups) if crossed else (read * groups, made)
    return {
        **dict(zip(("in_channels", "out_channels"), channels, strict=True)),
        "in_features": read,
        "out_features": made,
        "num_embeddings": made,
        "embedding_dim": read,
        "num_features": made,
        "kernel_size": tuple(weight.shape[2:]),
        "bias": given.get("bias") is not None,
    }


def _result(piece: Piece) -> Any:
    with torch.no_grad():
        return piece(*(x.clone() for x in piece.inputs))


def _attempt(make: Callable[[], Any]) -> Any:
    """Returns what was made, None where operands do not fit: a name in torch may mean something else."""
    try:
        return make()
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError, PieceError):
        return None


def _is_same(found: Any, expected: Any) -> bool:
    same_kind = isinstance(found, Tensor) and isinstance(expected, Tensor)
    return same_kind and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)


def operator_names(call: Call) -> Iterator[str]:
    """Yields the operators of a call, outermost first, with the overload where it is not the usual one."""
    if isinstance(call.target, OpOverload):
        _, name, overload = str(call.target).split(".")
        yield name.rstrip("_") if overload in _USUAL else f"{name.rstrip('_')}.{overload}"
    yield from chain.from_iterable(operator_names(part) for _, part in call.operands if isinstance(part, Call))
