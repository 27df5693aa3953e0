"""The site: it builds without a warning, every page is in its menu, and everything public is on its reference pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import quantplug
from quantplug import plugin

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Values and types of typing, which have no docstring: the pages describe them.
DESCRIBED = {
    *("OPENVINO_INTEGER_PRODUCTS", "XNNPACK_INTEGER_STATES", "XNNPACK_WIDE_RANGES"),
    *("QuantizationConfig", "Annotations", "Constraint", "ONEDNN_PAIRS"),
}


class Loader(yaml.SafeLoader):
    """Reads what mkdocs.yml names of Python's as text."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages(entry):
    """Yields the pages of a menu."""
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages(inner)


def test_every_page_is_in_the_menu_once():
    menu = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert sorted(menu) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize(("face", "page"), [(quantplug, "quantplug.md"), (plugin, "plugin.md")])
def test_everything_public_is_on_its_reference_page(face, page):
    text = (DOCS / "reference" / page).read_text()
    shown = re.findall(rf"^::: {re.escape(face.__name__)}\.(\w+)$", text, re.MULTILINE)
    linked = re.findall(r"\(quantplug\.md#quantplug\.(\w+)\)", text)
    described = [name for name in face.__all__ if name in DESCRIBED and f"`{name}`" in text]
    assert sorted([*shown, *linked, *described]) == sorted(face.__all__)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_lists_have_an_empty_line_before_them(page):
    """Without it the site runs them into the sentence before, where the repository does not."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    item = r"(?:- |\d+\. )"
    assert re.findall(rf"^(?! *{item}|#| )\S.*\n{item}.*", text, re.MULTILINE) == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^(WARNING|ERROR)", done.stderr, re.MULTILINE), done.stderr
    reference = (tmp_path / "site" / "reference" / "quantplug" / "index.html").read_text()
    for name in set(quantplug.__all__) - DESCRIBED:
        assert f'id="quantplug.{name}"' in reference, name
    assert 'id="quantplug.BackendQuantizer.set_module_name"' in reference
    guide = (tmp_path / "site" / "backend-developers" / "index.html").read_text()
    assert "tiny8/kernels.py" not in guide  # in the repository a link, on the site plain text
    assert "fonts.googleapis" not in guide
