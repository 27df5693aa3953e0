"""What each layer of a q/dq graph loses, and whether its numbers fit what it computes.

Before: a float graph, the q/dq graph of it, and batches. After: for each layer the error of its own and the error that
has come together up to it, how its roundings fit the values, how its constants fit the float ones, and what the model's
output loses where this layer alone is quantized.

A layer's own error is that of its constants and of the rounding of what it yields, on float inputs: the rounding of
what comes in belongs to the layer that yields it. Energies are sums of squares, in double precision.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.calibration.outputs import floats_of
from quantplug.core.errors import CalibrationError, ModelError
from quantplug.core.graph.facts import operands, operator_name, sizes_of
from quantplug.core.qdq.integer_io import dequantized_outputs, quantized_inputs
from quantplug.core.qdq.nodes import is_dequantize, range_of, stored_dtype
from quantplug.core.qdq.qparams import StaticQParams, qparams, static_qparams
from quantplug.core.report.layers import Piece, Rounding, fixed_nodes, pieces, rounds_activations
from quantplug.core.report.runs import FloatRuns, OwnRun, Run, as_quantized
from quantplug.core.specs.levels import STEP_ROUNDING

BINS = 48
_POINTS = 160


@dataclass
class RangeFit:
    """How one rounding of an activation fits its float values.

    Attributes:
        rounding: the quantize node and the dequantize node behind it.
        params: scale, zero point and integers; None where there is not one of each.
        smallest: the smallest float value.
        largest: the largest.
        count: how many values there are.
        below: how many are below what the integers hold.
        above: how many are above.
        noise: energy of the rounding error.
        attainable: the same with as many integers over the range that the values take.
        shifted: the same with the scale that there is and the zero point that the values want.
        histogram: counts of the values between the smallest and the largest.
    """

    rounding: Rounding
    params: StaticQParams | None
    smallest: float
    largest: float
    count: int = 0
    below: int = 0
    above: int = 0
    noise: float = 0.0
    attainable: float = 0.0
    shifted: float = 0.0
    histogram: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))

    def add(self, value: Tensor, rounded: Tensor) -> None:
        """Adds the values of a batch, and what they are rounded to."""
        x = _finite(value.detach().float())
        self.count += x.numel()
        self.noise += error_energy(rounded, x)
        if self.smallest < self.largest:
            self.histogram += torch.histc(x, BINS, self.smallest, self.largest).double()
        if self.params is None:
            return
        low, high = self.params.bounds
        # Values that are rounded to the last integer are not clipped.
        self.below += int((x < low - self.params.scale / 2).sum())
        self.above += int((x > high + self.params.scale / 2).sum())
        steps = self.params.quant_max - self.params.quant_min
        scale = max(max(self.largest, 0.0) - min(self.smallest, 0.0), 1e-12) / steps
        self.attainable += energy(_on_grid(x, scale, min(self.smallest, 0.0), steps) - x)
        self.shifted += energy(_on_grid(x, self.params.scale, min(self.smallest, 0.0), steps) - x)


@dataclass(frozen=True)
class ConstantFit:
    """How a quantized constant of a layer fits the float one.

    Attributes:
        operand: its name in the operator's schema.
        dtype: of its integers; "" where it is float.
        granularity: "per tensor", "per channel" or "per group".
        axis: of the channels that the operator yields.
        scale_axis: along which the scales run, None where there is one or it is not known.
        noise: energy of the error, for each channel.
        attainable: the same with as many integers over the largest magnitude, with scales as many as it has.
        by_channel: the same with a scale for each channel.
        energy: of the float constant, for each channel.
        factors: for each channel by what its numbers had to be multiplied to fit best.
        explained: energy of the error that is left then, for each channel.
        largest: the largest magnitude of the float constant, for each channel.
        held: the largest magnitude of the quantized one, for each channel.
        clipped: the share of its integers that are the lowest or the highest, for each channel.
        floored: for each channel whether its numbers are the nearest integers by the smallest scale of all channels, as
            where a spec keeps scales from being smaller.
    """

    operand: str
    dtype: str
    granularity: str
    axis: int
    scale_axis: int | None
    noise: Tensor
    attainable: Tensor
    by_channel: Tensor
    energy: Tensor
    factors: Tensor
    explained: Tensor
    largest: Tensor
    held: Tensor
    clipped: Tensor
    floored: Tensor


@dataclass
class LayerErrors:
    """What was measured of one layer; energies over all batches.

    Attributes:
        piece: its nodes.
        signal: of the float value.
        computing: of the error before the result is rounded.
        own: of the error behind that.
        accumulated: of the error in the quantized model.
        output: of the error of the model's output where it alone is quantized; None where that is not known.
        constant: the part of `computing` that is one number for each channel.
        channel_signal: `signal` by channel.
        channel_own: `own` by channel.
        dead: channels that yield one number in the quantized model, and several in float.
        ranges: one for each rounding.
        constants: one for each constant that float has too.
        points: some float values beside those in the quantized model, [points, 2].
    """

    piece: Piece
    signal: float = 0.0
    computing: float = 0.0
    own: float = 0.0
    accumulated: float = 0.0
    output: float | None = None
    constant: float = 0.0
    channel_signal: Tensor | None = None
    channel_own: Tensor | None = None
    dead: tuple[int, ...] = ()
    ranges: list[RangeFit] = field(default_factory=list)
    constants: list[ConstantFit] = field(default_factory=list)
    points: Tensor = field(default_factory=lambda: torch.zeros(0, 2))


@dataclass(frozen=True)
class Measured:
    """All layers of a model, and its output.

    Attributes:
        layers: in graph order.
        signal: energy of the float outputs.
        noise: energy of the error of the quantized outputs.
        unknown: names of layers that the float model lacks, whose own error is not known.
    """

    layers: tuple[LayerErrors, ...]
    signal: float
    noise: float
    unknown: tuple[str, ...] = ()


def measure_layers(
    floats: fx.GraphModule, converted: fx.GraphModule, batches: Sequence[tuple[Any, ...]], alone: bool = True
) -> Measured:
    """Measures each layer of a q/dq graph against the float graph that it was made of.

    Args:
        floats: the exported float graph; neither is changed.
        converted: the q/dq graph, all inputs by position.
        batches: positional inputs of both.
        alone: whether to run the float model once for each layer, from the layer on.

    Raises:
        ModelError: the two return tensors of other shapes.
        CalibrationError: the float model returns what is not finite.
    """
    found = _Measurement(as_quantized(floats, converted), converted, alone)
    for batch in batches:
        found.widen(batch)
    for batch in batches:
        found.add(batch)
    return found.result()


class _Measurement:
    def __init__(self, floats: fx.GraphModule, converted: fx.GraphModule, alone: bool) -> None:
        self._floats, self._converted, self._alone = floats, converted, alone
        self._pieces = pieces(converted.graph)
        self._constants = fixed_nodes(converted.graph)
        self._ends: dict[fx.Node, tuple[float, float]] = {}
        self._layers: dict[fx.Node, LayerErrors] = {}
        self._channels: dict[fx.Node, _Channels] = {}
        self._known: set[fx.Node] = set()
        self._signal = self._noise = 0.0

    def widen(self, batch: tuple[Any, ...]) -> None:
        """Notes the ends of the float values."""
        for node, value in self._passed(FloatRuns(self._floats, batch), batch)[1].items():
            if bool(value.isfinite().any()):
                low, high = self._ends.get(node, (float("inf"), float("-inf")))
                held = value[value.isfinite()]
                self._ends[node] = (min(low, float(held.min())), max(high, float(held.max())))

    def add(self, batch: tuple[Any, ...]) -> None:
        """Measures a batch."""
        reference = FloatRuns(self._floats, batch)
        own, floats = self._passed(reference, batch)
        run = Run(self._converted)
        quantized = run.values(quantized_inputs(self._converted, batch))
        fixed = {node: quantized[node] for node in self._constants if node in quantized}
        wanted = floats_of(reference.result())
        if not all(bool(value.isfinite().all()) for value in wanted):
            raise CalibrationError(
                "The float model's output has NaN or infinity on these batches; take those out that make them."
            )
        result = dequantized_outputs(self._converted, quantized[self._converted.graph.output_node()])
        found = _alike(floats_of(result), wanted)
        self._signal += sum(map(energy, wanted))
        self._noise += _error(found, wanted)
        for piece in self._pieces:
            if piece.end in floats and isinstance(own.get(piece.end), Tensor):
                layer = self._layer(piece, reference, fixed)
                self._add(layer, floats[piece.end], own[piece.end], quantized, fixed)
                if self._alone and not piece.passes_on:
                    value = _own_value(run, piece, own[piece.end], floats[piece.end], fixed)
                    unrounded = dict.fromkeys(_float_readers(piece, self._constants), own[piece.end])
                    _add_output(layer, reference.with_value(piece.end.name, value, unrounded), wanted)

    def _passed(self, reference: FloatRuns, batch: tuple[Any, ...]) -> tuple[dict[fx.Node, Any], dict[fx.Node, Tensor]]:
        """Returns what each layer yields on float inputs, and its float value."""
        run = OwnRun(self._converted, self._pieces, reference.values)
        # An input that is an integer in the q/dq graph has lost its rounding to whoever calls it.
        passed = run.values(quantized_inputs(self._converted, batch))
        values = {piece.end: passed.get(piece.end) for piece in self._pieces}
        self._known |= {end for end in values if isinstance(reference.values.get(end.name), Tensor)}
        floats = {node: v for node, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return run.own, floats

    def _layer(self, piece: Piece, reference: FloatRuns, fixed: dict[fx.Node, Any]) -> LayerErrors:
        if piece.end not in self._layers:
            ends = self._ends.get(piece.end, (0.0, 0.0))
            ranges = [RangeFit(rounding, _numbers(rounding.quantize), *ends) for rounding in piece.roundings]
            constants = [*_constant_fits(piece, reference, fixed)]
            self._layers[piece.end] = LayerErrors(piece, ranges=ranges, constants=constants)
        return self._layers[piece.end]

    def _add(
        self, layer: LayerErrors, wanted: Tensor, own: Tensor, quantized: dict[fx.Node, Any], fixed: dict[fx.Node, Any]
    ) -> None:
        piece, run = layer.piece, Run(self._converted)
        for fit in layer.ranges:
            fit.add(wanted, run.rounded(fit.rounding, wanted, fixed))
        behind = _behind(piece)
        rounded = _own_value(run, piece, own, wanted, fixed)
        layer.signal += energy(wanted)
        layer.computing += error_energy(own, wanted)
        layer.own += error_energy(rounded, wanted)
        layer.accumulated += error_energy(quantized[behind], wanted)
        channels = self._channels.setdefault(piece.end, _Channels(channel_axis(piece)))
        channels.add(*map(_finite, (wanted, rounded, quantized[behind], own.double() - wanted.double())))
        channels.give(layer)
        if not len(layer.points):
            layer.points = _points(wanted, quantized[behind])

    def result(self) -> Measured:
        """Returns what was measured."""
        unknown = tuple(
            p.root.name for p in self._pieces if p.constants and p.end in self._layers and p.end not in self._known
        )
        return Measured(tuple(self._layers.values()), self._signal, self._noise, unknown)


def _alike(found: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """Returns the outputs of a q/dq graph if they are those of its float model.

    Raises:
        ModelError: they have other shapes.
    """
    shapes, expected = ([tuple(value.shape) for value in values] for values in (found, wanted))
    if shapes != expected:
        raise ModelError(
            f"The float model returns tensors of shapes {expected} and the q/dq graph {shapes}; pass the model that it "
            "was made of."
        )
    return found


def _behind(piece: Piece) -> fx.Node:
    """Returns the node with a layer's value as most of its readers read it."""
    return piece.roundings[0].back if piece.roundings else piece.end


