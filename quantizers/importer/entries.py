"""One pattern config of torch.ao, whether it came as an object or as a dictionary of the RFC."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quantplug.core.errors import ConfigError

OBSERVATIONS = {
    "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT": "own",
    "OUTPUT_SHARE_OBSERVER_WITH_INPUT": "shared",
    "INPUT_OUTPUT_NOT_OBSERVED": "none",
    # The names of the RFC.
    "NEED_OBSERVER_FOR_BOTH_INPUTS_AND_OUTPUTS": "own",
    "OUTPUT_IS_SHARING_OBSERVER_WITH_INPUT": "shared",
}
_SAME_KEYS = {"reference_quantized_module_for_root": "reference_quantized_module"}


@dataclass(frozen=True)
class PatternEntry:
    """What a `BackendPatternConfig` says, under the names of its attributes.

    Attributes:
        pattern: the pattern, or None if only the complex format is given.
        pattern_complex_format: the pattern as nested tuples from the last operator to the first.
        observation_type: an `ObservationType` or its name.
        dtype_configs: `DTypeConfig` objects or dictionaries.
        root_module: class.
        qat_module: class.
        reference_quantized_module: class.
        fused_module: class.
        fuser_method: function.
        root_node_getter: function.
        extra_inputs_getter: function.
        num_tensor_args_to_observation_type: number of tensors -> `ObservationType`.
        input_type_to_index: role, such as "weight" -> position among the arguments.
    """

    pattern: Any = None
    pattern_complex_format: Any = None
    observation_type: Any = "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT"
    dtype_configs: list[Any] = field(default_factory=list)
    root_module: Any = None
    qat_module: Any = None
    reference_quantized_module: Any = None
    fused_module: Any = None
    fuser_method: Any = None
    root_node_getter: Any = None
    extra_inputs_getter: Any = None
    num_tensor_args_to_observation_type: Mapping[int | None, Any] = field(default_factory=dict)
    input_type_to_index: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.pattern is None) == (self.pattern_complex_format is None):
            raise ConfigError(
                f"A pattern config has pattern {self.pattern!r} and pattern_complex_format "
                f"{self.pattern_complex_format!r}; give one of the two."
            )

    @property
    def items(self) -> Any:
        """The pattern in whichever format it was given."""
        return self.pattern if self.pattern is not None else self.pattern_complex_format

    @property
    def text(self) -> str:
        """The pattern in words."""
        return _text(self.items)

    @property
    def fuses(self) -> bool:
        """Whether the config is about fusion: what is made of the piece has a config of its own."""
        several = isinstance(self.items, tuple | list)
        return several and (self.fused_module is not None or self.fuser_method is not None)

    def observation(self, tensors: int | None = None) -> str:
        """Returns "own", "shared" or "none".

        Args:
            tensors: how many operands are tensors, None for what holds where the config tells no cases apart.

        Raises:
            ConfigError: the observation type is not one of torch.ao's three.
        """
        by_count = self.num_tensor_args_to_observation_type if tensors is not None else {}
        found = by_count.get(tensors, self.observation_type)
        name = found if isinstance(found, str) else getattr(found, "name", repr(found))
        if name not in OBSERVATIONS:
            raise ConfigError(
                f"Pattern {self.text} has the observation type {name}; choose one of {list(OBSERVATIONS)}."
            )
        return OBSERVATIONS[name]


_NAMES = tuple(entry_field.name for entry_field in fields(PatternEntry))


def pattern_entry(config: Any) -> PatternEntry:
    """Returns what a `BackendPatternConfig`, or a dictionary with its keys, says.

    Raises:
        ConfigError: it is neither, or the dictionary has a key that means nothing.
    """
    if isinstance(config, Mapping):
        renamed: dict[str, Any] = {_SAME_KEYS.get(str(key), str(key)): found for key, found in config.items()}
        require_keys("pattern config", renamed, _NAMES)
        return PatternEntry(**{key: found for key, found in renamed.items() if found is not None})
    if not hasattr(config, "dtype_configs"):
        raise ConfigError(
            f"The configs of a backend config hold a {type(config).__name__}; give a BackendPatternConfig or a "
            "dictionary with 'pattern'."
        )
    return PatternEntry(**dict(_attributes(config)))


def _attributes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields what was set; the older setters, from before the API was public, keep theirs behind an underscore."""
    for name in _NAMES:
        found = getattr(config, name, getattr(config, f"_{name}", None))
        if found is not None:
            yield name, found


def require_keys(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuses a dictionary with a key that is not known.

    Raises:
        ConfigError: it has one.
    """
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise ConfigError(f"A {what} has the key {unknown!r}, which means nothing; choose from {sorted(known)}.")


def _text(pattern: Any) -> str:
    if isinstance(pattern, tuple | list):
        return f"({', '.join(map(_text, pattern))})"
    if isinstance(pattern, str):
        return f"'{pattern}'"
    return str(getattr(pattern, "__name__", pattern))
