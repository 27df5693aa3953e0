"""What commands show: one sentence of ours, nothing of the libraries', tables that lose nothing, JSON, or silence."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import version

import numpy as np
import pytest
import torch
from torch import nn

import quantplug
from quantplug import __main__, cli, demo
from quantplug.core.errors import QuantplugWarning
from quantplug.screen import Screen, current, with_screen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("screen")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 8, 8),)), where / "model.pt2")
    np.savez(where / "data.npz", np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    return where


@pytest.fixture
def run(monkeypatch, capsys, folder):
    """Runs the command line in the folder of the files; returns exit code, output and errors."""

    def call(line):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["quantplug", *line.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


def started(*line, env=None, **options):
    """Runs the command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "quantplug", *line],
        env={**os.environ, **(env or {})},
        text=True,
        stderr=subprocess.PIPE,
        **{"stdout": subprocess.PIPE, **options},
    )


def process(*line, **options):
    running = started(*line, **options)
    out, errors = running.communicate(timeout=300)
    return running.returncode, out, errors


def noisy():
    """A command that says what torch, torchao and quantplug say."""
    logging.getLogger("torchao").warning("Failed to load _C.so")
    logging.getLogger("torch.utils._pytree").warning("is deprecated")
    warnings.warn("torch thinks of its own", UserWarning, stacklevel=1)
    warnings.warn("The [config] costs accuracy.", QuantplugWarning, stacklevel=1)
    logging.getLogger("torch").error("no memory")


CALL = {"as_json": False, "quiet": False, "verbose": False}


def test_what_libraries_tell_their_developers_is_not_shown_and_what_we_tell_is_one_sentence(capsys, caplog):
    with_screen(noisy)(**CALL)
    assert capsys.readouterr().err == "warning: The [config] costs accuracy.\n"
    assert [record.message for record in caplog.records] == ["no memory"]
    before = list(warnings.filters)
    with_screen(noisy)(**CALL | {"quiet": True})
    assert capsys.readouterr().err == ""
    assert warnings.filters == before
    assert logging.root.manager.disable < logging.WARNING


def test_verbose_shows_everything(caplog):
    caplog.set_level(logging.WARNING)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with_screen(noisy)(**CALL | {"verbose": True})
    assert len(shown) == 2
    assert [record.message for record in caplog.records] == ["Failed to load _C.so", "is deprecated", "no memory"]


def test_every_warning_of_ours_reaches_who_runs_a_command(run):
    code, _, said = run("explain model.pt2 --backend fbgemm")
    assert (code, said) == (0, "warning: 'fbgemm' is an older name; this is backend 'x86'.\n")
    code, _, said = run("explain model.pt2 --backend fbgemm --quiet")
    assert (code, said) == (0, "")


def test_verbose_shows_where_an_error_comes_from(run):
    code, _, said = run("explain gone.pt2 --verbose")
    assert code == 2
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("error: There is no model file 'gone.pt2'")


@pytest.mark.slow
def test_torchaos_complaints_are_not_shown_and_can_be(folder):
    spoken = process("explain", "model.pt2", cwd=folder, env={"QUANTPLUG_VERBOSE": "1"})
    silent = process("explain", "model.pt2", cwd=folder)
    assert spoken[:2] == silent[:2]
    assert silent[::2] == (0, "")
    torchao = subprocess.run([sys.executable, "-c", "import torchao"], capture_output=True, text=True, check=True)
    loads = [line for line in torchao.stderr.splitlines() if line.startswith("Failed to load")]
    assert all(line in spoken[2].splitlines() for line in loads)


def test_each_command_has_the_options_of_the_screen(run):
    names = [found.name or found.callback.__name__.replace("_", "-") for found in cli.app.registered_commands]
    assert len(names) > 8
    for name in names:
        code, out, _ = run(f"{name} --help")
        assert code == 0
        assert all(option in out for option in ("--json", "-q, --quiet", "--verbose")), name


def test_help_is_not_cut_off_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run("quantize --help")
    assert "…" not in out
    assert "QUANTPLUG_VERBOSE" in out


