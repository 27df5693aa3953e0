"""Draws a random model: operators are tried on real tensors, and kept where what they yield is usable."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.model import EXAMPLE_BATCH, Input, Model, Step, pruned

OTHER_BATCH = 5
_MOST_ELEMENTS = 6000
_LARGEST = 1e3


class MisfitError(Exception):
    """No value of the model fits the operator that was drawn."""


@dataclass
class Draft:
    """A step that an operator is writing: values to read, modules to make, lines around its expression."""

    random: random.Random
    values: dict[str, Tensor]
    number: int
    is_dynamic: bool
    made: list[tuple[str, str, tuple[int, ...]]]  # kind, step and width of modules that can be used again
    init: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    owns: list[str] = field(default_factory=list)

    def value(self, *ranks: int, where: Callable[[Tensor], bool] = lambda t: True) -> str:
        """Picks a float value of one of the ranks, late ones more often."""
        fitting = [n for n, t in self.values.items() if t.is_floating_point() and t.dim() in ranks and where(t)]
        if not fitting:
            raise MisfitError
        index = min(int(self.random.expovariate(0.6)), len(fitting) - 1)
        return self.read(fitting[-1 - index])

    def like(self, name: str, **sizes: Any) -> str:
        """Picks another value of the same shape, or the same value again where there is none."""
        shape = self.shape(name)
        return self.value(len(shape), where=lambda t: tuple(t.shape) == shape)

    def read(self, name: str) -> str:
        if name not in self.reads:
            self.reads.append(name)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def module(self, made: str) -> str:
        path = f"self.m{self.number}" + "abcdefgh"[len(self.init)]
        self.init.append(f"{path} = {made}")
        return path

    def buffer(self, made: str) -> str:
        name = f"b{self.number}" + "abcdefgh"[len(self.init)]
        self.init.append(f'self.register_buffer("{name}", {made})')
        return f"self.{name}"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def dimension(self, name: str) -> int:
        """Picks a dimension, not the batch where that is open."""
        return self.random.randrange(1 if self.is_dynamic else 0, len(self.shape(name)))

    def fixed(self) -> None:
        """Says that the operator needs a fixed batch."""
        if self.is_dynamic:
            raise MisfitError


OPERATORS: dict[str, tuple[float, Callable[[Draft], str]]] = {}


def operator(weight: float = 1.0) -> Callable[[Callable[[Draft], str]], Callable[[Draft], str]]:
    def register(write: Callable[[Draft], str]) -> Callable[[Draft], str]:
        OPERATORS[write.__name__] = (weight, write)
        return write

    return register


def generated(seed: int, configs: tuple[str, ...] = ("int8",), without: frozenset[str] = frozenset()) -> Model:
    """Returns the random model of a seed."""
    import fuzz.operators  # noqa: F401

    drawn = random.Random(seed)
    while not (model := _drawn(seed, drawn, configs, without)).steps:
        pass  # inputs that few operators take
    return _with_outputs(model, drawn)


def _drawn(seed: int, drawn: random.Random, configs: tuple[str, ...], without: frozenset[str]) -> Model:
    is_dynamic = drawn.random() < 0.2
    inputs = _inputs(drawn)
    names = [name for name in OPERATORS if name not in without]
    weights = [OPERATORS[name][0] * drawn.choice((0.2, 1, 1, 3)) for name in names]
    tracks = [_values(inputs, EXAMPLE_BATCH)] + ([_values(inputs, OTHER_BATCH)] if is_dynamic else [])
    holder = nn.Module()
    steps: list[Any] = []
    made: list[Any] = []
    wanted, tries = drawn.randint(5, 40 if drawn.random() < 0.4 else 15), 0
    while len(steps) < wanted and tries < 400:
        tries += 1
        name = drawn.choices(names, weights)[0]
        draft = Draft(drawn, tracks[0], len(steps), is_dynamic, made)
        step = _tried(name, draft, holder, tracks)
        if step is not None:
            steps.append(step)
    config = drawn.choices(configs, [4, *[1] * (len(configs) - 1)])[0]
    return Model(seed, inputs, tuple(steps), (), config=config, strict=drawn.random() < 0.3, is_dynamic=is_dynamic)


def _inputs(drawn: random.Random) -> tuple[Input, ...]:
    c, size, length, width = (
        drawn.choice((2, 3, 4, 8)),
        drawn.randint(5, 12),
        drawn.randint(4, 9),
        drawn.choice((4, 6, 8, 16)),
    )
    n = EXAMPLE_BATCH
    kinds = {
        "image": (n, c, size, drawn.choice((size, size + 2))),
        "sequence": (n, length, width),
        "signal": (n, c, length * 2),
        "vector": (n, width),
        "tokens": (n, length),
        "volume": (n, c, 4, 5, 6),
    }
    first = drawn.choices(list(kinds), [6, 5, 2, 2, 2, 1])[0]
    more = drawn.choices(list(kinds), [2, 2, 1, 2, 1, 0], k=1) if drawn.random() < 0.25 else []
    same = [first] if drawn.random() < 0.15 else []
    scale = drawn.choice((1.0, 1.0, 0.1, 5.0))
    return tuple(
        Input(f"x{i}", kinds[kind], 20 if kind == "tokens" else 0, scale)
        for i, kind in enumerate([first, *more, *same])
    )


def _values(inputs: tuple[Input, ...], batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {each.name: each.draw(generator, batch) for each in inputs}


def _tried(name: str, draft: Draft, holder: nn.Module, tracks: list[dict[str, Tensor]]) -> Step | None:
    result = f"v{draft.number}"
    try:
        expression = OPERATORS[name][1](draft)
        body = (*draft.before, f"{result} = {expression}", *draft.after)
        found = [_run(draft.init, body, result, holder, values) for values in tracks]
    except (MisfitError, RuntimeError, ValueError, IndexError, AssertionError):
        return None
    if not _is_usable(found, draft.is_dynamic):
        return None
    for values, value in zip(tracks, found, strict=True):
        values[result] = value
    for each in draft.init:
        if "nn.Linear" in each or "nn.Conv2d" in each:
            draft.made.append((each.split(" = ")[0], result, tuple(draft.shape(draft.reads[0]))))
    return Step(result, name, tuple(draft.init), body, tuple(draft.reads), tuple(found[0].shape), tuple(draft.owns))


def _run(init: list[str], body: tuple[str, ...], result: str, holder: nn.Module, values: dict[str, Tensor]) -> Tensor:
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "self": holder,
        **{k: v.clone() for k, v in values.items()},
    }
    torch.manual_seed(int(result[1:]))
    # oneDNN's float convolutions read memory that nobody wrote where a tap lies in padding only: a seed is one model.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        for line in init:
            name = line.split(" = ")[0].removeprefix("self.")
            if name.isidentifier() and hasattr(holder, name):  # of an attempt that did not fit
                delattr(holder, name)
            exec(line, scope)
        holder.eval()
        exec("\n".join(body), scope)
    return scope[result]


def _is_usable(found: list[Any], is_dynamic: bool) -> bool:
    if not all(isinstance(each, Tensor) and each.is_floating_point() and each.dim() for each in found):
        return False
    value = found[0]
    if not 1 < value.numel() <= _MOST_ELEMENTS or not value.isfinite().all() or value.abs().max() > _LARGEST:
        return False
    if value.std() < 1e-3:
        return False
    if not is_dynamic:
        return True
    return [each.shape[0] for each in found] == [EXAMPLE_BATCH, OTHER_BATCH] and found[0].shape[1:] == found[1].shape[
        1:
    ]


def _with_outputs(model: Model, drawn: random.Random) -> Model:
    read = {name for step in model.steps for name in step.reads}
    unread = [step.name for step in model.steps if step.name not in read]
    outputs = tuple(dict.fromkeys([model.steps[-1].name, *reversed(unread[-5:])]))
    structure = "tensor" if len(outputs) == 1 and drawn.random() < 0.8 else drawn.choice(("tuple", "tuple", "dict"))
    return pruned(replace(model, outputs=outputs, structure=structure))
