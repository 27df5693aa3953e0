"""From a spelled pattern to a module that consists of nothing else.

Before: a spelling, a sample of sizes, and which captures have to come from a quantized producer. After: a
module with inputs to run it on. The neighbours that some rules ask for, a quantized producer or a quantized
reader, are operators that the backend itself quantizes.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantplug.conformance.recipes import POSITIVE, Constant, Indices, Sample, Shape, operands_for
from quantplug.conformance.spelling import Call, Given, Many, Operand, Spelling
from quantplug.core.errors import QuantplugError, first_line
from quantplug.core.peers.torch_names import OpOverload, schema_of


class PieceError(QuantplugError, ValueError):
    """A spelled pattern is no call that its operators accept."""


@dataclass(frozen=True)
class Input:
    """An input of a piece, by its position."""

    index: int


@dataclass(frozen=True)
class Held:
    """A parameter or a buffer of a piece, by its name."""

    name: str


@dataclass(frozen=True)
class Resolved:
    """A call whose operands are known: inputs, constants, other calls, and plain values."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Piece(nn.Module):
    """A pattern as a module.

    Args:
        root: the spelled pattern.
        sample: sizes and data.
        given: what it reads in place of made-up tensors, such as another piece's result.
        number: another one means other data and constants of the same sizes.

    Attributes:
        inputs: tensors of the shapes that it takes.
        captures: for the names that the pattern binds inputs to, the position of the input.
        followers: positions of the inputs that are `given`.
    """

    def __init__(self, root: Call, sample: Sample, given: Tensor | None = None, number: int = 0) -> None:
        super().__init__()
        self.sample, self.inputs, self.captures = sample, list[Tensor](), dict[str, int]()
        self.followers: list[int] = []
        self._given = given
        self._random = torch.Generator().manual_seed(zlib.crc32(f"{root}{sample}".encode()) + number)
        self._bound: dict[str, Any] = {}
        self._positive = str(root.target).split(".")[1:2] in [[name] for name in POSITIVE]
        try:
            self.root = self._call(root)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            raise PieceError(f"{root.target} cannot be called with made-up operands: {first_line(error)}") from error

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the piece."""
        return self._run(self.root, inputs)

    def _run(self, found: Any, inputs: Any) -> Any:
        if isinstance(found, Input):
            return inputs[found.index]
        if isinstance(found, Held):
            return getattr(self, found.name)
        if isinstance(found, list):
            return [self._run(element, inputs) for element in found]
        if not isinstance(found, Resolved):
            return found
        args = [self._run(value, inputs) for value in found.args]
        return found.target(*args, **{name: self._run(value, inputs) for name, value in found.kwargs.items()})

    def value(self, resolved: Any) -> Any:
        """Returns what an operand is with the piece's own inputs."""
        with torch.no_grad():
            return self._run(resolved, [tensor.clone() for tensor in self.inputs])

    def _call(self, call: Call) -> Resolved:
        known = {name: self._inner(part) for name, part in call.operands if isinstance(part, Call | Given)}
        if not isinstance(call.target, OpOverload):
            return self._checked(Resolved(call.target, tuple(known.values()), {}))
        values = {name: self.value(part) for name, part in known.items()}
        if self._given is not None:
            values |= {name: self._given for name, part in call.operands if getattr(part, "kind", "") == "a tensor"}
        wanted = operands_for(call.target, self.sample, values)
        spelled = dict(call.operands)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in schema_of(call.target).arguments:
            present, value = self._operand(argument, spelled, known, wanted)
            if present and not argument.kwarg_only and len(args) + len(kwargs) == _position(call.target, argument.name):
                args.append(value)
            elif present:
                kwargs[argument.name] = value
        return self._checked(Resolved(call.target, tuple(args), kwargs))

    def _checked(self, resolved: Resolved) -> Resolved:
        """Runs a call once, so that one which its operator refuses is found where it is made."""
        self.value(resolved)
        return resolved

    def _inner(self, part: Spelling) -> Any:
        return part.value if isinstance(part, Given) else self._call(part) if isinstance(part, Call) else part

    def _operand(
        self, argument: Any, spelled: Mapping[str, Any], known: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """Returns whether an operand is given, and what it is."""
        name, optional = argument.name, argument.has_default_value()
        if name in known:
            return True, known[name]
        if name in spelled and spelled[name] is None:
            return not optional, None
        found = wanted.get(name, wanted.get("*"))
        if _is_tensor(spelled.get(name)):
            return True, self._leaves(spelled[name], found or wanted.get("self") or Shape(self.sample.image))
        if name in wanted and not isinstance(found, Shape | Constant | Indices):
            return True, [found] if isinstance(found, int) and str(argument.type).startswith("List[int") else found
        if optional or found is None:
            return not optional, self._absent(argument) if not optional else None
        return True, self._leaves(None, found)

    @staticmethod
    def _absent(argument: Any) -> None:
        if not str(argument.type).startswith("Optional"):
            raise PieceError(f"operand '{argument.name}' has no recipe")

    def _leaves(self, spelling: Any, wanted: Any) -> Any:
        if isinstance(spelling, Many):
            return [self._leaves(element, wanted) for element in spelling.elements]
        name = getattr(spelling, "name", None)
        if name is None or name not in self._bound:
            made = self._leaf(getattr(spelling, "kind", ""), wanted)
            self._bound[name or f"unnamed {len(self._bound)}"] = made
            if name and isinstance(made, Input):
                self.captures[name] = made.index
            return made
        return self._bound[name]

    def _leaf(self, kind: str, wanted: Any) -> Input | Held:
        if isinstance(wanted, Constant) or kind == "a constant":
            return self._hold(wanted)
        if self._given is not None and kind == "a tensor" and not isinstance(wanted, Indices):
            self.followers.append(len(self.inputs))
            self.inputs.append(self._given.clone())
        elif isinstance(wanted, Indices):
            self.inputs.append(torch.randint(wanted.limit, wanted.sizes, generator=self._random))
        else:
            self.inputs.append(self._data(wanted.sizes))
        return Input(len(self.inputs) - 1)

    def _hold(self, wanted: Any) -> Held:
        name = f"constant{len(list(self.parameters())) + len(list(self.buffers()))}"
        values = torch.randn(wanted.sizes, generator=self._random)
        values = values.abs() + 0.5 if getattr(wanted, "positive", False) else values * _by_channel(wanted.sizes)
        if few := getattr(wanted, "values", ()):
            values = torch.tensor(few)[torch.randint(len(few), wanted.sizes, generator=self._random)]
        if getattr(wanted, "is_buffer", False):
            self.register_buffer(name, values)
        else:
            self.register_parameter(name, nn.Parameter(values))
        return Held(name)

    def _data(self, sizes: tuple[int, ...]) -> Tensor:
        sign = "positive" if self._positive else self.sample.sign
        if sign == "both":
            return torch.randn(sizes, generator=self._random) + 0.5  # about zero, zero points would hardly count
        found = torch.rand(sizes, generator=self._random) * 3 + 0.05
        if sign == "positive":
            return found
        # Some values are positive, at the same places of every input, so that relu leaves a range of sums too.
        return torch.where(torch.arange(found.numel()).view(found.shape) % 4 == 0, found / 6, 0.25 - found)


def _by_channel(sizes: tuple[int, ...]) -> Tensor:
    """Returns factors that differ along the axes on which weights have channels, so that their scales do."""
    factors = [2.0 ** -(torch.arange(size) % 3) for size in sizes[:2]] if len(sizes) > 1 else []
    shapes = [[-1 if axis == own else 1 for axis in range(len(sizes))] for own in range(len(factors))]
    return math.prod((f.view(shape) for f, shape in zip(factors, shapes, strict=True)), start=torch.ones(()))


def _is_tensor(spelling: Any) -> bool:
    return isinstance(spelling, Many) or (isinstance(spelling, Operand) and spelling.kind != "anything")


def _position(target: OpOverload, name: str) -> int:
    return [argument.name for argument in schema_of(target).arguments].index(name)


class Sum(nn.Module):
    """A tensor added to itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns twice the tensor."""
        return x + x


def neighbours(shape: tuple[int, ...]) -> list[nn.Module]:
    """Returns modules that keep a shape, for a backend to choose one that it quantizes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Of four dimensions a linear's result is a view of a matrix, which no operator may detach in place.
        images = [nn.Conv2d(shape[1], shape[1], 1)] if len(shape) == 4 else []
        linears = [nn.Linear(shape[-1], shape[-1])] if shape else []
        return [Sum(), *images, *linears, nn.Sigmoid(), nn.Tanh()]


class Placed(nn.Module):
    """A piece between neighbours.

    Attributes:
        before: a quantized producer for the inputs that the rule follows, or None.
        piece: a piece, or the module of an example.
        after: a quantized reader of the result, or None.
        is_wide: whether its result is one of several tensors in one scale, whose range reaches to its negative. What
            an activation cuts off is seen there; in a range of its own, saturation cuts it off too.
    """

    def __init__(
        self, piece: nn.Module, inputs: tuple[Any, ...], followed: frozenset[int],
        before: nn.Module | None = None, after: nn.Module | None = None, *, is_wide: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.is_wide = is_wide
        self.piece, self.inputs, self.followed, self.before, self.after = piece, inputs, followed, before, after

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns what the piece yields, what the reader makes of it, and what the producer yields.

        A producer that has two users is not fused with the piece.
        """
        given = [self.before(x) if self.before and i in self.followed else x for i, x in enumerate(inputs)]
        result = self.piece(*given)
        read = [self.after(result)] if self.after else []
        return (result, *read, *(given[i] for i in self.followed if self.before))

    @property
    def results(self) -> int:
        """How many tensors the module returns."""
        return 1 + (self.after is not None) + (len(self.followed) if self.before else 0)


class Led(nn.Module):
    """A piece whose rule follows a quantized producer, behind one.

    Attributes:
        inputs: of both together.
    """

    def __init__(self, piece: nn.Module, inputs: tuple[Any, ...], followed: frozenset[int], before: nn.Module) -> None:
        super().__init__()
        self.piece, self.inputs, self.followed, self.before = piece, inputs, followed, before

    def forward(self, *inputs: Any) -> Any:
        """Runs both."""
        return self.piece(*(self.before(x) if i in self.followed else x for i, x in enumerate(inputs)))


class Following(Placed):
    """A piece behind pieces of another rule, one for each input that it takes from them.

    Attributes:
        before: those pieces; what they yield is a result too, so that none of them is fused with the piece.
    """

    def __init__(self, producers: Sequence[Any], piece: Piece, after: nn.Module | None = None) -> None:
        free = [x for i, x in enumerate(piece.inputs) if i not in piece.followers]
        inputs = (*(x for producer in producers for x in producer.inputs), *free)
        super().__init__(piece, inputs, frozenset(), nn.ModuleList(producers), after)
        self._sizes = [len(producer.inputs) for producer in producers]
        self._followers = dict(zip(piece.followers, range(len(producers)), strict=True))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns what the piece yields, what the reader makes of it, and what the producers yield."""
        assert isinstance(self.before, nn.ModuleList)
        rest, made = list(inputs), []
        for producer, size in zip(self.before, self._sizes, strict=True):
            made.append(producer(*rest[:size]))
            rest = rest[size:]
        places = range(len(self._followers) + len(rest))
        result = self.piece(*(made[self._followers[i]] if i in self._followers else rest.pop(0) for i in places))
        read = [self.after(result)] if self.after else []
        return (result, *read, *made)

    @property
    def results(self) -> int:
        """How many tensors the module returns."""
        return 1 + (self.after is not None) + len(self._sizes)


class Batch(nn.Module):
    """Several pieces side by side, each with inputs and outputs of its own.

    Attributes:
        placed: the pieces.
        inputs: the inputs of all of them.
    """

    def __init__(self, placed: list[Placed]) -> None:
        super().__init__()
        self.placed = placed
        self.branches = nn.ModuleList(placed)
        self.inputs = tuple(x for one in placed for x in one.inputs)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Returns the outputs of all pieces."""
        results, start = [], 0
        for one in self.placed:
            end = start + len(one.inputs)
            results.append(one(*inputs[start:end]))
            start = end
        return tuple(results)
