"""The whole flow in one call: export, annotate, calibrate, convert, lower.

Before: an `nn.Module` (or what `torch.export` made of it) and calibration data. After: an `Artefact` that
runs in the real runtime, with its reference q/dq graph and its report.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug.core.bias_correction import correct_biases
from quantplug.core.boundary_dtypes import quantized_inputs
from quantplug.core.calibrate import calibrate
from quantplug.core.convert import convert_pt2e
from quantplug.core.errors import ConfigError, ModelError, first_line
from quantplug.core.prepare import prepare_pt2e
from quantplug.core.report import Report, explain
from quantplug.files import write_whole
from quantplug.lowering.program import Program
from quantplug.quantizers.quantizer import BackendQuantizer
from quantplug.quantizers.registry import get_quantizer


@dataclass(frozen=True)
class Artefact:
    """A quantized model that runs.

    Attributes:
        program: the lowered model in its runtime.
        reference: the q/dq graph that it was lowered from, which runs anywhere in PyTorch.
        report: how each operator was quantized, or why not.
        backend: the name of the backend.
    """

    program: Program
    reference: fx.GraphModule
    report: Report
    backend: str

    def __call__(self, *inputs: Any) -> Any:
        """Runs the artefact in its real runtime, on inputs of the exported shapes."""
        return self.program(*inputs)

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
    example_inputs: tuple[Any, ...],
    backend: str | BackendQuantizer = "xnnpack",
    calibration: Iterable[Any] | None = None,
    config: QuantizationConfig | str | None = None,
    *,
    dynamic_shapes: Any = None,
    limit: int | None = None,
    progress: bool = True,
    correct_bias: bool = False,
    **lowering: Any,
) -> Artefact:
    """Quantizes a model and lowers it to a backend's kernels.

    Args:
        model: an `nn.Module` (exported here, in eval mode), an `ExportedProgram` or its graph module;
            it is not changed.
        example_inputs: one batch of positional inputs, as for `torch.export.export`.
        backend: "xnnpack", "x86", the name of a plugin, or a quantizer with scopes of your own.
        calibration: iterable of batches (see `calibrate`); dynamic and weight-only configs need none.
        config: a config or the name of one of the backend's; None for its default.
        dynamic_shapes: as for `torch.export.export`.
        limit: at most so many calibration batches.
        progress: whether calibration shows a bar.
        correct_bias: whether layers' biases undo the mean error of quantization (see `correct_biases`); worth it
            below 8 bits and with per-tensor weights.
        lowering: options of the backend's lowering.

    Raises:
        ConfigError: unknown backend, config or option of the lowering, or calibration data is missing or cannot be
            read twice.
        ModelError: the model cannot be exported, or no operator of it can be quantized.
        CalibrationError: the calibration data is empty, not finite or does not fit the model.
        LoweringError: the backend cannot run the result.
    """
    quantizer = _quantizer(backend, config)
    quantizer.backend.require_lowering_options(lowering)
    inputs = _as_tuple(example_inputs)
    if calibration is None and quantizer.needs_calibration:
        raise ConfigError(
            f"Backend '{quantizer.backend.name}' quantizes activations statically here and needs data; pass "
            "calibration=loader, or a config that needs none such as 'int8_dynamic'."
        )
    if correct_bias:
        _require_batches(calibration)
    exported = export(model, inputs, dynamic_shapes)
    prepared = prepare_pt2e(exported, quantizer)
    _require_quantized(explain(prepared), quantizer.backend.name)
    if calibration is not None and quantizer.needs_calibration:
        calibrate(prepared, calibration, limit=limit, progress=progress)
    if correct_bias and calibration is not None:
        correct_biases(prepared, calibration)
    reference = convert_pt2e(prepared)
    inputs = quantized_inputs(reference, inputs)
    program = quantizer.backend.lower(reference, inputs, dynamic_shapes=dynamic_shapes, **lowering)
    return Artefact(program, reference, explain(reference), quantizer.backend.name)


def _require_batches(calibration: Iterable[Any] | None) -> None:
    """Refuses data that cannot be read after calibration, which comes first."""
    if calibration is None or isinstance(calibration, Iterator):
        found = "none" if calibration is None else f"a {type(calibration).__name__}, which can be read only once"
        raise ConfigError(f"correct_bias=True needs calibration batches, found {found}; pass a list or a DataLoader.")


def _require_quantized(report: Report, backend: str) -> None:
    if report.quantized:
        return
    reason = f"'{report.rows[0].node}' stays float: {report.rows[0].reason}" if report.rows else "it has no operators"
    raise ModelError(f"Backend '{backend}' quantizes nothing in the model ({reason}); change the model or the scopes.")


def _quantizer(backend: str | BackendQuantizer, config: QuantizationConfig | str | None) -> BackendQuantizer:
    if isinstance(backend, str):
        quantizer = get_quantizer(backend)
        return quantizer.set_global(config) if config is not None else quantizer
    if not isinstance(backend, BackendQuantizer):
        raise ConfigError(f"backend takes a name or a quantizer of a backend, found {type(backend).__name__}.")
    if config is not None:
        raise ConfigError("backend is a quantizer and config was given too; call its set_global(config) instead.")
    return backend


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    if isinstance(inputs, tuple | list):
        return tuple(inputs)
    if isinstance(inputs, Tensor):
        return (inputs,)
    raise ConfigError(
        f"example_inputs takes a tuple of inputs, found {type(inputs).__name__}; pass (x,) for one input."
    )


def export(
    model: nn.Module | torch.export.ExportedProgram, example_inputs: tuple[Any, ...], dynamic_shapes: Any = None
) -> fx.GraphModule:
    """Returns the graph module of a model, exported in eval mode the default (non-strict) way.

    Args:
        model: a module, an exported program or a graph module, which is returned as it is.
        example_inputs: positional inputs.
        dynamic_shapes: as for `torch.export.export`.

    Raises:
        ModelError: the model is none of these, or torch.export fails on it.
    """
    if isinstance(model, fx.GraphModule):
        return model
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    if not isinstance(model, nn.Module):
        raise ModelError(f"quantize takes an nn.Module or an exported program, found {type(model).__name__}.")
    in_training = any(module.training for module in model.modules())
    evaluated = copy.deepcopy(model).eval() if in_training else model
    try:
        return torch.export.export(evaluated, example_inputs, dynamic_shapes=dynamic_shapes).module()
    except Exception as error:
        raise ModelError(
            f"torch.export fails on {type(model).__name__}: {first_line(error)}; "
            "make the model exportable, then quantize it."
        ) from error
