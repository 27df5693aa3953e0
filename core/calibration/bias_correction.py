"""Bias correction: a calibrated model and batches -> biases for which quantized layers keep their float means.

Rounding weights to few bits shifts the mean of each output channel, and following layers add the shifts
up. Adding the difference of the means to the biases takes the shift away (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.2). A layer is
compared while all layers before it are corrected already, in one pass over the graph.

A layer whose result goes into a residual sum is compared at the sum. Compared by itself it leaves the shift that the
other operand brings, which every block hands on to the next: a ResNet32 of 8 bits then lost 1.8 dB on the very batches
that gave the means (compared at the sums it gains 0.1), one with 4-bit weights 2.0 (it gains 1.5).

Equal means are still no proof of a better model: clipped weights of 4 bits shrink their layers' results, and biases
for the means of those lose up to 3 dB. So the later half of the batches is held back, and a correction (of all layers,
of the later half of them, of the last one) is kept only if the outputs of these batches come closer to float, by more
than their samples differ: three samples confirm a loss of half a decibel as readily as a gain.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from quantplug.core.calibration.node_by_node import Batches, BatchRun, FloatRun, SideBySide, batches_of, move_parameter
from quantplug.core.calibration.observer_places import channel_axis, require_observers
from quantplug.core.calibration.outputs import OutputNoise, by_sample
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.graph.facts import attribute, is_observer, operands, tensor_value
from quantplug.core.graph.operators import operator_overloads
from quantplug.core.observers.from_specs import is_derived
from quantplug.core.pt2e.convert import convert_pt2e

SAMPLES = 128
_ADDS = operator_overloads("add.Tensor") | operator_overloads("add_.Tensor")


@dataclass(frozen=True, eq=False)
class BiasCorrection(Mapping[str, float]):
    """What a correction did: a mapping from each corrected layer's node name to its bias's largest change.

    Attributes:
        changes: this mapping; empty if no correction was confirmed.
        before: decibels of the outputs of held-back batches against float, without the correction.
        after: the same with it.
    """

    changes: dict[str, float] = field(default_factory=dict)
    before: float = math.nan
    after: float = math.nan

    def __getitem__(self, name: str) -> float:
        return self.changes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        """What was done, in a sentence."""
        if math.isnan(self.before):
            return "No layer has a bias of its own to correct."
        if not self.changes:
            return f"No bias was corrected: held-back batches keep {self.before:.1f} dB, and no correction gains more."
        return f"{len(self)} biases corrected: held-back batches keep {self.after:.1f} dB instead of {self.before:.1f}."


def correct_biases(
    prepared: fx.GraphModule,
    loader: Iterable[Any],
    samples: int = SAMPLES,
    *,
    inputs: Callable[[Any], Any] | None = None,
) -> BiasCorrection:
    """Gives a calibrated model's convolutions and linears biases that undo the mean error of quantization.

    The float and the quantized graph run side by side, and each layer's bias takes the difference of the means of its
    results, channel by channel (Nagel et al., arXiv:1906.04721, section 4.2).

    Layers without a bias of their own are left alone. A correction that held-back batches do not confirm is not
    kept. Nothing of the model is changed if an error is raised.

    Args:
        prepared: a model that `calibrate` has run; its biases are replaced.
        loader: batches as for `calibrate`.
        samples: batches are taken until they hold so many samples, but two at least; the later half is held back.
        inputs: picks the model's inputs out of a batch, as for `calibrate`.

    Raises:
        ModelError: `prepared` is not a prepared graph module, or is prepared for training.
        CalibrationError: it is not calibrated, the loader has fewer than two batches, a batch does not fit the model,
            or `samples` is no positive number.
    """
    model = require_observers(prepared, "correct_biases")
    step = "Bias correction, which holds half of them back,"
    with batches_of(model, loader, samples, inputs, least=2, step=step) as batches, torch.no_grad():
        biases = _own_biases(model)
        return _corrected(model, biases, batches) if biases else BiasCorrection()


def _corrected(model: fx.GraphModule, biases: Mapping[str, str], batches: Batches) -> BiasCorrection:
    sums, names, quantized = _sums(model, biases), list(biases), convert_pt2e(model)
    seen, held_back = batches.halves()
    wanted, starts = held_back.runs(partial(FloatRun, model)), _starts(len(names))
    changes, tried = [], []
    with progress_bar(shown=True, total=1 + len(starts), step="correct biases", unit="passes") as advance:
        expected = _means(model, seen, {sums.get(name, name): name for name in names})
        for start in starts:
            advance()
            changes.append(_changes(quantized, seen, names[start:], sums, expected))
            tried.append(_tried(quantized, held_back, wanted, changes[-1]))
        advance()
    best = max(range(len(tried)), key=lambda place: tried[place].decibels)
    before, after = tried[0], tried[best]
    if not after.is_less_than(before):
        return BiasCorrection({}, before.decibels, before.decibels)
    for name, change in changes[best].items():
        _add(model, biases[name], change)
    found = {name: float(change.abs().max()) for name, change in changes[best].items()}
    return BiasCorrection(found, before.decibels, after.decibels)


def _starts(count: int) -> list[int]:
    """Returns from which layer on corrections are tried; the first corrects none."""
    return [count, *sorted({0, count // 2, count - 1})]


def _own_biases(model: fx.GraphModule) -> dict[str, str]:
    """Returns {layer's node name: its bias's name} of biases that nothing else reads and no observer looks at."""
    readers = Counter(str(node.target) for node in model.graph.nodes if node.op == "get_attr" for _ in node.users)
    found = {}
    for node in model.graph.nodes:
        bias = operands(node).get("bias") if node.op == "call_function" and channel_axis(node) is not None else None
        if isinstance(bias, fx.Node) and bias.op == "call_module":
            observer = model.get_submodule(str(bias.target))
            bias = bias.args[0] if is_derived(observer) else None
        if isinstance(bias, fx.Node) and bias.op == "get_attr" and readers[str(bias.target)] == 1:
            found[node.name] = str(bias.target)
    return found


def _sums(model: fx.GraphModule, layers: Iterable[str]) -> dict[str, str]:
    """Returns {layer: sum} of layers whose results only go into a sum with something else; of two layers the later."""
    nodes = {node.name: node for node in model.graph.nodes}
    found = {total.name: name for name in layers if (total := _sum(model, nodes[name])) is not None}
    return {name: total for total, name in found.items()}


def _sum(model: fx.GraphModule, layer: fx.Node) -> fx.Node | None:
    node = layer
    while len(node.users) == 1:
        (node,) = node.users
        if node.op == "call_module" and is_observer(model.get_submodule(str(node.target))):
            continue
        first, second = (
            (operands(node).get(name) for name in ("self", "other")) if node.target in _ADDS else (None, None)
        )
        values = [tensor_value(each) for each in (layer, node)]
        is_sum = isinstance(first, fx.Node) and isinstance(second, fx.Node) and operands(node)["alpha"] == 1
        known = values[0] is not None and values[1] is not None and values[0].shape == values[1].shape
        return node if is_sum and known and first is not second else None
    return None


def _means(model: fx.GraphModule, batches: Batches, places: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the channels' means in the float model at {place: layer}."""
    runs, axes = batches.runs(partial(FloatRun, model)), _axes(model, places)
    return {node.name: _mean(runs, node, axes[node.name]) for node in runs.behind(_named(model, places))}


