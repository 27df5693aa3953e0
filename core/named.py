"""Functions by name, imported when they are first called.

Before: "package.module:function". After: a value that is called as the function is. A declaration names what its
lowering has, so that to declare a backend imports no runtime.
"""

import pkgutil
from functools import cached_property
from typing import Any

from quantplug.core.errors import ConfigError, first_line


class NamedFunction:
    """A function that is imported when it is first called.

    Two of one name are equal, and reports and plans call it as they would call the function.
    """

    def __init__(self, name: str) -> None:
        module, _, function = name.partition(":")
        if not module or not function:
            raise ConfigError(f"'{name}' names no function; give 'package.module:function'.")
        self.__module__, self.__qualname__ = module, function
        self.__name__ = function.rpartition(".")[2]

    @cached_property
    def function(self) -> Any:
        """The function.

        Raises:
            ConfigError: the name leads nowhere, or to what cannot be called.
        """
        name = f"{self.__module__}:{self.__qualname__}"
        found = resolved(name, f"function '{name}'")
        if not callable(found):
            raise ConfigError(f"'{name}' is a {type(found).__name__}; name a function.")
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Tells whether another one has the same name."""
        return isinstance(other, NamedFunction) and repr(other) == repr(self)

    def __hash__(self) -> int:
        """Goes with equality."""
        return hash(repr(self))

    def __repr__(self) -> str:
        """Returns how it is declared."""
        return f"named('{self.__module__}:{self.__qualname__}')"


def resolved(name: str, what: str) -> Any:
    """Returns what a name stands for, and imports what that takes.

    Args:
        name: "package.module:function".
        what: how an error calls it.

    Raises:
        ConfigError: the name leads nowhere.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The {what} is not there ({first_line(error)}); correct the name 'package.module:function', or install "
            "what it imports."
        ) from error


def named(name: str) -> NamedFunction:
    """Returns a function by name, for a declaration: a constraint, a transform, what tells the bits of weights.

    Args:
        name: "package.module:function"; it is imported when the function is first called.

    Raises:
        ConfigError: the text has no such form.
    """
    return NamedFunction(name)
