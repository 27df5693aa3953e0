"""GPTQ: weights rounded one column after the other, each one's error made up for by the columns that follow.

Before: a prepared, calibrated graph and batches. After: the same graph with weights of linear layers and convolutions
moved onto values that their integers stand for, so that the layers' results on these batches lie closer to those of the
float weights than those of the nearest values do.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv:2210.17323.
The scales are searched first: each block's is multiplied by the factor with the least error of rounding, weighted by
the energy of the inputs (the diagonal of the Hessian, as in AWQ's and llama.cpp's searches). What GPTQ rounded is then
made better by turns: scales fitted to the integers, and integers chosen anew one by one (QuantEase, arXiv:2309.01885).
Each row keeps the best of all that was tried, rounding to nearest with the observer's scales included, judged by the
whole Hessian. `rounding.py` has the arithmetic.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import one_hot
from torchao.quantization.pt2e import FixedQParamsObserver

from quantplug.algorithms.frozen import freeze, is_frozen
from quantplug.algorithms.results import ByLayer
from quantplug.algorithms.rounding import Passing, Tried, descended, errors_of, factors_of, refitted, target_of
from quantplug.algorithms.weights import Grid, Layer, Weight, weights_of
from quantplug.core.calibration.node_by_node import BatchRun, batches_of, node_by_node
from quantplug.core.calibration.observer_places import require_observers
from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.graph.editing import new_parameter, replace_parameter
from quantplug.core.graph.facts import describe, operands, operator_name
from quantplug.core.specs.levels import decibels

# How much less an error has to be for another round of it to be worth while.
_WORTH = 1e-3


@dataclass(frozen=True)
class RoundedLayer:
    """How near a layer's result is to that of its float weight, on the batches that it was rounded on.

    Attributes:
        before: decibels with the weight rounded to nearest.
        after: decibels with the weight it has now.
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

    Attributes:
        samples: batches are taken until they hold so many samples.
        damping: what is added to the Hessian's diagonal, as a share of its mean.
        scales: whether the scales of weights are searched too.
        sweeps: how often, at most, scales and integers are fitted to each other afterwards; 0 for GPTQ alone.
        stage: which graph it is for.

    Raises:
        ConfigError: `damping` is no positive number, or `sweeps` a negative one.
    """

    samples: int = 128
    damping: float = 0.01
    scales: bool = True
    sweeps: int = 3
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

        The observers of these weights keep their scales from now on. Nothing of the model is changed if an error is
        raised.

        Args:
            prepared: a calibrated model, of any quantizer, from our prepare or torchao's.
            loader: batches as for `calibrate`; activations that a later layer reads are in memory for all of them.
            inputs: picks the model's inputs out of a batch, as for `calibrate`.

        Raises:
            ModelError: `prepared` is not a prepared graph module, or is prepared for training.
            CalibrationError: there is no batch, one does not fit the model, or a layer is given NaN or infinity.
        """
        model = require_observers(prepared, "GPTQ")
        batches = batches_of(model, loader, self.samples, inputs, least=1, step="GPTQ")
        with torch.no_grad():
            weights, left = weights_of(model)
            found = list(self._rounded(model, batches, weights))
            for one in found:
                _keep(model, one)
            model.recompile()
        layers = {layer.node.name: one.quality for one in found for layer in one.weight.layers}
        return RoundedWeights(layers, left)

    def _rounded(
        self, model: fx.GraphModule, batches: list[tuple[Any, ...]], weights: list[Weight]
    ) -> Iterator["_Rounded"]:
        runs, floats = ([BatchRun(model, batch) for batch in batches] for _ in range(2))
        by_layer = {layer.node: (weight, layer) for weight in weights for layer in weight.layers}
        sums, last = _Sums(), max(by_layer, default=None)
        for node in node_by_node([*runs, *floats], {node.name for node in by_layer}):
            weight, layer = by_layer[node]
            total = sums.added(weight, layer, list(zip(runs, floats, strict=True)))
            if layer is not weight.layers[-1]:
                continue
            one = self._round(weight, total)
            yield one
            if node is last:
                return  # a language model's last tensor is its largest
            for run in runs:
                run.env[layer.observed] = one.value
                run.env[node] = run.run_node(node)

    def _round(self, weight: Weight, sums: Tensor) -> "_Rounded":
        (hessians, crosses), given = sums.unbind(1), weight.layers[0].matrix(weight.value)
        hessian = hessians.sum(0)
        passing = Passing.of(hessian, self.damping)
        matrix = target_of(given, hessians, crosses - hessians, self.damping)

        def tried(values: Tensor, grid: Grid) -> Tried:
            return Tried(values, grid.scale, errors_of(matrix - values, hessian))

        best = nearest = tried(weight.grid.nearest(matrix), weight.grid)
        for grid in self._grids(weight, matrix, hessian):
            if grid is not weight.grid:
                best = best.or_better(tried(grid.nearest(matrix), grid), by_row=grid.by_row)
            best = best.or_better(tried(passing.rounded(matrix, grid), grid), by_row=grid.by_row)
        for _ in range(self.sweeps):
            before, grid, values = best, replace(weight.grid, scale=best.scale), best.values
            if self._searches_scales(weight):
                grid, values = refitted(matrix, values, grid, passing.damped)
            best = best.or_better(tried(descended(matrix, values, grid, passing.damped), grid), by_row=grid.by_row)
            if best.errors.sum() >= (1 - _WORTH) * before.errors.sum():
                break
        energy = float(errors_of(matrix, hessian).sum())
        quality = RoundedLayer(*(decibels(energy, float(each.errors.sum())) for each in (nearest, best)))
        return _Rounded(weight, best.values.reshape(weight.value.shape).to(weight.value.dtype), best.scale, quality)

    def _grids(self, weight: Weight, matrix: Tensor, hessian: Tensor) -> Iterator[Grid]:
        yield weight.grid
        if self._searches_scales(weight):
            yield weight.grid.scaled(factors_of(weight.grid, matrix, hessian))

    def _searches_scales(self, weight: Weight) -> bool:
        return self.scales and weight.is_alone and not any(_is_given(layer.observer) for layer in weight.layers)


