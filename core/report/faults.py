"""What is wrong with a layer of a q/dq graph, told from what a sound quantization of the same numbers would lose.

Before: what was measured of each layer. After: at most one `Fault` for each, the one that costs the model's output most
first. A layer is accused where its numbers lose more than nine decibels against a range, a scale or a constant that the
same format could hold: that is more than observers of any kind give away to hold others better. What a format costs by
itself is no fault.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec

from quantplug.core.graph.facts import operator_name
from quantplug.core.graph.multiplications import multiplications
from quantplug.core.observers.sharing import annotation_of
from quantplug.core.qdq.nodes import is_dequantize
from quantplug.core.qdq.qparams import static_qparams
from quantplug.core.report.layer_errors import ConstantFit, LayerErrors, Measured, RangeFit
from quantplug.core.specs.decision import decision

CLIPPED = "clipped range"
SATURATING = "saturating sum"
WIDE = "wide range"
SWAPPED_RANGES = "swapped ranges"
ZERO_POINT = "wrong zero point"
STUCK = "stuck observer"
MISMATCH = "mismatched pair"
DEAD = "dead channel"
AXIS = "wrong axis"
SCALES = "wrong scales"
SWAPPED_SCALES = "swapped scales"
CLIPPED_WEIGHT = "clipped weight"
OUTLIER = "outlier channel"
WEIGHT = "wrong weight"
BIAS = "wrong bias"
ISLAND = "float island"
OTHER = "other computation"
KERNEL = "other kernel"
NOT_FINITE = "not finite"

# Eight times the energy: nine decibels.
_TIMES = 8.0
# Errors of less than this share of a signal (45 dB) are no fault, however little the format could lose. New data has
# tails that a range cuts off which fits all that calibration saw: where few values are clipped, 27 dB are no fault.
_SMALL, _TAILS, _TAIL = 10**-4.5, 10**-2.7, 0.02
# So many values beyond a range, of however few, may be there by chance.
_CHANCE = 2
# The median channel loses by one scale for all what two bits are worth.
_OUTLIER_TIMES, _OUTLIER_RATIO = 16.0, 8.0
_SAME = 0.35


@dataclass(frozen=True)
class Fault:
    """What is wrong with one layer.

    Attributes:
        kind: one of the constants of this module.
        says: a sentence with the numbers.
        at: the node that holds the numbers.
    """

    kind: str
    says: str
    at: str


_Wrong: TypeAlias = tuple[LayerErrors, RangeFit]


def faults(measured: Measured) -> dict[str, Fault]:
    """Returns by the name of the layer what is wrong with it; the one that costs the output most first."""
    found: dict[str, tuple[float, Fault]] = {}
    ranges = [(layer, fit) for layer in measured.layers for fit in layer.ranges if _is_wrong(layer, fit)]
    for layer in measured.layers:
        fault = next(_of_layer(layer, measured.layers, ranges), None)
        if fault is not None:
            found[layer.piece.root.name] = (_cost(layer, measured), fault)
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return {name: fault for name, (_, fault) in ordered}


def _cost(layer: LayerErrors, measured: Measured) -> float:
    if layer.output is not None:
        return layer.output / max(measured.signal, 1e-30)
    return layer.own / max(layer.signal, 1e-30)


def _of_layer(layer: LayerErrors, others: Sequence[LayerErrors], ranges: Sequence[_Wrong]) -> Iterator[Fault]:
    if math.isinf(layer.own):
        yield Fault(NOT_FINITE, "it yields NaN or infinity on float inputs.", layer.piece.root.name)
    for fit in layer.ranges:
        yield from _of_pair(fit)
    yield from _of_constants(layer, others)
    for wrong in ranges:
        if wrong[0] is layer:
            yield _of_range(wrong, ranges)
    yield from _of_island(layer, others)
    yield from _of_computation(layer)


def _of_pair(fit: RangeFit) -> Iterator[Fault]:
    back, there = static_qparams(fit.rounding.back), fit.params
    if back is None or there is None:
        return
    if (back.scale, back.zero_point) != (there.scale, there.zero_point):
        yield Fault(
            MISMATCH,
            f"'{fit.rounding.quantize.name}' rounds with scale {there.scale:.4g} and zero point {there.zero_point}, "
            f"and '{fit.rounding.back.name}' reads the integers with scale {back.scale:.4g} and zero point "
            f"{back.zero_point}.",
            fit.rounding.back.name,
        )


def _is_wrong(layer: LayerErrors, fit: RangeFit) -> bool:
    """Tells whether the range that a rounding has loses far more than the range of the values would."""
    clipped = fit.below + fit.above
    if 0 < clipped <= _CHANCE:
        return False
    clips_tails = 0 < clipped < _TAIL * fit.count
    least = (_TAILS if clips_tails else _SMALL) * layer.signal
    if fit.params is None or layer.piece.passes_on or fit.noise <= least:
        return False
    is_too_much = fit.noise > _TIMES * fit.attainable
    return is_too_much and (bool(clipped) or not _is_fixed(layer.piece.end))


def _is_fixed(node: fx.Node) -> bool:
    """Tells whether the range is that of a function, whatever values there are."""
    annotation = annotation_of(node)
    return annotation is not None and isinstance(annotation.output_qspec, FixedQParamsQuantizationSpec)


def _of_range(wrong: _Wrong, ranges: Sequence[_Wrong]) -> Fault:
    layer, fit = wrong
    assert fit.params is not None
    low, high = fit.params.bounds
    share = (fit.below + fit.above) / max(fit.count, 1)
    said = (
        f"its values lie in {fit.smallest:.3g}..{fit.largest:.3g} and its integers hold {low:.3g}..{high:.3g}, so that "
        f"{share:.1%} of them are clipped"
    )
    kind = _kind_of_range(layer, fit, share)
    partner = next((other for other in ranges if other[1] is not fit and _are_swapped(fit, other[1])), None)
    if partner is not None:
        kind, said = (
            SWAPPED_RANGES,
            f"{said}; that is the range of '{partner[0].piece.root.name}', which has this one's",
        )
    return Fault(kind, f"{said}.", fit.rounding.quantize.name)


def _kind_of_range(layer: LayerErrors, fit: RangeFit, share: float) -> str:
    assert fit.params is not None
    held, wanted = _width(*fit.params.bounds), _width(fit.smallest, fit.largest)
    is_default = fit.params.scale == 1.0 and fit.params.zero_point == 0
    if is_default or share > 0.9 or held > 64 * wanted or held < wanted / 12:
        return STUCK
    if share and fit.shifted < _TIMES / 2 * fit.attainable:
        return ZERO_POINT
    if held > wanted:
        return WIDE
    adds = any(operator_name(node) in ("aten::add", "aten::add_") for node in layer.piece.nodes)
    return SATURATING if adds else CLIPPED


def _width(low: float, high: float) -> float:
    return max(high, 0.0) - min(low, 0.0)


def _are_swapped(one: RangeFit, other: RangeFit) -> bool:
    if one.params is None or other.params is None:
        return False
    needs = [(fit.smallest, fit.largest) for fit in (one, other)]
    has = [fit.params.bounds for fit in (other, one) if fit.params is not None]
    return all(abs(math.log(_width(*a) / _width(*b))) < _SAME for a, b in zip(needs, has, strict=True))


def _of_constants(layer: LayerErrors, others: Sequence[LayerErrors]) -> Iterator[Fault]:
    for fit in layer.constants:
        if fit.dtype and len(fit.noise) and not _is_bias(fit):
            yield from _of_weight(layer, fit, others)
    for fit in layer.constants:
        if _is_bias(fit):
            yield from _of_bias(layer, fit)


def _is_bias(fit: ConstantFit) -> bool:
    return fit.operand == "bias"


def _of_weight(layer: LayerErrors, fit: ConstantFit, others: Sequence[LayerErrors]) -> Iterator[Fault]:
    wrong = (fit.noise > _TIMES * fit.attainable) & (fit.noise > _SMALL * fit.energy) & (fit.energy > 0)
    wrong &= ~fit.floored
    name = next((n.name for n in (layer.piece.constants.get(fit.operand),) if n is not None), layer.piece.root.name)
    dead = wrong & (fit.held == 0)
    if bool(dead.any()):
        which = dead.nonzero().flatten().tolist()
        yield Fault(DEAD, f"channels {which} of its {fit.operand} are all zero, and are not in float.", name)
    elif bool(wrong.any()):
        yield _of_wrong_weight(layer, fit, wrong.nonzero().flatten().tolist(), name, others)
    elif fit.granularity == "per tensor":
        yield from _of_outlier(fit, name)


def _of_wrong_weight(
    layer: LayerErrors, fit: ConstantFit, which: list[int], name: str, others: Sequence[LayerErrors]
) -> Fault:
    if fit.scale_axis is not None and fit.scale_axis != fit.axis:
        said = f"the scales of its {fit.operand} run along axis {fit.scale_axis}, its channels along axis {fit.axis}."
        return Fault(AXIS, said, name)
    noise, explained = float(fit.noise[which].sum()), float(fit.explained[which].sum())
    if explained < _TIMES * float(fit.attainable[which].sum()) and explained < noise / 4:
        factor = float(fit.factors[which].median())
        said = f"{len(which)} scales of its {fit.operand} had to be {factor:.3g} times as large"
        partner = next((o for o in others if o is not layer and _holds_scales_of(fit, o)), None)
        if partner is None:
            return Fault(SCALES, f"{said}.", name)
        return Fault(SWAPPED_SCALES, f"{said}; '{partner.piece.root.name}' has them, and its scales are here.", name)
    clipped = float(fit.clipped[which].mean())
    if clipped > 0.005:
        return Fault(
            CLIPPED_WEIGHT, f"{clipped:.1%} of the {fit.operand}'s numbers are cut off in channels {which}.", name
        )
    share = noise / max(float(fit.energy[which].sum()), 1e-30)
    said = f"its {fit.operand} is {_decibels(share)} away from float in channels {which}, more than rounding explains."
    return Fault(WEIGHT, said, name)


def _holds_scales_of(fit: ConstantFit, other: LayerErrors) -> bool:
    return any(_crossed(fit, theirs) for theirs in other.constants if theirs.dtype and not _is_bias(theirs))


def _crossed(one: ConstantFit, other: ConstantFit) -> bool:
    """Tells whether each of two weights has the largest magnitudes that the other would have."""
    pairs = ((one.largest, other.held), (other.largest, one.held))
    if any(bool((a <= 0).any()) or bool((b <= 0).any()) or a.shape != b.shape for a, b in pairs):
        return False
    return all(float((a / b).log().abs().median()) < 0.1 for a, b in pairs)


def _of_outlier(fit: ConstantFit, name: str) -> Iterator[Fault]:
    held = fit.energy > 0
    if int(held.sum()) < 2:
        return
    lost = (fit.noise / fit.by_channel.clamp_min(1e-30))[held]
    ratio = float(fit.largest.max() / fit.largest[held].median())
    if float(lost.median()) > _OUTLIER_TIMES and ratio > _OUTLIER_RATIO:
        place = int(fit.largest.argmax())
        yield Fault(
            OUTLIER,
            f"channel {place} of its {fit.operand} is {ratio:.0f} times as large as most, and one scale for all leaves "
            f"the others {_decibels(1 / float(lost.median()))} of what a scale for each would keep.",
            name,
        )


def _of_bias(layer: LayerErrors, fit: ConstantFit) -> Iterator[Fault]:
    noise, energy = float(fit.noise.sum()), float(fit.energy.sum())
    matters = layer.computing > 1e-3 * layer.signal and layer.constant > layer.computing / 2
    if matters and noise > 0.04 * energy:
        node = layer.piece.constants[fit.operand]
        factor = float((fit.factors * fit.energy).sum() / max(energy, 1e-30))
        told = f"about {1 / factor:.2g} times the float one" if factor > 0 else "another than the float one"
        yield Fault(BIAS, f"its bias is {told}, and moves each channel by a constant.", node.name)


def _of_island(layer: LayerErrors, others: Sequence[LayerErrors]) -> Iterator[Fault]:
    """A product in float between products in integers, which nobody decided to leave float."""
    decided = decision(layer.piece.root)
    if (decided is not None and not decided.quantized) or layer.piece.reads_integers or not _is_product(layer):
        return
    integers = [other for other in others if _is_product(other) and other.piece.reads_integers]
    if integers:
        yield Fault(
            ISLAND,
            f"it computes in float, and {len(integers)} other products of the model in integers.",
            layer.piece.root.name,
        )


def _is_product(layer: LayerErrors) -> bool:
    return bool(multiplications(layer.piece.root)) and bool(layer.piece.constants)


def _of_computation(layer: LayerErrors) -> Iterator[Fault]:
    rounds = any(map(is_dequantize, layer.piece.constants.values())) or any(fit.dtype for fit in layer.constants)
    runs_time = any(
        is_dequantize(s) for n in layer.piece.nodes for s in n.all_input_nodes if not s.args or _is_chosen(s)
    )
    if not rounds and not runs_time and layer.computing > 1e-3 * layer.signal:
        said = (
            f"it yields what is {_decibels(layer.computing / layer.signal)} away from the float layer on float inputs."
        )
        yield Fault(OTHER, said, layer.piece.root.name)


def _is_chosen(node: fx.Node) -> bool:
    """Tells whether a node reads numbers that are found at run time."""
    return any(isinstance(argument, fx.Node) for argument in itertools.islice(node.args, 1, None))


def _decibels(share: float) -> str:
    return f"{abs(10 * math.log10(max(share, 1e-30))):.0f} dB"


def of_kernel(layer: LayerErrors, reference: float, program: float) -> Fault | None:
    """Returns the fault of an artefact whose kernel does not compute what the q/dq graph says, None if it does.

    Args:
        layer: what is looked at.
        reference: noise of the layer's own in the q/dq graph, over the energy of the float value.
        program: the same in the artefact.
    """
    if program <= _TIMES * reference + 1e-3:
        return None
    said = f"its kernel is {_decibels(program)} from float on float inputs, and the q/dq graph {_decibels(reference)}."
    return Fault(KERNEL, said, layer.piece.root.name)
