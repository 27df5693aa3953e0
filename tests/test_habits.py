"""What strangers look for in a repository: it is there, it parses, and it says what the other files say."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from quantplug.core.annotation import plan
from quantplug.core.calibration import checkpoint

ROOT = Path(__file__).parent.parent
YAML = sorted(path for path in (*(ROOT / ".github").rglob("*.yml"), *ROOT.glob("*.y*ml"), *ROOT.glob(".*.yaml")))
YAML.append(ROOT / "CITATION.cff")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


class Loader(yaml.SafeLoader):
    """Reads what mkdocs.yml names of Python's as text."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def read(path):
    return yaml.load(path.read_text(), Loader)


def plain(command):
    """Returns a command as one types it in an activated environment, without what only makes it silent."""
    command = re.sub(r'"\$python" -m pip|\.venv/bin/pip', "pip", command.strip())
    command = re.sub(r'"\$python"|\.venv/bin/python', "python", command)
    return re.sub(r" (-q|--quiet)\b", "", command).replace("${OLDPWD}/", "")


def documented():
    """Returns the commands of README, CONTRIBUTING and .ci/run."""
    blocks = [
        line
        for page in ("README.md", "CONTRIBUTING.md")
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    lines = (*blocks, *(ROOT / ".ci" / "run").read_text().splitlines())
    return {plain(part) for line in lines for part in line.split("&&")} | {".ci/run"}


def steps(workflow):
    return [step for job in read(workflow)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_is_read(path):
    assert isinstance(read(path), dict)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_github_runs_is_what_the_documents_say(workflow):
    commands = [plain(step["run"]) for step in steps(workflow) if "run" in step]
    assert commands
    assert not set(commands) - documented()


def test_a_command_that_no_document_has_is_seen():
    assert plain(".venv/bin/python -m pytest -n 2") in documented()
    assert plain("python -m pytest -n 3") not in documented()
    assert plain('"$python" -m pip install -q torch==2.13.0') == "pip install torch==2.13.0"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_have_versions_and_no_rights(workflow):
    uses = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", used) for used in uses)
    assert read(workflow)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in read(workflow)["jobs"].values())


def test_github_tries_the_versions_of_python_that_the_package_names():
    tried = read(ROOT / ".github" / "workflows" / "check.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert tried == re.findall(r'Python :: (3\.\d+)"', PROJECT)
    assert said("requires-python") == f">={tried[0]}"


def test_torch_is_the_one_of_the_package_everywhere():
    (wanted,) = re.findall(r'"torch==([\d.]+)\.\*"', PROJECT)
    for path in (*WORKFLOWS, ROOT / "README.md", ROOT / ".ci" / "run"):
        assert set(re.findall(r"torch==([\d.]+)", path.read_text())) <= {f"{wanted}.0"}, path


def said(name):
    """Returns what pyproject.toml says of the project in one line."""
    return re.findall(rf'^{name} = "(.+?)"', PROJECT, re.MULTILINE)[0]


def headings():
    return re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)


def test_the_changelog_has_versions():
    first, *released = headings()
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in released)
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert all(re.match(r"- |  \S|#|$|\[|The |docs", line) for line in CHANGELOG.splitlines())


def test_the_version_is_one():
    (newest, date), *_ = (re.findall(r"\[(.+)\] - (.+)", heading)[0] for heading in headings()[1:])
    cited = read(ROOT / "CITATION.cff")
    assert said("version") == newest == cited["version"]
    assert str(cited["date-released"]) == date
    assert (ROOT / "tests" / "golden" / newest).is_dir(), "python tests/file_formats.py tests/golden/VERSION"
    assert cited["license"] == said("license")


def test_the_numbers_of_formats_are_those_of_the_code():
    page = (ROOT / "docs" / "public-api.md").read_text()
    assert f'`"version"`: {plan.VERSION} |' in page
    assert f'`"format"`: {checkpoint.FORMAT} |' in page
    assert (
        f'`"tune"`: {re.findall(r"^_VERSION = (.)", (ROOT / "src/quantplug/tuning.py").read_text(), re.M)[0]} |' in page
    )


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_forms_are_what_github_reads(form):
    found = read(form)
    assert {"name", "description", "body"} <= set(found)
    for field in found["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert "label" in field["attributes"]
    ids = [field["id"] for field in found["body"]]
    assert len(ids) == len(set(ids))


def test_no_file_is_larger_than_the_hook_lets_pass():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    hook = (ROOT / ".pre-commit-config.yaml").read_text()
    (most,) = re.findall(r"> ([\d_]+)", hook)
    for name in filter(None, files.split("\0")):
        path = ROOT / name
        assert path.is_symlink() or not path.exists() or path.stat().st_size <= int(most), name


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CITATION.cff", ".github/CODEOWNERS", ".github/pull_request_template.md"]
)
def test_it_is_there(name):
    assert (ROOT / name).read_text().strip()
