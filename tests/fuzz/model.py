"""A random model as data: steps that are lines of Python, so that it can be printed, shrunk and written to a file."""

import linecache
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLE_BATCH = 3
OPEN = torch.export.Dim("batch", min=1, max=16)
_HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


@dataclass(frozen=True)
class Input:
    """An input of the model; indices below `high` where that is given."""

    name: str
    shape: tuple[int, ...]
    high: int = 0
    scale: float = 1.0

    def draw(self, generator: torch.Generator, batch: int | None = None) -> Tensor:
        shape = self.shape if batch is None else (batch, *self.shape[1:])
        if self.high:
            return torch.randint(0, self.high, shape, generator=generator)
        return torch.randn(shape, generator=generator) * self.scale


@dataclass(frozen=True)
class Step:
    """One operator: the lines that make its modules and the lines that compute its value from earlier ones."""

    name: str
    family: str
    init: tuple[str, ...]
    body: tuple[str, ...]
    reads: tuple[str, ...]
    shape: tuple[int, ...]
    owns: tuple[str, ...] = ()  # steps whose modules it uses again


@dataclass(frozen=True)
class Model:
    """A model, how it is exported and the config that it is quantized with."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    structure: str = "tuple"  # or "tensor", "dict"
    config: str = "int8"
    strict: bool = False
    is_dynamic: bool = False

    @property
    def families(self) -> frozenset[str]:
        return frozenset(step.family for step in self.steps)

    def source(self) -> str:
        """Returns the Python source of a module `Model`."""
        init = [line for i, step in enumerate(self.steps) if step.init for line in _seeded(i, step)]
        body = [line for step in self.steps for line in step.body]
        arguments = ", ".join(("self", *(each.name for each in self.inputs)))
        lines = [
            "class Model(nn.Module):",
            "    def __init__(self):",
            *_indented(["super().__init__()", *init]),
            "",
            f"    def forward({arguments}):",
            *_indented([*body, f"return {self._returned()}"]),
        ]
        return _HEAD + "\n".join(lines) + "\n"

    def module(self) -> nn.Module:
        return module_of(self.source())

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Returns the inputs of a call; calls differ in values and, where the batch is open, in its size."""
        generator = torch.Generator().manual_seed(self.seed * 64 + number)
        size = (EXAMPLE_BATCH, 5, 1, 2)[number % 4] if self.is_dynamic else None
        return tuple(each.draw(generator, size) for each in self.inputs)

    def open_sizes(self) -> Any:
        return tuple({0: OPEN} for _ in self.inputs) if self.is_dynamic else None

    def _returned(self) -> str:
        if self.structure == "tensor":
            return self.outputs[0]
        if self.structure == "dict":
            return "{" + ", ".join(f'"{name}": {name}' for name in self.outputs) + "}"
        return "(" + ", ".join(self.outputs) + ",)"


def pruned(model: Model) -> Model:
    """Returns the model without steps and inputs that no output needs, None if no input is left."""
    wanted, kept = set(model.outputs), []
    owners: set[str] = set()
    for step in reversed(model.steps):
        if step.name in wanted:
            kept.append(step)
            wanted.update(step.reads)
            owners.update(step.owns)
        elif step.name in owners:  # its value is not used, its module is
            kept.append(replace(step, body=(), reads=()))
    inputs = tuple(each for each in model.inputs if each.name in wanted)
    return replace(model, steps=tuple(reversed(kept)), inputs=inputs)


def module_of(source: str) -> nn.Module:
    """Returns an instance of the class `Model` of some source, which dynamo can read too."""
    name = f"<fuzz {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = sys.modules.setdefault("fuzzed", types.ModuleType("fuzzed"))  # dynamo imports what a class says it is of
    exec(compile(source, name, "exec"), vars(module))
    return vars(module)["Model"]().eval()


def _seeded(index: int, step: Step) -> list[str]:
    # By its name: a step keeps its weights when others are dropped.
    return [f"torch.manual_seed({int(step.name.strip('v'))})", *step.init]


def _indented(lines: list[str]) -> list[str]:
    return [" " * 8 + line for whole in lines for line in whole.split("\n")]
