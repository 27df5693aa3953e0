"""A backend as a declaration: what its kernels can run, and how a q/dq graph is lowered to them."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.annotator import Annotator
from quantplug.core.errors import ConfigError
from quantplug.lowering.program import Program

ConfigFactory: TypeAlias = Callable[..., QuantizationConfig]
Lowering: TypeAlias = Callable[..., Program]
Transform: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True)
class Backend:
    """What a target declares.

    Attributes:
        name: how users and reports call it.
        annotators: its operator rows; the largest matching piece wins, then the order here.
        configs: config factories by name; the first is the default.
        lowering: the function from a converted graph and example inputs to a `Program`, or its name
            "package.module:function", which is imported when it is used, because runtimes are heavy.
        transforms: graph rewrites that run before annotation.
        folds_batch_norm: whether batch norms are folded into the operator before them.
        summary: one line for `quantplug backends`.
    """

    name: str
    annotators: tuple[Annotator, ...]
    configs: Mapping[str, ConfigFactory]
    lowering: str | Lowering
    transforms: tuple[Transform, ...] = ()
    folds_batch_norm: bool = True
    summary: str = ""

    def __post_init__(self) -> None:
        if not self.configs:
            raise ConfigError(f"Backend '{self.name}' declares no config; give at least one, the first is the default.")
        if not self.annotators:
            raise ConfigError(f"Backend '{self.name}' declares no annotator; it could quantize nothing.")

    def config(self, name: str | None = None, **options: Any) -> QuantizationConfig:
        """Returns a config by name, the default one for None.

        Args:
            name: a key of `configs`.
            options: passed to the factory, such as `observer="minmax"`.

        Raises:
            ConfigError: the backend has no such config, or the config no such option.
        """
        chosen = name if name is not None else next(iter(self.configs))
        if chosen not in self.configs:
            raise ConfigError(f"Backend '{self.name}' has no config '{chosen}'; choose one of {list(self.configs)}.")
        try:
            return self.configs[chosen](**options)
        except TypeError as error:
            raise ConfigError(
                f"Config '{chosen}' of backend '{self.name}' was given a wrong option: {error}."
            ) from None

    def lower(self, converted: fx.GraphModule, example_inputs: tuple[Any, ...], **options: Any) -> Program:
        """Lowers a converted model to a program that runs.

        Args:
            converted: the q/dq graph that convert returned.
            example_inputs: inputs of the shapes to lower for.
            options: passed to the lowering of this backend.

        Raises:
            LoweringError: the graph cannot be lowered.
        """
        function = pkgutil.resolve_name(self.lowering) if isinstance(self.lowering, str) else self.lowering
        # A slice of a data set would take the whole data set along into a saved program.
        own_inputs = map_aggregate(example_inputs, lambda v: v.detach().clone() if isinstance(v, Tensor) else v)
        program: Program = function(converted, own_inputs, **options)
        return program
