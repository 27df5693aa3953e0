"""A backend as a declaration: what its kernels can run, and how a q/dq graph is lowered to them."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.annotators.presets import config_for
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.annotation.plan import function_name
from quantplug.core.batch_norms.inference import Permission
from quantplug.core.errors import ConfigError, did_you_mean
from quantplug.core.graph.calling import by_position, in_order, input_names
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.named import resolved
from quantplug.core.peers.torch_names import pytree
from quantplug.core.specs.dtypes import DTypeConfig

if TYPE_CHECKING:  # declaring a backend imports no lowering
    from quantplug.lowering.emulation import EmulatedProgram, KernelSet
    from quantplug.lowering.program import Program

ConfigFactory: TypeAlias = Callable[..., QuantizationConfig]
Lowering: TypeAlias = Callable[..., Any]  # of a Program, whose room a declaration does not import
Transform: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]

WeightBits: TypeAlias = Callable[[QuantizationSpec, QuantizationSpec | None], int]


@dataclass(frozen=True)
class Backend:
    """What a target declares; immutable, see `derive` for a variant.

    Attributes:
        name: how users and reports call it.
        annotators: its operator rows; the largest matching piece wins, then the order here.
        configs: config factories by name; the first is the default. Where there is none, every dtype config
            gives one of its name.
        lowering: the function from a converted graph and example inputs to a `Program`, or its name
            "package.module:function", which is imported when it is used, because runtimes are heavy.
        transforms: graph rewrites that run before annotation.
        folds_batch_norm: whether batch norms are folded into the operator before them, or a function of both that
            allows it with None or returns the reason against it.
        summary: one line for `quantplug backends`.
        dtypes: the dtype configs that the kernels run, the preferred one first, for rows that declare none
            of their own; empty for no limits.
        kernels: the kernel set that emulates its kernels bit for bit, or its name: "xnnpack", "x86" or
            "package.module:SET"; None where there is no emulation. The conformance kit compares the two.
        without: why there is no row for an operator that users may ask after, by its name in ATen such as "bmm";
            reports say it.
        weight_bits: bits that a weight takes in its files, also where a config gives it fewer, which is then told; or
            a function of the specs of weight and activation (None: float) that returns them. None where files are as
            narrow as configs.
    """

    name: str
    annotators: tuple[Annotator, ...]
    configs: Mapping[str, ConfigFactory] = field(default_factory=dict)
    lowering: str | Lowering = ""
    transforms: tuple[Transform, ...] = ()
    folds_batch_norm: bool | Permission = True
    summary: str = ""
    dtypes: tuple[DTypeConfig, ...] = ()
    kernels: "str | KernelSet | None" = None
    without: Mapping[str, str] = field(default_factory=dict)
    weight_bits: int | WeightBits | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"A backend has the name {self.name!r}; give a word that users can type.")
        for what, kind in (("annotators", Annotator), ("dtypes", DTypeConfig)):
            object.__setattr__(self, what, self._tuple_of(what, kind))
        if not self.annotators:
            raise ConfigError(f"Backend '{self.name}' declares no annotator; it could quantize nothing.")
        self._require_distinct_dtypes()
        configs = dict(self.configs) or {dtypes.name: partial(config_for, dtypes) for dtypes in self.dtypes}
        object.__setattr__(self, "configs", MappingProxyType(configs))
        if not configs:
            raise ConfigError(
                f"Backend '{self.name}' declares no config; give `configs` or `dtypes`, the first is the default."
            )
        self._require_functions()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        return self

    def _tuple_of(self, what: str, kind: type) -> tuple[Any, ...]:
        found = getattr(self, what)
        if not isinstance(found, tuple | list):
            raise ConfigError(
                f"The {what} of backend '{self.name}' are a {type(found).__name__}; give a tuple of {kind.__name__}."
            )
        wrong = next((entry for entry in found if not isinstance(entry, kind)), None)
        if wrong is not None:
            raise ConfigError(
                f"The {what} of backend '{self.name}' hold {wrong!r}, which is no {kind.__name__}; take it out."
            )
        return tuple(found)

    def _require_distinct_dtypes(self) -> None:
        names = [dtypes.name for dtypes in self.dtypes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"Backend '{self.name}' declares the dtype config '{twice}' twice; rename one of them.")

    def _require_functions(self) -> None:
        for name, factory in self.configs.items():
            if not callable(factory):
                raise ConfigError(
                    f"Config '{name}' of backend '{self.name}' is a {type(factory).__name__}; give a function that "
                    "returns a QuantizationConfig."
                )
        for transform in self.transforms:
            if not callable(transform):
                raise ConfigError(
                    f"The transforms of backend '{self.name}' hold {transform!r}; each is a function of a graph module."
                )
            function_name(transform)  # plans may name it from now on
        if not self._are_kernels():
            raise ConfigError(
                f"Backend '{self.name}' has the kernels {self.kernels!r}; give a KernelSet or its name, or None."
            )
        if not callable(self.lowering) and not (isinstance(self.lowering, str) and ":" in self.lowering):
            raise ConfigError(
                f"Backend '{self.name}' has the lowering {self.lowering!r}; give a function or its name "
                "'package.module:function', such as 'quantplug.plugin:lower_to_reference'."
            )

    def _are_kernels(self) -> bool:
        if self.kernels is None or isinstance(self.kernels, str):
            return True
        from quantplug.lowering.emulation import KernelSet

        return isinstance(self.kernels, KernelSet)

    @property
    def rows(self) -> tuple[Annotator, ...]:
        """The annotators with the backend's dtype configs where a row declares none of its own."""
        return tuple(a if a.dtypes or not self.dtypes else a.accepting(*self.dtypes) for a in self.annotators)

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
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            said = f"has no option '{unknown[1]}'; leave it out" if unknown else f"was given a wrong option: {error}"
            raise ConfigError(f"Config '{chosen}' of backend '{self.name}' {said}.") from None

    @torch.inference_mode(False)
    def lower(
        self,
        converted: fx.GraphModule,
        example_inputs: tuple[Any, ...],
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "Program":
        """Lowers a converted model to a program that runs.

        Args:
            converted: the q/dq graph that convert returned.
            example_inputs: inputs of the shapes to lower for.
            example_kwargs: those that are given by name; the program takes them by name or position.
            options: passed to the lowering of this backend.

        Raises:
            LoweringError: the graph cannot be lowered, or the inputs do not fit it.
            ConfigError: the lowering's name leads nowhere, or it has no such option.
        """
        self.require_lowering_options(options)
        function = self._lowering()
        model, inputs = _positional(converted, example_inputs, example_kwargs)
        # A slice of a data set would take the whole data set along into a saved program.
        own_inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), inputs)
        program: Program = function(model, own_inputs, **options)
        return program

    def require_lowering_options(self, names: Iterable[str]) -> None:
        """Checks options of the lowering by name, which is worth doing before a model is calibrated.

        Raises:
            ConfigError: the lowering's name leads nowhere, or it has no such option.
        """
        parameters = list(inspect.signature(self._lowering()).parameters.values())[2:]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        known = [parameter.name for parameter in parameters]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"The lowering of backend '{self.name}' has no option '{name}'{did_you_mean(name, known)}; "
                    f"choose from {known}."
                )

    def _lowering(self) -> Lowering:
        if not isinstance(self.lowering, str):
            return self.lowering
        found: Lowering = resolved(self.lowering, f"lowering '{self.lowering}' of backend '{self.name}'")
        return found

    def emulate(
        self,
        converted: fx.GraphModule,
        example_inputs: tuple[Any, ...],
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "EmulatedProgram":
        """Returns a program that computes what this backend's integer kernels compute, on any machine.

        Args:
            converted: the q/dq graph that convert returned.
            example_inputs: inputs of the shapes to emulate for.
            example_kwargs: those that are given by name.
            options: as for `quantplug.emulate`.

        Raises:
            ConfigError: the backend names no kernels.
            LoweringError: the graph cannot be emulated.
        """
        if self.kernels is None:
            raise ConfigError(f"Backend '{self.name}' names no kernels to emulate; declare kernels=KernelSet(...).")
        from quantplug.lowering.emulation import emulate, kernel_set

        kernels = kernel_set(self.kernels)
        model, inputs = _positional(converted, example_inputs, example_kwargs)
        return emulate(model, inputs, kernels, **options)


def _positional(
    converted: fx.GraphModule, inputs: tuple[Any, ...], keywords: Mapping[str, Any] | None
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Returns a graph and inputs in the only form that lowerings know: all by position."""
    model = by_position(require_graph_module(converted, "lower"))
    return model, in_order(input_names(model), inputs, keywords) if keywords else inputs
