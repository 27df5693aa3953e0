"""The whole flow in one call: export, annotate, calibrate, convert, lower.

Before: an `nn.Module` (or what `torch.export` made of it) and calibration data. After: an `Artefact` that
runs in the real runtime, with its reference q/dq graph and its report.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig, Quantizer

from quantplug.algorithms.recipe import Algorithm, CorrectBiases, apply, by_stage, recipe_of
from quantplug.core.calibration.bias_correction import SAMPLES
from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.observer_places import waits_for_data
from quantplug.core.errors import ConfigError, ModelError, QuantplugWarning, first_line
from quantplug.core.files.whole import write_whole
from quantplug.core.graph.calling import in_order, input_names
from quantplug.core.graph.nested_sizes import require_nested
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.peers.torch_names import pytree
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.qdq.integer_io import quantized_inputs
from quantplug.core.report.explain import Report, explain
from quantplug.language.experts import with_experts_apart
from quantplug.lowering.program import Program
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.registry import get_quantizer


@dataclass(frozen=True)
class Artefact:
    """A quantized model that runs.

    Attributes:
        program: the lowered model in its runtime.
        reference: the q/dq graph that it was lowered from, which runs anywhere in PyTorch.
        report: how each operator was quantized, or why not.
        backend: the name of the backend.
        applied: what each algorithm of the recipe did, in order; `str` tells it in a sentence.
    """

    program: Program
    reference: fx.GraphModule
    report: Report
    backend: str
    applied: tuple[object, ...] = ()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the artefact in its real runtime, on inputs of the exported shapes, by position or by name.

        Raises:
            LoweringError: the inputs do not fit the exported model.
        """
        return self.program(*in_order(input_names(self.reference), inputs, keywords))

    def save(self, path: str | Path) -> Path:
        """Writes the artefact (a `.pte` for XNNPACK, a `.pt2` for x86) and returns the path.

        The file appears whole or not at all.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
        """
        return write_whole(Path(path), self.program.save)

    @property
    def nbytes(self) -> int:
        """Size of the saved artefact in bytes."""
        return self.program.nbytes


