"""Looking inside of a quantized model: float, q/dq graph, emulated kernels and the real artefact side by side.

Before: a float model, what was made of it, and data. After: an `Inspection`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from quantplug.core.calibration.batches import BatchReader, loader_iterator, nonfinite_input, picked, sample_count
from quantplug.core.errors import CalibrationError, ConfigError, ModelError
from quantplug.core.graph.calling import by_position
from quantplug.core.graph.facts import module_path, require_graph_module
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.qdq.quantized_tensors import plain_tensors
from quantplug.core.report.faults import Fault, faults, of_kernel
from quantplug.core.report.layer_errors import LayerErrors, Measured, RangeFit, measure_layers
from quantplug.core.report.runs import with_float_inputs
from quantplug.core.specs.levels import decibels
from quantplug.flow import Artefact, export
from quantplug.lowering.timing import Taken, total
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.registry import get_quantizer
from quantplug.xray.remedies import Remedies
from quantplug.xray.result import InspectedLayer, Inspection, LayerRange, LayerTime
from quantplug.xray.seen import Seen

SAMPLES = 64


@torch.inference_mode(False)
def inspect(
    model: nn.Module | torch.export.ExportedProgram | fx.GraphModule,
    quantized: Artefact | fx.GraphModule,
    data: Iterable[Any],
    *,
    backend: str | BackendQuantizer | None = None,
    inputs: Callable[[Any], Any] | None = None,
    samples: int = SAMPLES,
    times: bool | None = None,
    kernels: bool = True,
) -> Inspection:
    """Looks inside of a quantized model: which layer loses what, what is wrong with it, and how long it takes.

    A layer's own noise is that of its quantized form on float inputs; its accumulated noise is that in the quantized
    model. Values inside of the artefact are read from a second program of the same graph that returns them too; the
    notes say whether it returns the same result, and why a form is missing.

    Args:
        model: the float model that quantization began with, as for `quantize`. Where a recipe rescales it, the graph
            behind that.
        quantized: what `quantize` returned, or a q/dq graph of any quantizer.
        data: batches as for `calibrate`.
        backend: the backend that a q/dq graph is lowered to, by name or as a quantizer of it; None to look at the graph
            alone. An artefact has its own.
        inputs: picks the model's inputs out of a batch.
        samples: batches are taken until they hold so many samples.
        times: True to time each layer also where that takes a program for each (XNNPACK: seconds a layer); None to
            time what programs tell by themselves (x86); False for no times.
        kernels: whether to look at the emulation and the artefact; False for the q/dq graph alone.

    Raises:
        ModelError: the model cannot be exported, or `quantized` is no q/dq graph.
        ConfigError: there is no such backend, or an artefact was given another one.
        CalibrationError: there is no batch, one does not fit the model, or is not finite.
    """
    converted = _converted(quantized)
    chosen = backend_of(quantized, backend)
    batches, floats, count = _read(model, converted, data, inputs, samples)
    measured = _measured(floats, converted, batches)
    program = quantized.program if isinstance(quantized, Artefact) else None
    seen = Seen(floats, converted, batches)
    if chosen is not None and kernels:
        seen.look(chosen, program, times)
    else:
        seen.reference()
    return _inspection("" if chosen is None else chosen.name, count, measured, seen)


def _converted(quantized: Any) -> fx.GraphModule:
    graph = quantized.reference if isinstance(quantized, Artefact) else quantized
    model = plain_tensors(require_graph_module(graph, "inspect"))
    if not any(is_qdq(node) for node in model.graph.nodes):
        raise ModelError(
            "inspect takes a q/dq graph, and this one quantizes nothing outside of control flow; pass what "
            "`convert_pt2e` or `quantize` returned."
        )
    return by_position(model)


def backend_of(quantized: Any, backend: str | BackendQuantizer | None) -> Backend | None:
    """Returns what a q/dq graph is lowered to: the backend that is given, or that of an artefact; None for neither.

    Raises:
        ConfigError: there is no such backend, or an artefact is given another one.
    """
    own = quantized.backend if isinstance(quantized, Artefact) else None
    name = own if backend is None else backend
    found = None if name is None else (get_quantizer(name) if isinstance(name, str) else name).backend
    if own is not None and found is not None and found.name != own:
        raise ConfigError(f"The artefact is of backend '{own}' and backend '{found.name}' was given; leave it out.")
    return found


def _read(
    model: Any, converted: fx.GraphModule, data: Iterable[Any], inputs: Callable[[Any], Any] | None, samples: int
) -> tuple[list[tuple[Any, ...]], fx.GraphModule, int]:
    """Returns the batches by position, the float graph, and how many samples there are."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"samples takes a number from 1 on, found {samples!r}; leave it out.")
    reader, found, count = BatchReader(with_float_inputs(model, converted)), list[tuple[Any, ...]](), 0
    for place, batch in enumerate(loader_iterator(data)):
        named = reader.arguments(picked(batch, inputs), place)
        wrong = nonfinite_input(named)
        if wrong is not None:
            raise CalibrationError(f"Input '{wrong}' of batch {place} has NaN or infinity; take the batch out.")
        found.append(tuple(named.values()))
        count += sample_count(named)
        if count >= samples:
            break
    if not found:
        raise CalibrationError(
            "inspect takes 1 or more batches, and the data yielded none (a generator can be read only once); pass more."
        )
    return found, by_position(export(model, found[0])), count


