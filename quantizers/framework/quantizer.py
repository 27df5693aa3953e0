"""The Quantizer that a backend's declaration gives: scopes, transforms, annotation, validation."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.annotation.annotator import Choice
from quantplug.core.annotation.configs import stays_float
from quantplug.core.annotation.engine import annotate
from quantplug.core.annotation.plan import Transforms, function_name
from quantplug.core.batch_norms.inference import Permission
from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import describe, is_constant, require_graph_module
from quantplug.core.graph.meta import IO_DTYPES, SUBMODEL, TRAINING, TRANSFORMS
from quantplug.core.qdq.integer_io import IODTypes
from quantplug.core.specs.decision import decision
from quantplug.core.specs.dtypes import integer_range
from quantplug.quantizers.framework.backend import Backend, WeightBits
from quantplug.quantizers.framework.capabilities import Capability, capabilities
from quantplug.quantizers.framework.scopes import OperatorType, Scopes, quantizes

Self = TypeVar("Self", bound="BackendQuantizer")


class BackendQuantizer(Quantizer):
    """A torchao Quantizer over the annotators of a backend.

    Every `set_...` takes a config, the name of one of the backend's configs, or None for float, and
    returns the quantizer. A more specific scope wins: module name, module type, operator type, filter,
    global. Where no config was set, nothing at all or parts to stay float, the backend's default config is the
    global one.

    Attributes:
        backend: the declaration.
        strict: whether a scope that covers nothing is an error.
    """

    backend: Backend

    def __init__(self, *, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict
        self.scopes = Scopes()
        self._boundaries = IODTypes()

    @property
    def folds_batch_norm(self) -> bool | Permission:
        """Whether prepare folds batch norms before it annotates, or which.

        Where a scope leaves operators float, their batch norms stay: nothing that is float is rewritten.
        """
        declared = self.backend.folds_batch_norm
        settings = self._effective_scopes().settings
        everywhere = any(scope.kind == "global" for scope in settings) and all(scope.quantizes for scope in settings)
        return declared if everywhere or declared is False else self._may_fold

    def _may_fold(self, producer: fx.Node, batch_norm: fx.Node) -> str | None:
        declared = self.backend.folds_batch_norm
        reason = self.leaves_float(producer) or self._leaves_by_name(batch_norm)
        return reason or (declared(producer, batch_norm) if callable(declared) else None)

    def _leaves_by_name(self, batch_norm: fx.Node) -> str | None:
        """Returns which scope leaves a batch norm float, one that names it; others are about what it follows."""
        return self.leaves_float(batch_norm) if self._effective_scopes().choose(batch_norm).is_named else None

    @property
    def leaves_all_float(self) -> bool:
        """Whether the scopes ask for no quantization at all."""
        return not any(scope.quantizes for scope in self._effective_scopes().settings)

    def leaves_float(self, node: fx.Node) -> str | None:
        """Returns which scope leaves a node float, in words, or None if it has a config."""
        choice = self._effective_scopes().choose(node)
        if choice.config is not None and quantizes(choice.config):
            return None
        return f"{describe(node)} {stays_float(choice)}"

    def set_global(self: Self, config: QuantizationConfig | str | None) -> Self:
        """Sets the config of every node that no other scope covers."""
        self.scopes.set_global(self._config(config))
        return self

    def set_module_name(self: Self, name: str, config: QuantizationConfig | str | None) -> Self:
        """Sets the config below a module path ("layer1.0") or a pattern of paths ("layer*.conv1")."""
        self.scopes.set_module_name(name, self._config(config))
        return self

    def set_module_type(self: Self, kind: type[nn.Module] | str, config: QuantizationConfig | str | None) -> Self:
        """Sets the config of everything below modules of a type.

        Raises:
            ConfigError: `kind` is no module class.
        """
        self.scopes.set_module_type(kind, self._config(config))
        return self

    def set_operator_type(
        self: Self, operator: OperatorType | type[nn.Module], config: QuantizationConfig | str | None
    ) -> Self:
        """Sets the config of an operator: ATen name, overload, packet, function (F.linear) or module class.

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
        """The older name of `set_operator_type`."""
        return self.set_operator_type(operator, config)

    def set_filter(self: Self, accepts: Callable[[fx.Node], bool], config: QuantizationConfig | str | None) -> Self:
        """Sets the config of the nodes that a predicate accepts."""
        self.scopes.set_filter(accepts, self._config(config))
        return self

    def set_io(self: Self, input: torch.dtype | None = None, output: torch.dtype | None = None) -> Self:  # noqa: A002
        """Sets the dtypes of the converted model's float inputs and outputs; None leaves them float.

        With an integer dtype (torch.int8 on XNNPACK, torch.uint8 on x86 and OpenVINO) the model takes or returns
        the integers themselves, whose scales `quantplug.boundary_qparams` reads; quantplug's own
        `convert_pt2e` carries it out. Kernels that could as well write float write integers at outputs then.

        Raises:
            ConfigError: a dtype is no integer dtype.
        """
        for name, dtype in (("input", input), ("output", output)):
            if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype.is_floating_point):
                raise ConfigError(f"set_io was given {name}={dtype!r}; pass an integer dtype or None for float.")
        self._boundaries = IODTypes(input, output)
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

    def _effective_scopes(self) -> Scopes:
        settings = self.scopes.settings
        if any(scope.config is not None or scope.kind == "global" for scope in settings):
            return self.scopes
        default = Scopes(list(settings))
        default.set_global(self.backend.config())
        return default

    @property
    def needs_calibration(self) -> bool:
        """Whether any config in force has activation scales that calibration has to find."""
        configs = (scope.config for scope in self._effective_scopes().settings)
        activations = (c.input_activation or c.output_activation for c in configs if c is not None)
        return any(spec is not None and not spec.is_dynamic for spec in activations)

    def capabilities(self) -> list[Capability]:
        """Returns what the backend can quantize, one row for each rule, in the order of declaration."""
        return capabilities(self.backend)

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Runs the backend's rewrites on the graph that is about to be annotated."""
        for transform in self.backend.transforms:
            model = transform(model)
        if not SUBMODEL.get(model):
            IO_DTYPES.put(model, self._boundaries)
        functions = tuple(map(function_name, self.backend.transforms))
        TRANSFORMS.put(model, (Transforms(functions),) if functions else ())
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Writes an annotation on every node that a rule of the backend takes, and a decision on all others.

        Raises:
            ConfigError: in strict mode, a scope covers nothing; the graph is unchanged.
            ModelError: the model is not an exported graph.
        """
        require_graph_module(model, f"Backend '{self.backend.name}'")
        scopes = self._effective_scopes()
        # The submodels of control flow come one by one; the scopes were held against all of them at first.
        silent = scopes.unmatched(model) if self.strict and not SUBMODEL.get(model) else []
        if silent:
            raise ConfigError(f"Backend '{self.backend.name}': {'; '.join(silent)}; correct it or pass strict=False.")
        choose = _in_training(scopes.choose) if TRAINING.get(model) else scopes.choose
        annotate(model, self.backend.rows, choose, self.backend.name, strict=self.strict, without=self.backend.without)
        self._tell_of_wide_weights(model)
        return model

    def _tell_of_wide_weights(self, model: fx.GraphModule) -> None:
        """Warns of weights that a config gives fewer bits than the backend's files store."""
        stored = self.backend.weight_bits
        if stored is None:
            return
        bits_of = stored if callable(stored) else lambda weight, activation: stored
        narrow = {
            node.name: bits
            for node in model.graph.nodes
            if (bits := _bits_beyond(node, bits_of)) and (found := decision(node)) and found.owner == self.backend.name
        }
        if narrow:
            names = [f"'{name}'" for name in narrow]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            warnings.warn(
                f"Backend '{self.backend.name}' stores weights in {max(narrow.values())} bits: the config's fewer bits "
                f"for {shown} cost accuracy and make no file smaller; take a config of that many bits, or a backend "
                "with kernels for fewer.",
                UserWarning,
                stacklevel=2,
            )

    def validate(self, model: fx.GraphModule) -> None:
        """Accepts the annotated graph: what annotate wrote was checked row by row."""


