"""Pictures of an inspection, as PNG in data URLs: matplotlib draws them, and a page holds them.

Before: an inspection. After: text for `src` of an image.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

from quantplug.xray.result import InspectedLayer, Inspection, LayerRange

_STYLE = {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}
_FLOAT, _INTEGERS, _BEFORE = "#2f6f8f", "#d9822b", "#9aa7b4"


def overview(found: Inspection, before: Inspection | None = None) -> str:
    """Draws how near each layer is to float, in graph order, by itself and in the quantized model."""
    names = [layer.node for layer in found.layers]
    form = "program" if "program" in found.output else "reference"
    with _Figure(max(7.0, min(0.28 * len(names), 18)), 3.0) as (figure, panel):
        if before is not None:
            _line(panel, names, before, form, own=False, color=_BEFORE, label="before, in the model")
        _line(panel, names, found, form, own=True, color=_FLOAT, label="by itself")
        _line(panel, names, found, form, own=False, color=_INTEGERS, label="in the model")
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right")
        panel.set_ylabel("dB against float")
        panel.legend(frameon=False, loc="best")
        return _png(figure)


def _line(panel: Any, names: Sequence[str], found: Inspection, form: str, *, own: bool, color: str, label: str) -> None:
    layers = {layer.node: layer for layer in found.layers}
    numbers = [_number(layers[name], form, own) if name in layers else None for name in names]
    places = [place for place, number in enumerate(numbers) if number is not None]
    panel.plot(places, [numbers[place] for place in places], color=color, label=label, marker=".", linewidth=1)


def _number(layer: InspectedLayer, form: str, own: bool) -> float | None:
    known = (layer.decibels(form, own), layer.decibels("reference", own))
    found = next((number for number in known if number is not None), None)
    return None if found is None else min(found, 100.0)


def layer_picture(layer: InspectedLayer) -> str:
    """Draws the range of a layer's float values with what the integers hold, and quantized against float values."""
    with _Figure(4.4, 1.7, columns=2) as (figure, (values, pairs)):
        if layer.ranges:
            _draw_range(values, layer.ranges[0])
        else:
            values.set_visible(False)
        _draw_points(pairs, layer)
        return _png(figure)


def _draw_range(panel: Any, found: LayerRange) -> None:
    width = (found.largest - found.smallest) / max(len(found.histogram), 1) or 1e-12
    places = [found.smallest + (place + 0.5) * width for place in range(len(found.histogram))]
    panel.axvspan(found.lowest, found.highest, color=_INTEGERS, alpha=0.18, lw=0)
    panel.bar(places, found.histogram, width=width, color=_FLOAT)
    panel.set_yscale("symlog", linthresh=1)
    panel.set_yticks([])
    margin = 0.08 * max(found.highest - found.lowest, found.largest - found.smallest, 1e-12)
    panel.set_xlim(min(found.lowest, found.smallest) - margin, max(found.highest, found.largest) + margin)
    panel.set_title("float values, and the range held", fontsize=7)


def _draw_points(panel: Any, layer: InspectedLayer) -> None:
    x, y = [point[0] for point in layer.points], [point[1] for point in layer.points]
    panel.plot([min(x, default=0), max(x, default=1)], [min(x, default=0), max(x, default=1)], color=_BEFORE, lw=0.8)
    panel.plot(x, y, ".", markersize=2.5, color=_INTEGERS)
    panel.set_title("quantized against float", fontsize=7)


class _Figure:
    """A figure with the style of all pictures, and its panels."""

    def __init__(self, width: float, height: float, columns: int = 1) -> None:
        import matplotlib as mpl

        self._size, self._columns, self._context = (width, height), columns, mpl.rc_context(_STYLE)

    def __enter__(self) -> tuple[Any, Any]:
        from matplotlib.figure import Figure

        self._context.__enter__()
        figure = Figure(figsize=self._size)
        figure.subplots_adjust(left=0.08, right=0.98, top=0.86, bottom=0.16 if self._columns > 1 else 0.42)
        return figure, figure.subplots(1, self._columns)

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