@dataclass(frozen=True)
class _Rounded:
    weight: Weight
    value: Tensor
    scale: Tensor
    quality: RoundedLayer


class _Sums:
    """Sums of products of what layers read; layers that read the same tensor share them."""

    def __init__(self) -> None:
        self._totals: dict[int, Tensor] = {}
        self._last: tuple[Any, Tensor] | None = None

    def added(self, weight: Weight, layer: Layer, runs: list[tuple[BatchRun, BatchRun]]) -> Tensor:
        """Returns sums over what the weight's layers up to this one read, [2, 2, groups, columns, columns].

        Of every other batch, and of the rest: what they read behind rounded layers with itself, and what they read in
        the float model with it.
        """
        own = self._of(layer, weight.value.shape, runs)
        before = self._totals.pop(id(weight), None)
        total = own if before is None else before + own
        if layer is not weight.layers[-1]:
            self._totals[id(weight)] = total
        return total

    def _of(self, layer: Layer, shape: torch.Size, runs: list[tuple[BatchRun, BatchRun]]) -> Tensor:
        given = operands(layer.node)
        source = given["input"]
        key = (
            source,
            tuple(shape[1:]),
            *(str(given.get(name)) for name in ("stride", "padding", "dilation", "groups")),
        )
        if self._last is None or self._last[0] != key:
            products = [_products(layer, run.env[source], other.env[source], shape) for run, other in runs]
            total = torch.stack([sum(products[half::2], torch.zeros_like(products[0])) for half in range(2)])
            if not bool(torch.isfinite(total).all()):
                raise CalibrationError(
                    f"GPTQ found NaN or infinity in what {describe(layer.node)} reads; take the batch out that makes "
                    "them, or leave the layer float."
                )
            self._last = (key, total)
        return self._last[1]


def _products(layer: Layer, value: Tensor, wanted: Tensor, shape: torch.Size) -> Tensor:
    """Returns sums of products of the inputs that one output reads, float32 [2, groups, columns, columns]."""
    columns, others = (_columns(layer, each.float(), shape) for each in (value, wanted))
    return torch.stack([columns @ columns.transpose(1, 2), others @ columns.transpose(1, 2)])


def _columns(layer: Layer, value: Tensor, shape: torch.Size) -> Tensor:
    """Returns what a layer multiplies its weight by, [groups, columns, outputs]."""
    if operator_name(layer.node) == "aten::linear":
        return value.reshape(1, -1, value.shape[-1]).transpose(1, 2)
    return _patches(layer, value, shape)


def _patches(layer: Layer, value: Tensor, shape: torch.Size) -> Tensor:
    """Returns what a convolution multiplies its weight by, [groups, columns, outputs].

    It is the convolution itself that picks them, with one weight of 1 for each: so every padding is its own.
    """
    places = math.prod(shape[2:])
    channels = int(shape[1]) * layer.groups
    picks = (
        one_hot(torch.arange(places)).to(value).reshape(places, 1, *shape[2:]).repeat(channels, *[1] * (len(shape) - 1))
    )
    given = {name: found for name, found in operands(layer.node).items() if not isinstance(found, fx.Node)}
    target: Any = layer.node.target
    picked = target(**{**given, "input": value, "weight": picks, "bias": None, "groups": channels})
    return picked.movedim(1, 0).reshape(layer.groups, int(shape[1]) * places, -1)  # type: ignore[no-any-return]


def _is_given(observer: nn.Module) -> bool:
    """Tells whether an observer's scale is not its own to choose."""
    scheme: Any = getattr(observer, "scheme", None)
    powers = getattr(scheme, "power_of_two", False)
    return is_frozen(observer) or isinstance(observer, FixedQParamsObserver) or bool(powers)


def _keep(model: fx.GraphModule, one: _Rounded) -> None:
    """Puts a rounded weight into the model; the tensor that it had may be the caller's, or read in float."""
    layers = one.weight.layers
    if one.weight.is_read_in_float:
        own = new_parameter(model, layers[0].constant, "rounded", one.value)
        for layer in layers:
            layer.observed.replace_input_with(layer.constant, own)
    else:
        replace_parameter(model, one.weight.paths, one.value)
    for layer in layers:
        freeze(layer.observer, one.scale, one.weight.grid.zero_point)
