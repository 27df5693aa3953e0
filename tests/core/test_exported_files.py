"""Files of unknown origin: nothing in a `.pt2` runs when it is read, and what is refused is told in a sentence."""

import contextlib
import io
import json
import pickle
import resource
import signal
import time
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import quantplug
from quantplug import cli
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError
from quantplug.core.files.exported import read_exported
from quantplug.core.files.size_texts import is_size
from quantplug.files import load_batches, load_exported
from quantplug.lowering.x86.running.program import X86Program
from quantplug.quantizers.framework import names, registry
from quantplug.quantizers.x86 import X86Quantizer

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CONSTANTS, INPUTS = "data/constants/model_constants_config.json", "data/sample_inputs/model.pt"


class Marks:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    torch.export.save(torch.export.export(net(), (X,), dynamic_shapes=({0: batch},)), path)
    return path


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "marker"


def pickled(marker):
    buffer = io.BytesIO()
    torch.save((Marks(marker),), buffer)
    return buffer.getvalue()


def rewritten(saved, folder, change):
    """Writes the archive again; `change` gets its records by name."""
    with zipfile.ZipFile(saved) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    path = folder / "hostile.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(f"model/{name}", content)
    return path


def edited(records, name, edit):
    content = json.loads(records[name])
    edit(content)
    records[name] = json.dumps(content).encode()


def inputs_pickle(records, marker):
    records[INPUTS] = pickled(marker)


def weight_pickle(records, marker):
    def edit(content):
        payload = next(iter(content["config"].values()))
        payload["use_pickle"] = True
        records["data/weights/" + payload["path_name"]] = pickled(marker)

    edited(records, WEIGHTS, edit)


def opaque_constant(records, marker):
    records["data/constants/opaque_obj_0"] = pickle.dumps(Marks(marker))
    meta = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edited(records, CONSTANTS, lambda content: content["config"].update(c=meta))


def legacy_weights(records, marker):
    records["data/weights/model.pt"] = pickled(marker)


def legacy_constants(records, marker):
    records["data/constants/model.pt"] = pickled(marker)


def code(marker):
    return f"__import__('pathlib').Path('{marker}').touch()"


def size_text(records, marker):
    def edit(content):
        sizes = content["graph_module"]["graph"]["tensor_values"]["input"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = code(marker)

    edited(records, MODEL, edit)


def guard_text(records, marker):
    edited(records, MODEL, lambda content: content.update(guards_code=[code(marker)]))


def input_name(records, marker):
    text = records[MODEL].decode()
    records[MODEL] = text.replace(
        '"forward_arg_names": ["input"]', json.dumps(f"input={code(marker)}").join(('"forward_arg_names": [', "]"))
    ).encode()


def enum_module(records, marker):
    (marker.parent / "hostile_module.py").write_text(f"open({str(marker)!r}, 'w')")

    def edit(content):
        context = json.dumps({"__enum__": True, "fqn": "hostile_module:Kind", "name": "A"})
        tree = [1, {"type": "builtins.dict", "context": context, "children_spec": []}]
        content["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(tree)

    edited(records, MODEL, edit)


def function_of_torch(records, marker):
    def edit(content):
        node = content["graph_module"]["graph"]["nodes"][1]
        node["target"] = "torch.os.system"
        node["inputs"] = [{"name": "command", "arg": {"as_string": f"touch {marker}"}, "kind": 1}]

    edited(records, MODEL, edit)


HOSTILE = (
    inputs_pickle,
    weight_pickle,
    opaque_constant,
    size_text,
    guard_text,
    input_name,
    enum_module,
    function_of_torch,
)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.__name__)
def test_what_a_hostile_file_says_does_not_run(saved, tmp_path, marker, monkeypatch, hostile):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = rewritten(saved, tmp_path, lambda records: hostile(records, marker))
    with pytest.raises(ArtefactError, match=r"hostile.pt2' is not read: record '\S+' .*--trust") as caught:
        read_exported(path)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtefactError):
        X86Program.load(path)
    assert not marker.exists()


@pytest.mark.parametrize("hostile", [legacy_weights, legacy_constants])
def test_records_that_a_model_does_not_need_are_left_alone(saved, tmp_path, marker, hostile):
    path = rewritten(saved, tmp_path, lambda records: hostile(records, marker))
    read_exported(path)
    assert not marker.exists()


