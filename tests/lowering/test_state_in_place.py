"""Rows that a `.pte` writes into a buffer: in place where nobody can tell, and right wherever somebody could."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import quantplug
from quantplug.core.specs.levels import sqnr

ROWS, FEATURES = 6, 16


class Rows(nn.Module):
    """A table of rows, filled at given positions."""

    data: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 8)
        self.register_buffer("data", torch.zeros(ROWS, FEATURES))

    def write(self, x: Tensor, at: Tensor) -> Tensor:
        y: Tensor = self.read(x)
        self.data.index_copy_(0, at, y)
        return y


class Last(Rows):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.write(x, at)
        return self.out(self.data)


class ReadBefore(Rows):
    """What the rows were is used behind the write."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        before = self.data.clone()
        self.write(x, at)
        return self.out(self.data - before)


class SeenBefore(Rows):
    """The same through a view, which at run time is the buffer's own memory."""

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        before = self.data.clone().view(1, ROWS * FEATURES)
        y = self.write(x, at)
        return self.out(self.data), before.sum(1) + y.sum()


class Twice(Rows):
    """Two writes, between which the rows are read."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.write(x, at)
        between = self.data.view(1, ROWS, FEATURES) * 2
        self.data.index_put_((at - 1,), x)
        return self.out(self.data + between[0])


class Returned(Rows):
    """The rows themselves are a result, which a later call must not change."""

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        self.write(x, at)
        return self.out(self.data), self.data


class ReturnedView(Rows):
    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        self.write(x, at)
        return self.out(self.data), self.data.view(2, ROWS // 2, FEATURES)


class Added(Rows):
    """Rows are added to those that are there; a position that comes twice counts twice."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.data.index_put_((at,), self.read(x), accumulate=True)
        return self.out(self.data)


class Exchanged(Rows):
    """Two tables, each of which gets what the other one was."""

    other: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", torch.ones(ROWS, FEATURES))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        held = self.data.clone()
        self.data.index_put_((at,), self.other[at] + self.read(x))
        self.other.index_put_((at,), held[at])
        return self.out(self.data) + self.out(self.other)


KINDS = (Last, ReadBefore, SeenBefore, Twice, Returned, ReturnedView, Added, Exchanged)


def calls(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(2, FEATURES, generator=generator) * (1 + number) for number in range(count)]
    return [(x, torch.tensor([1 + number % 4, 2 + number % 4])) for number, x in enumerate(rows)]


def lowered(kind: type[Rows]) -> tuple[nn.Module, quantplug.Artefact]:
    model = kind().eval()
    exported = torch.export.export(copy.deepcopy(model), calls(1)[0])
    return model, quantplug.quantize(exported, calls(1)[0], "xnnpack", calls(5), "int8_dynamic", progress=False)


def operators(artefact: quantplug.Artefact) -> Counter[str]:
    """Returns how often each operator outside of the delegates is called in the file."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    plan = deserialize_pte_binary(artefact.program.buffer).program.execution_plan[0]  # type: ignore[attr-defined]
    called = (step.instr_args for step in plan.chains[0].instructions)
    return Counter(plan.operators[call.op_index].name for call in called if hasattr(call, "op_index"))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_rows_are_what_they_were_in_the_model_from_call_to_call(kind: type[Rows]) -> None:
    model, artefact = lowered(kind)
    found, expected = [], []
    for call in calls(5):
        found.append(artefact(*call))
        with torch.no_grad():
            expected.append(copy.deepcopy(model(*call)))
    for one, other in zip(found, expected, strict=True):  # after the last call, which overwrote none of the results
        for part, wanted in zip(leaves(one), leaves(other), strict=True):
            assert sqnr(part, wanted) > 25


def leaves(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "copies"), [(Last, 0), (ReturnedView, 0), (Added, 1), (SeenBefore, 1), (Twice, 1)])
def test_a_file_copies_no_buffer_whose_rows_alone_are_written(kind: type[Rows], copies: int) -> None:
    found = operators(lowered(kind)[1])
    assert found["aten::copy_"] == copies
    assert bool(found["aten::index_put_"]) is not copies
