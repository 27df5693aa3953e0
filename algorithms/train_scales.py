"""Scales that are trained: integers of few bits stay, and what they are multiplied by is fitted to the model's outputs.

Before: a prepared, calibrated graph, best with weights that `GPTQ` has rounded, and batches. After: the same graph
with other scales of its weights, biases and norms, with which the outputs are nearer to those of the float model.

Chen et al., "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models", arXiv:2407.11062, section
3.3, who train the scales end to end by the labels. Here the float model teaches (Hinton et al., arXiv:1503.02531): the
loss is the divergence of the outputs' softmax and the squared error of the outputs, each as a share of what it was. The
divergence tells which of a language model's 50,000 logits count; alone it fits the batches that it sees, and the
squared error, which asks for all of them, holds it back.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from quantplug.algorithms.kept import Kept, fingerprint
from quantplug.algorithms.trainable import Trainable
from quantplug.algorithms.weights import FEW_BITS, Weight, keep, weights_of
from quantplug.core.calibration.node_by_node import Batches, FloatRun, batches_of, move_parameter
from quantplug.core.calibration.observer_places import require_observers
from quantplug.core.calibration.outputs import floats_of, is_no_chance, rows_of
from quantplug.core.calibration.parking import Parked, Parking
from quantplug.core.calibration.processes import joined, telling
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError, first_line
from quantplug.core.peers.glibc import give_back
from quantplug.core.specs.levels import decibels

# Of eight batches one is held back.
_HELD_BACK = 8
# The rate grows over so many steps.
_WARM = 8
# As in the paper's code: of noisy gradients, a mean over the last twenty squares.
_BETAS = (0.9, 0.95)
# Numbers of an output whose losses are computed at once.
_PART = 2**20
# Bytes of float outputs that wait in memory: each is read once a pass, which takes seconds.
_WAITING = 2**25
# What the loss has to fall by, and what the squared error may grow by: 0.2 and 0.1 decibels.
_LEAST_GAIN, _MOST_LOSS = 10**-0.02, 10**0.01


@dataclass(frozen=True)
class Distance:
    """How far outputs are from those of the float model.

    Attributes:
        decibels: signal to quantization noise ratio.
        divergence: Kullback-Leibler divergence of the softmax over the last dimension, in nats, in the mean.
    """

    decibels: float
    divergence: float


@dataclass(frozen=True)
class TrainedScales:
    """What training did.

    Attributes:
        scales: by the node name of each layer how many scales its weight has; empty if nothing was kept.
        vectors: names of the biases and of the weights of norms that were trained too.
        before: how far outputs of held-back batches were from float, None where nothing was trained.
        after: how far they are now.
        left: by node name why the scales of another layer are as they were.
    """

    scales: dict[str, int] = field(default_factory=dict)
    vectors: tuple[str, ...] = ()
    before: Distance | None = None
    after: Distance | None = None
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """What was done, in a sentence."""
        if self.before is None or self.after is None:
            return "No scale was trained" + (f": {next(iter(self.left.values()))}." if self.left else ".")
        if not self.scales:
            return f"No trained scale was kept: held-back batches keep {self.before.decibels:.1f} dB, and gain no more."
        return (
            f"Scales of {len(self.scales)} layers and {len(self.vectors)} biases and norms trained: held-back batches "
            f"keep {self.after.decibels:.1f} dB instead of {self.before.decibels:.1f}, and a divergence of "
            f"{self.after.divergence:.3g} instead of {self.before.divergence:.3g}."
        )


@dataclass(frozen=True)
class TrainScales:
    """Trains scales of weights of few bits, biases and norms, for the outputs of the whole model; see `apply`.

    As EfficientQAT trains scales end to end (Chen et al., arXiv:2407.11062, section 3.3), with the float model as the
    teacher instead of labels (Hinton et al., arXiv:1503.02531).

    Attributes:
        samples: batches are taken until they hold so many samples, but two at least; one of eight is held back.
        epochs: how often each batch that is not held back is taken, for one step of the optimizer; few large batches
            want more.
        rate: the learning rate, as a share of each number.
        checkpoint: file to keep what is trained in, from which a run that was killed goes on with the same bits.
            Removed at the end.
        resume: takes up an existing checkpoint; model, batches and options must be the same.
        stage: which graph it is for.

    Raises:
        ConfigError: `epochs` or `rate` is no positive number.
    """

    samples: int = 128
    epochs: int = 2
    rate: float = 6e-4
    checkpoint: str | Path | None = None
    resume: bool = True
    stage: ClassVar[str] = "rounded"

    def __post_init__(self) -> None:
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise ConfigError(f"TrainScales takes a number of epochs from 1 on, found {self.epochs!r}; leave it out.")
        if not isinstance(self.rate, int | float) or not 0 < self.rate < 1:
            raise ConfigError(
                f"TrainScales takes a rate between 0 and 1, found {self.rate!r}; leave it out for 0.0006."
            )

    @torch.inference_mode(False)
    def apply(
        self, prepared: fx.GraphModule, loader: Iterable[Any], *, inputs: Callable[[Any], Any] | None = None
    ) -> TrainedScales:
        """Gives weights other scales, and layers and norms other biases and weights; no integer changes.

        Weights of more than 5 bits are left alone, whose scales gain nothing. The others' observers keep their scales
        from now on. What held-back batches do not confirm is not kept. Nothing of the model is changed if an error is
        raised.

        Args:
            prepared: a calibrated model, of any quantizer, from our prepare or torchao's.
            loader: batches as for `calibrate`.
            inputs: picks the model's inputs out of a batch, as for `calibrate`.

        Raises:
            ModelError: `prepared` is not a prepared graph module, or is prepared for training.
            CalibrationError: there are fewer than two batches, one does not fit the model, the outputs are not finite,
                an operator has no gradient, another process failed, or the checkpoint is of another model, data or
                options.
            ArtefactError: the checkpoint cannot be read or written.
        """
        model = require_observers(prepared, "TrainScales")
        step = "TrainScales, which holds some of them back,"
        with batches_of(model, loader, self.samples, inputs, least=2, step=step) as batches:
            weights, left = _without(*weights_of(model), _objection)
            if not weights:
                return TrainedScales(left=left)
            trainable = Trainable(model, weights)
            del weights  # so that none is there any more when its successor is
            give_back()
            with Parking(_WAITING) as parking, torch.enable_grad():
                data = _Data(model, batches, parking)
                if not data.has_numbers:
                    reason = "the model returns no floats"
                    return TrainedScales(left=_without(trainable.weights, left, lambda _: reason)[1])
                with joined() as ranks, telling(ranks):
                    kept = Kept(self.checkpoint, lambda: fingerprint(self, model, trainable.weights, batches), ranks)
                    found = self._trained(model, trainable, data, kept, left)
                kept.remove()
                return found

    def _trained(
        self, model: fx.GraphModule, trainable: Trainable, data: "_Data", kept: Kept, left: dict[str, str]
    ) -> TrainedScales:
        held_back = data.held_back
        total = self.epochs * data.seen + 2 * len(held_back)
        with progress_bar(shown=True, total=total, step="TrainScales", unit="batches") as advance:
            before = _Measured(trainable, data, advance)
            self._train(trainable, data, before, kept, advance)
            after = _Measured(trainable, data, advance)
        if not after.is_better_than(before):
            return TrainedScales({}, (), before.distance, before.distance, left)
        scales = {layer.node.name: each.scale.numel() for each in trainable.scaled for layer in each.weight.layers}
        for vector in trainable.vectors:
            move_parameter(model, vector.paths, vector.value().detach())
        for each in trainable.taken():
            keep(model, each.weight, each.rescaled(), each.scale)
        model.recompile()
        vectors = tuple(vector.paths[0] for vector in trainable.vectors)
        return TrainedScales(scales, vectors, before.distance, after.distance, left)

    def _train(
        self,
        trainable: Trainable,
        data: "_Data",
        before: "_Measured",
        kept: Kept,
        advance: Callable[[], None],
    ) -> None:
        optimizer = torch.optim.Adam(trainable.parameters(), lr=self.rate, betas=_BETAS)
        generator = torch.Generator().manual_seed(0)
        order = [place for _ in range(self.epochs) for place in torch.randperm(data.seen, generator=generator).tolist()]
        done = _taken_up(optimizer, kept, resume=self.resume)
        for step, place in enumerate(order):
            if step >= done:
                loss = before.loss(data.losses(trainable, place).mean(0))
                optimizer.zero_grad()
                _backward(loss)
                optimizer.param_groups[0]["lr"] = self.rate * _share(step, len(order))
                optimizer.step()
                kept.write(partial(_content, optimizer, step + 1))
            advance()


def _content(optimizer: torch.optim.Optimizer, done: int) -> dict[str, Any]:
    """Returns what a run that is killed goes on from."""
    (group,) = optimizer.param_groups
    return {"steps": done, "trained": [each.detach() for each in group["params"]], "optimizer": optimizer.state_dict()}


def _taken_up(optimizer: torch.optim.Optimizer, kept: Kept, *, resume: bool) -> int:
    """Goes on from what another run has left, and returns how many steps it made."""
    content = kept.content(resume=resume)
    if content is None:
        return 0
    (group,) = optimizer.param_groups
    try:
        with torch.no_grad():
            for each, value in zip(group["params"], content["trained"], strict=True):
                each.copy_(value)
        optimizer.load_state_dict(content["optimizer"])
        return int(content["steps"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArtefactError(
            f"'{kept.name}' is no checkpoint of TrainScales ({type(error).__name__}); delete it."
        ) from error


def _share(step: int, steps: int) -> float:
    """Returns which share of the rate a step has: all after a few, falling to none with the cosine."""
    return min((step + 1) / _WARM, (1 + math.cos(math.pi * step / steps)) / 2)


def _without(
    weights: list[Weight], left: dict[str, str], objection: Callable[[Weight], str | None]
) -> tuple[list[Weight], dict[str, str]]:
    """Returns the weights that nothing is said against, and by operator why others are left."""
    reasons = [(weight, objection(weight)) for weight in weights]
    told = {layer.node.name: reason for weight, reason in reasons if reason for layer in weight.layers}
    return [weight for weight, reason in reasons if reason is None], left | told


def _objection(weight: Weight) -> str | None:
    """Returns why the scales of a weight stay."""
    if not weight.grid.is_of_few_bits:
        return f"its weight has more than {FEW_BITS} bits"
    if not weight.is_alone:
        return "another weight has the same scales"
    return "its scale is given" if weight.is_given else None


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise CalibrationError(
            f"TrainScales found an operator without a gradient ({first_line(error)}); leave it out of the recipe."
        ) from error


class _Data:
    """Batches, with what the float model makes of them; the last ones are held back.

    Attributes:
        seen: how many batches are trained on.
        held_back: the places of the others.
        has_numbers: whether the model returns any of floating point.
    """

    def __init__(self, model: fx.GraphModule, batches: Batches, parking: Parking) -> None:
        self._batches = batches
        self.seen = len(batches) - max(1, len(batches) // _HELD_BACK)
        self.held_back = range(self.seen, len(batches))
        self._wanted: list[Parked] = []
        with torch.no_grad():
            for batch in batches:
                found = [value.float() for value in floats_of(FloatRun(model, batch).result())]
                self._wanted.append(parking.parked(found))
        self.has_numbers = bool(self._wanted[0].leaves)

    def losses(self, trainable: Trainable, place: int) -> Tensor:
        """Returns for each sample of a batch energy, squared error and divergence of its outputs, [samples, 3]."""
        batch, wanted = self._batches[place], self._wanted[place].values()
        found = [value.float() for value in floats_of(trainable.result(batch))]
        return _losses(found, wanted)


def _losses(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    rows = rows_of(wanted)
    each = [_of_one(one, other, rows) for one, other in zip(found, wanted, strict=True)]
    return sum(each[1:], each[0])


def _of_one(found: Tensor, wanted: Tensor, rows: int) -> Tensor:
    """Returns the losses of one output, in parts, of which each is computed again on the way back."""
    last = wanted.shape[-1] if wanted.dim() else 1
    parts = (torch.split(each.reshape(-1, last), max(1, _PART // max(1, last))) for each in (found, wanted))
    losses = torch.cat([checkpoint(_of_part, *part, use_reentrant=False) for part in zip(*parts, strict=True)])
    energy, error, divergence = losses.reshape(rows, -1, 3).unbind(2)
    return torch.stack([energy.sum(1), error.sum(1), divergence.mean(1)], 1)


def _of_part(found: Tensor, wanted: Tensor) -> Tensor:
    """Returns energy, squared error and divergence along the last dimension, [..., 3] of tensors [..., numbers].

    The divergence is Kullback and Leibler's, of the softmax.
    """
    logs, found_logs = torch.log_softmax(wanted, -1), torch.log_softmax(found, -1)
    likely, change = logs.exp(), found_logs - logs
    # Both distributions add up to 1, so that q - p - p * change is -p * change in the sum, whose terms would cancel.
    # Where they are near each other, q - p is p * expm1(change) without the rounding.
    grown = torch.where(change < 1, likely * torch.expm1(change.clamp(max=1)), found_logs.exp() - likely)
    divergence = (grown - likely * change).sum(-1)
    return torch.stack([wanted.square().sum(-1), (found - wanted).square().sum(-1), divergence], -1)


class _Measured:
    """The losses of held-back batches, and the loss that is measured by them."""

    def __init__(self, trainable: Trainable, data: _Data, advance: Callable[[], None]) -> None:
        found = []
        with torch.no_grad():
            for place in data.held_back:
                found.append(data.losses(trainable, place))
                advance()
        self._losses = torch.cat(found).double().cpu()
        if not bool(torch.isfinite(self._losses).all()):
            raise CalibrationError(
                "TrainScales found NaN or infinity in what the model returns; take the batch out that makes them."
            )
        energy, error, divergence = self._losses.mean(0).tolist()
        self.distance = Distance(decibels(energy, error), divergence)
        self._units = torch.tensor([max(error, 1e-12 * energy, 1e-30), max(divergence, 1e-9)])

    def loss(self, losses: Tensor) -> Tensor:
        """Returns squared error and divergence as shares of what they are here, added, of losses [..., 3]."""
        return (losses[..., 1:] / self._units.to(losses)).sum(-1)

    def is_better_than(self, before: "_Measured") -> bool:
        """Tells whether the loss is less, by more than chance, and the squared error not more."""
        then, now = (before.loss(each._losses) for each in (before, self))
        gains = bool(now.mean() < _LEAST_GAIN * then.mean()) and is_no_chance(then - now)
        return gains and bool(self._losses[:, 1].sum() <= _MOST_LOSS * before._losses[:, 1].sum())