def quantize(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: tuple[Any, ...] | None = None,
    backend: str | BackendQuantizer = "xnnpack",
    calibration: Iterable[Any] | None = None,
    config: QuantizationConfig | str | None = None,
    *,
    quantizer: Quantizer | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    dynamic_shapes: Any = None,
    limit: int | None = None,
    progress: bool = True,
    correct_bias: bool | int = False,
    recipe: str | Sequence[Algorithm] = (),
    engine: str | Sequence[str] | Mapping[str, str] | None = None,
    **lowering: Any,
) -> Artefact:
    """Quantizes a model and lowers it to a backend's kernels.

    Args:
        model: an `nn.Module` (exported here, in eval mode), an `ExportedProgram` or its graph module;
            it is not changed.
        example_inputs: one batch of positional inputs, as for `torch.export.export`; may be left out for inputs that
            are all given by name, and for an `ExportedProgram`, which carries its own.
        backend: "xnnpack", "x86", the name of a plugin, or a quantizer with scopes of your own.
        calibration: iterable of batches (see `calibrate`); dynamic and weight-only configs need none.
        config: a config or the name of one of the backend's; None for its default.
        quantizer: any quantizer (ours, torchao's, ExecuTorch's, a composition, one of your own) that annotates in the
            place of the backend's; `backend` then names the lowering. A warning says where it is another than that
            of the quantizer's own backend.
        example_kwargs: the inputs that the model takes by name; the artefact takes them by name or position.
        inputs: picks the model's inputs out of a calibration batch, such as `lambda batch: batch[0]` for
            pairs of images and labels.
        dynamic_shapes: as for `torch.export.export`: one entry for each parameter of `forward`, `*xs` being one.
        limit: at most so many calibration batches.
        progress: whether calibration and the algorithms show bars, with the time left, where there is a terminal.
        correct_bias: whether layers' biases undo the mean error of quantization (see `correct_biases`), or from how
            many samples; worth it below 8 bits and with per-tensor weights. A warning says where nothing is gained.
        recipe: algorithms in this order, such as `[GPTQ()]`, or the name of some: "fast" or "accurate".
        engine: what runs the q/dq graph where the backend has several engines, such as x86: "onednn",
            "onednn_package", "openvino" or "onnxruntime", by default the backend's own; "auto" for the fastest on this
            machine, timed on the example inputs, or several names for the fastest of those: the report has the times.
            A dict has an engine for each module by its path or a pattern of paths, "" being the rest of the model.
        lowering: options of the backend's lowering, or of the engine (see `Backend.lower`).

    Raises:
        ConfigError: unknown backend, config, engine or option of the lowering, `dynamic_shapes` that does not fit the
            inputs, or calibration data is missing or cannot be read twice.
        ModelError: the model cannot be exported, or no operator of it can be quantized.
        CalibrationError: the calibration data is empty, not finite or does not fit the model.
        LoweringError: the backend cannot run the result, or the engine is not installed.
    """
    request = Request(
        backend=backend,
        calibration=calibration,
        config=config,
        quantizer=quantizer,
        inputs=inputs,
        dynamic_shapes=dynamic_shapes,
        limit=limit,
        progress=progress,
        correct_bias=correct_bias,
        recipe=recipe,
        engine=engine,
        lowering=lowering,
    )
    return lowered(request, converted(request, model, example_inputs, example_kwargs))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for of a model, by the names that `quantize` has for it."""

    backend: str | BackendQuantizer
    calibration: Iterable[Any] | None = None
    config: QuantizationConfig | str | None = None
    quantizer: Quantizer | None = None
    inputs: Callable[[Any], Any] | None = None
    dynamic_shapes: Any = None
    limit: int | None = None
    progress: bool = True
    correct_bias: bool | int = False
    recipe: str | Sequence[Algorithm] = ()
    engine: str | Sequence[str] | Mapping[str, str] | None = None
    lowering: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    """A q/dq graph, which holds nothing of the float model that it does not compute with.

    Attributes:
        reference: the graph.
        inputs: its example inputs, quantized where the graph takes integers.
        target: the backend that lowers it.
        applied: what each algorithm did.
    """

    reference: fx.GraphModule
    inputs: tuple[Any, ...]
    target: Backend
    applied: tuple[object, ...]


@torch.inference_mode(False)
def converted(
    request: Request,
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Converted:
    """Returns the q/dq graph of a model, the first half of `quantize`.

    Raises:
        QuantplugError: as `quantize` does.
    """
    target, chosen = _chosen(request.backend, request.config, request.quantizer)
    target.require_lowering_options(request.lowering, request.engine)
    _tell_of_another_backend(target, chosen)
    args, kwargs = _examples(model, example_inputs, example_kwargs)
    calibration, inputs, progress = request.calibration, request.inputs, request.progress
    if calibration is None and isinstance(chosen, BackendQuantizer):
        _require_no_data(chosen.needs_calibration, target.name)
    algorithms = _with_biases(recipe_of(request.recipe), request.correct_bias)
    if algorithms:
        _require_batches(calibration)
    exported = export(model, args, request.dynamic_shapes, kwargs)
    floats, others = by_stage(algorithms)
    exported = working_copy(exported) if floats else exported
    applied = apply(floats, exported, calibration, inputs, chosen, progress=progress)
    prepared = prepare_pt2e(exported, chosen)
    _require_quantized(explain(prepared), target.name)
    if calibration is None:
        _require_no_data(waits_for_data(prepared), target.name)
    elif waits_for_data(prepared):
        calibrate(prepared, calibration, limit=request.limit, progress=progress, inputs=inputs)
    applied += apply(others, prepared, calibration, inputs, chosen, progress=progress)
    if not isinstance(request.recipe, str):
        _tell_of_nothing(applied)
    reference = convert_pt2e(prepared)
    values = quantized_inputs(reference, in_order(input_names(reference), args, kwargs))
    return Converted(reference, values, target, tuple(applied))


@torch.inference_mode(False)
def lowered(request: Request, found: Converted) -> Artefact:
    """Returns the artefact of a q/dq graph, the second half of `quantize`.

    Raises:
        LoweringError: the backend cannot run the result, or the engine is not installed.
    """
    shapes, engine = request.dynamic_shapes, request.engine
    program = found.target.lower(
        found.reference, found.inputs, dynamic_shapes=shapes, engine=engine, **request.lowering
    )
    report = replace(explain(found.reference), engines=getattr(program, "engines", None))
    return Artefact(program, found.reference, report, found.target.name, found.applied)


def _with_biases(algorithms: tuple[Algorithm, ...], correct: bool | int) -> tuple[Algorithm, ...]:
    """Returns algorithms, with bias correction at their end where it is asked for."""
    if not isinstance(correct, int):
        raise ConfigError(f"correct_bias takes True, False or a number of samples, found {type(correct).__name__}.")
    if not correct or any(isinstance(each, CorrectBiases) for each in algorithms):
        return algorithms
    return (*algorithms, CorrectBiases(SAMPLES if correct is True else correct))


def _tell_of_nothing(applied: Sequence[object]) -> None:
    """Warns where an algorithm that was asked for by itself did nothing."""
    for done in applied:
        if isinstance(done, Mapping) and not done:
            warnings.warn(str(done), QuantplugWarning, stacklevel=5)


def _tell_of_another_backend(target: Backend, chosen: Quantizer) -> None:
    if isinstance(chosen, BackendQuantizer) and chosen.backend.lowering != target.lowering:
        found = chosen.backend.name
        warnings.warn(
            f"The quantizer is for backend '{found}' and the program is made for '{target.name}'; pass "
            f"backend='{found}' for a program of its own.",
            QuantplugWarning,
            stacklevel=5,
        )


def _require_no_data(waits: bool, backend: str) -> None:
    if waits:
        raise ConfigError(
            f"Backend '{backend}' quantizes activations statically here and needs data; pass calibration=loader, or a "
            "config that needs none such as 'int8_dynamic'."
        )


def _require_batches(calibration: Iterable[Any] | None) -> None:
    """Refuses data that cannot be read after calibration, which comes first."""
    if calibration is None or isinstance(calibration, Iterator):
        found = "none" if calibration is None else f"a {type(calibration).__name__}, which can be read only once"
        raise ConfigError(
            f"correct_bias and recipe need calibration batches, found {found}; pass a list or a DataLoader."
        )


def _require_quantized(report: Report, backend: str) -> None:
    if report.quantized:
        return
    reason = f"'{report.rows[0].node}' stays float: {report.rows[0].reason}" if report.rows else "it has no operators"
    raise ModelError(f"Backend '{backend}' quantizes nothing in the model ({reason}); change the model or the scopes.")


def _chosen(
    backend: str | BackendQuantizer, config: QuantizationConfig | str | None, quantizer: Quantizer | None
) -> tuple[Backend, Quantizer]:
    """Returns the backend that lowers and the quantizer that annotates."""
    if not isinstance(backend, str | BackendQuantizer):
        raise ConfigError(
            f"backend takes a name or a quantizer of a backend, found {type(backend).__name__}; pass a quantizer of "
            "another kind as quantizer=, and the name of the backend that lowers as backend=."
        )
    own = get_quantizer(backend) if isinstance(backend, str) else backend
    if quantizer is None and config is None:
        return own.backend, own
    if config is not None and (quantizer is not None or not isinstance(backend, str)):
        given = "backend is a quantizer" if quantizer is None else "quantizer"
        raise ConfigError(f"{given} and config was given too; call its set_global(config) instead.")
    if quantizer is None:
        return own.backend, own.set_global(config)
    if not isinstance(quantizer, Quantizer):
        found = quantizer.__name__ if isinstance(quantizer, type) else type(quantizer).__name__
        raise ConfigError(f"quantizer takes an instance of torchao's Quantizer, found {found}.")
    return own.backend, quantizer


def _examples(model: Any, inputs: Any, keywords: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword example inputs."""
    if not isinstance(keywords, Mapping | None):
        raise ConfigError(f"example_kwargs takes a dict of inputs by name, found {type(keywords).__name__}.")
    if inputs is None and keywords is None:
        own = model.example_inputs if isinstance(model, torch.export.ExportedProgram) else None
        if own is None:
            raise ConfigError("quantize was given no example inputs; pass example_inputs=(x,) or example_kwargs={...}.")
        return _ordinary(tuple(own[0])), _ordinary(dict(own[1]))
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list | None):
        raise ConfigError(
            f"example_inputs takes a tuple of inputs, found {type(inputs).__name__}; pass (x,) for one input, or "
            "example_kwargs={...} for inputs by name."
        )
    return _ordinary(tuple(inputs or ())), _ordinary(dict(keywords or {}))