def test_help_loads_nothing_that_takes_long():
    program = (
        "import sys; from quantplug.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchao', 'numpy', 'jinja2', 'networkx', 'rich.markdown'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    for line in (["--help"], ["quantize", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_help_and_completion_answer_before_a_user_waits():
    completing = {"_QUANTPLUG_COMPLETE": "complete_bash", "COMP_WORDS": "quantplug explain --backend x"}
    completing["COMP_CWORD"] = "3"
    for line, env in ((["--help"], {}), (["quantize", "--help"], {}), ([], completing)):
        began = _processor_time()
        _, out, _ = subprocess_of_the_script(*line, env=env)
        # 0.1 to 0.3 s; torch alone takes longer than 1 s. Time of the processor, since others may be busy beside it.
        assert _processor_time() - began < 1, line
    assert out.split() == ["xnnpack", "x86"]


def _processor_time():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def subprocess_of_the_script(*line, env):
    program = "import sys; from quantplug.cli import main; sys.argv[0] = 'quantplug'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *line], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_the_version_is_the_installed_one(run):
    assert run("--version")[:2] == (0, f"quantplug {version('quantplug')}\n")
    assert quantplug.__version__ == version("quantplug")


@pytest.mark.parametrize("columns", [None, "40", "80", "120"])
def test_no_width_loses_anything_of_the_backends(run, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("backends")
    assert code == 0
    assert "…" not in out
    for entry in quantplug.backends():
        for name in (entry.name, *entry.quantizer.backend.configs):
            assert name in out.replace(",", "").split(), name
        assert entry.quantizer.backend.summary in " ".join(out.split())
    if columns is None:
        assert len(out.splitlines()) < len(quantplug.backends()) + 5  # a line for each


def test_no_operator_is_cut_off_in_a_pipe(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    _, out, _ = run("explain model.pt2 --backend x86")
    assert "int8, int8 per channel -> fused into relu" in out
    assert "…" not in out


def test_backends_as_json(run):
    code, out, _ = run("backends --json")
    found = {row["backend"]: row for row in json.loads(out)["backends"]}
    assert code == 0
    assert found["xnnpack"]["configs"] == list(quantplug.get_quantizer("xnnpack").backend.configs)
    assert found["x86"]["modes"] == ["static", "dynamic", "weight_only"]
    assert found["x86"]["version"] == version("quantplug")


def test_a_quantized_model_as_json_and_in_silence(run, folder):
    line = "quantize model.pt2 --backend x86 --calibration data.npz --out made.pt2 --correct-bias"
    code, out, said = run(f"{line} --json")
    found = json.loads(out)
    assert code == 0
    assert said.startswith("warning: No bias was corrected: ")
    assert found["bytes"] == (folder / "made.pt2").stat().st_size
    assert found["model_bytes"] == (folder / "model.pt2").stat().st_size
    assert found["report"]["quantized"] == 4
    assert len(found["applied"]) == 1
    (folder / "made.pt2").unlink()
    assert run(f"{line} --quiet") == (0, "", "")
    assert (folder / "made.pt2").exists()


def test_what_the_operators_are_as_json(run):
    explained = json.loads(run("explain model.pt2 --backend x86 --json")[1])
    assert explained["quantized"] == len(explained["rows"]) == 4
    noise = json.loads(run("sensitivity model.pt2 --calibration data.npz --backend x86 --json")[1])
    assert {row["operator"] for row in noise["rows"]} == {"conv2d", "linear"}
    assert run("sensitivity model.pt2 --calibration data.npz --backend x86 --quiet") == (0, "", "")


def test_a_written_package_as_json(run, folder):
    code, out, _ = run("new-backend json_npu --json")
    assert code == 0
    assert (folder / json.loads(out)["folder"] / "pyproject.toml").exists()


def test_what_json_cannot_say_is_null(capsys):
    Screen(as_json=True).document({"noise": float("inf"), "rows": ({"dB": float("nan")}, 1)})
    assert json.loads(capsys.readouterr().out) == {"noise": None, "rows": [{"dB": None}, 1]}


def test_an_error_is_a_sentence_where_json_was_asked_for(run):
    code, out, said = run("explain gone.pt2 --json")
    assert (code, out) == (2, "")
    assert said.startswith("error: There is no model file 'gone.pt2'")


def test_outside_of_a_command_people_read():
    assert current() == Screen()
    assert current().is_read


@pytest.mark.slow
def test_the_demo_as_json(run, folder, monkeypatch):
    digits = demo.load_digits()
    few = demo.Digits(digits.train[:32], digits.train_labels[:32], digits.test[:32], digits.test_labels[:32])
    monkeypatch.setattr(demo, "load_digits", lambda: few)
    monkeypatch.setattr(demo, "train", lambda digits: demo.DigitNet(8).eval())
    code, out, _ = run("demo --json --out shown")
    found = json.loads(out)
    assert code == 0
    assert [row["model"] for row in found["figures"]][2:] == ["int8, xnnpack", "int8, x86"]
    assert found["figures"][0]["decibels"] is None
    assert found["figures"][2]["size"] == (folder / "shown" / "digits.pte").stat().st_size
    assert all((folder / path).exists() for path in found["written"])


@pytest.mark.slow
def test_the_kernels_as_json(run):
    code, out, _ = run("numerics --backend x86 --json")
    rows = json.loads(out)["kernels"]
    assert code == (0 if all(row["holds"] for row in rows) else 1)
    assert {"linear", "convolution"} <= {row["kernel"] for row in rows}
    assert all(row["elements"] > 0 for row in rows)


@pytest.mark.slow
def test_a_pipe_that_is_closed_ends_quietly(folder):
    running = started("backends", cwd=folder)
    running.stdout.close()
    said = running.stderr.read()
    assert running.wait(300) == 1
    assert said == ""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 4])
def test_ctrl_c_ends_quietly_with_its_exit_code(folder, moment):
    np.savez(folder / "long.npz", np.zeros((60000, 3, 8, 8), np.float32))
    running = started("quantize", "model.pt2", "--calibration", "long.npz", "--out", "never.pte", cwd=folder)
    time.sleep(moment)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not (folder / "never.pte").exists()


def test_ctrl_c_while_the_command_line_is_read_ends_quietly(monkeypatch):
    class Pressed:
        def find_spec(self, name, path, target=None):
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "quantplug.cli")
    monkeypatch.delattr("quantplug.cli")
    monkeypatch.setattr(sys, "meta_path", [Pressed()])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130
