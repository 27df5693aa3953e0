"""Engines as declarations: other lowerings that run a backend's q/dq graphs."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quantplug.core.errors import ConfigError

AUTO = "auto"
Asked: TypeAlias = str | Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class Engine:
    """A runtime that a backend's q/dq graphs can be lowered to, for `lower(..., engine=...)`.

    Attributes:
        lowering: the name of its lowering, "package.module:function".
        needs: packages that it imports, which may not be installed.
        extra: what brings them, as `pip install` takes it.
        halves_products_alone: whether its option `float_dtype` concerns only products that stay float. Where a graph
            has none, the engine is not tried in bfloat16 too.
    """

    lowering: str
    needs: tuple[str, ...] = ()
    extra: str = ""
    halves_products_alone: bool = False

    def objection(self, name: str) -> str | None:
        """Returns the sentence on a package that is not installed, or None."""
        missing = next((package for package in self.needs if importlib.util.find_spec(package) is None), None)
        if missing is None:
            return None
        return (
            f"Engine '{name}' needs the package {missing}, which is not installed; run pip install '{self.extra}', or "
            "choose another engine."
        )


def require_engines(backend: str, engines: Mapping[str, Any]) -> None:
    """Raises ConfigError where what a backend declares as its engines are none."""
    wrong = next((name for name, engine in engines.items() if not isinstance(engine, Engine) or name == AUTO), None)
    if wrong is not None:
        raise ConfigError(
            f"Engine '{wrong}' of backend '{backend}' is a {type(engines[wrong]).__name__}; give another name than "
            f"'{AUTO}' and an Engine('package.module:function')."
        )
