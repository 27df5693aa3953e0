"""Weights alone in integers through OpenVINO: what a file holds, which kernels read it, and what they compute."""

import warnings
import zipfile
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.openvino import OpenVINOProgram

FULL = "int4_weight_only"
GROUPS = {size: ("x86", FULL, {"group_size": size}) for size in (32, 64, 128)}
CHANNELS: tuple[str, str, dict[str, Any]] = ("xnnpack", FULL, {})


@pytest.fixture(autouse=True)
def _runtime() -> None:
    pytest.importorskip("openvino")
    torch.manual_seed(0)


class Block(nn.Module):
    """A gated block behind a norm, as language models have them, and a head of any number of outputs."""

    def __init__(self, outputs: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.gate, self.up = nn.Linear(256, 512, bias=False), nn.Linear(256, 512)
        self.down, self.head = nn.Linear(512, 256, bias=False), nn.Linear(256, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.head(x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


class Tied(nn.Module):
    """A table that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.table(ids))))


def quantized(model: nn.Module, x: Tensor, given: tuple[str, str, dict[str, Any]], opened: Any = None) -> Any:
    backend, name, options = given
    config = quantplug.get_quantizer(backend).backend.config(name, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        shapes = None if opened is None else (opened,)
        return quantplug.quantize(model.eval(), (x,), "openvino", config=config, dynamic_shapes=shapes, progress=False)


def read_by(compiled: Any) -> Counter[tuple[str, str]]:
    """Counts what kernels read that is a constant of integers: (kind of kernel, type of the constant)."""
    found: Counter[tuple[str, str]] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        kind = node.get_rt_info()["layerType"].value
        for source in node.input_values():
            given, element = source.get_node().get_rt_info()["layerType"].value, source.get_element_type()
            if given == "Const" and element.get_type_name() in ("i4", "i8") and len(source.get_shape()) > 1:
                found[kind, element.get_type_name()] += 1
    return found


def stored(path: Any) -> tuple[str, int]:
    """Returns the description in a file and the bytes of its constants."""
    with zipfile.ZipFile(path) as archive:
        return archive.read("model.xml").decode(), archive.getinfo("model.bin").file_size


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("given", "shape"),
    [(GROUPS[32], (3,)), (GROUPS[64], (2, 5)), (GROUPS[128], (1, 1)), (CHANNELS, (4,)), (CHANNELS, (2, 3))],
)
def test_a_file_holds_four_bits_that_the_kernels_read_as_they_are(given: Any, shape: Any, tmp_path: Any) -> None:
    model, calls = Block(), [torch.randn(*shape, 256) for _ in range(2)]
    artefact = quantized(model, calls[0], given)
    path = artefact.save(tmp_path / "model.zip")
    loaded = OpenVINOProgram.load(path)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    description, size = stored(path)
    assert description.count('element_type="i4"') == 4
    assert 'element_type="i8"' not in description
    groups = weights // given[2].get("group_size", 256)
    assert size < weights / 2 + 4 * groups + 16_000, "beside integers and scales: biases, norms, their alignment"
    for x in calls:
        expected = artefact.reference(x)
        assert sqnr(artefact(x), expected) > 100
        assert torch.equal(loaded(x), artefact(x))
        assert sqnr(expected, model(x)) < 45
    placed = {operator.node: operator.placement for operator in artefact.program.ops}
    kernels = {name: found for name, found in placed.items() if name.startswith("linear")}
    assert (set(kernels.values()), len(kernels)) == ({"int8"}, 4)
    assert (placed["mul"], placed["layer_norm"], placed["add"]) == ("float", "float", "float")
    for program in (artefact.program, loaded):
        assert read_by(program.compiled) == {("FullyConnected", "i4"): 4}, "a kernel of floats reads no integers"


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [GROUPS[32], CHANNELS], ids=["groups", "channels"])
def test_open_batches_and_lengths(given: Any) -> None:
    opened = {axis: torch.export.Dim(name, min=1, max=64) for axis, name in enumerate(("batch", "length"))}
    model = Block(40)
    artefact = quantized(model, torch.randn(3, 5, 256), given, opened)
    for batch, length in product((1, 7), (1, 33)):
        x = torch.randn(batch, length, 256)
        for _ in range(2):
            assert sqnr(artefact(x), artefact.reference(x)) > 100
    assert read_by(artefact.program.compiled) == {("FullyConnected", "i4"): 4}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("given", "read"),
    [
        (CHANNELS, {("FullyConnected", "i4"): 2, ("Gather", "i4"): 1}),
        (("x86", "int8_weight_only", {}), {("FullyConnected", "i8"): 2, ("Gather", "i8"): 1}),
        (GROUPS[32], {("FullyConnected", "i4"): 2}),  # no kernel looks up rows in groups
    ],
    ids=["four bits", "eight bits", "groups"],
)
def test_a_table_that_is_the_head_too_is_stored_once(given: Any, read: Any, tmp_path: Any) -> None:
    ids = torch.randint(0, 96, (2, 5))
    artefact = quantized(Tied(), ids, given, {1: torch.export.Dim("length", min=1, max=32)})
    description, _ = stored(artefact.save(tmp_path / "model.zip"))
    assert description.count('element_type="i4"') + description.count('element_type="i8"') == 2
    assert read_by(artefact.program.compiled) == read
    for length in (1, 9, 9):
        ids = torch.randint(0, 96, (2, length))
        assert sqnr(artefact(ids), artefact.reference(ids)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 2, 7, 10, 16, 33])
@pytest.mark.parametrize(("inputs", "size"), [(32, 32), (64, 32), (96, 96), (160, 32), (192, 64), (256, 256), (63, 0)])
def test_any_number_of_channels(inputs: int, size: int, outputs: int) -> None:
    given = ("x86", FULL, {"group_size": size}) if size else CHANNELS
    artefact = quantized(nn.Linear(inputs, outputs), torch.randn(3, inputs), given)
    for rows in (3, 3):
        x = torch.randn(rows, inputs)
        assert sqnr(artefact(x), artefact.reference(x)) > 90


@pytest.mark.slow
def test_weights_of_four_bits_beside_integers_keep_eight() -> None:
    """Their kernels multiply bytes."""
    x = torch.randn(4, 64)
    config = quantplug.get_symmetric_quantization_config(True, weight_qmin=-7, weight_qmax=7)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    with pytest.warns(UserWarning, match="Backend 'openvino' stores weights in 8 bits"):
        artefact: Any = quantplug.quantize(model, (x,), "openvino", [x], config, progress=False)
    assert not any(kind == "i4" for _, kind in read_by(artefact.program.compiled))
    assert sqnr(artefact(x), artefact.reference(x)) > 40


@pytest.mark.slow
def test_convolutions_of_four_bits_are_stored_so_and_computed_in_float(tmp_path: Any) -> None:
    x = torch.randn(2, 3, 9, 9)
    artefact = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), x, CHANNELS)
    assert stored(artefact.save(tmp_path / "model.zip"))[0].count('element_type="i4"') == 2
    assert sqnr(artefact(x), artefact.reference(x)) > 90