def _own_value(run: Run, piece: Piece, own: Tensor, wanted: Tensor, fixed: dict[fx.Node, Any]) -> Tensor:
    """Returns what a layer yields on float inputs, behind the rounding that changes it most."""
    if piece.passes_on or not piece.roundings:
        return own
    values = {piece.end: own}
    for rounding in piece.roundings:
        values[rounding.back] = run.rounded(rounding, values[rounding.quantize.all_input_nodes[0]], fixed)
    del values[piece.end]
    return max(values.values(), key=lambda value: error_energy(value, wanted))


def _float_readers(piece: Piece, constants: set[fx.Node]) -> list[str]:
    """Returns the readers of what a layer yields that read it as it is before it is rounded."""
    return [reader.name for reader in piece.end.users if piece.roundings and not rounds_activations(reader, constants)]


def _add_output(layer: LayerErrors, found: Any, wanted: list[Tensor]) -> None:
    if found is not None:
        layer.output = (layer.output or 0.0) + _error(floats_of(found), wanted)


def _numbers(quantize: fx.Node) -> StaticQParams | None:
    found = static_qparams(quantize)
    if found is None and operator_name(quantize) == "quantized_decomposed::quantize_per_tensor":
        read = qparams(quantize)  # torchao writes scales that are buffers
        found = read.static() if read.is_static else None
    return found if found is not None and 0 < found.scale < math.inf else None


