"""Paths that the system does not take, files of other kinds and inputs that are none: one sentence each."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quantplug
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError, LoweringError, QuantplugError
from quantplug.core.files.exported import read_exported
from quantplug.core.files.whole import kind_at, write_content
from quantplug.files import require_apart
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program
from quantplug.scaffold import new_backend

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def quantized(backend, **options):
    pytest.importorskip("openvino")
    return quantplug.quantize(model(), (X,), backend, [X], progress=False, **options)


def prepared():
    return quantplug.prepare_pt2e(torch.export.export(model(), (X,)).module(), quantplug.get_quantizer("x86"))


PLACES = {
    "a model": read_exported,
    "a file to write": lambda path: write_content(path, b"content"),
    "an output": lambda path: require_apart([], [path]),
    "x86": X86Program.load,
    "openvino": OpenVINOProgram.load,
    "a folder for a package": lambda path: new_backend("my_npu", path),
    "a checkpoint": lambda path: quantplug.calibrate(prepared(), [X], checkpoint=path, progress=False),
}


@pytest.mark.parametrize("name", ["n" * 300, "nul\0"], ids=["long", "nul"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_path_is_one_sentence(place, name, tmp_path):
    with pytest.raises(ArtefactError, match=r"is no path that can be used \(.*\); give another\.$") as error:
        PLACES[place](tmp_path / name)
    assert "\n" not in str(error.value)


def test_below_a_file_there_is_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    assert kind_at(tmp_path / "file" / "below") == "nothing"
    with pytest.raises(ArtefactError, match=r"^There is no folder '.*file' to write 'below' to; create it first\.$"):
        write_content(tmp_path / "file" / "below", b"")


def test_the_longest_name_that_the_system_takes_is_written(tmp_path):
    longest = tmp_path / ("n" * 251 + ".pte")
    assert write_content(longest, b"content").read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [longest]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["[red]m.pte", "[/b].pte", "\udcff\udcfe.pte"])
def test_names_of_odd_characters_are_written_and_printed(name, tmp_path, monkeypatch):
    """The work was done when printing or writing the name failed."""
    torch.export.save(torch.export.export(model(), (X,)), tmp_path / "model.pt2")
    np.savez(tmp_path / "data.npz", X.numpy())
    (tmp_path / "[").mkdir()
    line = [
        "quantize",
        "model.pt2",
        "--calibration",
        "data.npz",
        "--out",
        name,
        "--report",
        f"{name}.html",
        "-b",
        "x86",
    ]
    code = "import sys; from quantplug.cli import main; sys.argv = ['quantplug', *sys.argv[1:]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *line], cwd=tmp_path, capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"Wrote {name.encode('utf-8', 'backslashreplace').decode()} (".encode() in done.stdout
    assert (tmp_path / name).is_file()
    assert (tmp_path / f"{name}.html").is_file()


def test_a_checkpoint_that_is_no_file_is_not_to_be_deleted(tmp_path):
    with pytest.raises(ArtefactError, match=r"is a folder; give the path of a file to write\.$"):
        quantplug.calibrate(prepared(), [X], checkpoint=tmp_path, progress=False)
    with pytest.raises(ArtefactError, match="a device or a pipe"):
        quantplug.calibrate(prepared(), [X], checkpoint="/dev/null", progress=False)


def write_kinds(folder):
    torch.save(model().state_dict(), folder / "weights")
    torch.save(model().state_dict(), folder / "old", _use_new_zipfile_serialization=False)
    np.savez(folder / "arrays.npz", X.numpy())
    (folder / "text").write_text("no model")
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        torch.jit.script(model()).save(folder / "script")
    for backend in ("xnnpack", "openvino"):
        quantized(backend).save(folder / backend)


KINDS = {
    "weights": "a file of torch.save",
    "old": "a pickle",
    "arrays.npz": "a file of numpy arrays",
    "text": "a file of another kind",
    "script": "a TorchScript program",
    "xnnpack": "an ExecuTorch program",
    "openvino": "a program of backend 'openvino'",
}


@pytest.mark.slow
def test_files_of_other_kinds_are_named_and_trust_is_not_asked_for(tmp_path):
    write_kinds(tmp_path)
    for name, kind in KINDS.items():
        for trust in (False, True):
            with pytest.raises(ArtefactError, match=rf"is {kind}.*, not an exported program; write one") as error:
                read_exported(tmp_path / name, trust=trust)
            assert "trust" not in str(error.value)


def test_a_program_keeps_its_own_folders_for_itself(tmp_path):
    artefact = quantized("openvino", options={"CACHE_DIR": str(tmp_path / "cache"), "INFERENCE_NUM_THREADS": 1})
    loaded = OpenVINOProgram.load(artefact.save(tmp_path / "program"))
    assert loaded.options["INFERENCE_NUM_THREADS"] == 1
    assert "CACHE_DIR" not in loaded.options


def test_sparse_inputs_are_one_sentence():
    sparse = X.to_sparse()
    with pytest.raises(ConfigError, match=r"example input is sparse \(torch.sparse_coo\); pass its `to_dense\(\)`"):
        quantplug.quantize(model(), (sparse,), "x86", [X], progress=False)
    with pytest.raises(CalibrationError, match=r"batch 0 is sparse \(torch.sparse_coo\)"):
        quantplug.calibrate(prepared(), [sparse], progress=False)
    with pytest.raises(LoweringError, match=r"An input is sparse \(torch.sparse_coo\)"):
        quantized("x86")(sparse)


def test_values_of_any_size_are_shown_in_one_line():
    array: Any = np.zeros((1000, 1000))
    for attempt in (
        lambda: quantplug.calibrate(prepared(), [X], inputs=array, progress=False),
        lambda: quantplug.calibrate(prepared(), [X], limit=array, progress=False),
        lambda: quantplug.prepare_pt2e(prepared(), array),
        lambda: quantplug.get_quantizer(array),
        lambda: quantplug.get_quantizer("x86").set_module_type(array, "int8"),
        lambda: quantized("x86", correct_bias=array),
        lambda: quantized("x86", float_dtype=array),
        lambda: quantized("x86")([[0.0] * 8] * 4000),
        lambda: quantized("x86")(FakeTensorMode().from_tensor(X)),
    ):
        with pytest.raises(QuantplugError) as error:
            attempt()
        assert len(str(error.value)) < 400
        assert "\n" not in str(error.value)


def test_what_picks_inputs_is_a_function():
    with pytest.raises(CalibrationError, match=r"^inputs is 0; pass a function of a batch"):
        quantplug.calibrate(prepared(), [X], inputs=0, progress=False)  # type: ignore[arg-type]
