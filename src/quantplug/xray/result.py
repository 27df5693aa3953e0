"""What an inspection found, as a value: a table, JSON, one HTML page."""

import json
import math
from dataclasses import asdict, dataclass
from io import StringIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantplug.core.errors import ArtefactError, first_line
from quantplug.core.files.typed import typed
from quantplug.core.specs.levels import decibels

FORMS = ("reference", "emulation", "program")
"""The forms of a quantized model: its q/dq graph, its kernels' arithmetic in PyTorch, and the real artefact."""

NAMED = 3


@dataclass(frozen=True)
class LayerRange:
    """How one rounding fits what it rounds.

    Attributes:
        node: the quantize node.
        dtype: of its integers.
        lowest: what the lowest integer stands for.
        highest: what the highest stands for.
        smallest: the smallest float value on the data.
        largest: the largest.
        saturated: the share of float values that are clipped, 0 to 1.
        used: the share of the range that float values take, 0 to 1.
        noise: energy of the rounding error over that of the values.
        histogram: counts of the float values in bins of equal width from the smallest to the largest.
    """

    node: str
    dtype: str
    lowest: float
    highest: float
    smallest: float
    largest: float
    saturated: float
    used: float
    noise: float
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerTime:
    """How long a layer takes, in microseconds a call.

    Attributes:
        low: a lower bound: the lower quartile, or less where the layer was timed as a program of its own.
        middle: the median.
        high: an upper bound.
    """

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class InspectedLayer:
    """One layer of a quantized model.

    Noise is the energy of an error over the energy of the float value, and None where either is not known.

    Attributes:
        node: the operator that names it.
        operator: such as "conv2d".
        module_path: dotted path of the module it was traced in.
        placement: where the artefact runs it, such as "int8"; "" where that is not known.
        kernel: what runs it, and how.
        weight: how its weight is stored, such as "int8 per channel"; "" for float or none.
        own: its noise where it reads float values, by form.
        accumulated: its noise in the quantized model, by form.
        output: the noise of the model's output where this layer alone is quantized.
        ranges: its roundings.
        worst_channel: the channel with the most noise of its own.
        worst: that noise.
        dead: channels that yield one number in the quantized model, and several in float.
        time: how long it takes.
        fault: what is wrong with it, such as "clipped range"; "" for nothing.
        says: the same in a sentence, or what it costs.
        remedy: code that can be pasted.
        slow_says: where its time goes.
        slow_remedy: code that may make it faster.
        points: some float values, each beside what the quantized model has.
    """

    node: str
    operator: str
    module_path: str
    placement: str
    kernel: str
    weight: str
    own: dict[str, float | None]
    accumulated: dict[str, float | None]
    output: float | None
    ranges: tuple[LayerRange, ...]
    worst_channel: int | None
    worst: float | None
    dead: tuple[int, ...]
    time: LayerTime | None
    fault: str
    says: str
    remedy: str
    slow_says: str = ""
    slow_remedy: str = ""
    points: tuple[tuple[float, ...], ...] = ()

    @property
    def saturated(self) -> float:
        """The largest share of float values that one of its roundings clips."""
        return max((found.saturated for found in self.ranges), default=0.0)

    @property
    def worst_decibels(self) -> float | None:
        """The signal-to-quantization-noise ratio of the worst channel."""
        return ratio(self.worst)

    def decibels(self, form: str = "reference", own: bool = False) -> float | None:
        """Returns its signal-to-quantization-noise ratio; infinite where nothing is lost, None where it is not known.

        Args:
            form: "reference", "emulation" or "program".
            own: where it reads float values, not those of the quantized model.
        """
        return ratio((self.own if own else self.accumulated).get(form))


def ratio(noise: float | None) -> float | None:
    """Returns a noise in decibels, None for None."""
    return None if noise is None else decibels(1, noise)


