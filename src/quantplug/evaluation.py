"""A metric of the float model, its q/dq graph and its artefact, side by side, with how far the figures can be trusted.

Before: a float model, what was made of it, and labelled data. After: an `Evaluation`. All forms see the same samples,
so that a difference is that of pairs: its interval is that of the paired bootstrap (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993), which is much narrower than those of the two metrics. Shares of hits have
Wilson's score interval (1927), other metrics that of the bootstrap.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from quantplug.core.calibration.batches import BatchReader, loader_iterator, nonfinite_input, picked
from quantplug.core.errors import ArtefactError, CalibrationError, first_line
from quantplug.core.files.typed import typed
from quantplug.core.graph.calling import by_position
from quantplug.core.graph.facts import require_graph_module
from quantplug.core.peers.torch_names import pytree
from quantplug.core.qdq.integer_io import dequantized_outputs, quantized_inputs
from quantplug.core.report.runs import with_float_inputs
from quantplug.flow import Artefact, export
from quantplug.metrics import Score, chosen_metric, scores_of
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.xray.flow import backend_of

RESAMPLES = 1000
_Z = 1.959964  # the normal distribution's two-sided 95 %


@dataclass(frozen=True)
class FormScore:
    """The metric of one form of the model.

    Attributes:
        form: "float", "reference" (the q/dq graph) or "program" (the artefact).
        value: the metric.
        low: lower end of its 95 % interval.
        high: upper end.
        difference: the metric less that of float; 0 for float.
        difference_low: lower end of the 95 % interval of the difference, of pairs.
        difference_high: upper end.
    """

    form: str
    value: float
    low: float
    high: float
    difference: float = 0.0
    difference_low: float = 0.0
    difference_high: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """The metric of a model in its forms.

    Attributes:
        metric: its name.
        samples: how many there are.
        scores: one for each form, float first.
        interval: what kind of interval the values have.
        backend: the name of the backend; "" where there is no artefact.
    """

    metric: str
    samples: int
    scores: tuple[FormScore, ...]
    interval: str
    backend: str = ""

    def score(self, form: str) -> FormScore:
        """Returns the score of a form; KeyError if it was not measured."""
        return {score.form: score for score in self.scores}[form]

    def table(self) -> Table:
        """Returns the scores as a rich table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("model", self.metric, "95 % interval", "less float", "95 % interval of pairs"):
            table.add_column(heading, justify="left" if heading == "model" else "right")
        for s in self.scores:
            pairs = f"{s.difference_low:+.4f} to {s.difference_high:+.4f}" if s.form != "float" else ""
            less = f"{s.difference:+.4f}" if s.form != "float" else ""
            table.add_row(_FORMS[s.form], f"{s.value:.4f}", f"{s.low:.4f} to {s.high:.4f}", less, pairs)
        return table

    def summary(self) -> str:
        """Returns how the intervals were found, in one sentence."""
        return (
            f"{self.samples} samples; intervals of {self.metric}: {self.interval}; of differences: paired bootstrap, "
            f"{RESAMPLES} resamples."
        )

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=120, no_color=True).print(self.table())
        return f"{out.getvalue()}{self.summary()}"

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Evaluation":
        """Returns what `to_json` wrote.

        Raises:
            ArtefactError: the text is none of it.
        """
        try:
            found: Evaluation = typed(json.loads(text), Evaluation, "it")
        except (ValueError, RecursionError) as error:
            raise ArtefactError(
                f"The text is no evaluation ({first_line(error)}); write one with Evaluation.to_json."
            ) from error
        return found


_FORMS = {"float": "float", "reference": "q/dq graph", "program": "artefact"}


