"""The Quantizer that a backend's declaration gives: transforms, annotation, validation, by the scopes of a user's."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import fx
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.annotation.annotator import Choice
from quantplug.core.annotation.engine import annotate
from quantplug.core.annotation.plan import Transforms, function_name
from quantplug.core.batch_norms.inference import Permission
from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.graph.meta import IO_DTYPES, SUBMODEL, TRAINING, TRANSFORMS
from quantplug.core.qdq.integer_io import IODTypes
from quantplug.quantizers.framework.capabilities import Capability, capabilities
from quantplug.quantizers.framework.scoped import ScopedQuantizer, effective_scopes
from quantplug.quantizers.framework.weight_bits import tell_of_wide_weights

Self = TypeVar("Self", bound="BackendQuantizer")


class BackendQuantizer(ScopedQuantizer):
    """A torchao Quantizer over the annotators of a backend.

    Attributes:
        backend: the declaration.
        strict: whether a scope that covers nothing, and a spec that breaks a limit of the kernels, are errors.
    """

    def __init__(self, *, strict: bool = True) -> None:
        super().__init__(strict=strict)
        self._io_dtypes = IODTypes()

    @property
    def folds_batch_norm(self) -> bool | Permission:
        """Whether prepare folds batch norms before it annotates, or which.

        Where a scope leaves operators float, their batch norms stay: nothing that is float is rewritten.
        """
        declared = self.backend.folds_batch_norm
        settings = effective_scopes(self).settings
        everywhere = any(scope.kind == "global" for scope in settings) and all(scope.quantizes for scope in settings)
        return declared if everywhere or declared is False else self._may_fold

    def _may_fold(self, producer: fx.Node, batch_norm: fx.Node) -> str | None:
        declared = self.backend.folds_batch_norm
        reason = self.leaves_float(producer) or self._leaves_by_name(batch_norm)
        return reason or (declared(producer, batch_norm) if callable(declared) else None)

    def _leaves_by_name(self, batch_norm: fx.Node) -> str | None:
        """Returns which scope leaves a batch norm float, one that names it; others are about what it follows."""
        return self.leaves_float(batch_norm) if effective_scopes(self).choose(batch_norm).is_named else None

    def set_io(self: Self, input: torch.dtype | None = None, output: torch.dtype | None = None) -> Self:  # noqa: A002
        """Sets the dtypes of the converted model's float inputs and outputs; None leaves them float.

        With an integer dtype (torch.int8 on XNNPACK, torch.uint8 on x86 and OpenVINO) the model takes or returns
        the integers themselves, whose scales `quantplug.boundary_qparams` reads; quantplug's own
        `convert_pt2e` carries it out. Kernels that could as well write float write integers at outputs then.

        Args:
            input: an integer dtype, or None for float.
            output: an integer dtype, or None for float.

        Raises:
            ConfigError: a dtype is no integer dtype.
        """
        for name, dtype in (("input", input), ("output", output)):
            if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype.is_floating_point):
                raise ConfigError(f"set_io was given {name}={dtype!r}; pass an integer dtype or None for float.")
        self._io_dtypes = IODTypes(input, output)
        return self

    def capabilities(self) -> list[Capability]:
        """Returns what the backend can quantize, one row for each rule, in the order of declaration."""
        return capabilities(self.backend)

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Runs the backend's rewrites on the graph that is about to be annotated."""
        for transform in self.backend.transforms:
            model = transform(model)
        if not SUBMODEL.get(model):
            IO_DTYPES.put(model, self._io_dtypes)
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
        scopes = effective_scopes(self)
        # The submodels of control flow come one by one; the scopes were held against all of them at first.
        silent = scopes.unmatched(model) if self.strict and not SUBMODEL.get(model) else []
        if silent:
            raise ConfigError(f"Backend '{self.backend.name}': {'; '.join(silent)}; correct it or pass strict=False.")
        choose = _in_training(scopes.choose) if TRAINING.get(model) else scopes.choose
        annotate(model, self.backend.rows, choose, self.backend.name, strict=self.strict, without=self.backend.without)
        tell_of_wide_weights(self.backend, model.graph)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Accepts the annotated graph: what annotate wrote was checked row by row."""


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