def _named(model: fx.GraphModule, names: Collection[str]) -> list[fx.Node]:
    return [node for node in model.graph.nodes if node.name in names]


def _changes(
    model: fx.GraphModule,
    batches: Batches,
    layers: Iterable[str],
    sums: Mapping[str, str],
    expected: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Returns by layer the changes that give it, or the sum that it goes into, the expected means."""
    places = {sums.get(name, name): name for name in layers}
    runs, axes, changes = batches.runs(partial(BatchRun, model)), _axes(model, places), dict[str, Tensor]()
    for node in runs.behind(_named(model, places)):
        axis = axes[node.name]
        change = expected[node.name] - _mean(runs, node, axis)
        changes[places[node.name]] = change
        for run in runs.visits():
            run.env[node] = run.env[node] + _along_channels(change, run.env[node], axis)
    return changes


def _tried(model: fx.GraphModule, batches: Batches, wanted: SideBySide, changes: Mapping[str, Tensor]) -> OutputNoise:
    """Returns what a model with changed biases makes of held-back batches."""
    axes, noise = _axes(model, {name: name for name in changes}), OutputNoise()
    runs = batches.runs(lambda batch: _ChangedRun(model, batch, changes, axes))
    for run, floats in zip(runs.visits(), wanted.visits(), strict=True):
        noise.add(by_sample(run.result()), by_sample(floats.result()))
    return noise


class _ChangedRun(BatchRun):
    """Runs a model with changes added to results of layers, along their axes of channels."""

    def __init__(
        self, model: fx.GraphModule, batch: tuple[Any, ...], changes: Mapping[str, Tensor], axes: Mapping[str, int]
    ) -> None:
        super().__init__(model, batch)
        self._changes, self._axes = changes, axes

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, and adds what its layer is changed by."""
        found = super().run_node(n)
        change = self._changes.get(n.name)
        return found if change is None else found + _along_channels(change, found, self._axes[n.name])


def _axes(model: fx.GraphModule, places: Mapping[str, str]) -> dict[str, int]:
    """Returns the axis of output channels at {place: layer}."""
    found = {node.name: channel_axis(node) for node in model.graph.nodes if node.name in set(places.values())}
    axes = {place: found[name] for place, name in places.items()}
    return {place: axis for place, axis in axes.items() if axis is not None}


def _mean(runs: SideBySide, node: fx.Node, axis: int) -> Tensor:
    """Returns the means of a node's channels over all batches."""
    total, count = torch.zeros(()), 0
    for run in runs.visits():
        channels = run.env[node].double().movedim(axis, 0).flatten(1)
        total, count = total + channels.sum(1), count + channels.shape[1]
    return total / count


def _along_channels(change: Tensor, value: Tensor, axis: int) -> Tensor:
    return change.to(value.dtype).view(-1, *[1] * (value.dim() - 1 - axis % value.dim()))


def _add(model: fx.GraphModule, name: str, change: Tensor) -> None:
    """Replaces a bias: the tensor itself may be the caller's."""
    before = attribute(model, name)
    move_parameter(model, [name], (before + change).to(before.dtype))