@torch.inference_mode(False)
def evaluate(
    model: nn.Module | torch.export.ExportedProgram | fx.GraphModule,
    quantized: Artefact | fx.GraphModule,
    data: Iterable[Any],
    metric: str | Score = "top1",
    *,
    backend: str | BackendQuantizer | None = None,
    inputs: Callable[[Any], Any] | None = None,
    labels: Callable[[Any], Any] | None = None,
) -> Evaluation:
    """Measures a metric of the float model, the q/dq graph and the artefact on the same labelled samples.

    Args:
        model: the float model, as for `quantize`.
        quantized: what `quantize` returned, or a q/dq graph of any quantizer.
        data: batches of samples with labels; the last may be smaller than the model's own batch.
        metric: "top1", "top5", or a function of what the model returns for all samples and of all labels, which returns
            one number for each sample (their mean is the metric) or one number.
        backend: the backend that a q/dq graph is lowered to, by name or as a quantizer of it; None to measure the graph
            alone.
        inputs: picks the model's inputs out of a batch; the first of a pair by default.
        labels: picks the labels; the second of a pair by default.

    Raises:
        ConfigError: there is no such metric or backend, or the metric returns something else.
        CalibrationError: there is no batch, samples and labels differ in number, or something is not finite.
        ModelError: the model cannot be exported, or `quantized` is no q/dq graph.
        LoweringError: the graph cannot be lowered.
    """
    score, name = chosen_metric(metric)
    graph = quantized.reference if isinstance(quantized, Artefact) else quantized
    converted = by_position(require_graph_module(graph, "evaluate"))
    chosen = backend_of(quantized, backend)
    read = _Labelled(model, converted, inputs, labels)
    forms: dict[str, Callable[..., Any]] = {}
    found, wanted = dict[str, list[Any]](), list[Tensor]()
    for place, batch in enumerate(loader_iterator(data)):
        values, marks = read(batch, place)
        forms = forms or _forms(model, quantized, converted, chosen, values)
        for form, run in forms.items():
            found.setdefault(form, []).append(_first(run, values, len(marks)))
        wanted.append(marks)
    if not wanted:
        raise CalibrationError(
            "evaluate takes 1 or more batches, and the data yielded none (a generator can be read only once); pass "
            "more."
        )
    outputs = {form: _joined(parts) for form, parts in found.items()}
    return _evaluation(name, score, outputs, torch.cat(wanted), "" if chosen is None else chosen.name)


class _Labelled:
    """Reads batches: inputs filled up to the model's own batch, and labels."""

    def __init__(
        self,
        model: Any,
        converted: fx.GraphModule,
        inputs: Callable[[Any], Any] | None,
        labels: Callable[[Any], Any] | None,
    ) -> None:
        self._reader = BatchReader(with_float_inputs(model, converted))
        sizes = (size for spec in self._reader.specs.values() for size in spec.shape[:1])
        self._size = next((size for size in sizes if size is not None), None)
        self._inputs, self._labels = inputs or (lambda pair: pair[0]), labels or (lambda pair: pair[1])
        self._takes_pairs = inputs is None or labels is None

    def __call__(self, batch: Any, place: int) -> tuple[tuple[Any, ...], Tensor]:
        """Returns the inputs of a batch by position, and its labels."""
        if self._takes_pairs and not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise CalibrationError(
                f"Batch {place} is a {type(batch).__name__}, and evaluate takes pairs of inputs and labels; pass "
                "inputs= and labels= that pick them."
            )
        labels = torch.as_tensor(picked(batch, self._labels))
        count = len(labels) if labels.dim() else 0
        given = pytree.tree_map_only(
            Tensor, lambda value: _filled(value, self._size, count, place), picked(batch, self._inputs)
        )
        named = self._reader.arguments(given, place)
        wrong = nonfinite_input({**named, "labels": labels})
        if wrong is not None:
            raise CalibrationError(f"'{wrong}' of batch {place} has NaN or infinity; take the batch out.")
        return tuple(named.values()), labels


