"""Plugins: packages outside of the tree are found, listed, used and judged, in an interpreter of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quantplug
from quantplug import scaffold
from quantplug.conformance import CHECKS
from quantplug.core.errors import ConfigError

PACKAGE = Path(__file__).parent / "plugin_package"


def installed(package, target):
    """Installs a package into a folder of its own, without an index, and returns the environment that sees it."""
    source = target.with_name(f"{target.name}-source")
    subprocess.run(["cp", "-r", str(package), str(source)], check=True)  # setuptools writes beside the sources
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "400"}  # a table of wide rows, and no list


@pytest.fixture(scope="module")
def plugged(tmp_path_factory):
    return installed(PACKAGE, tmp_path_factory.mktemp("plugin") / "site")


def python(*arguments, env, cwd=None):
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def command_line(*arguments, env, cwd=None):
    program = "import sys; from quantplug.cli import main; sys.argv[0] = 'quantplug'; main()"
    return python("-c", program, *arguments, env=env, cwd=cwd)


@pytest.mark.slow
def test_b26_r17_b16_a_package_is_listed_with_what_is_wrong_with_its_other_entries(plugged):
    code, out, _ = command_line("backends", env=plugged)
    assert code == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "tiny_npu tiny-npu 1.2.3 static int8 int8 sums" in rows
    assert any(row.startswith("tiny_broken tiny-npu 1.2.3 - - - broken: ModuleNotFoundError") for row in rows)
    assert any(row.startswith("x86 tiny-npu 1.2.3 - - - broken: the name is taken by 'quantplug'") for row in rows)
    assert any(row.startswith("x86 quantplug") for row in rows)


USE = """
import torch, quantplug
x = torch.linspace(-2, 3, 24).reshape(4, 6)
class Model(torch.nn.Module):
    def forward(self, a, b): return torch.relu(a + b)
artefact = quantplug.quantize(Model(), (x, x.flip(0)), "tiny_npu", [(x, x.flip(0))], progress=False)
assert {op.placement for op in artefact.program.ops} == {"int8"}
assert torch.allclose(artefact(x, x.flip(0)), torch.relu(x + x.flip(0)), atol=0.05)
assert [row.rule for row in quantplug.capabilities("tiny_npu")] == ["add_relu", "add"]
assert "add_relu" in str(artefact.report)
quantplug.get_quantizer("x86")
try:
    quantplug.get_quantizer("tiny_broken")
except quantplug.QuantplugError as error:
    print(error)
"""


@pytest.mark.slow
def test_b26_r02_r03_a_plugin_is_used_by_name_and_a_broken_one_harms_no_other(plugged, tmp_path):
    code, out, err = python("-c", USE, env=plugged, cwd=tmp_path)
    assert code == 0, err
    assert "Backend 'tiny_broken' of package 'tiny-npu' is broken: ModuleNotFoundError" in out


def kit(name, *arguments, env, cwd):
    options = ("-q", "-p", "no:cacheprovider", "--quantplug-backend", name)
    return python("-m", "pytest", *options, *arguments, env=env, cwd=cwd)


@pytest.mark.slow
def test_b26_r01_a_plugin_passes_the_kit_where_there_are_no_test_files(plugged, tmp_path):
    code, out, _ = kit("tiny_npu", "-rA", env=plugged, cwd=tmp_path)
    assert code == 0, out
    assert "::tiny_npu-int8-add_relu-aten.add.Tensor-1-static-delegated" in out
    forms = len(re.findall(r"PASSED .*-output$", out, re.MULTILINE))
    assert forms >= 4
    assert "PASSED quantplug-backend tiny_npu::tiny_npu-int8-add-aten.add.Tensor-behind-add-static-output" in out
    assert out.count("PASSED") == forms * (len(CHECKS) - 2)
    assert "the backend names no kernels to emulate" in out
    assert "the row declares no limit on ratios of scales" in out
    assert f"{2 * forms} skipped" in out


@pytest.mark.slow
def test_the_kit_says_which_backend_it_cannot_test(plugged, tmp_path):
    code, out, err = kit("tiny_np", env=plugged, cwd=tmp_path)
    assert code == 4
    assert "There is no backend 'tiny_np' (did you mean 'tiny_npu'?)" in out + err
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_r02_r05_what_new_backend_writes_passes_the_kit_and_its_own_tests(tmp_path):
    code, out, err = command_line("new-backend", "fresh_npu", "--out", str(tmp_path), env=dict(os.environ))
    assert code == 0, err
    assert "pytest --quantplug-backend fresh_npu" in out
    env = installed(tmp_path / "fresh-npu", tmp_path / "site")
    code, out, _ = kit("fresh_npu", "tests", env=env, cwd=tmp_path / "fresh-npu")
    assert code == 0, out
    assert " passed" in out.splitlines()[-1]


def test_new_backend_writes_code_in_good_style(tmp_path):
    folder = scaffold.new_backend("fresh_npu", tmp_path)
    for check in (("check", "--select", "E,F,I,W,B,UP"), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *check, "--line-length", "120", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("My-NPU", "A backend named 'My-NPU' could not be imported; use lower-case letters"),
        ("class", "A backend named 'class' could not be imported"),
        ("../up", "could not be imported"),
        ("", "A backend named '' could not be imported"),
        ("xnnpack", "The name 'xnnpack' is taken by an installed backend; choose another."),
        ("json", "The name 'json' is taken by an installed module; choose another, such as 'json_npu'."),
        ("there", "exists already; choose another name, or another folder with --out."),
    ],
)
def test_new_backend_refuses_in_one_sentence_and_writes_nothing(tmp_path, name, sentence):
    (tmp_path / "there").mkdir()
    with pytest.raises(quantplug.QuantplugError, match=sentence.replace("(", r"\(").replace(".", r"\.")):
        scaffold.new_backend(name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_new_backend_needs_a_folder_to_write_to(tmp_path):
    with pytest.raises(quantplug.QuantplugError, match=r"There is no folder '.*nowhere' to write 'fresh-npu' to"):
        scaffold.new_backend("fresh_npu", tmp_path / "nowhere")


def test_an_interrupted_new_backend_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(name, folder):
        (folder / "half").write_text("written")
        raise KeyboardInterrupt

    monkeypatch.setattr(scaffold, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        scaffold.new_backend("fresh_npu", tmp_path)
    assert not list(tmp_path.iterdir())


def test_r10_r11_the_capability_table_has_modes_dtypes_and_levels():
    rows = {row.rule: row for row in quantplug.capabilities("x86")}
    assert rows["linear"].modes == ("static", "dynamic", "weight_only")
    assert rows["conv"].modes == ("static", "dynamic", "weight_only")
    assert rows["cat"].modes == ("static",)
    assert rows["linear"].dtypes == ("uint8", "int8", "float16")
    assert rows["linear"].level in ("exact", "one step", "approximate")
    reduced = quantplug.get_x86_quantization_config(reduce_range=True).input_activation
    assert (reduced.quant_min, reduced.quant_max, reduced.dtype) == (0, 127, torch.uint8)
    with pytest.raises(ConfigError, match="There is no backend 'tpu'"):
        quantplug.capabilities("tpu")