def _bits_beyond(node: fx.Node, bits_of: WeightBits) -> int | None:
    """Returns the bits in which a constant that a node reads is stored, if it is to have fewer by more than one.

    One bit less is what kernels ask for whose sums overflow.
    """
    given = node.meta.get(Q_ANNOTATION_KEY)
    specs = given.input_qspec_map if given is not None else {}
    beside = next((spec for source, spec in specs.items() if not _is_held(source)), None)
    activation = beside if isinstance(beside, QuantizationSpec) else None
    for source, spec in specs.items():
        if _is_held(source) and isinstance(spec, QuantizationSpec) and not spec.dtype.is_floating_point:
            low, high = integer_range(spec)
            bits = bits_of(spec, activation)
            if high - low < 2 ** (bits - 2):
                return bits
    return None


def _is_held(source: fx.Node) -> bool:
    """Tells whether an operand is a constant, or made of constants alone."""
    return is_constant(source) or bool(source.all_input_nodes and all(map(is_constant, source.all_input_nodes)))


def _in_training(choose: Callable[[fx.Node], Choice]) -> Callable[[fx.Node], Choice]:
    """Returns a choice of configs that say they are for training; prepare makes the fake quantizes of their specs."""
    trained: dict[int, QuantizationConfig] = {}

    def chosen(node: fx.Node) -> Choice:
        found = choose(node)
        if found.config is None or found.config.is_qat:
            return found
        config = trained.setdefault(id(found.config), replace(found.config, is_qat=True))
        return replace(found, config=config)

    return chosen
