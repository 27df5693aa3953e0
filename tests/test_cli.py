"""The command line, end to end: files in, files out, one sentence and exit code 2 for everything wrong."""

import json
import resource
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantplug import cli, flow
from quantplug.algorithms import recipe
from quantplug.algorithms.sensitivity import Sensitivity
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 8, 8),)), folder / "model.pt2")
    torch.export.save(
        torch.export.export(model.double(), (torch.randn(2, 3, 8, 8, dtype=torch.float64),)), folder / "double.pt2"
    )
    data = np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", data)
    np.savez(folder / "wrong.npz", data[..., :5])
    np.savez(folder / "few.npz", data[:1])
    np.savez(folder / "two.npz", data, data)
    (folder / "text.npz").write_text("no arrays")
    (folder / "text.pt2").write_text("no model")
    return folder


@pytest.fixture
def run(monkeypatch, capsys, files):
    """Runs the command line in the folder of the files; returns exit code, output and errors."""

    def call(line):
        monkeypatch.chdir(files)
        monkeypatch.setattr(sys, "argv", ["quantplug", *line.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


class Reader(nn.Module):
    """Takes its inputs as Hugging Face's models do: by name, some in containers, one a switch."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 16), nn.Linear(16, 4)

    def forward(self, ids, *, mask=None, extra=None, doubled=True):
        found = self.table(ids) * mask.unsqueeze(-1)
        found = found + extra["shift"]
        return {"logits": self.linear(found * 2 if doubled else found)}


@pytest.fixture(scope="module")
def by_name(files):
    torch.manual_seed(0)
    model = Reader().eval()
    ids, mask, shift = torch.randint(0, 10, (2, 5)), torch.ones(2, 5), torch.randn(2, 5, 16)
    inputs = {"mask": mask, "extra": {"shift": shift}, "doubled": True}
    torch.export.save(torch.export.export(model, (ids,), inputs), files / "named.pt2")
    arrays: dict[str, Any] = {"mask": np.ones((6, 5), np.float32)}
    arrays["ids"] = np.random.default_rng(0).integers(0, 10, (6, 5))
    arrays["extra_shift"] = 100 * np.random.default_rng(0).standard_normal((6, 5, 16)).astype(np.float32)
    np.savez(files / "named.npz", **arrays)
    np.savez(files / "typo.npz", **{name.replace("mask", "maks"): array for name, array in arrays.items()})
    return model, arrays


def test_a_model_exported_by_keywords_is_quantized_with_arrays_by_name(run, files, by_name):
    model, arrays = by_name
    code, _, errors = run("quantize named.pt2 --backend x86 --calibration named.npz --out named_x86.pt2 --limit 3")
    assert (code, errors) == (0, "")
    loaded = X86Program.load(files / "named_x86.pt2")
    for start in (0, 4):
        ids, mask, shift = (torch.from_numpy(arrays[n][start : start + 2]) for n in ("ids", "mask", "extra_shift"))
        expected = model(ids, mask=mask, extra={"shift": shift})["logits"]
        found = loaded(ids, mask=mask, extra={"shift": shift}, doubled=True)["logits"]
        assert sqnr(found, expected) > 30  # the ranges are those of the file: its shifts are 100 times the examples'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("typo.npz", "holds the array 'maks', the model's inputs are ['ids', 'mask', 'extra_shift']"),
        ("two.npz", "write it with numpy.savez(path, ids=array, mask=array, extra_shift=array)"),
    ],
)
def test_arrays_of_other_names_are_one_sentence(run, files, by_name, data, said):
    code, _, errors = run(f"quantize named.pt2 --calibration {data} --out never.pte")
    assert code == 2
    assert said in " ".join(errors.split())
    assert not (files / "never.pte").exists()


def test_help_shows_brackets_as_they_are(run):
    code, out, _ = run("quantize --help")
    assert code == 0
    assert "[samples, ...]" in " ".join(out.replace("│", " ").split())


@pytest.mark.slow
def test_quantize_corrects_biases_with_as_many_samples_as_asked(run, monkeypatch):
    seen: list[Any] = []

    def correct_biases(prepared, loader, samples, **_):
        seen.append(samples)
        return True

    monkeypatch.setattr(recipe, "correct_biases", correct_biases)
    line = "quantize model.pt2 --calibration data.npz --out biased.pte"
    assert run(f"{line} --bias-samples 6")[0] == 0
    assert run(f"{line} --correct-bias")[0] == 0
    assert seen == [6, 128]


@pytest.mark.slow
def test_quantize_takes_a_recipe_by_its_name_and_says_what_was_done(run):
    line = "quantize model.pt2 --calibration data.npz --out better.pte"
    code, out, _ = run(f"{line} --recipe accurate")
    assert code == 0
    assert "rounded anew" in out
    code, _, errors = run(f"{line} --recipe acurate")
    assert code == 2
    assert "There is no recipe 'acurate'; choose one of ['fast', 'accurate']" in " ".join(errors.split())


@pytest.mark.slow
def test_quantize_writes_a_program_that_loads_and_a_report(run, files):
    observers = "--observer mse --weight-observer mse --correct-bias"
    code, out, _ = run(f"quantize model.pt2 --calibration data.npz --out model.pte --report report.json {observers}")
    assert code == 0
    assert "4 of 4 operators quantized" in out
    assert "Wrote model.pte" in out
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(str(files / "model.pte")).load_method("forward")
    assert loaded.execute([torch.randn(2, 3, 8, 8)])[0].shape == (2, 5)
    report = json.loads((files / "report.json").read_text())
    assert report["quantized"] == 4
    assert {row["owner"] for row in report["rows"]} == {"xnnpack"}


@pytest.mark.slow
def test_weights_of_seven_bits_are_asked_for_by_an_option(run, files):
    line = (
        "quantize model.pt2 --backend {} --calibration data.npz --out model_x86.pt2 --report bits.json --weight-bits {}"
    )
    assert run(line.format("x86", 7))[0] == 0
    rows = json.loads((files / "bits.json").read_text())["rows"]
    assert "int8 of 7 bits per channel" in next(row["how"] for row in rows if "conv2d" in row["node"])
    code, _, errors = run(line.format("x86", 6))
    assert (code, "give 8, 7 for machines without VNNI" in errors) == (2, True)
    code, _, errors = run(line.format("xnnpack", 7))
    assert (code, "weight_bits" in errors) == (2, True)


def test_quantize_for_x86_with_a_config_and_a_page(run, files):
    code, _, _ = run("quantize model.pt2 -b x86 -c int8_dynamic -o model_x86.pt2 --report report.html")
    assert code == 0
    from quantplug.lowering.x86 import X86Program

    assert X86Program.load(files / "model_x86.pt2")(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert "<h1>model.pt2</h1>" in (files / "report.html").read_text()


def test_the_fastest_engine_is_shown_and_remembered(run, files, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    line = "quantize model.pt2 --backend x86 --calibration data.npz --engine onednn,onednn_package --out fast.pt2"
    code, out, errors = run(f"{line} --json")
    assert (code, errors) == (0, "")
    times = json.loads(out)["report"]["engines"]
    assert [row["engine"] for row in times["rows"]] == ["onednn", "onednn_package"]
    assert "no-such-compiler" in times["rows"][1]["reason"]
    assert not times["is_remembered"]
    code, out, _ = run(line)
    assert f" {times['rows'][0]['microseconds']:.0f} " in out
    assert "needs a C++ compiler" in out
    assert "remembered from an earlier call" in out
    assert "timed in turns" in run(f"{line} --time-anew")[1]
    assert X86Program.load(files / "fast.pt2")(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    code, _, errors = run(line.replace("onednn,", "onedn,"))
    assert code == 2
    assert "no engine 'onedn' (did you mean 'onednn'?)" in " ".join(errors.split())


def test_explain_needs_no_data(run):
    code, out, _ = run("explain model.pt2 --backend x86")
    assert code == 0
    assert "conv_relu" in out
    assert "4 of 4 operators quantized" in out


@pytest.mark.few(1)
@pytest.mark.parametrize("options", ["", " --program"])
def test_sensitivity_shows_draws_and_writes_what_the_function_finds(run, files, options):
    line = f"sensitivity model.pt2 --calibration data.npz --backend x86{options} --report noise"
    code, printed, _ = run(f"{line}.json")
    assert code == 0
    assert "share of noise" in printed
    found = Sensitivity.from_json((files / "noise.json").read_text())
    assert f"together {found.decibels:.1f} dB" in printed
    assert {row.operator for row in found.rows} == {"conv2d", "linear"}
    assert run(f"{line}.png")[0] == 0
    assert (files / "noise.png").read_bytes().startswith(b"\x89PNG")
    code, _, said = run(f"{line}.txt")
    assert (code, "end its name in .png or .json" in said) == (2, True)


def test_backends_lists_names_and_configs(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("backends")
    assert code == 0
    assert "xnnpack" in out
    assert "int8_dynamic" in out


QUANTIZE = "quantize model.pt2 --calibration data.npz --out never.pte "
BAD = {
    "quantize gone.pt2 -o never.pte": "There is no model file 'gone.pt2'; check the path.",
    "quantize text.pt2 -o never.pte": "'text.pt2' is a file of another kind, not an exported program",
    "quantize model.pt2 -o never.pte": "needs data; pass calibration=loader",
    "quantize model.pt2 -o never.pte --calibration gone.npz": "There is no calibration file 'gone.npz'",
    "quantize model.pt2 -o never.pte --calibration text.npz": "'text.npz' is no .npz file",
    "quantize model.pt2 -o never.pte --calibration wrong.npz": "has shape [2, 3, 8, 5], expected [2, 3, 8, 8]",
    "quantize model.pt2 -o never.pte --calibration few.npz": "holds {'arr_0': 1} samples, the model takes batches of 2",
    "quantize model.pt2 -o never.pte --calibration two.npz": "holds 2 arrays ['arr_0', 'arr_1'], the model has inputs",
    "quantize model.pt2 -o nowhere/never.pte --calibration data.npz": "There is no folder",
    QUANTIZE + "--backend xnpack": "There is no backend 'xnpack' (did you mean 'xnnpack'?)",
    QUANTIZE + "--weight-bits 7": "Config 'int8' of backend 'xnnpack' has no option 'weight_bits'; leave it out.",
    QUANTIZE + "--config int9": "Backend 'xnnpack' has no config 'int9'; choose one of ['int8'",
    QUANTIZE + "--report report.txt": "The report 'report.txt' has no known kind; end its name in .html or .json.",
    QUANTIZE + "--report nowhere/report.html": "There is no folder",
    QUANTIZE + "--batch-size 3": "has shape [3, 3, 8, 8], expected [2, 3, 8, 8]",
    "quantize double.pt2 --calibration data.npz -o never.pte": "is torch.float64, not torch.float32",
    "explain gone.pt2": "There is no model file 'gone.pt2'",
    "explain model.pt2 --backend tpu": "There is no backend 'tpu'",
    "explain model.pt2 --config int9": "no config 'int9'",
}


@pytest.mark.parametrize("line", BAD)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(run, files, line):
    before = sorted(path.name for path in files.iterdir())
    code, out, err = run(line)
    assert code == 2
    assert out == ""
    lines = [text for text in err.splitlines() if text.startswith("error:")]
    assert len(lines) == 1, err
    assert BAD[line] in lines[0]
    assert lines[0].endswith(".")
    assert "Traceback" not in err
    assert sorted(path.name for path in files.iterdir()) == before


@pytest.mark.parametrize("line", ["quantize", QUANTIZE + "--limit 0", QUANTIZE + "--batch-size 0", "nonsense"])
def test_wrong_usage_is_exit_code_2(run, line):
    code, _, err = run(line)
    assert code == 2
    assert "Traceback" not in err


def command(line, **options):
    code = f"from quantplug.cli import main; import sys; sys.argv = {['quantplug', *line.split()]!r}; main()"
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=300, check=False, **options)


@pytest.mark.slow
def test_an_output_that_is_full_is_one_sentence(files):
    with open("/dev/full", "w") as full:
        done = command("explain model.pt2", cwd=files, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "error: the output fails (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xnnpack", "cortex_m", "openvino", "onnxruntime", "x86"])
def test_a_full_disk_is_no_fault_of_the_model(backend, files):
    def no_large_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    line = f"quantize model.pt2 --calibration data.npz --out never.pte --backend {backend}"
    before = sorted(path.name for path in files.iterdir())
    done = command(line, cwd=files, capture_output=True, preexec_fn=no_large_files)
    assert done.returncode == 2
    (said,) = (text for text in done.stderr.splitlines() if text.startswith("error:"))
    assert "File too large" in said
    assert "keep the operator" not in said
    assert sorted(path.name for path in files.iterdir()) == before


def test_ctrl_c_leaves_no_half_written_file(run, files, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, "explain", interrupted)
    before = sorted(path.name for path in files.iterdir())
    code, _, err = run(QUANTIZE)
    assert code != 0
    assert "Traceback" not in err
    assert sorted(path.name for path in files.iterdir()) == before


def test_the_installed_command_and_the_module_answer_help_quickly():
    command = [sys.executable, "-c", "from quantplug.cli import main; main()", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0
    for name in ("demo", "backends", "quantize", "explain"):
        assert name in found.stdout
    heavy = "import sys, quantplug.cli; sys.exit(sorted({'torch', 'torchao', 'executorch'} & set(sys.modules)) != [])"
    assert subprocess.run([sys.executable, "-c", heavy], timeout=120, check=False).returncode == 0
