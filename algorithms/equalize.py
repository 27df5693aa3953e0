"""Cross-layer equalization: channels scaled so that the weights on both sides of them have the same ranges.

Before: an exported float graph. After: the same graph, that computes the same, in which no channel of a layer has a
much larger weight than the others, so that one scale for a whole weight fits all of them.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.1:
s = sqrt(r1 r2) / r2 for the ranges r1 of a channel's rows and r2 of its columns (equation 11), repeated over chains of
layers until nothing changes. Where a batch norm stands behind a layer the range is that of the folded weight. Biases
are absorbed (section 4.2) if the user asks for it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.algorithms.absorb import absorbed
from quantplug.algorithms.changes import Change, put_changes, put_parameters
from quantplug.algorithms.channels import Source, channels_of
from quantplug.algorithms.judge import Judge, Judged
from quantplug.algorithms.layers import Layer, layer_of
from quantplug.algorithms.results import ByLayer
from quantplug.algorithms.scaling import (
    Group,
    Scales,
    column_ranges,
    groups_of,
    is_batch_norm,
    numbers_of,
    require_float_graph,
)
from quantplug.algorithms.trial import compared
from quantplug.core.calibration.node_by_node import Batches
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.graph.facts import operands
from quantplug.core.graph.working_copy import over_same_tensors

# Chains of layers need a few rounds to even out; a change below this is no gain.
_ROUNDS, _LEAST_CHANGE = 20, 0.01


@dataclass(frozen=True)
class EqualizedLayer:
    """A layer whose weight's columns were scaled.

    Attributes:
        sources: names of the nodes that what it reads comes from, whose parameters were divided by the scales.
        least: the least of its scales.
        most: the greatest.
    """

    sources: tuple[str, ...]
    least: float
    most: float


@dataclass(frozen=True, eq=False)
class Equalized(ByLayer[EqualizedLayer]):
    """What equalization did: a mapping from a layer's node name to the scales of what it reads.

    Attributes:
        layers: this mapping.
        left: by node name why the columns of another layer's weight keep their scale.
        absorbed: by the name of what gave its bias to the layers behind it by how much at most.
    """

    absorbed: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """What was done, in a sentence."""
        biases = f"; {len(self.absorbed)} biases absorbed" if self.absorbed else ""
        if not self.layers:
            why = f": {next(reversed(self.left.values()))}" if self.left else ""
            return f"No layer was equalized{why}{biases}."
        widest = max(max(layer.most, 1 / layer.least) for layer in self.layers.values())
        return f"{len(self)} layers equalized, by scales up to {widest:.3g}; {len(self.left)} left as they are{biases}."


@dataclass(frozen=True)
class Equalize(Judged):
    """Evens out the ranges of weights, channel by channel, over layers that follow each other; see `apply`.

    Cross-layer equalization (Nagel et al., arXiv:1906.04721, section 4.1): a channel of a producer is divided by a
    number, and the columns of the layers that read it are multiplied by that. The model computes the same.

    Attributes:
        per_channel: which weights the gain is measured with: True for per-channel scales, False for per-tensor ones;
            None for both, of which none may lose.
        samples: batches to measure the gain on are taken until they hold so many samples.
        absorb: which parts of biases move into the layers behind (section 4.2 of the paper), if the outputs gain: None
            for none. "exact" for those that nothing clips on the way. "seen" for those besides whose channels stay
            far above a relu's 0 on all batches; for inputs beyond these the model computes something else.
        quantizer: the gain is measured with what it makes of the model, if that needs no calibration, instead of with
            8 bits. In a recipe it is the model's own.
        before_gptq: whether `GPTQ` comes behind it, and the gain is measured with weights of few bits that a short one
            has rounded, on a quarter of the batches.
        stage: which graph it is for.

    Raises:
        ConfigError: `absorb` is something else.
    """

    per_channel: bool | None = None
    samples: int = 32
    absorb: Literal["exact", "seen"] | None = None
    quantizer: Quantizer | None = None
    before_gptq: bool = False
    stage: ClassVar[str] = "float"

    def __post_init__(self) -> None:
        if self.absorb not in (None, "exact", "seen"):
            raise ConfigError(
                f"Equalize absorbs biases 'exact' or 'seen', found {self.absorb!r}; leave it out for none."
            )

    @torch.inference_mode(False)
    def apply(
        self,
        model: fx.GraphModule,
        loader: Iterable[Any] | None = None,
        *,
        inputs: Callable[[Any], Any] | None = None,
    ) -> Equalized:
        """Gives layers and batch norms other parameters, with which the graph computes the same.

        Nothing of the model is changed if an error is raised.

        Args:
            model: an exported float graph, of `torch.export.export(...).module()`; its parameters are replaced.
            loader: batches as for `calibrate`, or None: scales need no data. With batches they are kept only if the
                outputs come nearer to float with all layers in 8 bits, or as the quantizer has them.
            inputs: picks the model's inputs out of a batch, as for `calibrate`.

        Raises:
            ModelError: `model` is no exported graph module, is prepared already, or a scaled number leaves its type.
            CalibrationError: biases are to be absorbed without a loader; a loader has no batch, one does not
                fit the model, or has NaN.
        """
        graph = require_float_graph(model, "Equalize")
        if loader is None and self.absorb is not None:
            raise CalibrationError("Equalize moves biases by what batches show, and got no loader; pass one.")
        with numbers_of(graph, loader, self.samples, inputs, "Equalize") as batches, torch.no_grad():
            return self._equalized(graph, batches)

    def _equalized(self, graph: fx.GraphModule, batches: Batches) -> Equalized:
        passes = len(batches) * (1 if self.absorb is None else 2)
        with progress_bar(shown=passes > 0, total=passes, step="Equalize") as advance:
            found, changed = self._scaled(graph, batches, advance)
            biases = [] if self.absorb is None else self._absorbed(graph, changed, batches, found, advance)
        put_parameters(graph, changed)
        put_changes(graph, biases)
        return found

    def _scaled(
        self, graph: fx.GraphModule, batches: Batches, advance: Callable[[], None]
    ) -> tuple[Equalized, dict[str, Tensor]]:
        """Returns what there is to say of scales, and the parameters with those that gain."""
        channels = channels_of(graph)
        groups, left = _with_ranges(groups_of(channels))
        if not groups:
            return Equalized({}, channels.left | left), {}
        scales, judge = Scales(graph, groups), self._judge(graph)
        seen, others = judge.parts(batches)
        before = judge.tried(scales, seen) if batches else None
        _even_out(scales)
        found, left = _layers(scales), channels.left | left
        if before is not None:
            outcome = compared(before, judge.tried(scales, seen), others, advance)
            if not outcome.gains:
                return Equalized({}, left | dict.fromkeys(found, outcome.told())), {}
        return Equalized(found, left), scales.changed()

    def _absorbed(
        self,
        graph: fx.GraphModule,
        changed: dict[str, Tensor],
        batches: Batches,
        found: Equalized,
        advance: Callable[[], None],
    ) -> list[Change]:
        """Returns the biases to change after the scales, none where the outputs do not gain."""
        scaled, moved = over_same_tensors(graph), over_same_tensors(graph)
        put_parameters(scaled, changed)
        put_parameters(moved, changed)
        changes, told_of = absorbed(scaled, batches, behind_relu=self.absorb == "seen")
        if not told_of:
            return []
        put_changes(moved, changes)
        if not self._judge(scaled).outcome(scaled, moved, batches, advance).gains:
            return []
        found.absorbed.update(told_of)
        return changes

    def _judge(self, graph: fx.GraphModule) -> Judge:
        return Judge.of(graph, self.quantizer, self.per_channel, before_gptq=self.before_gptq)


def _with_ranges(groups: list[Group]) -> tuple[list[Group], dict[str, str]]:
    """Returns the groups whose producers have a range, and why the readers of the others are left."""
    found, left = [], dict[str, str]()
    for group in groups:
        without = next((source.node.name for source in group.sources if _weighted(source) is None), None)
        if without is None:
            found.append(group)
        else:
            left |= dict.fromkeys(
                (reader.layer.node.name for reader in group.readers), f"what it reads comes from '{without}', no layer"
            )
    return found, left


def _weighted(source: Source) -> Layer | None:
    """Returns the layer that produces a channel, which a batch norm may stand behind."""
    return layer_of(operands(source.node)["input"] if is_batch_norm(source.node) else source.node)


def _even_out(scales: Scales) -> None:
    for _ in range(_ROUNDS):
        changes = [0.0]
        for index, group in enumerate(scales.groups):
            before = scales.by_group[index]
            scales.multiply(index, _step(scales, group))
            changes.append(float((scales.by_group[index] / before).log().abs().max()))
        if max(changes) < _LEAST_CHANGE:
            return


def _step(scales: Scales, group: Group) -> Tensor:
    """Returns by what to multiply the scales of a group now, [1 + count]."""
    rows = group.largest((source, _row_ranges(scales, source)) for source in group.sources)
    read = group.largest((reader, column_ranges(reader, scales.folded(reader.layer))) for reader in group.readers)
    step = (rows / read).sqrt()
    return torch.where((rows > 0) & (read > 0) & torch.isfinite(step), step, 1.0)


def _row_ranges(scales: Scales, source: Source) -> Tensor:
    """Returns the largest magnitude of a producer's weight by channel, with its batch norm folded into it."""
    layer = _weighted(source)
    assert layer is not None
    rows, slope = layer.by_rows(scales.value(layer.weight)).abs().flatten(1).amax(1), scales.slope(source.node)
    return rows if slope is None else rows * slope.abs()


def _layers(scales: Scales) -> dict[str, EqualizedLayer]:
    found = {}
    for group, scale in zip(scales.groups, scales.by_group, strict=True):
        for reader in group.readers:
            own = scale[reader.channels]
            sources = tuple(source.node.name for source in group.sources)
            found[reader.layer.node.name] = EqualizedLayer(sources, float(own.min()), float(own.max()))
    return found
