"""Backends by name: the built-in ones and those that installed packages announce as entry points."""

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from types import FrameType
from typing import Any

from quantplug.core.errors import ConfigError, did_you_mean, first_line, shown
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.capabilities import Capability
from quantplug.quantizers.framework.quantizer import BackendQuantizer

GROUP = "quantplug.backends"
_BUILT_IN = {
    "xnnpack": "quantplug.quantizers.xnnpack:XNNPACKQuantizer",
    "x86": "quantplug.quantizers.x86:X86Quantizer",
    "openvino": "quantplug.quantizers.openvino:OpenVINOQuantizer",
    "onnxruntime": "quantplug.quantizers.onnxruntime:ONNXRuntimeQuantizer",
    "native": "quantplug.quantizers.native:NativeQuantizer",
    "tensorrt": "quantplug.quantizers.tensorrt:TensorRTQuantizer",
    "cortex_m": "quantplug.quantizers.cortex_m:CortexMQuantizer",
    "arm": "quantplug.quantizers.arm:ArmQuantizer",
    "embedding": "quantplug.quantizers.embedding:EmbeddingQuantizer",
}
# How torch's older quantization (`torch.backends.quantized.engine`, `get_default_qconfig`) calls these kernels.
_OLDER_NAMES = {"fbgemm": "x86", "onednn": "x86", "qnnpack": "xnnpack"}


@dataclass(frozen=True)
class Registered:
    """A backend that is known by name.

    Attributes:
        name: the name.
        distribution: the package it comes from.
        quantizer: the quantizer class, or None if the plugin is broken.
        problem: what is wrong with the plugin; empty if nothing is.
        version: of the package.
    """

    name: str
    distribution: str
    quantizer: type[BackendQuantizer] | None
    problem: str = ""
    version: str = ""


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
    release = point.dist.version if point.dist else version("quantplug")
    if point.name in known:
        problem = f"the name is taken by '{known[point.name].distribution}'"
        return Registered(point.name, distribution, None, problem, release)
    pressed: list[int] = []
    try:
        with _noting_ctrl_c(pressed):
            quantizer = _quantizer_class(point.name, point.load())
    except BaseException as error:  # a plugin may fail in any way, also by sys.exit; the others must not notice
        if pressed:
            raise
        problem = str(error) if isinstance(error, ConfigError) else first_line(error)
        return Registered(point.name, distribution, None, problem, release)
    return Registered(point.name, distribution, quantizer, "", release)


@contextmanager
def _noting_ctrl_c(pressed: list[int]) -> Iterator[None]:
    """Notes signals of the user's: a plugin can raise KeyboardInterrupt too, but only the user ends the program."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    handle = before

    def note(number: int, frame: FrameType | None) -> Any:
        pressed.append(number)
        return handle(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _quantizer_class(name: str, loaded: Any) -> type[BackendQuantizer]:
    """Returns the quantizer class that an entry point names, or one around the declaration that it names."""
    if isinstance(loaded, Backend):
        loaded = type(f"{loaded.name.title()}Quantizer", (BackendQuantizer,), {"backend": loaded})
    if not (isinstance(loaded, type) and issubclass(loaded, BackendQuantizer)):
        raise ConfigError(f"it names a {type(loaded).__name__}, not a Backend or a subclass of BackendQuantizer")
    if loaded.backend.name != name:
        raise ConfigError(f"it names the backend '{loaded.backend.name}'; entry point and backend need one name")
    return loaded


def get_quantizer(name: str, *, strict: bool = True) -> BackendQuantizer:
    """Returns a new quantizer of a backend by its name.

    Args:
        name: the backend, such as "xnnpack" or "x86". The names of torch's older engines are understood, with a
            warning that says which backend they get: "fbgemm" and "onednn" are x86, "qnnpack" is xnnpack.
        strict: whether a scope that covers nothing is an error.

    Raises:
        ConfigError: there is no such backend, or its plugin is broken.
    """
    if not isinstance(name, str):
        raise ConfigError(f"There is no backend '{shown(name)}'; pass a name, such as 'xnnpack'.")
    known = {entry.name: entry for entry in reversed(backends())}
    meant = _OLDER_NAMES.get(name.lower())
    if meant is not None and name not in known:
        warnings.warn(f"'{name}' is an older name; this is backend '{meant}'.", UserWarning, stacklevel=2)
        name = meant
    if name not in known:
        raise ConfigError(
            f"There is no backend '{shown(name)}'{did_you_mean(name.lower(), known)}; choose one of {sorted(known)}."
        )
    quantizer = known[name].quantizer
    if quantizer is None:
        raise ConfigError(
            f"Backend '{name}' of package '{known[name].distribution}' is broken: {known[name].problem}; "
            "update or uninstall that package."
        )
    try:
        return quantizer(strict=strict)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"Backend '{name}' of package '{known[name].distribution}' makes no quantizer ({first_line(error)}); "
            "update or uninstall that package."
        ) from error


def capabilities(name: str) -> list[Capability]:
    """Returns what a backend can quantize, one row for each rule, in the order of declaration.

    Args:
        name: the backend, such as "xnnpack" or "x86".

    Raises:
        ConfigError: there is no such backend, or its plugin is broken.
    """
    return get_quantizer(name).capabilities()
