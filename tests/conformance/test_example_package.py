"""The example package: a target of eight operators by the public face alone, in the kit and in a model."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quantplug
from quantplug import plugin
from quantplug.plugin import BackendQuantizer, verdicts

PACKAGE = Path(__file__).parents[2] / "examples" / "npu_package"
DECLARATION = PACKAGE / "src" / "tiny8" / "__init__.py"
OPERATORS = {"conv2d", "linear", "add", "mul", "mean", "sigmoid", "max_pool2d", "cat"}


@pytest.fixture(scope="module")
def tiny8():
    sys.path.insert(0, str(PACKAGE / "src"))
    yield importlib.import_module("tiny8")
    sys.path.remove(str(PACKAGE / "src"))


class Eight(nn.Module):
    """Each of the eight operators, some twice."""

    def __init__(self, window):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding="same")
        self.narrow = nn.Conv2d(8, 8, window, padding="same", groups=4)
        self.gate = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.stem(x)), 2)
        x = torch.cat((torch.relu(x + self.narrow(x)), x), 1).mean((2, 3))
        return self.head(x * torch.sigmoid(self.gate(x)))


def test_the_declaration_is_short_and_imports_the_public_face_only():
    text = DECLARATION.read_text()
    lines = len(text.splitlines())
    assert lines <= 110
    assert f"rows and rules in {lines} lines" in (PACKAGE.parents[1] / "docs" / "backend-developers.md").read_text()
    tree = ast.parse(text)
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules - sys.stdlib_module_names == {"quantplug.plugin", "torch", "tiny8.kernels"}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "qp"}
    assert used <= set(plugin.__all__)


def test_the_entry_point_names_the_backend(tiny8):
    points = (PACKAGE / "pyproject.toml").read_text().partition('[project.entry-points."quantplug.backends"]\n')[2]
    assert points.startswith('tiny8 = "tiny8:TINY8"\n')
    assert tiny8.TINY8.name == "tiny8"
    assert {row.name for row in tiny8.TINY8.rows} >= OPERATORS - {"conv2d"}


@pytest.mark.slow
def test_the_package_keeps_what_it_declares(tiny8):
    found = list(verdicts(tiny8.TINY8))
    assert len(found) > 1000
    assert not [(name, check, verdict.reason) for name, check, verdict in found if verdict.status == "failed"]


@pytest.mark.few(1)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
def test_a_model_of_the_eight_operators_runs_on_integers(tiny8, is_decomposed, is_open):
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 9, 8) for _ in range(4)]
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}} if is_open else None
    # A window of two has an uneven padding, which decompositions write as an operator that the target has not.
    model = Eight(window=3 if is_decomposed else 2).eval()
    exported = torch.export.export(model, (batches[0],), dynamic_shapes=shapes)
    exported = exported.run_decompositions() if is_decomposed else exported
    quantizer = type("Tiny8Quantizer", (BackendQuantizer,), {"backend": tiny8.TINY8})().set_global(tiny8.TINY8.config())
    prepared = quantplug.prepare_pt2e(exported.module(), quantizer)
    for batch in batches:
        prepared(batch)
    converted = quantplug.convert_pt2e(prepared)
    program = tiny8.TINY8.lower(converted, (batches[0],))
    names = {node.name for node in converted.graph.nodes if str(node.target).startswith("aten.")}
    assert {each.node for each in program.ops} == names
    floats = [each for each in program.ops if each.placement != "int8"]
    assert not floats
    last = [node for node in converted.graph.nodes if "dequantize_per_tensor" in str(node.target)][-1]
    for batch in (*batches[:2], torch.randn(7, 3, 9, 8) if is_open else batches[2]):
        steps = (program(batch) - converted(batch)).abs().max() / last.args[1]
        assert steps <= 1.01
