"""Modules that an extra of the package brings, imported where they are used.

Before: a module's name. After: the module, or one sentence with the line that installs it.
"""

from importlib import import_module
from typing import Any

from quantplug.core.errors import ConfigError, first_line


def extra_module(name: str, extra: str, what: str) -> Any:
    """Returns a module that is not among the package's own dependencies.

    Args:
        name: of the module.
        extra: the extra that brings it.
        what: what needs it, as a sentence about it begins.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {name.partition('.')[0]}, which is not installed or broken ({first_line(error)}); "
            f"pip install 'quantplug[{extra}]'."
        ) from error
