"""Files of programs from anybody: what their records say is checked, and programs are neither copied nor pickled."""

import copy
import io
import json
import pickle
import random
import zipfile

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.errors import ArtefactError
from quantplug.lowering.openvino.program import OpenVINOProgram
from quantplug.lowering.x86.running.program import X86Program
from quantplug.lowering.xnnpack.runtime import constants_of

X = torch.linspace(-1, 1, 16).reshape(2, 8)
RECORDS = {"x86": "quantplug_x86.json", "openvino": "settings.json"}
LOAD = {"x86": X86Program.load, "openvino": OpenVINOProgram.load}
DELETED = object()
NASTY = [DELETED, None, -1, 7, 10**400, 0.5, "x", "load", "float64", "9", [], [1], ["x", 0], {}, {"x": 1}]


class Counter(nn.Module):
    """Has a state, for which OpenVINO's files have records, and returns a number beside tensors."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return {"y": torch.relu(self.fc(x)) + self.seen, "number": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    torch.manual_seed(0)
    model = Counter().eval()
    return {
        name: quantplug.quantize(model, (X,), name, [X], progress=False).save(folder / f"{name}.bin") for name in LOAD
    }


def _changed(path, target, name, change):
    """Writes a copy of an archive with the record that ends in a name as a function changes it."""
    with zipfile.ZipFile(path) as source:
        records = {entry: source.read(entry) for entry in source.namelist()}
    key = next(entry for entry in records if entry.endswith(name))
    records[key] = change(records[key])
    with zipfile.ZipFile(target, "w") as archive:
        for entry, content in records.items():
            archive.writestr(entry, content)
    return target


def _paths(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from _paths(each, (*path, key))


def _with(content, path, value):
    settings = holder = json.loads(content)
    for key in path[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(settings).encode()


def _outcome(load, path):
    """Returns what is wrong with how reading and running a file ends, or None."""
    try:
        load(path)(X)
    except ArtefactError as error:
        return None if "\n" not in str(error) else f"no sentence: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", LOAD)
def test_a_changed_record_runs_or_is_one_sentence(saved, tmp_path, backend, every):
    if backend == "openvino":
        pytest.importorskip("openvino")
    load, name, file = LOAD[backend], RECORDS[backend], tmp_path / "m"
    assert torch.equal(load(_changed(saved[backend], file, name, lambda c: c))(X)["y"], load(saved[backend])(X)["y"])
    with zipfile.ZipFile(saved[backend]) as archive:
        record = json.loads(archive.read(next(entry for entry in archive.namelist() if entry.endswith(name))))
    mutations = [(path, value) for path in _paths(record) for value in NASTY]
    found = {}
    for path, value in mutations if every else random.Random(7).sample(mutations, 60):
        _changed(saved[backend], file, name, lambda content, p=path, v=value: _with(content, p, v))
        found[path, str(value)[:40]] = _outcome(load, file)
    assert {what: outcome for what, outcome in found.items() if outcome} == {}


@pytest.mark.parametrize("backend", LOAD)
@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"[" * 100_000, b"\xff"])
def test_a_record_that_is_no_object_is_one_sentence(saved, tmp_path, backend, content):
    file = _changed(saved[backend], tmp_path / "m", RECORDS[backend], lambda _: content)
    with pytest.raises(ArtefactError):
        LOAD[backend](file)


@pytest.mark.parametrize("pair", [DELETED, None, "9"])
@pytest.mark.parametrize("backend", LOAD)
def test_a_pair_that_is_no_number_is_named(saved, tmp_path, backend, pair):
    file = _changed(saved[backend], tmp_path / "m", RECORDS[backend], lambda c: _with(c, ("pair",), pair))
    with pytest.raises(ArtefactError, match="'pair'"):
        LOAD[backend](file)


def test_a_file_sets_no_option_of_openvino_that_writes(saved, tmp_path):
    pytest.importorskip("openvino")
    cache = tmp_path / "cache"
    option = {"CACHE_DIR": str(cache)}
    file = _changed(saved["openvino"], tmp_path / "m", "settings.json", lambda c: _with(c, ("options",), option))
    with pytest.raises(ArtefactError, match=r"CACHE_DIR.*which a file may not"):
        OpenVINOProgram.load(file)
    assert not cache.exists()
    # The caller may: it is the caller's folder.
    OpenVINOProgram.load(file, {"CACHE_DIR": str(cache)})


def test_a_file_of_compressed_records_is_refused(saved, tmp_path):
    """A few kilobytes of zeros would be read as gigabytes."""
    pytest.importorskip("openvino")
    with zipfile.ZipFile(saved["openvino"]) as source, zipfile.ZipFile(tmp_path / "m", "w") as archive:
        for entry in source.namelist():
            archive.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(ArtefactError, match="compressed"):
        OpenVINOProgram.load(tmp_path / "m")


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "inputs", [3, X, (X,), ((X, X), {}), (([X],), {}), ((X.double(),), {}), ((X[:1],), {}), ((), {}), ((X,), {"y": X})]
)
def test_other_sample_inputs_than_the_graph_takes_are_one_sentence(saved, tmp_path, inputs):
    file = _changed(saved["x86"], tmp_path / "m", "sample_inputs/model.pt", lambda _: _saved(inputs))
    with pytest.raises(ArtefactError, match=r"sample inputs|no exported program|Input 0"):
        X86Program.load(file)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "openvino", "xnnpack", "cortex_m", "native"])
def test_programs_are_neither_copied_nor_pickled(backend):
    if backend == "openvino":
        pytest.importorskip("openvino")
    if backend == "cortex_m":
        pytest.importorskip("tosa_serializer")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    artefact = quantplug.quantize(model, (X,), backend, [X], progress=False)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ArtefactError, match="save"):
            attempt(artefact.program)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_constants_go_along_with_the_file(backend, tmp_path):
    x, constants = torch.ones(1, 8), {"get_answer": 42, "get_some": [1, 2]}
    model = nn.Linear(8, 8).eval()
    artefact = quantplug.quantize(model, (x,), backend, config="int8_dynamic", progress=False, constants=constants)
    path = artefact.save(tmp_path / "model.pt2")
    if backend == "xnnpack":
        assert constants_of(path.read_bytes()) == constants
    else:
        assert X86Program.load(path).constants == constants


def test_a_file_of_before_constants_is_read(saved, tmp_path):
    file = _changed(saved["x86"], tmp_path / "m", RECORDS["x86"], lambda c: _with(c, ("constants",), DELETED))
    assert X86Program.load(file).constants == {}