@pytest.mark.parametrize("hostile", [inputs_pickle, weight_pickle, opaque_constant, size_text, enum_module])
def test_a_file_that_is_trusted_runs_its_pickles(saved, tmp_path, marker, monkeypatch, hostile):
    """Also shows that the files above are hostile."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = rewritten(saved, tmp_path, lambda records: hostile(records, marker))
    with contextlib.suppress(ArtefactError):  # it is no good model, but what it says has run
        read_exported(path, trust=True)
    assert marker.exists()


ENDLESS = [
    "9**9**9**9",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "((Symbol('s0')**60)**60)**60",
    "Float('1e999999999')",
    "Float('0.5', precision=999999999)",
    "9**(9*9*9*9*9*9*9*9)",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_arithmetic_without_end_is_refused(saved, tmp_path, text):
    def size(content):
        content["graph_module"]["graph"]["tensor_values"]["input"]["sizes"][0]["as_expr"]["expr_str"] = text

    edits = (size, lambda content: content.update(guards_code=[f"{text} > 1", "(1,)*999999999999 == 3"]))
    for edit in edits:
        path = rewritten(saved, tmp_path, lambda records, edit=edit: edited(records, MODEL, edit))
        with pytest.raises(ArtefactError, match="is not read: record"):
            read_exported(path)


@pytest.mark.parametrize(
    "text",
    ["Pow(Add(Pow(Symbol('s0', integer=True), Integer(2)), Integer(1)), Integer(2))", "s0**-1", "Float('0.5', 15)"],
)
def test_arithmetic_of_models_is_read(text):
    assert is_size(text)


@pytest.mark.slow
def test_an_archive_of_many_records_is_read_in_no_time(saved, tmp_path):
    path = rewritten(saved, tmp_path, lambda records: records.update({f"extra/{n}": b"" for n in range(20_000)}))
    begun = time.perf_counter()
    read_exported(path)
    assert time.perf_counter() - begun < 20


def other_inputs(given):
    def change(records):
        buffer = io.BytesIO()
        torch.save(given, buffer)
        records[INPUTS] = buffer.getvalue()

    return change


def metadata(text):
    def edit(content):
        for node in content["graph_module"]["graph"]["nodes"]:
            node["metadata"] = {"torch_fn": text, "nn_module_stack": f"L,{text},torch.nn.Linear"}

    return lambda records: edited(records, MODEL, edit)


MISFITS = {
    "no guards": lambda records: edited(records, MODEL, lambda content: content.update(guards_code=None)),
    "no structure": other_inputs((X, X)),
    "no inputs": other_inputs(((), {})),
    "another shape": other_inputs(((X[:, :1],), {})),
    "another dtype": other_inputs(((X.double(),), {})),
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_a_program_that_does_not_take_its_own_inputs_is_one_sentence(saved, tmp_path, change):
    path = rewritten(saved, tmp_path, change)
    with pytest.raises(ArtefactError, match=r"hostile.pt2' holds .* program .*\.$") as error:
        load_exported(path)
    assert "\n" not in str(error.value)


def test_empty_example_inputs_make_no_batches(saved, tmp_path):
    path, data = rewritten(saved, tmp_path, other_inputs(((X[:0],), {}))), tmp_path / "data.npz"
    np.savez(data, X.numpy())
    with pytest.raises(CalibrationError, match="--batch-size"):
        load_batches(data, load_exported(path), None)


def test_a_file_sends_no_codes_to_the_terminal(saved, tmp_path, monkeypatch, capsys):
    """Nor does what it says of functions break the search for partitions."""
    path = rewritten(saved, tmp_path, metadata("a\x1b[2J"))
    monkeypatch.setattr("sys.argv", ["quantplug", "explain", str(path)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "\x1b[2J" not in capsys.readouterr().out


def test_nesting_without_end_is_one_sentence(saved, tmp_path):
    path = rewritten(saved, tmp_path, lambda records: records.update({MODEL: b"[" * 200_000}))
    with pytest.raises(ArtefactError, match="nested too deeply"):
        read_exported(path)


@pytest.mark.parametrize("name", ["model/../../out", "/out", "model/models/model.json"])
def test_names_that_lead_out_or_come_twice_are_refused(saved, tmp_path, name):
    path = rewritten(saved, tmp_path, lambda records: None)
    with zipfile.ZipFile(path, "a") as archive, _warning_of_duplicates(name):
        archive.writestr(name, b"x")
    with pytest.raises(ArtefactError, match="twice or leads out"):
        read_exported(path)


def _warning_of_duplicates(name):
    return pytest.warns(UserWarning, match="Duplicate name") if "json" in name else contextlib.nullcontext()


def test_a_compressed_bomb_is_refused(saved, tmp_path):
    path = rewritten(saved, tmp_path, lambda records: None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/extra/bomb", bytes(10_000_000), zipfile.ZIP_DEFLATED)
    with pytest.raises(ArtefactError, match="compressed"):
        read_exported(path)


def test_the_older_format_is_refused(tmp_path, marker):
    path = tmp_path / "old.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.8")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", pickled(marker))
    with pytest.raises(ArtefactError, match=r"torch 2\.7"):
        read_exported(path)
    assert not marker.exists()


class Block(nn.Module):
    """State, a scope without gradients, sizes that are computed, operators with text, outputs in containers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.blocks = nn.ModuleDict({"a-b": nn.Linear(8, 8)})

    def forward(self, x, more):
        self.seen.add_(1)
        with torch.no_grad():
            y = torch.einsum("bij,bjk->bik", x, x.transpose(1, 2)) @ x
        y = torch.nn.functional.gelu(self.blocks["a-b"](y), approximate="tanh") + more["bias"]
        return {"y": y.reshape(y.shape[0] * y.shape[1], 8), "n": [self.seen + 0]}


