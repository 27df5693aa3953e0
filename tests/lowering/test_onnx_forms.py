"""Forms of models that engines or torch's exporter stumble over: bags, branches, functions between layers."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.specs.levels import sqnr

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from models import Function, needs_vnni

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def quantized(model, inputs, config, batches=None, backend="onnxruntime"):
    torch.manual_seed(0)
    return quantplug.quantize(model.eval(), inputs, backend, batches, config, progress=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_of_rows_are_summed_and_do_not_end_the_process(mode):
    model = Function(lambda m, x: m.layer(m.bag(x)), bag=nn.EmbeddingBag(10, 4, mode=mode), layer=nn.Linear(4, 2))
    indices = torch.tensor([[1, 2, 3], [4, 4, 9]])
    artefact = quantized(model, (indices,), "int8", [indices])
    for given in (indices, indices.flip(1), 9 - indices):
        assert sqnr(artefact(given), artefact.reference(given)) > 60


class Chosen(nn.Module):
    """Layers in the branches of a condition, and one before it."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        return torch.cond(x.sum() > 0, lambda y: F.relu(self.one(y)), lambda y: self.other(y) * 2.0, (x,))


class Nested(nn.Module):
    """A condition in a branch of another."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, flag):
        def inner(y):
            return torch.cond(y.sum() > 0, lambda z: self.one(z), lambda z: self.other(z) + 1.0, (y,))

        return torch.cond(flag, inner, lambda y: self.first(y) * 1.5, (self.first(x),))


@needs_vnni
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("backend", "config", "integers"),
    [
        ("onnxruntime", "int8", 2),
        ("onnxruntime", "int8_dynamic", 3),
        ("onnxruntime", "int8_weight_only", 3),
        ("onnxruntime", "float16", 0),
        ("tensorrt", "int8", 3),
        ("openvino", "int8", 2),  # the kernel of the third has the name of what multiplies its result
        ("openvino", "float16", 0),
    ],
)
def test_layers_in_branches_are_quantized_and_the_right_branch_is_chosen(backend, config, integers):
    pytest.importorskip("openvino")
    artefact = quantized(Chosen(), (X,), config, [X, -X, 3 * X, -3 * X] if config == "int8" else None, backend)
    floor = 60 if backend != "tensorrt" else 30  # where the largest number lies on a tie, it may be off by a step
    for x in (X, -X, 2 * X, -2 * X):
        assert sqnr(artefact(x), artefact.reference(x)) > floor
    placed = [op.placement for op in artefact.program.ops if op.target == "aten.linear.default"]
    assert len(placed) == 3
    assert placed.count("int8") == integers


def test_branches_in_branches():
    flags = torch.tensor(True), torch.tensor(False)
    artefact = quantized(Nested(), (X, flags[0]), "int8_dynamic")
    for flag in flags:
        for x in (X, -X):
            assert sqnr(artefact(x, flag), artefact.reference(x, flag)) > 60


@pytest.mark.parametrize("config", ["int8_weight_only", "int4_weight_only"])
def test_weights_alone_are_read_in_integers_between_functions_too(config):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(3, 32)
    artefact = quantized(model, (x,), config)
    program: Any = artefact.program
    assert list(program.kernels.values()) == ["MatMulNBits"] * 3
    assert sqnr(artefact(2 * x), artefact.reference(2 * x)) > 100


def test_nothing_is_logged_of_how_a_file_is_written(tmp_path):
    class Listening(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    told: list[str] = []
    handler = Listening(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
        images = torch.randn(2, 3, 8, 8)
        quantized(model, (images,), "int8", [images]).save(tmp_path / "model.onnx")
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert told == []
