"""transformers beside a torchvision that does not fit the torch that is installed.

Before: torchvision is installed, and importing it raises. transformers asks only whether it is there, imports it with
every model, and fails. After: to transformers it is not installed, as long as it is imported; texts need none of it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from torch import __version__ as version

from quantplug.core.errors import ConfigError, first_line

_NAME = "torchvision"


@contextmanager
def usable_torchvision() -> Iterator[None]:
    """Hides torchvision from what asks for it meanwhile, if importing it raises.

    Raises:
        ConfigError: transformers has asked for it before, and goes by that answer.
    """
    problem = None if _NAME in sys.modules or find_spec(_NAME) is None else _problem()
    if problem is None:
        yield
        return
    # Python's own way to say that a module is not there; `find_spec` says so too.
    sys.modules[_NAME] = None  # type: ignore[assignment]
    try:
        _require_unasked(problem)
        yield
    finally:
        del sys.modules[_NAME]


def _problem() -> str | None:
    try:
        import_module(_NAME)
    except Exception as error:  # of its compiled operators: RuntimeError, OSError, AttributeError
        return first_line(error)
    return None


def _require_unasked(problem: str) -> None:
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        raise ConfigError(
            f"transformers was told that torchvision is installed, which cannot be imported ({problem}): read the "
            f"checkpoint before anything else uses transformers, or install the torchvision of torch {version}."
        )


def reason_of(error: BaseException) -> str:
    """Returns what an error says that began a chain of errors; the last one says that an import failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