@pytest.mark.parametrize("strict", [False, True])
def test_ordinary_programs_are_read_as_torch_reads_them(tmp_path, strict):
    x, more = torch.randn(4, 6, 8), {"bias": torch.randn(8)}
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=32)
    shapes = {"x": {0: batch, 1: 2 * length}, "more": {"bias": None}}
    exported = torch.export.export(Block().eval(), (x, more), dynamic_shapes=shapes, strict=strict)
    path = tmp_path / "model.pt2"
    torch.export.save(exported, path)
    ours, theirs = read_exported(path).module(), torch.export.load(path).module()
    for sizes in ((4, 6), (3, 10)):
        given = torch.randn(*sizes, 8)
        got, expected = ours(given, more), theirs(given, more)
        assert torch.equal(got["y"], expected["y"])
        assert torch.equal(got["n"][0], expected["n"][0])


def test_x86_keeps_nothing_of_the_example_inputs(tmp_path):
    marked = torch.full((64, 3, 8, 8), 1.2345678)
    artefact = quantplug.quantize(net(), (marked,), "x86", [X.repeat(32, 1, 1, 1)], progress=False)
    path = artefact.save(tmp_path / "model.pt2")
    assert marked[0, 0, 0, :1].numpy().tobytes() not in path.read_bytes()
    assert path.stat().st_size < marked.nbytes
    assert isinstance(artefact.program, X86Program)
    assert not artefact.program.example_inputs[0].any()
    loaded = X86Program.load(path)
    for _ in range(2):
        given = torch.randn_like(marked)
        assert torch.equal(loaded(given), artefact(given))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "native", "openvino", "xnnpack", "cortex_m"])
def test_no_artefact_holds_the_data_of_example_inputs(tmp_path, backend):
    marked = torch.full((2, 3, 8, 8), 1.2345678)
    artefact = quantplug.quantize(net(), (marked,), backend, [X[:2]], progress=False)
    path = artefact.save(tmp_path / "model")
    (tmp_path / "report.html").write_text(artefact.report.html())
    for file in (path, tmp_path / "report.html"):
        assert marked[0, 0, 0, :2].numpy().tobytes() not in file.read_bytes()


class Selecting(nn.Module):
    """How many rows it selects is asserted in words."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y[y[:, 0] > 0]


class Described(Selecting):
    """Takes an input with the name that a node's own has in the file."""

    def forward(self, metadata):
        return self.layer(metadata)