def channel_axis(piece: Piece) -> int:
    """Returns the axis of the channels of what a layer yields: the second of images, else the last."""
    name = operator_name(piece.root)
    if name == "aten::linear" or _is_matrix_product(name):
        return -1
    return 1 if "conv" in name or len(sizes_of(piece.end)) == 4 else -1


def _is_matrix_product(name: str) -> bool:
    """Tells whether an operator's second operand holds a column for each channel: mm, addmm, bmm, baddbmm, matmul."""
    return name.endswith("mm") or name == "aten::matmul"


class _Channels:
    """Sums over channels of what one layer yields."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._signal = self._own = self._bias = torch.zeros(1, dtype=torch.float64)
        self._count = 0
        self._ends: list[Tensor] = []

    def add(self, wanted: Tensor, own: Tensor, quantized: Tensor, error: Tensor) -> None:
        """Adds a batch."""
        if wanted.dim() < 2:
            return
        rows = [self._rows(each) for each in (wanted, own, quantized, error)]
        self._count += rows[0].shape[1]
        self._signal = self._signal + rows[0].square().sum(1)
        self._own = self._own + (rows[1] - rows[0]).square().sum(1)
        self._bias = self._bias + rows[3].sum(1)
        ends = [rows[2].amin(1), rows[2].amax(1), rows[0].amin(1), rows[0].amax(1)]
        pick = (torch.minimum, torch.maximum, torch.minimum, torch.maximum)
        self._ends = [f(*pair) for f, *pair in zip(pick, self._ends, ends, strict=True)] if self._ends else ends

    def _rows(self, value: Tensor) -> Tensor:
        return value.detach().double().movedim(self._axis, 0).flatten(1)

    def give(self, layer: LayerErrors) -> None:
        """Writes the sums into a layer."""
        if not self._ends:
            return
        layer.channel_signal, layer.channel_own = self._signal, self._own
        layer.constant = float(self._bias.square().sum()) / self._count
        low, high, float_low, float_high = self._ends
        dead = (low == high) & (float_low < float_high)
        layer.dead = tuple(int(place) for place in dead.nonzero().flatten())


def _points(wanted: Tensor, quantized: Tensor) -> Tensor:
    held = wanted.isfinite() & quantized.isfinite()
    x, y = wanted.detach()[held].float(), quantized.detach()[held].float()
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_POINTS]
    return torch.stack((x[chosen], y[chosen]), 1)


def _constant_fits(piece: Piece, reference: FloatRuns, fixed: dict[fx.Node, Any]) -> Iterable[ConstantFit]:
    for name, node in piece.constants.items():
        wanted, found = reference.operand(piece.root.name, name, operands), fixed.get(node)
        if not isinstance(wanted, Tensor) or not isinstance(found, Tensor) or wanted.shape != found.shape:
            continue
        if wanted.is_floating_point() and wanted.dim():
            yield _constant_fit(piece, name, node, wanted, found, fixed)


def _constant_fit(
    piece: Piece, name: str, node: fx.Node, wanted: Tensor, found: Tensor, fixed: dict[fx.Node, Any]
) -> ConstantFit:
    source = node
    while not is_dequantize(source) and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    given = operands(source) if is_dequantize(source) else {}
    axis = weight_axis(piece, name)
    scale_axis = given.get("axis") if source is node else None
    w, q = _rows(wanted, axis), _rows(found, axis)
    steps = _magnitude(given)
    per_channel = _symmetric(w, w.abs().amax(1, keepdim=True), steps)
    whole = _symmetric(w, w.abs().max(), steps)
    granularity = (range_of(source) or "per tensor") if given else ""
    factors = (w * q).sum(1) / q.square().sum(1).clamp_min(1e-30)
    return ConstantFit(
        operand=name,
        dtype=_name(stored_dtype(source)) if given else "",
        granularity=granularity,
        axis=axis,
        scale_axis=None if scale_axis is None else int(scale_axis) % wanted.dim(),
        noise=(q - w).square().sum(1),
        attainable=whole if granularity == "per tensor" else per_channel,
        by_channel=per_channel,
        energy=w.square().sum(1),
        factors=factors,
        explained=(q * factors[:, None] - w).square().sum(1),
        largest=w.abs().amax(1),
        held=q.abs().amax(1),
        clipped=_clipped(w, q),
        floored=_floored(w, q, fixed.get(given["scales"]) if scale_axis == axis else None),
    )


def _floored(w: Tensor, q: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None or scales.shape != (len(w),):
        return torch.zeros(len(w), dtype=torch.bool)
    scales = scales.detach().double()
    is_nearest = (q - w).abs().amax(1) <= scales / 2 * (1 + STEP_ROUNDING)
    return is_nearest & (scales == scales.min()) & (scales.min() < scales.max())


def weight_axis(piece: Piece, operand: str) -> int:
    """Returns the axis of an operand of a layer's root along which the channels run that the layer yields."""
    name = operator_name(piece.root)
    return 1 if "transpose" in name or (_is_matrix_product(name) and operand != "self") else 0


