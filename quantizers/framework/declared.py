"""What a backend's declaration has to be, so that a mistake in it is told where it is made and not where it is used."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quantplug.core.annotation.plan import function_name
from quantplug.core.errors import ConfigError
from quantplug.core.specs.dtypes import DTypeConfig


def require_name(name: Any) -> None:
    """Raises ConfigError unless a backend's name is a word."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"A backend has the name {name!r}; give a word that users can type.")


def entries(backend: str, what: str, found: Any, kind: type) -> tuple[Any, ...]:
    """Returns the entries of a declaration that are all of one kind as a tuple.

    Raises:
        ConfigError: it is no tuple or list, or an entry is of another kind.
    """
    if not isinstance(found, tuple | list):
        raise ConfigError(
            f"The {what} of backend '{backend}' are a {type(found).__name__}; give a tuple of {kind.__name__}."
        )
    wrong = next((entry for entry in found if not isinstance(entry, kind)), None)
    if wrong is not None:
        raise ConfigError(
            f"The {what} of backend '{backend}' hold {wrong!r}, which is no {kind.__name__}; take it out."
        )
    return tuple(found)


def require_rows(
    backend: str, annotators: tuple[Any, ...], dtypes: Iterable[DTypeConfig], configs: Mapping[str, Any]
) -> None:
    """Raises ConfigError where a backend could quantize nothing, or has two dtype configs of one name."""
    if not annotators:
        raise ConfigError(f"Backend '{backend}' declares no annotator; it could quantize nothing.")
    names = [each.name for each in dtypes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"Backend '{backend}' declares the dtype config '{twice}' twice; rename one of them.")
    if not configs:
        raise ConfigError(
            f"Backend '{backend}' declares no config; give `configs` or `dtypes`, the first is the default."
        )


def require_functions(backend: str, configs: Mapping[str, Any], transforms: Iterable[Callable[..., Any]]) -> None:
    """Raises ConfigError where a config factory or a rewrite is no function, or a rewrite none that plans can name."""
    for name, factory in configs.items():
        if not callable(factory):
            raise ConfigError(
                f"Config '{name}' of backend '{backend}' is a {type(factory).__name__}; give a function that "
                "returns a QuantizationConfig."
            )
    for transform in transforms:
        if not callable(transform):
            raise ConfigError(
                f"The transforms of backend '{backend}' hold {transform!r}; each is a function of a graph module."
            )
        function_name(transform)  # plans may name it from now on


def require_lowering(backend: str, lowering: Any, kernels: Any) -> None:
    """Raises ConfigError unless a backend's lowering and kernels are what they should be, or may be names of such."""
    if not _are_kernels(kernels):
        raise ConfigError(f"Backend '{backend}' has the kernels {kernels!r}; give a KernelSet or its name, or None.")
    if not callable(lowering) and not (isinstance(lowering, str) and ":" in lowering):
        raise ConfigError(
            f"Backend '{backend}' has the lowering {lowering!r}; give a function or its name "
            "'package.module:function', such as 'quantplug.plugin:lower_to_reference'."
        )


def _are_kernels(kernels: Any) -> bool:
    if kernels is None or isinstance(kernels, str):
        return True
    from quantplug.lowering.emulation import KernelSet

    return isinstance(kernels, KernelSet)