def _ordinary(inputs: Any) -> Any:
    """Returns inputs that export can trace: tensors made in inference mode are copied.

    Raises:
        ConfigError: a tensor is sparse or has no numbers.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    sparse = next((tensor for tensor in tensors if tensor.layout != torch.strided), None)
    if sparse is not None:
        raise ConfigError(f"An example input is sparse ({sparse.layout}); pass its `to_dense()`.")
    if any(tensor.is_meta for tensor in tensors):
        raise ConfigError("An example input is on the device 'meta', which holds no numbers; pass real tensors.")
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, inputs)


def _require_weights(model: nn.Module) -> None:
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if held.is_meta:
            raise ModelError(
                f"'{name}' of the model is on the device 'meta', which holds no numbers; load its weights."
            )
        if held.is_inference():
            raise ModelError(
                f"'{name}' of the model was made in torch.inference_mode(), where export cannot follow it; make the "
                "model outside of it."
            )


def export(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Returns the graph module of a model, exported in eval mode the default (non-strict) way.

    Args:
        model: a module, whose stacked experts become linear layers (see `quantplug.language.experts`); or an exported
            program or a graph module, which is returned as it is.
        example_inputs: positional inputs.
        dynamic_shapes: as for `torch.export.export`.
        example_kwargs: keyword inputs.

    Raises:
        ModelError: the model is none of these, or torch.export fails on it.
        ConfigError: `dynamic_shapes` is not nested as the inputs are.
    """
    if isinstance(model, fx.GraphModule | torch.export.ExportedProgram):
        exported = model if isinstance(model, fx.GraphModule) else model.module()
        _require_weights(exported)
        return exported
    if not isinstance(model, nn.Module):
        raise ModelError(f"quantize takes an nn.Module or an exported program, found {type(model).__name__}.")
    _require_weights(model)
    in_training = any(module.training for module in model.modules())
    evaluated = with_experts_apart(copy.deepcopy(model).eval() if in_training else model)
    keywords = dict(example_kwargs or {})
    require_nested(evaluated, example_inputs, keywords, dynamic_shapes)
    try:
        return torch.export.export(evaluated, example_inputs, keywords, dynamic_shapes=dynamic_shapes).module()
    except Exception as error:
        raise ModelError(
            f"torch.export fails on {type(model).__name__}: {first_line(error)}; {_remedy(evaluated, dynamic_shapes)}"
        ) from error


def _remedy(model: nn.Module, dynamic_shapes: Any) -> str:
    """Returns what to do about a model that torch.export refuses."""
    recurrent = (f"{type(m).__name__} '{path}'" for path, m in model.named_modules() if isinstance(m, nn.RNNBase))
    layer = next(recurrent, None)
    if layer is None or dynamic_shapes is None:
        return "make the model exportable, then quantize it."
    return (
        f"the sequences of {layer} must have a static length, because export writes its steps out one by one: "
        "leave the length out of dynamic_shapes."
    )
