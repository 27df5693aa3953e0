"""torch.ao's dtypes with constraints as ours.

torch.ao's quantized dtypes name a storage and a scheme at once; the storage is what is left in a q/dq graph.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quantplug.core.errors import ConfigError
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints

STORAGE: Mapping[torch.dtype, torch.dtype] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
}
_PORTS = ("input", "output", "weight")
_BOUNDS = (
    "quant_min_lower_bound",
    "quant_max_upper_bound",
    "scale_min_lower_bound",
    "scale_max_upper_bound",
    "scale_exact_match",
    "zero_point_exact_match",
)


def dtype_config(found: Any, where: str) -> DTypeConfig:
    """Returns a `DTypeConfig` of torch.ao's, object or dictionary, as one of ours with a name made of its dtypes.

    Dtypes that are not given are float. Float16 activations that are chosen at run time are float in the kernels,
    which only store their weights in half precision: such a config becomes one of weights only.

    Args:
        found: the config.
        where: the pattern it belongs to, for errors.

    Raises:
        ConfigError: it is no dtype config, or has constraints that contradict each other.
    """
    get = found.get if isinstance(found, Mapping) else lambda name, default=None: getattr(found, name, default)
    if not isinstance(found, Mapping) and not hasattr(found, "input_dtype"):
        raise ConfigError(
            f"The dtype configs of pattern {where} hold a {type(found).__name__}; give a DTypeConfig or a dictionary."
        )
    ports = {port: _port(get(f"{port}_dtype_with_constraints") or get(f"{port}_dtype"), where) for port in _PORTS}
    dynamic = bool(get("is_dynamic"))
    if dynamic and ports["input"] is not None and ports["input"].dtype == torch.float16:
        dynamic, ports["input"] = False, None
    bias = torch.int32 if get("bias_dtype") in (torch.qint32, torch.int32) else None
    made = DTypeConfig("", bias=bias, is_dynamic=dynamic, **_with_free_input(ports))
    return replace(made, name=_name(made))


def _with_free_input(ports: dict[str, DTypeWithConstraints | None]) -> dict[str, DTypeWithConstraints | None]:
    """Frees the input where input and output have the same fixed qparams.

    Functions of known range, such as sigmoid, are declared so; torch.ao holds only the observer against it, and the
    input of a sigmoid is not in the range of its output: it would be clipped.
    """
    read, written = ports["input"], ports["output"]
    if read is None or written is None or read != written or written.scale_exact_match is None:
        return ports
    return {**ports, "input": replace(read, scale_exact_match=None, zero_point_exact_match=None)}


def _port(found: Any, where: str) -> DTypeWithConstraints | None:
    dtype = getattr(found, "dtype", found)
    if dtype is None or dtype in (torch.float32, torch.float):
        return None
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"A dtype config of pattern {where} has the dtype {dtype!r}; give a torch.dtype.")
    bounds = {} if isinstance(found, torch.dtype) else {name: getattr(found, name) for name in _BOUNDS}
    if dtype == torch.quint4x2:
        bounds = {"quant_min_lower_bound": 0, "quant_max_upper_bound": 15} | {
            name: bound for name, bound in bounds.items() if bound is not None
        }
    return DTypeWithConstraints(STORAGE.get(dtype, dtype), **bounds)


def _name(config: DTypeConfig) -> str:
    """Returns a name such as "uint8", "uint8_int8" for input and weight, or "uint8_int8_dynamic"."""
    ports = (config.at("output") or config.at("input"), config.at("weight"))
    parts = [port for port in ports if port is not None]
    suffix = "" if config.mode == "static" else f"_{config.mode}"
    suffix += "_fixed" if is_fixed(config) else ""
    return "_".join(str(port.dtype).removeprefix("torch.") for port in parts) + suffix or "float"


def is_fixed(config: DTypeConfig) -> bool:
    """Tells whether some port of a config has the only qparams that its kernel takes."""
    ports = (config.at(port) for port in _PORTS)
    return any(port is not None and port.scale_exact_match is not None for port in ports)


def distinct_names(configs: list[DTypeConfig]) -> dict[DTypeConfig, DTypeConfig]:
    """Returns each config with itself under a name that no other has: a number is added to the second on."""
    named: dict[DTypeConfig, DTypeConfig] = {}
    taken: dict[str, int] = {}
    for config in dict.fromkeys(configs):
        taken[config.name] = taken.get(config.name, 0) + 1
        count = taken[config.name]
        named[config] = config if count == 1 else replace(config, name=f"{config.name}_{count}")
    return named
