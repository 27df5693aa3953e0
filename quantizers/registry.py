"""Backends by name: the built-in ones and those that installed packages announce as entry points."""

import difflib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from quantplug.core.errors import ConfigError
from quantplug.quantizers.backend import Backend
from quantplug.quantizers.quantizer import BackendQuantizer

GROUP = "quantplug.backends"
_BUILT_IN = {
    "xnnpack": "quantplug.quantizers.xnnpack:XNNPACKQuantizer",
    "x86": "quantplug.quantizers.x86:X86Quantizer",
    "native": "quantplug.quantizers.native:NativeQuantizer",
    "tensorrt": "quantplug.quantizers.tensorrt:TensorRTQuantizer",
    "cortex_m": "quantplug.quantizers.cortex_m:CortexMQuantizer",
}


@dataclass(frozen=True)
class Registered:
    """A backend that is known by name.

    Attributes:
        name: the name.
        distribution: the package it comes from.
        quantizer: the quantizer class, or None if the plugin is broken.
        problem: what is wrong with the plugin; empty if nothing is.
    """

    name: str
    distribution: str
    quantizer: type[BackendQuantizer] | None
    problem: str = ""


def backends() -> list[Registered]:
    """Returns every known backend; broken and duplicate plugins are listed with their problem."""
    found: dict[str, Registered] = {}
    broken: list[Registered] = []
    own = [EntryPoint(name, where, GROUP) for name, where in _BUILT_IN.items()]
    for point in (*own, *entry_points(group=GROUP)):
        loaded = _load(point, found)
        if loaded.problem:
            broken.append(loaded)
        else:
            found[loaded.name] = loaded
    return [*found.values(), *broken]


def _load(point: EntryPoint, known: dict[str, Registered]) -> Registered:
    distribution = point.dist.name if point.dist else "quantplug"
    if point.name in known:
        problem = f"the name is taken by '{known[point.name].distribution}'"
        return Registered(point.name, distribution, None, problem)
    try:
        loaded = point.load()
    except Exception as error:  # a plugin may fail in any way; the others must not notice
        return Registered(point.name, distribution, None, f"{type(error).__name__}: {error}")
    if isinstance(loaded, Backend):
        loaded = type(f"{loaded.name.title()}Quantizer", (BackendQuantizer,), {"backend": loaded})
    if not (isinstance(loaded, type) and issubclass(loaded, BackendQuantizer)):
        problem = f"it names a {type(loaded).__name__}, not a Backend or a subclass of BackendQuantizer"
        return Registered(point.name, distribution, None, problem)
    return Registered(point.name, distribution, loaded)


def get_quantizer(name: str, *, strict: bool = True) -> BackendQuantizer:
    """Returns a new quantizer of a backend by its name.

    Args:
        name: the backend, such as "xnnpack" or "x86".
        strict: whether a scope that covers nothing is an error.

    Raises:
        ConfigError: there is no such backend, or its plugin is broken.
    """
    known = {entry.name: entry for entry in reversed(backends())}
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"There is no backend '{name}'{hint}; choose one of {sorted(known)}.")
    quantizer = known[name].quantizer
    if quantizer is None:
        raise ConfigError(
            f"Backend '{name}' of package '{known[name].distribution}' is broken: {known[name].problem}; "
            "update or uninstall that package."
        )
    return quantizer(strict=strict)
