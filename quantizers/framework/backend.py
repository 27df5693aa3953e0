"""A backend as a declaration: what its kernels can run, and how a q/dq graph is lowered to them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from quantplug.annotators.presets import config_for
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.batch_norms.inference import Permission
from quantplug.core.errors import ConfigError
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.quantizers.framework.declared import (
    entries,
    require_functions,
    require_lowering,
    require_name,
    require_rows,
)
from quantplug.quantizers.framework.engines import Asked, Engine, require_engines

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
        aliases: other names of configs, such as those that another library gives them, each with the name in `configs`.
        engines: by name what runs its q/dq graphs, the preferred one first, for `lower(..., engine="auto")`; empty
            where it is the lowering alone.
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
    aliases: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_name(self.name)
        object.__setattr__(self, "annotators", entries(self.name, "annotators", self.annotators, Annotator))
        object.__setattr__(self, "dtypes", entries(self.name, "dtypes", self.dtypes, DTypeConfig))
        configs = dict(self.configs) or {dtypes.name: partial(config_for, dtypes) for dtypes in self.dtypes}
        object.__setattr__(self, "configs", MappingProxyType(configs))
        object.__setattr__(self, "aliases", MappingProxyType({a: n for a, n in self.aliases.items() if n in configs}))
        object.__setattr__(self, "engines", MappingProxyType(dict(self.engines)))
        require_engines(self.name, self.engines)
        require_rows(self.name, self.annotators, self.dtypes, configs)
        require_functions(self.name, configs, self.transforms)
        require_lowering(self.name, self.lowering, self.kernels)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        return self

    @property
    def rows(self) -> tuple[Annotator, ...]:
        """The annotators with the backend's dtype configs where a row declares none of its own."""
        return tuple(a if a.dtypes or not self.dtypes else a.accepting(*self.dtypes) for a in self.annotators)

    def config(self, name: str | None = None, **options: Any) -> QuantizationConfig:
        """Returns a config by name, the default one for None.

        Args:
            name: a key of `configs` or of `aliases`.
            options: passed to the factory, such as `observer="minmax"`.

        Raises:
            ConfigError: the backend has no such config, or the config no such option.
        """
        chosen = self.aliases.get(name, name) if name is not None else next(iter(self.configs))
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
        engine: Asked | None = None,
        **options: Any,
    ) -> "Program":
        """Lowers a converted model to a program that runs.

        Args:
            converted: the q/dq graph that convert returned.
            example_inputs: inputs of the shapes to lower for.
            example_kwargs: those that are given by name; the program takes them by name or position.
            engine: one of `engines` by name, in the place of the backend's lowering; "auto" for the fastest of all, or
                several names for the fastest of those: they are timed in turns on the example inputs, each that
                computes what the q/dq graph computes, the choice is remembered for this machine and graph, and
                `engines` of the program has the times. A dict has the names of modules' engines by their paths or
                patterns of them, "" being the rest of the model: a `JoinedProgram`.
            options: passed to the lowering of this backend, or of each engine; an engine that has no such option is
                out. Where the fastest is chosen, `float_dtype` is what products that stay float compute in (None:
                bfloat16 is tried too where the processor has it), `remember=False` neither looks for an earlier choice
                nor keeps this one (QUANTPLUG_REMEMBER=0 in the environment does the same), `time_anew=True` does not
                look for one.

        Raises:
            LoweringError: the graph cannot be lowered, the inputs do not fit it, or the engine is not installed.
            ConfigError: the lowering's name leads nowhere, it has no such option, or there is no such engine.
        """
        from quantplug.quantizers.framework.lowered import lowered

        return lowered(self, converted, example_inputs, example_kwargs, options, engine)

    def require_lowering_options(self, names: Iterable[str], engine: Asked | None = None) -> None:
        """Checks options of the lowering by name, which is worth doing before a model is calibrated.

        Args:
            names: of the options.
            engine: as for `lower`.

        Raises:
            ConfigError: the lowering's name leads nowhere, it has no such option, or there is no such engine.
            LoweringError: the engine is not installed.
        """
        from quantplug.quantizers.framework.engine_choice import require_engine
        from quantplug.quantizers.framework.lowered import lowering_with

        if engine is None:
            lowering_with(self, names)
        else:
            require_engine(self.name, self.engines, engine, names)

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
        from quantplug.quantizers.framework.lowered import emulated

        return emulated(self, converted, example_inputs, example_kwargs, options)
