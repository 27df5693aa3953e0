"""Architectures of transformers by one call each: exported, quantized and run on both targets, by keyword, twice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from torch import Tensor
from torch.utils import _pytree as pytree

import quantplug
from quantplug.core.specs.levels import sqnr

QUICK = {("BERT", "x86")}


PAGE = Path(__file__).parent.parent / "docs" / "language-models.md"


def test_the_documents_table_has_each_architecture():
    _, _, table = PAGE.read_text().partition("| architecture |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(ARCHITECTURES)


def numbers(outputs: Any) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)])


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[] if (name, backend) in QUICK else pytest.mark.slow)
        for name in ARCHITECTURES
        for backend in ("x86", "xnnpack")
    ],
)
def test_an_architecture_runs_by_one_call(name, backend):
    model, batch = build(name)
    data = [batch() for _ in range(4)]
    artefact = quantplug.quantize(model, backend=backend, calibration=data, example_kwargs=data[0], progress=False)
    for given in (data[0], batch()):
        with torch.no_grad():
            true = model(**given)
        found, expected = artefact(**given), artefact.reference(*given.values())
        assert type(found) is type(true)
        kernels, ours = sqnr(numbers(found), numbers(expected)), sqnr(numbers(found), numbers(true))
        print(f"{name} on {backend}: {kernels:.1f} dB to the q/dq graph, {ours:.1f} dB to float")
        assert kernels > 25
        assert 14 < ours < 90
