"""Bias correction: a calibrated model and batches -> biases for which quantized layers keep their float means.

Rounding weights to few bits shifts the mean of each output channel, and following layers add the shifts
up. Adding the difference of the means to the biases takes the shift away (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.2). A layer is
compared while all layers before it are corrected already, in one pass over the graph: all batches go
through a node before any goes on to the next.

Equal means are no proof of a better model: deep networks of 8 bits and networks of clipped 4-bit weights were seen
to lose decibels on the very batches that gave the means (why is not known). So every other batch is held back, and a
correction (of all layers, of the later half, of the last one) is kept only if the outputs of these batches come closer
to float.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantplug.core.batches import BatchReader, loader_iterator, sample_count
from quantplug.core.compare import sqnr
from quantplug.core.constants import written_buffers
from quantplug.core.convert import convert_pt2e
from quantplug.core.errors import CalibrationError
from quantplug.core.graph import attribute, operands
from quantplug.core.observation import is_derived, is_observer
from quantplug.core.sites import channel_axis, require_prepared

# A gain below this may be chance: moving the end of one range by a few percent changes as much.
LEAST_GAIN = 0.2
SAMPLES = 128


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

    Layers without a bias of their own are left alone. A correction that held-back batches do not confirm is not
    kept. Nothing of the model is changed if an error is raised.

    Args:
        prepared: a model that `calibrate` has run; its biases are replaced.
        loader: batches as for `calibrate`; their activations are in memory together.
        samples: batches are taken until they hold so many samples, but two at least; every other one is held back.
        inputs: picks the model's inputs out of a batch, as for `calibrate`.

    Raises:
        ModelError: `prepared` is not a prepared graph module.
        CalibrationError: it is not calibrated, the loader has fewer than two batches, a batch does not fit the model,
            or `samples` is no positive number.
    """
    model = require_prepared(prepared, "correct_biases")
    batches = _batches(BatchReader(model), loader, samples, inputs)
    biases = _own_biases(model)
    if not biases:
        return BiasCorrection()
    with torch.no_grad():
        expected, wanted = _float_run(model, batches, biases)
        quantized, names = convert_pt2e(model), list(biases)
        tried = [_corrected(quantized, batches, set(names[start:]), expected) for start in _starts(len(names))]
    levels = [_level(outputs, wanted) for _, outputs in tried]
    best = max(range(len(tried)), key=levels.__getitem__)
    if not levels[best] > levels[0] + LEAST_GAIN:
        return BiasCorrection({}, levels[0], levels[0])
    changes = tried[best][0]
    for name, change in changes.items():
        _add(model, biases[name], change)
    return BiasCorrection({n: float(c.abs().max()) for n, c in changes.items()}, levels[0], levels[best])


def _starts(count: int) -> list[int]:
    """Returns from which layer on corrections are tried; the first corrects none."""
    return [count, *sorted({0, count // 2, count - 1})]


def _batches(
    reader: BatchReader, loader: Iterable[Any], samples: int, inputs: Callable[[Any], Any] | None
) -> list[tuple[Any, ...]]:
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise CalibrationError(f"Bias correction takes a number of samples from 1 on, found {samples!r}; leave it out.")
    found: list[tuple[Any, ...]] = []
    seen = 0
    for index, batch in enumerate(loader_iterator(loader)):
        named = reader.arguments(batch if inputs is None else inputs(batch), index)
        found.append(tuple(named.values()))
        seen += sample_count(named)
        if seen >= samples and len(found) > 1:
            break
    if len(found) < 2:
        raise CalibrationError(
            f"No bias can be corrected: half of the batches are held back to confirm it, and the loader yielded "
            f"{len(found) or 'no'} batch; pass two at least."
        )
    return found


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


class _Run(fx.Interpreter):
    """Runs a model without its observers; what it writes into buffers is its own."""

    def __init__(self, model: fx.GraphModule, batch: tuple[Any, ...]) -> None:
        super().__init__(model)
        self.args_iter = iter(batch)
        self.own = {name: attribute(model, name).clone() for name in written_buffers(model.graph)}

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reads a buffer that the model writes from the run's own copy."""
        return self.own[str(target)] if str(target) in self.own else super().get_attr(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes on what reaches an observer."""
        if is_observer(self.fetch_attr(str(target))):
            return args[0]
        return super().call_module(target, args, kwargs)


_Outputs = list[Tensor]


def _float_run(
    model: fx.GraphModule, batches: list[tuple[Any, ...]], wanted: Collection[str]
) -> tuple[dict[str, Tensor], _Outputs]:
    """Returns the channels' means of layers, and the held-back batches' outputs."""
    runs = [_Run(model, batch) for batch in batches]
    expected = {node.name: _mean([run.env[node] for run in runs[::2]], node) for node in _through(runs, wanted)}
    return expected, _outputs(runs[1::2])


def _corrected(
    model: fx.GraphModule, batches: list[tuple[Any, ...]], wanted: Collection[str], expected: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], _Outputs]:
    """Returns the changes that give layers their expected means, and the held-back batches' outputs with them."""
    runs, changes = [_Run(model, batch) for batch in batches], {}
    for node in _through(runs, wanted):
        changes[node.name] = expected[node.name] - _mean([run.env[node] for run in runs[::2]], node)
        for run in runs:
            run.env[node] = run.env[node] + _along_channels(changes[node.name], run.env[node], node)
    return changes, _outputs(runs[1::2])


def _through(runs: list[_Run], wanted: Collection[str]) -> Iterator[fx.Node]:
    """Runs all batches node by node and yields each wanted node once all have run it."""
    for node in runs[0].graph.nodes:
        for run in runs:
            run.env[node] = run.run_node(node)
        if node.name in wanted:
            yield node
        for run in runs:
            for used in run.user_to_last_uses.get(node, []):
                del run.env[used]


def _outputs(runs: list[_Run]) -> _Outputs:
    """Returns the outputs that have an error: tensors of floating point."""
    ends = [run.env[next(reversed(run.graph.nodes))] for run in runs]
    tensors = [found for end in ends for found in pytree.tree_leaves(end) if isinstance(found, Tensor)]
    return [found.double().flatten() for found in tensors if found.is_floating_point()]


def _level(outputs: _Outputs, wanted: _Outputs) -> float:
    """Returns decibels, or minus infinity where nothing can be compared: then no correction is kept."""
    return sqnr(torch.cat(outputs), torch.cat(wanted)) if wanted else -math.inf


def _axis(node: fx.Node, value: Tensor) -> int:
    axis = channel_axis(node)
    assert axis is not None
    return axis % value.dim()


def _mean(values: list[Tensor], node: fx.Node) -> Tensor:
    axis = _axis(node, values[0])
    channels = [value.double().movedim(axis, 0).flatten(1) for value in values]
    return torch.cat(channels, 1).mean(1)


def _along_channels(change: Tensor, value: Tensor, node: fx.Node) -> Tensor:
    return change.to(value.dtype).view(-1, *[1] * (value.dim() - 1 - _axis(node, value)))


def _add(model: fx.GraphModule, name: str, change: Tensor) -> None:
    """Replaces a bias: the tensor itself may be the caller's."""
    before = attribute(model, name)
    owner, _, leaf = name.rpartition(".")
    after = nn.Parameter((before + change).to(before.dtype).detach(), requires_grad=before.requires_grad)
    setattr(model.get_submodule(owner), leaf, after)
