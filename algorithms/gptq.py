"""GPTQ: weights rounded one column after the other, each one's error made up for by the columns that follow.

Before: a prepared, calibrated graph and batches. After: the same graph with weights of linear layers and convolutions
(transposed ones too) moved onto values that their integers stand for, so that the layers' results on these batches lie
closer to those of the float weights than those of the nearest values do.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv:2210.17323.
The scales are searched first: each block's is multiplied by the factor with the least error of rounding, weighted by
the energy of the inputs (the diagonal of the Hessian, as in AWQ's and llama.cpp's searches). What GPTQ rounded is then
made better by turns: scales fitted to the integers, and integers chosen anew one by one (QuantEase, arXiv:2309.01885).
Each row keeps the best of all that was tried, rounding to nearest with the observer's scales included, judged by the
whole Hessian. Tables of embeddings are rounded to nearest with scales that suit them best, in front of all that reads
them. `rounding.py` has the arithmetic.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantplug.algorithms.confirmed import without_doubt
from quantplug.algorithms.frozen import is_frozen
from quantplug.algorithms.kept import Kept, fingerprint
from quantplug.algorithms.pieces import Piece, pieces_of
from quantplug.algorithms.pieces import joined as joined_pieces
from quantplug.algorithms.products import Sums
from quantplug.algorithms.results import ByLayer
from quantplug.algorithms.rounded import Log, Rounded
from quantplug.algorithms.rounding import Passing, Tried, descended, errors_of, factors_of, fitted, refitted, target_of
from quantplug.algorithms.weights import Grid, Weight, keep, tables_of, weights_of
from quantplug.core.calibration.node_by_node import Batches, BatchRun, FloatRun, batches_of
from quantplug.core.calibration.observer_places import require_observers
from quantplug.core.calibration.processes import Alone, Exchange, joined, telling
from quantplug.core.calibration.progress import progress_bar
from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import decibels

# How much less an error has to be for another round of it to be worth while.
_WORTH = 1e-3


@dataclass(frozen=True)
class RoundedLayer:
    """How near a layer's result is to that of its float weight, on the batches that it was rounded on.

    Attributes:
        before: decibels with the weight rounded to nearest.
        after: decibels with the weight it has now. Of a table both are over all of its rows.
    """

    before: float
    after: float


@dataclass(frozen=True, eq=False)
class RoundedWeights(ByLayer[RoundedLayer]):
    """What rounding did: a mapping from each layer's node name to how near its result is.

    Attributes:
        layers: this mapping.
        left: by node name why another layer with a quantized weight keeps it as it is.
    """

    def __str__(self) -> str:
        """What was done, in a sentence."""
        if not self.layers:
            return "No weight was rounded anew" + (f": {next(iter(self.left.values()))}." if self.left else ".")
        gains = [layer.after - layer.before for layer in self.layers.values() if math.isfinite(layer.after)]
        gain = f", {sum(gains) / len(gains):.1f} dB nearer to float in the mean" if gains else ""
        return f"{len(self)} layers' weights rounded anew{gain}; {len(self.left)} left as they are."


@dataclass(frozen=True)
class GPTQ:
    """Rounds the weights of a calibrated model so that its layers' results change least; see `apply`.

    GPTQ (Frantar et al., arXiv:2210.17323): a weight is rounded column by column, and the columns that follow make up
    for each error. Scales are searched before it, and scales and integers fitted to each other behind it (QuantEase,
    arXiv:2309.01885).

    Attributes:
        samples: batches are taken until they hold so many samples.
        damping: what is added to the Hessian's diagonal, as a share of its mean.
        scales: whether the scales of weights are searched too.
        sweeps: how often, at most, scales and integers are fitted to each other afterwards; 0 for GPTQ alone.
        checkpoint: file to keep the rounded weights in, from which a run that was killed goes on with the same bits.
            Removed when all are rounded.
        resume: takes up an existing checkpoint; model, batches and options must be the same.
        stage: which graph it is for.

    Raises:
        ConfigError: `damping` is no positive number, or `sweeps` a negative one.
    """

    samples: int = 128
    damping: float = 0.01
    scales: bool = True
    sweeps: int = 3
    checkpoint: str | Path | None = None
    resume: bool = True
    stage: ClassVar[str] = "calibrated"

    def __post_init__(self) -> None:
        if not isinstance(self.damping, int | float) or not 0 < self.damping < math.inf:
            raise ConfigError(f"GPTQ takes a positive damping, found {self.damping!r}; leave it out for 0.01.")
        if isinstance(self.sweeps, bool) or not isinstance(self.sweeps, int) or self.sweeps < 0:
            raise ConfigError(f"GPTQ takes a number of sweeps from 0 on, found {self.sweeps!r}; leave it out for 3.")

    @torch.inference_mode(False)
    def apply(
        self, prepared: fx.GraphModule, loader: Iterable[Any], *, inputs: Callable[[Any], Any] | None = None
    ) -> RoundedWeights:
        """Moves weights onto values that their integers stand for; convert stores just these integers.

        The observers of these weights keep their scales from now on. Weights of more than 5 bits stay as they are where
        the model's outputs on these batches are no nearer to float. Nothing of the model is changed if an error is
        raised. In a process of an initialized `torch.distributed` job each rank reads its own shard, all share the
        work, and all end with the same model: that of one process which reads the first batch of each rank, then the
        second of each, and so on.

        Args:
            prepared: a calibrated model, of any quantizer, from our prepare or torchao's.
            loader: batches as for `calibrate`.
            inputs: picks the model's inputs out of a batch, as for `calibrate`.

        Raises:
            ModelError: `prepared` is not a prepared graph module, or is prepared for training.
            CalibrationError: there is no batch, one does not fit the model, a layer is given NaN or infinity, another
                process failed, or the checkpoint is of another model, data or options.
            ArtefactError: the checkpoint cannot be read or written.
        """
        model = require_observers(prepared, "GPTQ")
        with torch.no_grad(), batches_of(model, loader, self.samples, inputs, least=1, step="GPTQ") as batches:
            return self.rounded_on(model, batches)

    def rounded_on(self, model: fx.GraphModule, batches: Batches) -> RoundedWeights:
        """Does what `apply` does, on all of some batches that wait already; without gradients.

        Args:
            model: the prepared, calibrated graph module.
            batches: its inputs.
        """
        (weights, left), (tables, of_tables) = weights_of(model), tables_of(model)
        with joined() as ranks, telling(ranks):
            kept = Kept(self.checkpoint, lambda: fingerprint(self, model, [*tables, *weights], batches), ranks)
            log = Log(kept, [*tables, *weights], batches, resume=self.resume)
            rounding = self._rounded(model, batches, weights, tables, ranks, log)
            rounded = list(_logged(rounding, log, len(weights + tables)))
            found, doubt = without_doubt(model, batches, rounded, ranks)
            values = [one.value for one in found]
            ranks.gather(None)  # what fails after this fails on all
        for one, value in zip(found, values, strict=True):
            keep(model, one.weight, value, one.scale)
        model.recompile()
        kept.remove()
        layers = {layer.node.name: _quality(one) for one in found for layer in one.weight.layers}
        others = (layer.node.name for one in rounded for layer in one.weight.layers)
        reasons = left | of_tables | {name: doubt for name in others if doubt}
        return RoundedWeights(layers, {name: reason for name, reason in reasons.items() if name not in layers})

    def _rounded(
        self,
        model: fx.GraphModule,
        batches: Batches,
        weights: list[Weight],
        tables: list[Weight],
        ranks: Exchange | Alone,
        log: Log,
    ) -> Iterator[Rounded]:
        own, count = batches[ranks.rank :: ranks.size], len(batches)
        runs, floats = (own.runs(partial(kind, model)) for kind in (BatchRun, FloatRun))
        by_layer = {layer.node: (weight, layer) for weight in weights for layer in weight.layers}
        looked_up: dict[fx.Node, tuple[fx.Node, Rounded]] = {}
        for table in tables:
            one = log.found(table) or self._fitted(table, batches)
            looked_up |= {layer.node: (layer.observed, one) for layer in table.layers}
            yield one
        stops = {**by_layer, **looked_up}
        sums = Sums(runs, floats, ranks, count)
        for node, _ in zip(runs.stops(stops), floats.stops(stops), strict=True):
            if node in looked_up:
                observed, one = looked_up[node]
                runs.replace(observed, one.value)
                continue
            weight, layer = by_layer[node]
            found = log.found(weight)
            total = None if found is not None else sums.added(weight, layer)
            if layer is not weight.layers[-1]:
                continue
            if total is not None:
                found = self._round(weight, total, batches, ranks)
            assert found is not None
            yield found
            runs.replace(layer.observed, found.value)

    def _fitted(self, table: Weight, batches: Batches) -> Rounded:
        """Returns a table rounded to nearest, with scales that suit it best; each of its numbers counts alike."""
        matrix = table.matrix
        grid = fitted(matrix, table.grid) if self._searches_scales(table) else table.grid
        energy, values = float(matrix.square().sum()), grid.nearest(matrix)
        errors = (float((matrix - rounded).square_().sum()) for rounded in (table.grid.nearest(matrix), values))
        quality = (decibels(energy, error) for error in errors)
        return Rounded(table, batches.parked(table.as_held(values)), grid.as_given(grid.scale), *quality)

    def _round(self, weight: Weight, sums: Tensor, batches: Batches, ranks: Exchange | Alone) -> Rounded:
        hessians, crosses = sums.unbind(1)
        hessian = hessians.sum(0)
        matrix = target_of(weight.matrix, hessians, crosses - hessians, self.damping)
        pieces = pieces_of(Piece(matrix, hessian, Passing.of(hessian, self.damping), weight.grid))
        energy = sum(float(errors_of(piece.matrix, piece.hessian).sum()) for piece in pieces)
        tried, nearest = self._of_pieces(pieces, ranks, searches=self._searches_scales(weight))
        best = joined_pieces(tried, matrix.shape, weight.grid)
        quality = (decibels(energy, error) for error in (nearest, float(best.errors.sum())))
        return Rounded(weight, batches.parked(weight.as_held(best.values)), weight.grid.as_given(best.scale), *quality)

    def _of_pieces(self, pieces: list[Piece], ranks: Exchange | Alone, *, searches: bool) -> tuple[list[Tried], float]:
        """Returns the best of all that was tried of each piece, and the error of rounding all of them to nearest."""
        own = {
            place: self._best_and_nearest(pieces[place], searches=searches)
            for place in range(ranks.rank, len(pieces), ranks.size)
        }
        every = {place: found for some in ranks.gather(own) for place, found in some.items()}
        found = [every[place] for place in range(len(pieces))]
        return [tried for tried, _ in found], sum(nearest for _, nearest in found)

    def _best_and_nearest(self, piece: Piece, *, searches: bool) -> tuple[Tried, float]:
        """Returns the best of all that was tried, and the error of rounding to nearest."""
        matrix, passing = piece.matrix, piece.passing

        def tried(values: Tensor, grid: Grid) -> Tried:
            return Tried(values, grid.scale, errors_of(matrix - values, piece.hessian))

        best = nearest = tried(piece.grid.nearest(matrix), piece.grid)
        best = best.or_better(tried(passing.rounded(matrix, piece.grid), piece.grid))
        if searches:
            grid = piece.grid.scaled(factors_of(piece.grid, matrix, piece.hessian))
            for values in (grid.nearest(matrix), passing.rounded(matrix, grid)):
                best = best.or_better(tried(values, grid))
        for _ in range(self.sweeps):
            before, grid, values = best, replace(piece.grid, scale=best.scale), best.values
            if searches:
                grid, values = refitted(matrix, values, grid, passing.damped)
            best = best.or_better(tried(descended(matrix, values, grid, passing.damped), grid))
            if best.errors.sum() >= (1 - _WORTH) * before.errors.sum():
                break
        return best, float(nearest.errors.sum())

    def _searches_scales(self, weight: Weight) -> bool:
        given = weight.is_given or any(is_frozen(layer.observer) for layer in weight.layers)
        return self.scales and weight.is_alone and not given


def _quality(one: Rounded) -> RoundedLayer:
    return RoundedLayer(one.before, one.after)


def _logged(rounding: Iterator[Rounded], log: Log, total: int) -> Iterator[Rounded]:
    """Yields weights as they are rounded, shows how many are, and keeps them."""
    with progress_bar(shown=True, total=total, step="GPTQ", unit="weights") as advance:
        for one in rounding:
            log.add(one)
            advance()
            yield one
