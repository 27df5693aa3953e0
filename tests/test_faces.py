"""Two modules are public: what is written for users imports from nothing else, and every name in them is there."""

import ast
import inspect
import pkgutil
import re
from pathlib import Path
from types import GenericAlias

import pytest

import quantplug
from quantplug import plugin, scaffold

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
FACES = {"quantplug": quantplug, "quantplug.plugin": plugin}
INNER = {module.name for module in pkgutil.iter_modules(quantplug.__path__)} - {"plugin"}
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
MENTION = re.compile(rf"\bquantplug\.(?:{'|'.join(sorted(INNER))})\b")
TEMPLATES = [name for name in scaffold._FILES if name.endswith(".py.jinja")]


def imports_from_within(source):
    """Yields what a program imports of quantplug beside the public names of its two faces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "quantplug" and a.name not in FACES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quantplug":
            public = {*FACES[node.module].__all__, *_faces_in(node.module)} if node.module in FACES else set()
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quantplug":
            known = node.attr in {*quantplug.__all__, "plugin", "__all__", "__version__"}
            yield from () if known else (f"quantplug.{node.attr}",)


def _faces_in(module):
    return {name.rpartition(".")[2] for name in FACES if name.rpartition(".")[0] == module}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import quantplug.core.annotation.plan", ["quantplug.core.annotation.plan"]),
        ("from quantplug.core.annotation.plan import Plan", ["quantplug.core.annotation.plan.Plan"]),
        ("from quantplug import core, plugin, Plan", ["quantplug.core"]),
        ("from quantplug.plugin import Backend, partial", ["quantplug.plugin.partial"]),
        ("import quantplug\nquantplug.core.annotation.plan.Plan", ["quantplug.core"]),
        ("import quantplug\nfrom quantplug import plugin\nquantplug.quantize", []),
    ],
)
def test_an_import_from_within_is_seen(source, found):
    assert list(imports_from_within(source)) == found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_know_the_two_faces_only(document):
    text = document.read_text()
    for block in BLOCK.findall(text):
        assert not list(imports_from_within(block))
    assert not MENTION.findall(text)


def test_every_block_of_python_is_read():
    opened = sum(len(re.findall(r"^```py", document.read_text(), flags=re.MULTILINE)) for document in DOCUMENTS)
    assert opened == sum(len(BLOCK.findall(document.read_text())) for document in DOCUMENTS) > 25


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_know_the_two_faces_only(example):
    assert not list(imports_from_within(example.read_text()))
    assert not MENTION.findall(example.read_text())


def test_what_new_backend_writes_knows_the_two_faces_only(tmp_path):
    folder = scaffold.new_backend("faced_npu", tmp_path)
    written = sorted(folder.rglob("*.py"))
    assert len(written) == len(TEMPLATES) > 2
    for path in written:
        assert not list(imports_from_within(path.read_text())), path.name
    for path in filter(Path.is_file, folder.rglob("*")):
        assert not MENTION.findall(path.read_text()), path.name


@pytest.mark.parametrize("face", FACES)
def test_public_names_are_there_once_and_say_what_they_are(face):
    names = FACES[face].__all__
    assert len(names) == len(set(names))
    for name in names:
        found = getattr(FACES[face], name)
        assert not name.startswith("_")
        if isinstance(found, GenericAlias):  # Python 3.10 takes these for classes
            continue
        if inspect.isclass(found) or inspect.isroutine(found) or inspect.ismodule(found):
            assert inspect.getdoc(found), name


def test_a_name_that_both_faces_have_is_one_thing():
    both = set(quantplug.__all__) & set(plugin.__all__)
    assert len(both) > 10
    assert all(getattr(quantplug, name) is getattr(plugin, name) for name in both)


def test_the_face_of_authors_is_described_by_groups():
    text = Path(plugin.__file__).read_text()
    groups = re.findall(r"^    # (.+)$", text[text.index("__all__") :], flags=re.MULTILINE)
    assert groups == [name.rstrip(".") for name in re.findall(r"^- \*\*(.+?)\*\*", plugin.__doc__, flags=re.MULTILINE)]


def test_every_public_thing_of_authors_is_listed():
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(Path(plugin.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert imported == set(plugin.__all__)


def test_the_names_of_both_faces_are_known_to_type_checkers():
    """The lazy names stand in two lists, one for the interpreter and one for type checkers."""
    tree = ast.parse(Path(quantplug.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.asname for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    declared |= {node.target.id for node in checked.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in declared if not name.startswith("_")} == set(quantplug.__all__)
