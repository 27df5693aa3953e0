"""The HTML page of an inspection: what to look at first, then every layer, with pictures; nothing is fetched."""

from typing import Any

import jinja2

from quantplug.xray.pictures import layer_picture, overview
from quantplug.xray.result import FORMS, InspectedLayer, Inspection, gained, interval, shown

# Layers with a picture: what can still be opened and read.
_PICTURES = 40
_TITLES = {"reference": "q/dq graph", "emulation": "emulation", "program": "artefact"}


def page(found: Inspection, title: str, before: Inspection | None = None) -> str:
    """Returns the page.

    Args:
        found: the inspection.
        title: of the page.
        before: another one to be shown beside it.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantplug", "templates/pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(decibels=shown, gained=gained, interval=interval)
    drawn = [layer.node for layer in found.by_noise()[:_PICTURES]]
    return environment.get_template("inspection.html.jinja").render(
        found=found,
        title=title,
        before=before,
        forms={form: name for form, name in _TITLES.items() if form in found.output and form in FORMS},
        overview=overview(found, before),
        pictures={layer.node: layer_picture(layer) for layer in found.layers if layer.node in drawn},
        earlier={} if before is None else {layer.node: layer for layer in before.layers},
        change=_change,
    )


def _change(layer: InspectedLayer, earlier: dict[str, InspectedLayer], form: str) -> Any:
    """Returns by how many decibels a layer is nearer to float than before; "" where that is not known."""
    there = earlier.get(layer.node)
    now, then = layer.decibels(form), None if there is None else there.decibels(form)
    if now is None or then is None or now in (float("inf"), float("-inf")) or then in (float("inf"), float("-inf")):
        return ""
    return f"{now - then:+.1f}"