def _rows(value: Tensor, axis: int) -> Tensor:
    """Returns a row for each channel, in double precision."""
    whole = value.detach().double()
    return whole.movedim(axis, 0).flatten(1) if whole.dim() > 1 else whole[:, None]


def _magnitude(given: dict[str, Any]) -> int:
    highest = given.get("quant_max")
    return int(highest) if isinstance(highest, int) and highest > 0 else 127


def _symmetric(w: Tensor, largest: Tensor, steps: int) -> Tensor:
    scale = largest.clamp_min(1e-30) / steps
    return ((w / scale).round() * scale - w).square().sum(1)


def _clipped(w: Tensor, q: Tensor) -> Tensor:
    """Returns for each channel the share of its numbers that stand at its largest magnitude, and were larger."""
    ends = q.abs().amax(1, keepdim=True)
    return ((q.abs() >= ends) & (w.abs() > 1.02 * ends) & (ends > 0)).double().mean(1)


def _on_grid(x: Tensor, scale: float, low: float, steps: int) -> Tensor:
    zero = round(-low / scale)
    return ((x / scale).round() + zero).clamp(0, steps).sub(zero) * scale


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def energy(value: Tensor) -> float:
    """Returns the sum of squares of the numbers that are finite: what a mask hides is minus infinity."""
    whole = value.detach().double()
    return float(whole[whole.isfinite()].square().sum())


def error_energy(found: Tensor, wanted: Tensor) -> float:
    """Returns the sum of squared differences where a float value is finite; infinite where the other is not."""
    held = wanted.isfinite()
    total = float((found.detach().double() - wanted.detach().double())[held].square().sum())
    return math.inf if math.isnan(total) else total


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return sum(error_energy(one, other) for one, other in zip(found, wanted, strict=True))


def _finite(value: Tensor) -> Tensor:
    return torch.where(value.isfinite(), value, torch.zeros((), dtype=value.dtype))
