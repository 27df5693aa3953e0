"""The dictionaries of RFC-0019, "Extending PyTorch Quantization to Custom Backends": operators with their mappings.

Before: `{"name": ..., "operator": {torch.nn.Conv2d: {"type": ..., "qat_mapping": ...}, ...}}`, patterns from the last
operator to the first. After: a `PatternEntry` for each operator, each key of its mappings and each of its fusions.
The RFC leaves dtypes to the backend's table: activations may be 8 bits of either sign, weights are signed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quantplug.core.errors import ConfigError
from quantplug.quantizers.importer.entries import PatternEntry, require_keys

_REFERENCES, _TRAINING = "float_to_quantized_operator_mapping", "qat_mapping"
_MODES = ("static", "dynamic")


def operator_entries(operators: Mapping[Any, Mapping[str, Any]]) -> Iterator[PatternEntry]:
    """Yields the pattern configs of the value of "operator".

    Raises:
        ConfigError: a config has a key or a mode that means nothing, or no type.
    """
    for operator, config in operators.items():
        require_keys("config of an operator", config, ("type", _REFERENCES, _TRAINING, "fusions"))
        if "type" not in config:
            raise ConfigError(f"The config of operator {operator!r} has no 'type', which says how it is observed.")
        references, training = _modules(config, _REFERENCES), _modules(config, _TRAINING)
        dtypes = [*_static(), *_dynamic(config)]
        for pattern in dict.fromkeys((operator, *references, *training, *config.get("fusions", ()))):
            yield PatternEntry(
                pattern_complex_format=pattern,
                observation_type=config["type"],
                dtype_configs=dtypes,
                reference_quantized_module=references.get(pattern),
                qat_module=training.get(pattern),
            )


def _modules(config: Mapping[str, Any], name: str) -> dict[Any, Any]:
    """Returns a mapping's modules by their patterns, those of all modes together."""
    by_mode = config.get(name, {})
    require_keys(f"'{name}'", by_mode, _MODES)
    return {pattern: module for modules in by_mode.values() for pattern, module in modules.items()}


def _static() -> list[dict[str, Any]]:
    return [
        {"input_dtype": dtype, "output_dtype": dtype, "weight_dtype": torch.qint8}
        for dtype in (torch.quint8, torch.qint8)
    ]


def _dynamic(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    declared = "dynamic" in config.get(_REFERENCES, {})
    return [{"input_dtype": torch.quint8, "weight_dtype": torch.qint8, "is_dynamic": True}] if declared else []
