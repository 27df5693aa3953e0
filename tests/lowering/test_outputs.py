"""Whatever a model returns comes back from every program, twice, and from its file where that can name it."""

import collections
import copy
import json
import sys
import zipfile

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.errors import ArtefactError
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program

Pair = collections.namedtuple("Pair", ["logits", "features"])

RETURNS = {
    "a tensor twice": lambda y: (y, y),
    "a copy": lambda y: {"a": y, "b": [y.clone(), (y.detach(),)]},
    "numbers and nothing": lambda y: (3, None, y, 2.5, True),
    "a size": lambda y: (y, y.shape[0]),
    "an ordered dictionary": lambda y: collections.OrderedDict(b=y * 2, a=y),
    "a named tuple": lambda y: Pair(y, y + 1),
}


class Returns(nn.Module):
    """A linear layer and what is made of its result."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(8, 8), make

    def forward(self, x):
        return self.make(self.linear(x))


def quantized(make, backend):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return quantplug.quantize(Returns(make).eval(), (x,), backend, [x], progress=False)


def require_same(found, expected):
    assert type(found) is type(expected)
    flat, structure = torch.utils._pytree.tree_flatten(found)
    wanted, expected_structure = torch.utils._pytree.tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(flat, wanted, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, atol=0.05, rtol=0)
        else:
            assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
@pytest.mark.parametrize("make", RETURNS.values(), ids=list(RETURNS))
def test_what_a_model_returns_is_what_its_program_returns(make, backend):
    pytest.importorskip("openvino")
    artefact = quantized(make, backend)
    for x in (torch.randn(4, 8), torch.randn(4, 8)):
        require_same(artefact(x), artefact.reference(x))


class Cell(nn.Module):
    """A recurrent cell whose state is a named tuple, taken and returned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x, state):
        hidden = torch.tanh(self.linear(torch.cat([x, state.logits], 1)))
        return Pair(hidden, state.features + hidden)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
def test_a_named_tuple_is_taken(backend):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    calls = [(torch.randn(2, 8), Pair(torch.randn(2, 8), torch.randn(2, 8))) for _ in range(3)]
    artefact = quantplug.quantize(Cell().eval(), calls[0], backend, calls, progress=False)
    for call in calls[1:]:
        require_same(artefact(*call), artefact.reference(*call))


def test_a_tensor_that_is_returned_twice_is_two_tensors_of_an_openvino_program():
    pytest.importorskip("openvino")
    one, other = quantized(RETURNS["a copy"], "openvino")(torch.ones(4, 8)).values()
    before = other[0].clone()
    one.zero_()
    assert torch.equal(other[0], before)


@pytest.mark.few(1)
@pytest.mark.parametrize(("backend", "program"), [("x86", X86Program), ("openvino", OpenVINOProgram)])
@pytest.mark.parametrize("name", [name for name in RETURNS if name != "a named tuple"])
def test_a_program_read_from_its_file_returns_the_same(name, backend, program, tmp_path):
    pytest.importorskip("openvino")
    artefact = quantized(RETURNS[name], backend)
    loaded = program.load(artefact.save(tmp_path / "program"))
    for x in (torch.randn(4, 8), torch.randn(4, 8)):
        require_same(loaded(x), artefact(x))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "openvino", "onnxruntime", "tensorrt"])
def test_a_file_that_cannot_name_a_type_says_so_and_is_not_begun(backend, tmp_path):
    pytest.importorskip("openvino")
    pytest.importorskip("onnxruntime")
    artefact = quantized(RETURNS["a named tuple"], backend)
    with pytest.raises(ArtefactError, match="returns a 'Pair', which a file cannot name") as error:
        artefact.save(tmp_path / "program")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["outputs", "signature"])
def test_an_openvino_file_imports_nothing(where, tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    (tmp_path / "planted.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = quantized(RETURNS["a size"], "openvino").save(tmp_path / "program.zip")
    factory = {"default_factory_module": "planted", "default_factory_name": "x", "dict_context": []}
    planted = json.dumps([1, {"type": "collections.defaultdict", "context": factory, "children_spec": []}])
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    settings = json.loads(records["settings.json"])
    OpenVINOProgram.load(rewritten(path, records, settings))
    changed = copy.deepcopy(settings)
    changed[where]["structure"] = planted
    with pytest.raises(ArtefactError, match="not of plain containers"):
        OpenVINOProgram.load(rewritten(path, records, changed))
    assert "planted" not in sys.modules


def rewritten(path, records, settings):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, json.dumps(settings) if name == "settings.json" else content)
    return path
