"""Rotation: outliers of a residual stream spread over all of its channels, by matrices that weights take.

Before: an exported float graph. After: the same graph with other parameters, that computes the same, in which what
layers read has no channel much larger than the others: each is a mixture of all.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv:2404.00456, section 4, stages 1a and
1b, and Liu et al., "SpinQuant: LLM Quantization with Learned Rotations", arXiv:2405.16406, section 3 (R1 and R2): what
writes a residual stream is multiplied by an orthogonal matrix and what reads it by its inverse, and so are the heads'
values of an attention. Weights of norms go into the layers that read them before. What would have to be computed at run
time (R3 and R4) is not done. Where a layer norm subtracts the mean the matrix leaves vectors of equal numbers
as they are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.algorithms.blocks import Basis, Norm, bases_of
from quantplug.algorithms.changes import Change, Changes, put_changes
from quantplug.algorithms.channels import Reader, Source
from quantplug.algorithms.judge import Judge, Judged
from quantplug.algorithms.layers import Layer
from quantplug.algorithms.orthogonal import rotation
from quantplug.algorithms.results import ByLayer
from quantplug.algorithms.scaling import numbers_of, require_float_graph
from quantplug.algorithms.weights import FEW_BITS
from quantplug.core.calibration.node_by_node import Batches
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import ConfigError
from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.working_copy import over_same_tensors


@dataclass(frozen=True)
class RotatedLayer:
    """A layer that reads channels in another basis.

    Attributes:
        sources: names of the nodes that write what it reads, whose parameters were turned too.
        norms: names of the norms whose weights and biases it took.
        size: how many channels were mixed with each other.
    """

    sources: tuple[str, ...]
    norms: tuple[str, ...]
    size: int


@dataclass(frozen=True, eq=False)
class Rotated(ByLayer[RotatedLayer]):
    """What rotation did: a mapping from a layer's node name to what became of what it reads.

    Attributes:
        layers: this mapping.
        left: by node name why another layer reads what it read before.
    """

    def __str__(self) -> str:
        """What was done, in a sentence."""
        if not self.layers:
            return "No layer was rotated" + (f": {next(reversed(self.left.values()))}." if self.left else ".")
        sizes = ", ".join(str(size) for size in sorted({layer.size for layer in self.layers.values()}, reverse=True))
        return f"{len(self)} layers read rotated channels, in blocks of {sizes}; {len(self.left)} left as they are."


@dataclass(frozen=True)
class Rotate(Judged):
    """Spreads outliers over all channels of residual streams and of attentions' values; see `apply`.

    QuaRot (Ashkboos et al., arXiv:2404.00456, section 4) and SpinQuant (Liu et al., arXiv:2405.16406, R1 and R2 of
    section 3): what writes a stream is multiplied by an orthogonal matrix made of Hadamard's, and what reads it by the
    inverse. The model computes the same.

    Attributes:
        seed: of the signs of the Hadamard matrices.
        samples: batches to measure the gain on are taken until they hold so many samples.
        per_channel: which weights the gain is measured with: True for per-channel scales, False for per-tensor ones;
            None for both, of which none may lose.
        quantizer: the gain is measured with what it makes of the model, if that needs no calibration, instead of with
            8 bits. In a recipe it is the model's own.
        few_bits: whether a model stays as it is if the quantizer, which has to be known then, gives none of its weights
            5 bits or fewer.
        before_gptq: whether `GPTQ` comes behind it, and the gain is measured with weights of few bits that a short one
            has rounded, on a quarter of the batches. Rounded to nearest, SmolLM2 loses by a rotation, and behind
            `GPTQ` it gains.
        stage: which graph it is for.
    """

    seed: int = 0
    samples: int = 128
    per_channel: bool | None = None
    quantizer: Quantizer | None = None
    few_bits: bool = False
    before_gptq: bool = False
    stage: ClassVar[str] = "float"

    @torch.inference_mode(False)
    def apply(
        self,
        model: fx.GraphModule,
        loader: Iterable[Any] | None = None,
        *,
        inputs: Callable[[Any], Any] | None = None,
    ) -> Rotated:
        """Gives layers, embeddings and norms other parameters, with which the graph computes the same.

        Nothing of the model is changed if an error is raised.

        Args:
            model: an exported float graph, of `torch.export.export(...).module()`; its parameters are replaced. A table
                that is the weight of a layer too becomes two.
            loader: batches as for `calibrate`, or None: rotations need no data. With batches they are kept only if the
                outputs come nearer to float with all layers in 8 bits.
            inputs: picks the model's inputs out of a batch, as for `calibrate`.

        Raises:
            ConfigError: `few_bits` is asked for without a quantizer.
            ModelError: `model` is no exported graph module, is prepared already, or a turned number leaves its type.
            CalibrationError: a loader is given and has no batch, one does not fit the model, or has NaN.
        """
        if self.few_bits and self.quantizer is None:
            raise ConfigError("Rotate asks for weights of few bits and knows no quantizer; pass Rotate(quantizer=...).")
        graph = require_float_graph(model, "Rotate")
        with numbers_of(graph, loader, self.samples, inputs, "Rotate") as batches, torch.no_grad():
            return self._rotated(graph, batches)

    def _rotated(self, graph: fx.GraphModule, batches: Batches) -> Rotated:
        bases, left = bases_of(graph)
        found, changes = _layers(bases), _changes(graph, bases, self.seed)
        if not found:
            return Rotated({}, left)
        judge = Judge.of(graph, self.quantizer, self.per_channel, before_gptq=self.before_gptq)
        if self.few_bits and not judge.has_few_bits:
            return Rotated({}, left | dict.fromkeys(found, f"no weight has {FEW_BITS} bits or fewer"))
        if batches:
            turned = over_same_tensors(graph)
            put_changes(turned, changes)
            with progress_bar(shown=True, total=len(judge.parts(batches)[1]), step="Rotate") as advance:
                outcome = judge.outcome(graph, turned, batches, advance)
            if not outcome.gains:
                return Rotated({}, left | dict.fromkeys(found, outcome.told("rotated")))
        put_changes(graph, changes)
        return Rotated(found, left)


def _layers(bases: list[Basis]) -> dict[str, RotatedLayer]:
    found = {}
    for basis in bases:
        sources = tuple(source.node.name for source in basis.sources)
        for reader in basis.readers:
            norms = tuple(norm.node.name for norm in _norms_before(reader, basis))
            found[reader.layer.node.name] = RotatedLayer(sources, norms, basis.size)
    return found


def _norms_before(reader: Reader, basis: Basis) -> list[Norm]:
    read = set(reader.channels.tolist())
    return [norm for norm in basis.norms if not read.isdisjoint(norm.channels[1].tolist())]


def _changes(model: fx.GraphModule, bases: list[Basis], seed: int) -> list[Change]:
    """Returns what becomes of each parameter."""
    changes = _Turned(model)
    matrices = [rotation(basis.size, seed=seed, keeps_mean=basis.keeps_mean) for basis in bases]
    # Readers take weights and biases of norms first: what they add to their own biases is turned with these.
    for basis, matrix in zip(bases, matrices, strict=True):
        for reader in basis.readers:
            changes.read(reader, _norms_before(reader, basis), matrix)
    for basis, matrix in zip(bases, matrices, strict=True):
        for source in basis.sources:
            changes.written(source, matrix)
        for norm in basis.norms:
            changes.given_away(norm)
    return changes.found("Rotated")


class _Turned(Changes):
    """Values of parameters that are being turned."""

    def read(self, reader: Reader, norms: list[Norm], matrix: Tensor) -> None:
        """Turns the columns of a layer, after it took the weights and biases of the norms before it."""
        weight = self.of(reader.layer.weight, reader.layer.node)
        for norm in norms:
            places = torch.isin(reader.channels, norm.channels[1])
            channels = torch.searchsorted(norm.channels[1], reader.channels[places])
            if norm.bias is not None:
                self._take_bias(reader.layer, weight.value[:, places] @ self.held(norm.bias).flatten()[channels])
            if norm.weight is not None:
                factors = self.held(norm.weight).flatten()[channels]
                weight.value[:, places] *= factors.reshape(-1, *[1] * (weight.value.dim() - 2))
        weight.value = _turned(weight.value, 1, reader.channels, matrix)

    def _take_bias(self, layer: Layer, added: Tensor) -> None:
        bias = self.of_bias(layer.node, layer.weight, layer.bias)
        bias.value = bias.value + added

    def written(self, source: Source, matrix: Tensor) -> None:
        """Turns what writes channels: rows of a layer and its bias, or the last dimension of a table."""
        is_table = source.node in source.parameters or operator_name(source.node) == "aten::embedding"
        reader = next(iter(source.node.users)) if source.node in source.parameters else source.node
        changes = [self.of(parameter, reader) for parameter in source.parameters]
        new = self.new_bias(reader, source.parameters[0])
        for change in [*changes, *([] if new is None else [new])]:
            change.value = _turned(change.value, -1 if is_table else 0, source.channels, matrix)

    def given_away(self, norm: Norm) -> None:
        """Leaves a norm a weight of ones and a bias of zeros."""
        for parameter, value in ((norm.weight, 1.0), (norm.bias, 0.0)):
            if parameter is not None:
                change = self.of(parameter, norm.node)
                change.value = torch.full_like(change.value, value)


def _turned(value: Tensor, axis: int, channels: Tensor, matrix: Tensor) -> Tensor:
    """Returns a parameter with its blocks along an axis multiplied by a matrix; channels of number 0 stay."""
    moved = value.movedim(axis, -1).clone()
    places = channels.to(value.device) > 0
    blocks = moved[..., places].reshape(*moved.shape[:-1], -1, len(matrix))
    moved[..., places] = (blocks @ matrix.to(value.device)).flatten(-2)
    return moved.movedim(-1, axis).contiguous()
