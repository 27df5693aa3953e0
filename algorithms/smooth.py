"""SmoothQuant: outliers of activations moved into the weights that read them, where a producer can give the scale.

Before: an exported float graph and batches. After: the same graph, that computes the same, in which what layers read
has channels of more even ranges, so that one scale for the whole tensor fits them; the weights that read it have the
rest.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
arXiv:2211.10438, section 4: s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) for each channel j that layers read (equation
4). Scales go into the parameters of norms, layers and multiplications before them; a multiplication is inserted where
nothing takes them and the user allows it. alpha is searched for each group of layers with common scales, as for a layer
in AWQ (Lin et al., arXiv:2306.00978, section 3.2), by the error of the layers' results where what they read is rounded
to 8 bits by one scale and their weights to 8 bits by one scale for each output channel, or for all. What gains for
layers has to gain for the outputs of the model too, on the later half of the batches, which is held back.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.nn.functional import linear
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.algorithms.channels import Reader, channels_of
from quantplug.algorithms.judge import Judge, Judged
from quantplug.algorithms.multiplying import multiplied, places_of, put
from quantplug.algorithms.results import ByLayer
from quantplug.algorithms.scaling import (
    Group,
    Scales,
    column_ranges,
    columns,
    groups_of,
    numbers_of,
    require_float_graph,
)
from quantplug.algorithms.trial import STEPS, STEPS_OF_WEIGHTS, compared, round_to
from quantplug.core.calibration.node_by_node import Batches, BatchRun, SideBySide
from quantplug.core.calibration.outputs import LEAST_GAIN
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.graph.facts import describe, operands
from quantplug.core.specs.levels import decibels

_ALPHAS = tuple(step / 10 for step in range(11))
# How much of what a layer reads its error is judged by: rows of a linear layer, samples of a convolution.
_ROWS, _SAMPLES = 512, 8


@dataclass(frozen=True)
class SmoothedLayer:
    """A layer that reads smoother values, and how near its group's results are to float with everything in 8 bits.

    Attributes:
        sources: names of the nodes that what it reads comes from, whose parameters were divided by the scales.
        alpha: how much of the outliers moved into weights, from 0 to 1.
        before: decibels without scales, over all layers of the group.
        after: decibels with them.
    """

    sources: tuple[str, ...]
    alpha: float
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Smoothed(ByLayer[SmoothedLayer]):
    """What smoothing did: a mapping from a layer's node name to what became of what it reads.

    Attributes:
        layers: this mapping.
        left: by node name why another layer reads what it read before.
        inserted: by the names of multiplications that were inserted the names of the nodes whose values they multiply.
    """

    inserted: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """What was done, in a sentence."""
        if not self.layers:
            return "No layer reads smoother values" + (f": {next(reversed(self.left.values()))}." if self.left else ".")
        gains = [layer.after - layer.before for layer in self.layers.values() if math.isfinite(layer.after)]
        gain = f", {sum(gains) / len(gains):.1f} dB nearer to float in the mean" if gains else ""
        inserted = f", {len(self.inserted)} multiplications inserted" if self.inserted else ""
        return f"{len(self)} layers read smoother values{gain}{inserted}; {len(self.left)} left as they are."


@dataclass(frozen=True)
class Smooth(Judged):
    """Moves outliers of activations into weights; see `apply`.

    SmoothQuant (Xiao et al., arXiv:2211.10438, section 4): for each channel j that layers read, activations are divided
    by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) and weights multiplied by it. alpha is searched as in AWQ (Lin et
    al., arXiv:2306.00978, section 3.2).

    Attributes:
        alpha: how much of the outliers moves, from 0 (ranges of weights alone are evened out) to 1; None to search it
            for each group of layers, which is left alone where no alpha gains.
        samples: batches are taken until they hold so many samples.
        per_channel: which weights the gain is measured with: True for per-channel scales, False for per-tensor ones;
            None for both, of which none may lose.
        multiply: whether a multiplication may be inserted in front of layers whose producer cannot take the scales. It
            helps only where the quantizer leaves it in float.
        quantizer: the gain of the whole model is measured with what it makes of it, if that needs no calibration,
            instead of with 8 bits. In a recipe it is the model's own.
        before_gptq: whether `GPTQ` comes behind it, and that gain is measured with weights of few bits that a short one
            has rounded, on an eighth of the batches.
        stage: which graph it is for.

    Raises:
        ConfigError: `alpha` is no number from 0 to 1.
    """

    alpha: float | None = None
    samples: int = 128
    per_channel: bool | None = None
    multiply: bool = False
    quantizer: Quantizer | None = None
    before_gptq: bool = False
    stage: ClassVar[str] = "float"

    def __post_init__(self) -> None:
        is_number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if self.alpha is not None and not (is_number and 0 <= self.alpha <= 1):
            raise ConfigError(f"Smooth takes an alpha from 0 to 1, found {self.alpha!r}; leave it out to search it.")

    @torch.inference_mode(False)
    def apply(
        self, model: fx.GraphModule, loader: Iterable[Any], *, inputs: Callable[[Any], Any] | None = None
    ) -> Smoothed:
        """Gives layers, norms and multiplications other parameters, with which the graph computes the same.

        Nothing of the model is changed if an error is raised.

        Args:
            model: an exported float graph, of `torch.export.export(...).module()`; its parameters are replaced.
            loader: batches as for `calibrate`.
            inputs: picks the model's inputs out of a batch, as for `calibrate`.

        Raises:
            ModelError: `model` is no exported graph module, is prepared already, or a scaled number leaves its type.
            CalibrationError: there is no batch, one does not fit the model or has NaN, or a layer is given infinity.
        """
        graph = require_float_graph(model, "Smooth")
        with numbers_of(graph, loader, self.samples, inputs, "Smooth") as batches, torch.no_grad():
            return self._smoothed(graph, batches)

    def _smoothed(self, graph: fx.GraphModule, batches: Batches) -> Smoothed:
        places = places_of(graph) if self.multiply else []
        tried = multiplied(graph, places)
        channels = channels_of(tried)
        scales, found = Scales(tried, groups_of(channels)), Smoothed(left=dict(channels.left))
        if not scales.groups:
            return found
        seen, held_back = batches.halves()
        held_back = held_back or seen
        judge = Judge.of(tried, self.quantizer, self.per_channel, before_gptq=self.before_gptq)
        rounded_on, _ = judge.parts(seen)
        before = judge.tried(scales, rounded_on) if self.alpha is None else None
        total = len(scales.groups) + (0 if before is None else len(held_back))
        with progress_bar(shown=True, total=total, step="Smooth", unit="groups of layers or batches") as advance:
            for index, read in _seen(tried, seen, scales.groups):
                self._smooth(scales, index, read, found)
                advance()
            if before is not None:
                outcome = compared(before, judge.tried(scales, rounded_on), held_back, advance)
                if not outcome.gains:
                    return Smoothed({}, found.left | dict.fromkeys(found.layers, outcome.told()))
        found.inserted.update(put(graph, places, scales.changed()))
        return found

    def _smooth(self, scales: Scales, index: int, seen: list["_Seen"], found: Smoothed) -> None:
        group = scales.groups[index]
        weights = [scales.folded(one.reader.layer).float() for one in seen]
        tried = {alpha: _scale(group, seen, weights, alpha) for alpha in self._alphas()}
        nothing = torch.ones(1 + group.count, dtype=torch.float64)
        before = _error(seen, weights, nothing, per_channel=self.per_channel is not False)
        errors = {
            alpha: _error(seen, weights, scale, per_channel=self.per_channel is not False)
            for alpha, scale in tried.items()
        }
        alpha = min(errors, key=errors.__getitem__)
        names = [one.reader.layer.node.name for one in seen]
        levels = [decibels(1, error) for error in (before, errors[alpha])]
        if self.alpha is None and not errors[alpha] < before * 10 ** (-LEAST_GAIN / 10):
            reason = f"no alpha brings its results from {levels[0]:.1f} dB nearer to float"
            found.left.update(dict.fromkeys(names, reason))
            return
        scales.multiply(index, tried[alpha])
        sources = tuple(source.node.name for source in group.sources)
        found.layers.update(dict.fromkeys(names, SmoothedLayer(sources, alpha, *levels)))

    def _alphas(self) -> tuple[float, ...]:
        return _ALPHAS if self.alpha is None else (self.alpha,)


@dataclass(frozen=True)
class _Seen:
    """What a layer reads on all batches.

    Attributes:
        reader: the layer.
        least: the least value of each channel, or 0, [channels].
        most: the greatest, or 0.
        sample: some of it, float32.
        axis: of the channels.
    """

    reader: Reader
    least: Tensor
    most: Tensor
    sample: Tensor
    axis: int

    def rounded(self, by_channel: Tensor) -> Tensor:
        """Returns the sample divided by scales, rounded to 8 bits of the range on all batches."""
        low, high = (end / by_channel for end in (self.least, self.most))
        shape = [-1 if at == self.axis else 1 for at in range(self.sample.dim())]
        return round_to(self.sample / by_channel.reshape(shape), (high.max() - low.min()) / STEPS)

    def result(self, value: Tensor, weight: Tensor) -> Tensor:
        """Returns what the layer makes of a value, without its bias."""
        layer = self.reader.layer
        if layer.spatial == 0:
            return linear(value, weight)
        given = {name: found for name, found in operands(layer.node).items() if not isinstance(found, fx.Node)}
        target: Any = layer.node.target
        result: Tensor = target(**{**given, "input": value, "weight": layer.as_held(weight), "bias": None})
        return result


def _seen(model: fx.GraphModule, batches: Batches, groups: list[Group]) -> Iterator[tuple[int, list[_Seen]]]:
    """Yields each group with what its layers read, once all of them have read it."""
    runs = batches.runs(partial(BatchRun, model))
    places = {reader.layer.node: (index, reader) for index, group in enumerate(groups) for reader in group.readers}
    found: dict[int, list[_Seen]] = {}
    for node in runs.stops(places):
        index, reader = places[node]
        found.setdefault(index, []).append(_read(reader, runs))
        if len(found[index]) == len(groups[index].readers):
            yield index, found.pop(index)


def _read(reader: Reader, runs: SideBySide) -> _Seen:
    values = [_Ends.of(reader, _rows(reader, run)) for run in runs.visits()]
    least, most = (torch.stack([getattr(each, end) for each in values]) for end in ("least", "most"))
    if not bool((torch.isfinite(least) & torch.isfinite(most)).all()):
        raise CalibrationError(
            f"Smooth found NaN or infinity in what {describe(reader.layer.node)} reads; take the batch out that makes "
            "them."
        )
    sample = _some(reader, runs, [each.shape for each in values])
    return _Seen(reader, least.amin(0).clamp(max=0), most.amax(0).clamp(min=0), sample, _axis(reader, values[0].shape))


@dataclass(frozen=True)
class _Ends:
    """The ends of what a layer reads of one batch, [channels], and its shape."""

    least: Tensor
    most: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, reader: Reader, rows: Tensor) -> "_Ends":
        others = [dim for dim in range(rows.dim()) if dim != _axis(reader, rows.shape)]
        return cls(rows.amin(others), rows.amax(others), rows.shape)


def _rows(reader: Reader, run: BatchRun) -> Tensor:
    value: Tensor = run.env[reader.layer.input].float()
    return value if reader.layer.spatial else value.reshape(-1, value.shape[-1])


def _axis(reader: Reader, shape: torch.Size) -> int:
    return len(shape) - reader.layer.spatial - 1


def _some(reader: Reader, runs: SideBySide, shapes: list[torch.Size]) -> Tensor:
    """Returns rows of all batches, evenly spread over them, or of those with images of the first's size."""
    if not _axis(reader, shapes[0]):
        every = [_rows(reader, run) for run in runs.visits()]
        return every[0]
    counts = [shape[0] if shape[1:] == shapes[0][1:] else 0 for shape in shapes]
    most = _SAMPLES if reader.layer.spatial else _ROWS
    chosen, found, start = torch.linspace(0, sum(counts) - 1, min(most, sum(counts))).long(), [], 0
    for run, count in zip(runs.visits(), counts, strict=True):
        own = chosen[(chosen >= start) & (chosen < start + count)] - start
        if len(own):
            rows = _rows(reader, run)
            found.append(rows[own.to(rows.device)])
        start += count
    return torch.cat(found)