class Paired(Selecting):
    """Sizes that export compares by `max`, and rounds with `math`; a layer whose name is no word."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"linear (8x8)": nn.Linear(8, 8)})

    def forward(self, x):
        y = self.parts["linear (8x8)"](self.layer(x))
        return y.reshape(x.shape[0] // 2, -1) + x.shape[0] ** 2, y.new_ones(max(x.shape[0], 4))


def test_guards_of_open_sizes_are_read(tmp_path):
    net, x = Paired().eval(), torch.randn(6, 8)
    sizes = {"x": {0: 2 * torch.export.Dim("half", min=2, max=16)}}
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=sizes), tmp_path / "model.pt2")
    read = read_exported(tmp_path / "model.pt2").module()
    for given in (x, torch.randn(10, 8)):
        assert all(map(torch.equal, read(given), net(given)))


@pytest.mark.parametrize("model", [Selecting, Described])
def test_assertions_and_inputs_of_any_name_are_read(model, tmp_path):
    net, x = model().eval(), torch.randn(6, 8)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "model.pt2")
    read = read_exported(tmp_path / "model.pt2").module()
    artefact = quantplug.quantize(net, (x,), "x86", [x], progress=False)
    loaded = X86Program.load(artefact.save(tmp_path / "quantized.pt2"))
    for given in (x, torch.randn(6, 8)):
        assert torch.equal(read(given), net(given))
        assert torch.equal(loaded(given), artefact(given))


class Commented(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x)) * 0.123  # found in the secret experiments


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "native", "openvino", "xnnpack", "cortex_m"])
def test_no_artefact_holds_lines_of_the_models_source(tmp_path, backend):
    """Export keeps a stack trace with each operator: paths of the author's machine and lines with their comments."""
    x = torch.randn(4, 8)
    content = (
        quantplug.quantize(Commented().eval(), (x,), backend, [x], progress=False).save(tmp_path / "m").read_bytes()
    )
    assert b"secret experiments" not in content
    assert str(Path(__file__).parent).encode() not in content


@contextlib.contextmanager
def nothing_fits():
    """Files may have a thousand bytes, as on a disk that is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "native", "openvino", "xnnpack", "cortex_m"])
def test_writing_where_nothing_can_be_written_is_one_sentence_and_leaves_nothing(tmp_path, backend):
    program = quantplug.quantize(net(), (X[:1],), backend, [X[:1]], progress=False).program
    with nothing_fits(), pytest.raises(ArtefactError, match=r"cannot be written .*File too large") as error:
        program.save(tmp_path / "model.pt2")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    exported = torch.export.export(net(), (X,)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
    with nothing_fits(), pytest.raises(ArtefactError, match="cannot be written"):
        quantplug.calibrate(prepared, [X] * 4, progress=False, checkpoint=tmp_path / "run", checkpoint_every=1)
    assert not list(tmp_path.iterdir())


def test_the_command_line_reads_no_pickles_and_overwrites_no_input(saved, tmp_path, marker, monkeypatch, capsys):
    path = rewritten(saved, tmp_path, lambda records: inputs_pickle(records, marker))
    for line in (f"explain {path}", f"quantize {path} --out {tmp_path / 'm.pte'}", f"quantize {saved} --out {saved}"):
        monkeypatch.setattr("sys.argv", ["quantplug", *line.split()])
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        told = capsys.readouterr().err
        assert ("is not read" if str(path) in line else "would be written over an input") in told
    assert not marker.exists()


def test_a_plugin_says_anything_about_itself(monkeypatch, capsys):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    for error in (ImportError("cannot open [/usr/lib/lib.so]"), MuteError()):
        point = EntryPoint("[/odd]", "nowhere:Nothing", names.GROUP)
        load = EntryPoint.load

        def raising(self, error=error, load=load):
            if self.name == "[/odd]":
                raise error
            return load(self)

        monkeypatch.setattr(EntryPoint, "load", raising)
        monkeypatch.setattr(names, "entry_points", lambda group, point=point: [point])
        monkeypatch.setattr("sys.argv", ["quantplug", "backends"])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        told = capsys.readouterr().out
        assert "[/odd]" in told
        assert type(error).__name__ in told
        monkeypatch.undo()


def test_a_plugin_that_makes_no_quantizer_is_one_sentence(monkeypatch):
    def fails(self, **options):
        raise ValueError("no licence")

    monkeypatch.setattr(X86Quantizer, "__init__", fails)
    with pytest.raises(ConfigError, match=r"^Backend 'x86' .* makes no quantizer \(ValueError: no licence\); "):
        quantplug.get_quantizer("x86")


def test_a_plugin_that_ends_the_process_is_listed_as_broken(monkeypatch):
    for error in (SystemExit(3), KeyboardInterrupt()):
        point = EntryPoint("ends", "nowhere:Nothing", names.GROUP)
        load = EntryPoint.load

        def raising(self, error=error, load=load):
            if self.name == "ends":
                raise error
            return load(self)

        monkeypatch.setattr(EntryPoint, "load", raising)
        monkeypatch.setattr(names, "entry_points", lambda group, point=point: [point])
        found = {entry.name: entry for entry in registry.backends()}
        assert type(error).__name__ in found["ends"].problem
        assert found["xnnpack"].quantizer is not None
        monkeypatch.undo()
