"""Looking inside of a quantized model: float, q/dq graph, emulated kernels and the real artefact side by side.

Before: a float model, what was made of it, and data. After: an `Inspection`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantplug.core.calibration.batches import BatchReader, loader_iterator, nonfinite_input, picked, sample_count
from quantplug.core.errors import CalibrationError, ConfigError, LoweringError, ModelError
from quantplug.core.graph.calling import by_position
from quantplug.core.graph.facts import module_path, require_graph_module
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.integer_io import dequantized_outputs, quantized_inputs, with_float_inputs
from quantplug.core.qdq.nodes import is_qdq
from quantplug.core.report.faults import Fault, faults, of_kernel
from quantplug.core.report.layer_errors import LayerErrors, Measured, RangeFit, energy, measure_layers
from quantplug.core.report.layers import pieces
from quantplug.core.report.runs import FloatRuns, OwnRun, Run, as_quantized
from quantplug.core.specs.levels import sqnr
from quantplug.flow import Artefact, export
from quantplug.lowering.between import Inside, LayersAlone, contiguous, cut_apart, with_values
from quantplug.lowering.program import LoweredOp, Program
from quantplug.lowering.timing import KernelTime, Taken, timed, total
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.framework.registry import get_quantizer
from quantplug.xray.remedies import Remedies
from quantplug.xray.result import InspectedLayer, Inspection, LayerRange, LayerTime

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
    seen = _Seen(floats, converted, batches)
    if chosen is not None and kernels:
        seen.look(chosen, program, times)
    else:
        seen.reference()
    return _inspection("" if chosen is None else chosen.name, count, measured, seen)


def _converted(quantized: Any) -> fx.GraphModule:
    graph = quantized.reference if isinstance(quantized, Artefact) else quantized
    model = require_graph_module(graph, "inspect")
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


@dataclass
class _Noise:
    """Energies of one form, by layer: the float value's, and the error's."""

    own: dict[str, list[float]] = field(default_factory=dict)
    accumulated: dict[str, list[float]] = field(default_factory=dict)
    output: list[float] = field(default_factory=lambda: [0.0, 0.0])


class _Seen:
    """Values of the q/dq graph, its emulation and its program, beside float ones."""

    def __init__(self, floats: fx.GraphModule, converted: fx.GraphModule, batches: Sequence[tuple[Any, ...]]) -> None:
        self.noise: dict[str, _Noise] = {}
        self.notes: list[str] = []
        self.ops: Mapping[str, LoweredOp] = {}
        self.kernel_times: tuple[KernelTime, ...] = ()
        self.times: dict[str, Taken] = {}
        self.time: Taken | None = None
        self._floats, self._converted, self._batches = as_quantized(floats, converted), converted, batches
        self._values, self._apart = with_values(converted), cut_apart(converted)
        self._inputs = [node.name for node in converted.graph.find_nodes(op="placeholder")]
        self._pieces = pieces(converted.graph)
        self._ends = {piece.root.name: piece.end.name for piece in self._pieces}

    def reference(self) -> None:
        """Looks at the q/dq graph."""
        self._add("reference", lambda graph, inputs: Run(graph))

    def look(self, backend: Backend, program: Program | None, times: bool | None) -> None:
        """Looks at all forms.

        Args:
            backend: what lowers and emulates.
            program: the artefact, None to lower it here.
            times: as for `inspect`.
        """
        self.reference()
        if backend.kernels is not None:
            self._add("emulation", backend.emulate)
        first = quantized_inputs(self._converted, self._batches[0])
        try:
            made = program if program is not None else backend.lower(self._converted, first)
        except LoweringError as error:  # a graph that cannot be lowered is one to look into
            self.notes.append(f"There is no artefact to look into: {error}")
            return
        self.ops = {op.node: op for op in made.ops}
        if made.has_kernels:
            self._add("program", backend.lower, made)
        if times is not False and made.has_kernels:
            self._time(backend, made, first, bool(times))

    def _add(self, form: str, make: Callable[..., Any], plain: Program | None = None) -> None:
        try:
            self.noise[form] = self._of_form(make, plain)
        except LoweringError as error:
            self.notes.append(f"The {form} is not looked into: {error}")

    def _of_form(self, make: Callable[..., Any], plain: Program | None) -> _Noise:
        found, runs = _Noise(), dict[str, Any]()
        for batch in self._batches:
            floats = FloatRuns(self._floats, batch)
            given = quantized_inputs(self._converted, batch)
            known = self._known(floats, given)
            values = tuple(contiguous(known[name]) for name in self._apart.values)
            if not runs:
                runs = {"in": make(self._values.model, given), "own": make(self._apart.model, values)}
            with torch.no_grad():
                inside, own = _fresh(runs["in"])(*given), _fresh(runs["own"])(*values)
            outputs = inside[: len(inside) - len(self._values.layers)]
            if plain is not None and batch is self._batches[0]:
                self._tell_of_agreement(outputs, _leaves(_fresh(plain)(*given)))
            self._sum(found, self._values, inside[len(outputs) :], floats, found.accumulated)
            self._sum(found, self._apart, own, floats, found.own)
            returned = _leaves(dequantized_outputs(self._converted, list(outputs)))
            _sum_outputs(found, returned, _leaves(floats.result()))
        return found

    def _known(self, floats: FloatRuns, given: tuple[Any, ...]) -> dict[str, Any]:
        """Returns what layers read by the names of nodes; what the float model lacks is computed of what it has."""
        run = OwnRun(self._converted, self._pieces, floats.values)
        passed = {node.name: value for node, value in run.values(given).items()}
        return {**passed, **dict(zip(self._inputs, _leaves(given), strict=True))}

    def _sum(
        self, found: _Noise, inside: Inside, values: Sequence[Any], floats: FloatRuns, into: dict[str, list[float]]
    ) -> None:
        for layer, value in zip(inside.layers, values, strict=True):
            wanted = floats.values.get(self._ends[layer])
            if isinstance(wanted, Tensor) and wanted.shape == value.shape:
                sums = into.setdefault(layer, [0.0, 0.0])
                sums[0] += energy(wanted)
                sums[1] += energy(value.double() - wanted.double())

    def _tell_of_agreement(self, found: Sequence[Any], wanted: Sequence[Any]) -> None:
        pairs = [pair for pair in zip(found, wanted, strict=True) if isinstance(pair[1], Tensor)]
        if all(torch.equal(*pair) for pair in pairs):
            self.notes.append(
                "The program that also returns the values in between gives the same results, bit for bit."
            )
            return
        least = min(sqnr(one.double(), other.double()) for one, other in pairs)
        self.notes.append(
            f"The program that also returns the values in between is fused otherwise: its results are {least:.1f} dB "
            "from the artefact's."
        )

    def _time(self, backend: Backend, program: Program, inputs: tuple[Any, ...], each: bool) -> None:
        self.time = timed(lambda: program(*inputs))
        self.kernel_times = program.kernel_times(*inputs)
        if self.kernel_times:
            self.notes.append(
                "Times are quartiles of kernels that ran one by one; a call of the whole also spends time between them."
            )
        elif each:
            self._time_alone(backend)
        else:
            self.notes.append(
                "Layers are not timed: the runtime tells no times, and a program for each takes long (times=True)."
            )

    def _time_alone(self, backend: Backend) -> None:
        given = quantized_inputs(self._converted, self._batches[0])
        values = self._known(FloatRuns(self._floats, self._batches[0]), given)
        alone = LayersAlone(self._converted, values, backend.lower)
        for layer in self._apart.layers:
            self._time_layer(alone, layer)
        self.notes.append(
            "Times are of each layer as a program of its own, less that of one that only rounds its inputs; the bounds "
            "hold what is not known of it."
        )

    def _time_layer(self, alone: LayersAlone, layer: str) -> None:
        try:
            self.times[layer] = alone.taken(layer)
        except LoweringError as error:
            self.notes.append(f"Layer '{layer}' is not timed: {error}")


def _fresh(run: Any) -> Any:
    restart: Callable[[], None] = getattr(run, "restart", lambda: None)
    restart()
    return run


def _leaves(result: Any) -> list[Any]:
    return list(pytree.tree_leaves(result))


def _sum_outputs(found: _Noise, outputs: Sequence[Any], wanted: Sequence[Any]) -> None:
    for value, expected in zip(outputs, wanted, strict=True):
        if isinstance(expected, Tensor) and isinstance(value, Tensor) and value.is_floating_point():
            found.output[0] += energy(expected)
            found.output[1] += energy(value.double() - expected.double())


def _inspection(backend: str, samples: int, measured: Measured, seen: _Seen) -> Inspection:
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
    layer: LayerErrors, fault: Fault | None, measured: Measured, noise: float, seen: _Seen, remedies: Remedies
) -> InspectedLayer:
    piece, name = layer.piece, layer.piece.root.name
    own = _forms(layer, seen, own=True)
    if fault is None and own.get("program") is not None:
        fault = of_kernel(layer, own["reference"] or 0.0, own["program"] or 0.0)
    output = None if layer.output is None else _share(measured.signal, layer.output)
    gain = -10 * _log10(1 - (layer.output or 0.0) / noise) if noise else 0.0
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


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-12))


def _forms(layer: LayerErrors, seen: _Seen, *, own: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for form, noise in seen.noise.items():
        sums = (noise.own if own else noise.accumulated).get(layer.piece.root.name)
        if sums is not None:
            found[form] = _share(*sums)
    if "reference" not in found:  # an input: nothing computes it
        found["reference"] = _share(layer.signal, layer.own if own else layer.accumulated)
    return found


def _share(signal: float, noise: float) -> float | None:
    return noise / signal if signal > 0 else (0.0 if noise == 0 else None)


def _kernels(layer: LayerErrors, seen: _Seen) -> tuple[list[str], Taken | None]:
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