def _measured(floats: fx.GraphModule, converted: fx.GraphModule, batches: Sequence[tuple[Any, ...]]) -> Measured:
    found = measure_layers(floats, converted, batches)
    computing = {layer.piece.root.name for layer in found.layers if layer.piece.root.op != "placeholder"}
    if computing <= set(found.unknown):
        raise ModelError(
            "No operator of the q/dq graph has a namesake in the float model; pass the model that it was made of."
        )
    return found


def _inspection(backend: str, samples: int, measured: Measured, seen: Seen) -> Inspection:
    found = faults(measured)
    remedies = Remedies([layer.piece for layer in measured.layers], backend)
    layers = [layer for layer in measured.layers if not layer.piece.passes_on]
    total_noise = sum(layer.output or 0.0 for layer in layers)
    rows = tuple(
        _layer(layer, found.get(layer.piece.root.name), measured, total_noise, seen, remedies) for layer in layers
    )
    forms = {form: _share(*noise.output) for form, noise in seen.noise.items()}
    notes = [*seen.notes]
    if measured.unknown:
        notes.append(f"The float model has no {', '.join(measured.unknown)}; what their constants lose is not known.")
    between = [time.taken for time in seen.kernel_times if not time.operators]
    return Inspection(
        backend, samples, rows, forms, _time(seen.time), _time(total(between)) if between else None, tuple(notes)
    )


def _layer(
    layer: LayerErrors, fault: Fault | None, measured: Measured, noise: float, seen: Seen, remedies: Remedies
) -> InspectedLayer:
    piece, name = layer.piece, layer.piece.root.name
    own = _forms(layer, seen, own=True)
    if fault is None and own.get("program") is not None:
        fault = of_kernel(layer, own["reference"] or 0.0, own["program"] or 0.0)
    output = None if layer.output is None else _share(measured.signal, layer.output)
    gain = decibels(noise, noise - (layer.output or 0.0)) if noise else 0.0
    advice = remedies.of_fault(layer, fault) if fault is not None else remedies.of_noise(layer, gain)
    op = seen.ops.get(name)
    slow = remedies.of_time(layer, op)
    kernels, taken = _kernels(layer, seen)
    worst = _worst(layer)
    return InspectedLayer(
        node=name,
        operator=_operator(piece.root),
        module_path=module_path(piece.root),
        placement=op.placement if op is not None else "",
        kernel=", ".join(kernels) or (op.how or op.reason if op is not None else ""),
        weight=next((f"{fit.dtype} {fit.granularity}" for fit in layer.constants if fit.dtype), ""),
        own=own,
        accumulated=_forms(layer, seen, own=False),
        output=output,
        ranges=tuple(_range(fit, layer.signal) for fit in layer.ranges if fit.params is not None),
        worst_channel=worst[0],
        worst=worst[1],
        dead=layer.dead,
        time=_time(taken),
        fault=fault.kind if fault is not None else "",
        says=advice.says,
        remedy=advice.code,
        slow_says=slow.says,
        slow_remedy=slow.code,
        points=tuple((float(f"{x:.4g}"), float(f"{y:.4g}")) for x, y in layer.points.tolist()),
    )  # fmt: skip


def _operator(node: fx.Node) -> str:
    return "input" if node.op == "placeholder" else str(node.target).removeprefix("aten.").removesuffix(".default")


def _forms(layer: LayerErrors, seen: Seen, *, own: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for form, noise in seen.noise.items():
        sums = (noise.own if own else noise.accumulated).get(layer.piece.root.name)
        if sums is not None:
            found[form] = _share(*sums)
    if "reference" not in found:  # an input: nothing computes it
        found["reference"] = _share(layer.signal, layer.own if own else layer.accumulated)
    return found


def _share(signal: float, noise: float) -> float | None:
    """Returns a noise over its signal; JSON has no infinity, so that the largest number stands for it."""
    if signal <= 0:
        return 0.0 if noise == 0 else None
    return min(noise / signal, sys.float_info.max)


def _kernels(layer: LayerErrors, seen: Seen) -> tuple[list[str], Taken | None]:
    """Returns what runs a layer, and how long it takes."""
    names = {node.name for node in layer.piece.nodes}
    own = [time for time in seen.kernel_times if time.operators & names]
    if not own:
        return [], seen.times.get(layer.piece.root.name)
    return list(dict.fromkeys(time.kernel.removesuffix(".default") for time in own)), total(t.taken for t in own)


def _time(taken: Taken | None) -> LayerTime | None:
    return None if taken is None else LayerTime(*(float(f"{t:.4g}") for t in (taken.low, taken.middle, taken.high)))


def _worst(layer: LayerErrors) -> tuple[int | None, float | None]:
    if layer.channel_signal is None or layer.channel_own is None:
        return None, None
    held = layer.channel_signal > 0
    if not bool(held.any()):
        return None, None
    ratios = torch.where(held, layer.channel_own / layer.channel_signal.clamp_min(1e-30), torch.zeros(()).double())
    return int(ratios.argmax()), float(ratios.max())


def _range(fit: RangeFit, signal: float) -> LayerRange:
    assert fit.params is not None
    low, high = fit.params.bounds
    inside = max(min(fit.largest, high) - max(fit.smallest, low), 0.0)
    return LayerRange(
        fit.rounding.quantize.name, str(fit.params.dtype).removeprefix("torch."), low, high, fit.smallest, fit.largest,
        (fit.below + fit.above) / max(fit.count, 1), min(inside / max(high - low, 1e-30), 1.0),
        _share(signal, fit.noise) or 0.0, tuple(int(count) for count in fit.histogram.tolist()),
    )  # fmt: skip