def _scale(group: Group, seen: list[_Seen], weights: list[Tensor], alpha: float) -> Tensor:
    """Returns the scales of a group, [1 + count], around 1 in the mean; 1 for channels of zeros."""
    values = group.largest((one.reader, torch.maximum(-one.least, one.most).cpu()) for one in seen)
    pairs = zip(seen, weights, strict=True)
    read = group.largest((one.reader, column_ranges(one.reader, weight).cpu()) for one, weight in pairs)
    is_live = (values > 0) & (read > 0) & torch.isfinite(read)
    is_live[0] = False
    logs = torch.where(is_live, alpha * values.log2() - (1 - alpha) * read.log2(), 0.0)
    mean = logs.sum() / is_live.sum().clamp(min=1)
    return torch.where(is_live, torch.exp2(logs - mean), 1.0)


def _error(seen: list[_Seen], weights: list[Tensor], scale: Tensor, *, per_channel: bool) -> float:
    """Returns the error of the layers' results in 8 bits, as a share of their energy, in the mean over layers."""
    shares = []
    for one, weight in zip(seen, weights, strict=True):
        by_channel = scale[one.reader.channels].to(weight)
        wanted = one.result(one.sample, weight)
        scaled = weight * columns(one.reader, by_channel, weight)
        rounded = one.result(one.rounded(by_channel), _rounded(scaled, per_channel=per_channel))
        shares.append(float((rounded - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30)))
    return sum(shares) / len(shares)


def _rounded(weight: Tensor, *, per_channel: bool) -> Tensor:
    rows = weight.abs().flatten(1).amax(1)
    rows = rows if per_channel else rows.amax().expand_as(rows)
    return round_to(weight, rows.reshape(-1, *[1] * (weight.dim() - 1)) / STEPS_OF_WEIGHTS)
