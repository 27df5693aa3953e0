"""A package for a backend of one's own, from templates: `quantplug new-backend NAME`.

Before: a name and a folder. After: a package whose backend passes the conformance kit as it is written; or
one sentence and nothing on the disk.
"""

import keyword
import re
import shutil
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from quantplug.core.errors import ArtefactError, ConfigError
from quantplug.core.files.whole import kind_at

# Template -> place in the package.
_FILES = {
    "pyproject.toml.jinja": "pyproject.toml",
    "README.md.jinja": "README.md",
    "__init__.py.jinja": "src/{name}/__init__.py",
    "backend.py.jinja": "src/{name}/backend.py",
    "lowering.py.jinja": "src/{name}/lowering.py",
    "test_backend.py.jinja": "tests/test_backend.py",
}


def new_backend(name: str, out: Path) -> Path:
    """Writes a package for a new backend and returns its folder, which appears whole or not at all.

    Args:
        name: of the backend, its module and its library of operators.
        out: the folder to write the package's folder into.

    Raises:
        ConfigError: the name is no module name, or is taken.
        ArtefactError: the package's folder exists, or the folder to write it into does not.
    """
    _require_free_name(name)
    target = out / name.replace("_", "-")
    if kind_at(target) != "nothing":
        raise ArtefactError(f"'{target}' exists already; choose another name, or another folder with --out.")
    if kind_at(out) != "folder":
        raise ArtefactError(f"There is no folder '{out}' to write '{target.name}' to; create it first.")
    unfinished = None
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=out))
        _write(name, unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        return unfinished.rename(target)
    except OSError as error:
        raise ArtefactError(f"'{target}' cannot be written ({error.strerror}); free or change its place.") from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _require_free_name(name: str) -> None:
    from quantplug.quantizers.framework.registry import backends

    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"A backend named '{name}' could not be imported; use lower-case letters, digits and underscores, "
            "such as 'my_npu'."
        )
    if name in {entry.name for entry in backends()}:
        raise ConfigError(f"The name '{name}' is taken by an installed backend; choose another.")
    if find_spec(name) is not None:
        raise ConfigError(f"The name '{name}' is taken by an installed module; choose another, such as '{name}_npu'.")


def _write(name: str, folder: Path) -> None:
    from jinja2 import Environment, StrictUndefined

    templates = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    for source, place in _FILES.items():
        text = files("quantplug").joinpath(f"templates/backend/{source}").read_text(encoding="utf-8")
        path = folder / place.format(name=name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(templates.from_string(text).render(name=name, distribution=name.replace("_", "-")), "utf-8")