@dataclass(frozen=True)
class Inspection:
    """What an inspection found, layer by layer.

    Noise is the energy of an error over the energy of the float value; `decibels` and `gain` return decibels. Times are
    microseconds. A form is "reference" (the q/dq graph), "emulation" or "program" (the artefact).

    Attributes:
        backend: the name of the backend; "" for a q/dq graph alone.
        samples: how many samples the figures are from.
        layers: in graph order.
        output: noise of the model's output, by form.
        time: of a call of the artefact.
        between: what a call spends between layers, as far as it is known.
        notes: what was not measured, and why; what the figures of the artefact are from.
    """

    backend: str
    samples: int
    layers: tuple[InspectedLayer, ...]
    output: dict[str, float | None]
    time: LayerTime | None = None
    between: LayerTime | None = None
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[InspectedLayer, ...]:
        """The layers that something is wrong with, the one that costs most first."""
        return tuple(layer for layer in self.by_noise() if layer.fault)

    def layer(self, node: str) -> InspectedLayer:
        """Returns a layer by the name of its operator; KeyError if there is none."""
        return {layer.node: layer for layer in self.layers}[node]

    def by_noise(self) -> tuple[InspectedLayer, ...]:
        """Returns the layers in the order in which to look at them: those at fault first, then by what they cost."""
        return tuple(sorted(self.layers, key=lambda layer: (not layer.fault, -_cost(layer))))

    def costliest(self, count: int = NAMED) -> tuple[InspectedLayer, ...]:
        """Returns the layers that cost the most decibels; those at fault come first, whatever they cost."""
        return tuple(layer for layer in self.by_noise()[:count] if layer.fault or _cost(layer))

    def slowest(self, count: int = NAMED) -> tuple[InspectedLayer, ...]:
        """Returns the layers that take the most time; none where it was not measured."""
        timed = [(layer.time.middle, layer) for layer in self.layers if layer.time is not None]
        return tuple(layer for _, layer in sorted(timed, key=lambda pair: -pair[0])[:count])

    def gain(self, node: str) -> float:
        """Returns by how many decibels the output is nearer to float without the noise of one layer.

        Infinite where no other layer makes any.
        The noises of layers add up as they are found one by one; where they depend on one another it is an estimate.
        """
        total = sum(map(_cost, self.layers))
        return decibels(total, total - _cost(self.layer(node))) if total else 0.0

    def decibels(self, form: str = "reference") -> float | None:
        """Returns the output's signal-to-quantization-noise ratio of one form."""
        return ratio(self.output.get(form))

    def table(self) -> Table:
        """Returns the layers as a rich table; where forms differ by a tenth of a decibel, each has its figure."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("layer", "operator", "module"):
            table.add_column(heading, overflow="fold")
        for heading in ("own dB", "dB", "costs dB", "clipped", "µs"):
            table.add_column(heading, justify="right")
        table.add_column("fault", overflow="fold")
        for layer in self.layers:
            names = map(escape, (layer.node, layer.operator, layer.module_path))
            figures = (self._forms(layer, own) for own in (True, False))
            clipped = f"{layer.saturated:.2%}" if layer.ranges else ""
            middle = "" if layer.time is None else f"{layer.time.middle:.1f}"
            table.add_row(*names, *figures, gained(self.gain(layer.node), ""), clipped, middle, layer.fault)
        return table

    def _forms(self, layer: InspectedLayer, own: bool) -> str:
        found = [
            shown(layer.decibels(form, own)) for form in FORMS if form in (layer.own if own else layer.accumulated)
        ]
        return found[0] if len(set(found)) == 1 else " / ".join(found)

    def summary(self) -> str:
        """Returns what to look at first, one line for each layer."""
        told = "; ".join(f"{form} {shown(self.decibels(form))} dB" for form in FORMS if form in self.output)
        lines = [f"{len(self.layers)} layers, {self.samples} samples, output against float: {told}."]
        lines += [self._costs(layer) for layer in self.costliest()]
        lines += [self._takes(layer) for layer in self.slowest()]
        return "\n".join((*lines, *self.notes))

    def _costs(self, layer: InspectedLayer) -> str:
        return f"{self.named(layer)} costs {gained(self.gain(layer.node))}: {layer.says}\n    {layer.remedy}"

    def _takes(self, layer: InspectedLayer) -> str:
        told = f"{self.named(layer)} takes {interval(layer.time)} microseconds"
        return f"{told}: {layer.slow_says}\n    {layer.slow_remedy}"

    @staticmethod
    def named(layer: InspectedLayer) -> str:
        """Returns how a sentence names a layer."""
        return f"'{layer.node}' (module '{layer.module_path}')" if layer.module_path else f"'{layer.node}'"

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=200, no_color=True).print(self.table())
        return f"{out.getvalue()}{self.summary()}"

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Inspection":
        """Returns what `to_json` wrote.

        Raises:
            ArtefactError: the text is none of it.
        """
        try:
            found: Inspection = typed(json.loads(text), Inspection, "it")
        except (ValueError, RecursionError) as error:
            raise ArtefactError(
                f"The text is no inspection ({first_line(error)}); write one with Inspection.to_json."
            ) from error
        return found

    def html(self, title: str = "Inspection", before: "Inspection | None" = None) -> str:
        """Returns one HTML page that needs nothing else.

        Args:
            title: of the page.
            before: another inspection, of the same model with other settings, to be shown beside it.
        """
        from quantplug.xray.page import page

        return page(self, title, before)


def _cost(layer: InspectedLayer) -> float:
    return layer.output or 0.0


def shown(number: float | None, digits: int = 1) -> str:
    """Returns decibels as tables show them."""
    if number is None:
        return "-"
    return "exact" if math.isinf(number) and number > 0 else f"{number:.{digits}f}"


def gained(decibels: float, unit: str = " dB") -> str:
    """Returns what a layer costs; the only one that costs anything costs all."""
    return "all" if math.isinf(decibels) else f"{decibels:.1f}{unit}"


def interval(time: LayerTime | None) -> str:
    """Returns a time with its bounds."""
    return "" if time is None else f"{time.middle:.1f} ({time.low:.1f} to {time.high:.1f})"
