"""Every example runs, and so does every Python block of the documents."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What the reader has on the machine already.
GIVEN = {
    "language-models": """
        from language_models import causal, write_folder
        write_folder("SmolLM2", causal(num_hidden_layers=1))
    """
}


def _run(arguments, cwd):
    places = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": places}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    done = _run([str(example)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=[] if path.name == "README.md" else pytest.mark.slow) for path in DOCUMENTS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_python_of_a_document_runs_from_top_to_bottom(document, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)
    program = tmp_path / "document.py"
    program.write_text("\n".join([textwrap.dedent(GIVEN.get(document.stem, "")), *blocks]))
    done = _run([str(program)], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_document_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing
