"""What to do about a layer, as a sentence and as code that can be pasted.

The code uses the names of the documents: `model`, `example_inputs`, `batches` (calibration data), `quantizer` (of
`quantplug.get_quantizer(backend).set_global(config)`, calibrated again behind a change) and `prepared`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantplug.core.graph.facts import module_path
from quantplug.core.report import faults
from quantplug.core.report.faults import Fault
from quantplug.core.report.layer_errors import LayerErrors
from quantplug.core.report.layers import Piece
from quantplug.lowering.program import LoweredOp

_OBSERVER = "quantizer.backend.config(observer={!r})"
_RANGES = (faults.CLIPPED, faults.SATURATING, faults.WIDE)
# Observers that leave out tails leave out fewer values than this share.
_TAIL = 0.01
# What calibration found is not what stands in the graph: nothing but another conversion puts it back.
_AGAIN = (
    faults.ZERO_POINT, faults.MISMATCH, faults.SWAPPED_RANGES, faults.SWAPPED_SCALES, faults.AXIS, faults.SCALES,
    faults.DEAD, faults.WEIGHT, faults.BIAS, faults.OTHER, faults.NOT_FINITE,
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        says: a sentence.
        code: the same as code.
    """

    says: str
    code: str


def _clipped(layer: LayerErrors) -> float:
    """Returns the largest share of values that one of a layer's roundings cuts off."""
    return max(((fit.below + fit.above) / max(fit.count, 1) for fit in layer.ranges), default=0.0)


class Remedies:
    """Writes advice for the layers of one model.

    Args:
        layers: all of them.
        backend: its name, "" where there is none.
    """

    def __init__(self, layers: Sequence[Piece], backend: str) -> None:
        self._layers, self._backend = layers, backend

    def of_fault(self, layer: LayerErrors, fault: Fault) -> Advice:
        """Returns what to do about a fault."""
        said = f"{fault.kind}: {fault.says}"
        if fault.kind in (faults.CLIPPED, faults.SATURATING) and _clipped(layer) > _TAIL:
            remedy = "No observer cuts off so many; calibrate with data like this, then convert:"
            return Advice(f"{said} {remedy}", "quantplug.calibrate(prepared, batches)")
        if fault.kind in _RANGES:
            remedy = "Calibrate with data like this, or take the range of all that calibration sees:"
            return Advice(f"{said} {remedy}", self._scope(layer.piece, _OBSERVER.format("minmax")))
        if fault.kind == faults.STUCK:
            remedy = "Its observer saw too little, or nothing; calibrate with representative batches, then convert:"
            return Advice(f"{said} {remedy}", "quantplug.calibrate(prepared, batches)")
        if fault.kind == faults.CLIPPED_WEIGHT:
            config = "quantizer.backend.config(weight_observer='minmax')"
            return Advice(f"{said} Take the range of all its numbers:", self._scope(layer.piece, config))
        if fault.kind == faults.OUTLIER:
            return Advice(f"{said} Give each channel a scale of its own:", self._scope(layer.piece, "'int8'"))
        if fault.kind == faults.ISLAND:
            return Advice(f"{said} Quantize it like its neighbours:", self._scope(layer.piece, "'int8'"))
        if fault.kind == faults.KERNEL:
            return Advice(f"{said} Leave it float, and report the model:", self._scope(layer.piece, "None"))
        assert fault.kind in _AGAIN
        remedy = (
            "That is none of calibration's numbers; convert the calibrated model again, and leave the graph as it is:"
        )
        return Advice(f"{said} {remedy}", "converted = quantplug.convert_pt2e(prepared)")

    def of_noise(self, layer: LayerErrors, gain: float) -> Advice:
        """Returns what to do about a layer that is sound and costs the most."""
        if layer.computing > layer.own / 2 and any(fit.dtype for fit in layer.constants):
            if any(fit.granularity == "per tensor" and fit.dtype for fit in layer.constants):
                return Advice("most is its weight's, under one scale:", self._scope(layer.piece, "'int8'"))
            return Advice("most is its weight's; round it for the layer's result:", self._again("recipe='accurate'"))
        worst = max(layer.ranges, key=lambda fit: fit.noise, default=None)
        if worst is not None and worst.params is not None and worst.noise > 2 * worst.attainable:
            low, high = worst.params.bounds
            said = (
                f"most is the rounding of what it yields, values from {worst.smallest:.3g} to {worst.largest:.3g} to "
                f"integers for {low:.3g} to {high:.3g}; calibrate with data like this, or take all of the range:"
            )
            return Advice(said, self._scope(layer.piece, _OBSERVER.format("minmax")))
        gains = "loses nothing" if math.isinf(gain) else f"gains up to {gain:.1f} dB"
        readers = self._readers(layer.piece) if layer.piece.reads_integers else []
        where = "in float, with what reads it," if readers else "in float"
        said = f"most is the rounding of what it yields; {where} the output {gains}:"
        scopes = dict.fromkeys(self._scope(piece, "None") for piece in (layer.piece, *readers))
        return Advice(said, "\n".join(scopes))

    def of_time(self, layer: LayerErrors, op: LoweredOp | None) -> Advice:
        """Returns what may make a layer faster."""
        if op is not None and op.placement != "int8":
            why = op.reason or "no kernel of integers runs it"
            if self._backend == "x86":
                return Advice(
                    f"it runs in float: {why}; let floats be bfloat16:", self._again("float_dtype=torch.bfloat16")
                )
            return Advice(f"it runs in float: {why}; search what may be in integers:", self._search())
        if self._backend == "x86":
            said = "it runs on an integer kernel; take the fastest kernel of each layer on this machine:"
            return Advice(said, self._again("autotune=True"))
        return Advice("it runs on an integer kernel; search for a faster mix of configs:", self._search())

    def _again(self, option: str) -> str:
        return f"quantplug.quantize(model, example_inputs, {self._backend or 'xnnpack'!r}, batches, {option})"

    def _search(self) -> str:
        backend = self._backend or "xnnpack"
        return f"quantplug.tune(model, example_inputs, batches, backend={backend!r}, at_least=30, cost='time')"

    def _scope(self, piece: Piece, config: str) -> str:
        """Returns the call that gives a layer a config: by its module where that is its alone."""
        owner = self._owner(piece)
        path, below = module_path(owner.root), f"{module_path(owner.root)}."
        paths = [module_path(other.root) for other in self._layers if other.root.op != "placeholder"]
        if path and paths.count(path) == 1 and not any(other.startswith(below) for other in paths):
            return f"quantizer.set_module_name({path!r}, {config})"
        return f"quantizer.set_filter(lambda node: node.name == {owner.root.name!r}, {config})"

    def _owner(self, piece: Piece) -> Piece:
        """Returns the layer whose spec rounds what a layer yields: that which reads it, where it computes in float."""
        if piece.reads_integers:
            return piece
        return next(iter(self._readers(piece)), piece)

    def _readers(self, piece: Piece) -> list[Piece]:
        """Returns the layers that read in integers what a layer yields: they round it whoever yields it."""
        return [other for other in self._layers if piece.end in other.sources and other.reads_integers]
