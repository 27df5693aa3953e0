"""A quantizer that is told by scopes what to quantize to.

Before: a backend with named configs, and settings of a user's. After: for each node the config that applies.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig, Quantizer

from quantplug.core.annotation.configs import stays_float
from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import describe
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.scopes import OperatorType, Scopes, quantizes

Self = TypeVar("Self", bound="ScopedQuantizer")


class ScopedQuantizer(Quantizer):
    """A quantizer with a config for each scope.

    Every `set_...` takes a config, the name of one of the backend's configs, or None for float, and
    returns the quantizer. A more specific scope wins: module name, module type, operator type, filter,
    global. Where no config was set, nothing at all or parts to stay float, the backend's default config is the
    global one.

    Attributes:
        backend: whose configs are set.
        strict: whether a scope that covers nothing is an error.
        scopes: what was set.
    """

    backend: Backend

    def __init__(self, *, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict
        self.scopes = Scopes()

    def set_global(self: Self, config: QuantizationConfig | str | None) -> Self:
        """Sets the config of every node that no other scope covers."""
        self.scopes.set_global(self._config(config))
        return self

    def set_module_name(self: Self, name: str, config: QuantizationConfig | str | None) -> Self:
        """Sets the config below a module path ("layer1.0") or a pattern of paths ("layer*.conv1").

        Args:
            name: the path, or the pattern.
            config: a config, the name of one of the backend's, or None for float.
        """
        self.scopes.set_module_name(name, self._config(config))
        return self

    def set_module_type(self: Self, kind: type[nn.Module] | str, config: QuantizationConfig | str | None) -> Self:
        """Sets the config of everything below modules of a type.

        Args:
            kind: the class, or its name, such as "Linear".
            config: a config, the name of one of the backend's, or None for float.

        Raises:
            ConfigError: `kind` is no module class.
        """
        self.scopes.set_module_type(kind, self._config(config))
        return self

    def set_operator_type(
        self: Self, operator: OperatorType | type[nn.Module], config: QuantizationConfig | str | None
    ) -> Self:
        """Sets the config of an operator: ATen name, overload, packet, function (F.linear) or module class.

        Args:
            operator: such as "conv2d", torch.nn.functional.linear or torch.nn.Linear.
            config: a config, the name of one of the backend's, or None for float.

        Raises:
            PatternError: there is no such operator.
        """
        if isinstance(operator, type) and issubclass(operator, nn.Module):
            return self.set_module_type(operator, config)
        self.scopes.set_operator_type(operator, self._config(config))
        return self

    def set_object_type(
        self: Self, operator: OperatorType | type[nn.Module], config: QuantizationConfig | str | None
    ) -> Self:
        """The older name of `set_operator_type`.

        Args:
            operator: as for `set_operator_type`.
            config: a config, the name of one of the backend's, or None for float.
        """
        return self.set_operator_type(operator, config)

    def set_filter(self: Self, accepts: Callable[[fx.Node], bool], config: QuantizationConfig | str | None) -> Self:
        """Sets the config of the nodes that a predicate accepts.

        Args:
            accepts: gets a node of the exported graph and tells whether it is meant.
            config: a config, the name of one of the backend's, or None for float.
        """
        self.scopes.set_filter(accepts, self._config(config))
        return self

    def _config(self, found: Any) -> QuantizationConfig | None:
        if found is None or isinstance(found, QuantizationConfig):
            return found
        if isinstance(found, str):
            return self.backend.config(found)
        raise ConfigError(
            f"A scope of backend '{self.backend.name}' takes a QuantizationConfig, one of the names "
            f"{list(self.backend.configs)} or None, found {type(found).__name__}."
        )

    def leaves_float(self, node: fx.Node) -> str | None:
        """Returns which scope leaves a node float, in words, or None if it has a config."""
        choice = effective_scopes(self).choose(node)
        if choice.config is not None and quantizes(choice.config):
            return None
        return f"{describe(node)} {stays_float(choice)}"

    @property
    def leaves_all_float(self) -> bool:
        """Whether the scopes ask for no quantization at all."""
        return not any(scope.quantizes for scope in effective_scopes(self).settings)

    @property
    def needs_calibration(self) -> bool:
        """Whether any config in force has activation scales that calibration has to find."""
        configs = (scope.config for scope in effective_scopes(self).settings)
        activations = (c.input_activation or c.output_activation for c in configs if c is not None)
        return any(spec is not None and not spec.is_dynamic for spec in activations)


def effective_scopes(quantizer: ScopedQuantizer) -> Scopes:
    """Returns the scopes in force: those that were set, over the backend's default config where none quantizes."""
    settings = quantizer.scopes.settings
    if any(scope.config is not None or scope.kind == "global" for scope in settings):
        return quantizer.scopes
    default = Scopes(list(settings))
    default.set_global(quantizer.backend.config())
    return default