def _filled(value: Tensor, size: int | None, count: int, place: int) -> Tensor:
    """Returns a tensor with its last sample repeated until it is a whole batch."""
    found = len(value) if value.dim() else 0
    if found != count or not count:
        raise CalibrationError(
            f"Batch {place} holds {found} samples and {count} labels; every sample needs one label, and a "
            "batch 1 sample."
        )
    if size is None or found >= size:
        return value
    return torch.cat((value, value[-1:].expand(size - found, *value.shape[1:])))


def _forms(
    model: Any, quantized: Any, converted: fx.GraphModule, backend: Backend | None, values: tuple[Any, ...]
) -> dict[str, Callable[..., Any]]:
    floats = by_position(export(model, values))
    forms: dict[str, Callable[..., Any]] = {"float": floats, "reference": _on_integers(converted, converted)}
    if isinstance(quantized, Artefact):
        forms["program"] = _on_integers(converted, quantized.program)
    elif backend is not None:
        lowered = backend.lower(converted, quantized_inputs(converted, values))
        forms["program"] = _on_integers(converted, lowered)
    return forms


def _on_integers(converted: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: dequantized_outputs(converted, run(*quantized_inputs(converted, values)))


def _first(run: Callable[..., Any], values: tuple[Any, ...], count: int) -> Any:
    """Returns what a model returns for the samples of a batch, without those that only fill it."""
    with torch.no_grad():
        result = run(*values)
    return pytree.tree_map_only(Tensor, lambda value: value[:count].clone() if value.dim() else value, result)


def _joined(parts: Sequence[Any]) -> Any:
    """Returns what a model returned for all samples, in the structure of one result."""
    leaves = [pytree.tree_leaves(part) for part in parts]
    tensors = [torch.cat(column) if isinstance(column[0], Tensor) and column[0].dim() else column[0]
               for column in zip(*leaves, strict=True)]  # fmt: skip
    return pytree.tree_unflatten(tensors, pytree.tree_structure(parts[0]))


def _evaluation(name: str, score: Score, found: dict[str, Any], labels: Tensor, backend: str) -> Evaluation:
    each = {form: scores_of(name, score, outputs, labels) for form, outputs in found.items()}
    drawn = _resampled(name, score, found, labels, each)
    shares = all(isinstance(s, Tensor) and bool(((s == 0) | (s == 1)).all()) for s in each.values())
    values = {form: _value(scores) for form, scores in each.items()}
    rows = []
    for form, value in values.items():
        low, high = _wilson(value, len(labels)) if shares else _ends(drawn[form])
        apart = _ends(drawn[form] - drawn["float"])
        rows.append(FormScore(form, value, low, high, value - values["float"], *apart))
    kind = "Wilson score interval" if shares else f"bootstrap, {RESAMPLES} resamples"
    return Evaluation(name, len(labels), tuple(rows), kind, backend)


def _value(scores: Tensor | float) -> float:
    return float(scores.mean()) if isinstance(scores, Tensor) else scores


def _resampled(
    name: str, score: Score, found: dict[str, Any], labels: Tensor, each: dict[str, Tensor | float]
) -> dict[str, Tensor]:
    """Returns by form the metric of samples that are drawn with replacement, the same ones for all forms."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, list[float]] = {form: [] for form in found}
    for _ in range(RESAMPLES):
        chosen = torch.randint(len(labels), (len(labels),), generator=generator)
        for form, scores in each.items():
            part = (
                scores[chosen] if isinstance(scores, Tensor) else _part_score(name, score, found[form], labels, chosen)
            )
            drawn[form].append(_value(part))
    return {form: torch.tensor(values, dtype=torch.float64) for form, values in drawn.items()}


def _part_score(name: str, score: Score, outputs: Any, labels: Tensor, chosen: Tensor) -> Tensor | float:
    part = pytree.tree_map_only(Tensor, lambda value: value[chosen] if value.dim() else value, outputs)
    return scores_of(name, score, part, labels[chosen])


def _ends(drawn: Tensor) -> tuple[float, float]:
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=drawn.dtype)).tolist()
    return float(low), float(high)


def _wilson(share: float, count: int) -> tuple[float, float]:
    middle = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)
