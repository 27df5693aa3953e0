"""What the package imports is what it asks for; extras are optional; a checkout without links says so."""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from quantplug.core import extras
from quantplug.core.errors import ConfigError

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
PACKAGE = ROOT / "src" / "quantplug"
ROOMS = ("algorithms", "annotators", "core", "lowering", "quantizers")
# Module -> its distribution, where the names differ.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "ethosu": "ethos-u-vela", "tosa_reference_model": "tosa-tools"}
# The kit is a plugin of pytest's, which pytest alone loads.
OF_ITS_OWN = {"pytest"}


def asked_for(name):
    """Returns what a list of requirements in pyproject.toml names: "dependencies", or an extra."""
    (listed,) = re.findall(rf"^{name} = (\[.*?\])(?: #.*)?$", PROJECT, re.DOTALL | re.MULTILINE)
    return {re.match(r"[\w-]+", line)[0] for line in ast.literal_eval(listed)}


@cache
def imported():
    """Returns (whether on import of the file, distribution, file) of all that the package imports of others."""
    return tuple(_imported())


def _imported():
    for path in (file for place in (*(ROOT / room for room in ROOMS), PACKAGE) for file in place.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in {name.partition(".")[0] for name in names} - {"quantplug", *sys.stdlib_module_names}:
                yield node in tree.body, DISTRIBUTIONS.get(module, module.replace("_", "-")), path


def test_what_is_imported_is_asked_for_and_what_is_asked_for_is_imported():
    always, sometimes = (
        asked_for("dependencies"),
        set().union(*map(asked_for, ("arm", "demo", "llm", "onnx", "openvino"))),
    )
    found = {(first, name) for first, name, _ in imported()} - {(True, name) for name in OF_ITS_OWN}
    assert {name for first, name in found if first} <= always
    assert {name for _, name in found} <= always | sometimes
    assert always <= {name for _, name in found}


def test_no_extra_is_imported_before_it_is_needed():
    own = asked_for("dependencies") | OF_ITS_OWN
    assert [(name, path) for first, name, path in imported() if first and name not in own] == []


def test_what_developers_install_has_every_extra():
    extras_of_dev = re.search(r"quantplug\[([\w,-]+)\]", PROJECT)[1].split(",")
    (section,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)\n\n", PROJECT, re.DOTALL | re.MULTILINE)
    assert set(extras_of_dev) == set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)) - {"dev"}


def test_an_extra_that_is_missing_is_one_sentence_with_the_line_that_installs_it():
    with pytest.raises(ConfigError, match=r"^A picture needs nowhere, .*; pip install 'quantplug\[demo\]'\.$"):
        extras.extra_module("nowhere.figure", "demo", "A picture")


def test_a_checkout_without_links_is_one_sentence(tmp_path):
    """As git leaves it on Windows without developer mode: a file with the link's target in the place of each link."""
    package = tmp_path / "quantplug"
    package.mkdir()
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, package)
    for room in ROOMS:
        (package / room).write_text(os.readlink(PACKAGE / room))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for line in (["-c", "import quantplug"], ["-m", "quantplug", "--help"]):
        done = subprocess.run([sys.executable, *line], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "git config core.symlinks true" in done.stderr.splitlines()[-1]


# An environment without extras would have to be downloaded: their modules are hidden instead from all that looks.
HIDDEN = (
    *("matplotlib", "sklearn", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "openvino", "torchvision"),
    *("transformers", "tokenizers", "safetensors", "gguf", "accelerate", "tosa", "serializer"),
    *("tosa_reference_model", "ethosu"),
    *("pytest", "hypothesis", "build", "mypy"),
)
WITHOUT_EXTRAS = f"""
import importlib.machinery, sys
found = importlib.machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {HIDDEN} else found(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""
FOUR_STEPS = """
import torch, quantplug
from torch import nn
assert quantplug.__file__.startswith(sys.argv[1]), quantplug.__file__
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
x = torch.randn(4, 3, 8, 8)
for backend, name in (("xnnpack", "m.pte"), ("x86", "m.pt2")):
    quantizer = quantplug.get_quantizer(backend)
    prepared = quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    quantplug.calibrate(prepared, [x])
    converted = quantplug.convert_pt2e(prepared)
    program = quantizer.backend.lower(converted, (x,))
    assert quantplug.sqnr(program(x), model(x)) > 25
    program.save(name)
    print(quantplug.explain(converted).summary())
prepared = quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantplug.get_quantizer("x86"))
quantplug.calibrate(prepared, [x])
try:
    quantplug.sensitivity(prepared, [x]).plot("noise.png")
except quantplug.ConfigError as error:
    print(error)
"""
COMMAND = "from quantplug.cli import main; sys.argv = ['quantplug', *sys.argv[2:]]; main()"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, built from a copy of the sources and installed by itself."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", ".*_cache", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, folder / "sources", symlinks=True, ignore=left_out)
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), "./sources"]
    subprocess.run(build, cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True)
    return folder / "site"


def _run(site, program, *arguments, cwd):
    line = [sys.executable, "-c", WITHOUT_EXTRAS + program, str(site), *arguments]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_wheel_without_extras_runs_the_four_steps_and_says_what_pictures_need(installed, tmp_path):
    done = _run(installed, FOUR_STEPS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert [line.partition(" operators")[0] for line in told[:2]] == ["4 of 4", "4 of 4"]
    assert told[2].startswith("A picture needs matplotlib, which is not installed")
    assert told[2].endswith("; pip install 'quantplug[demo]'.")
    assert {path.name for path in tmp_path.iterdir()} == {"m.pte", "m.pt2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("demo", "demo"),
        ("sensitivity m.pt2 --calibration d.npz --report noise.png", "demo"),
        ("llm model --out m.pte", "llm"),
    ],
)
def test_a_command_of_an_extra_says_how_to_install_it(installed, tmp_path, line, extra):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = _run(installed, COMMAND, *line.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.rstrip().endswith(f"pip install 'quantplug[{extra}]'.")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_every_backend_is_listed_without_extras(installed, tmp_path):
    done = _run(installed, COMMAND, "backends", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "broken" not in done.stdout
