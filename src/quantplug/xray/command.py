"""What `quantplug inspect` and `quantplug evaluate` do with files: quantize, look, write what was found.

Before: paths and names from the command line. After: a report on the console, and the files that were asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch import fx
from torch.export import ExportedProgram

from quantplug.algorithms.recipe import apply, by_stage, recipe_of
from quantplug.core.errors import ArtefactError, first_line
from quantplug.core.files.whole import kind_at, require_writable, write_content
from quantplug.core.graph.working_copy import working_copy
from quantplug.evaluation import evaluate
from quantplug.files import load_batches, load_exported, load_labelled, require_apart
from quantplug.flow import Artefact, quantize
from quantplug.metrics import metric_of
from quantplug.quantizers.framework.registry import get_quantizer
from quantplug.screen import current
from quantplug.xray.flow import inspect
from quantplug.xray.result import Inspection


@dataclass(frozen=True)
class Order:
    """What both commands are told.

    Attributes:
        model: the `.pt2` file.
        data: the `.npz` file.
        backend: its name.
        config: the name of one of its configs, None for the first.
        observer: how ranges are found, None for the config's own.
        recipe: the name of algorithms, "" for none.
        calibration: the `.npz` file to calibrate with, None for `data`.
        batch_size: samples of a batch, None for that of the export.
        trust: whether files may run code.
    """

    model: Path
    data: Path
    backend: str
    config: str | None
    observer: str | None
    recipe: str
    calibration: Path | None
    batch_size: int | None
    trust: bool

    def require(self, writes: Iterable[Path | None], reads: Iterable[Path | None] = ()) -> Any:
        """Checks names and paths before anything is read; returns the config."""
        options = {} if self.observer is None else {"observer": self.observer}
        config = get_quantizer(self.backend).backend.config(self.config, **options)
        recipe_of(self.recipe or ())
        written = [path for path in writes if path is not None]
        require_apart((self.model, self.data, self.calibration, *reads), written)
        for path in written:
            require_writable(path)
        return config


def look(order: Order, html: Path | None, save: Path | None, compare: Path | None, samples: int, times: bool) -> None:
    """Inspects the model of a file, prints what was found and writes it.

    Args:
        order: which model, and how it is quantized.
        html: the page to write.
        save: the file to write as JSON.
        compare: what an earlier inspection wrote as JSON.
        samples: how many to look at.
        times: whether to time layers where that takes a program for each.
    """
    config = order.require((html, save), (compare,))
    before = None if compare is None else _earlier(compare)
    program = load_exported(order.model, trust=order.trust)
    data = load_batches(order.data, program, order.batch_size)
    calibration = data if order.calibration is None else load_batches(order.calibration, program, order.batch_size)
    floats, artefact = quantized(program, calibration, order, config)
    found = inspect(floats, artefact, data, samples=samples, times=times or None)
    if save is not None:
        write_content(save, found.to_json().encode())
    if html is not None:
        write_content(html, found.html(f"{order.model.name} on {order.backend}", before).encode())
    console = current().console
    console.print(found.table())
    console.print(escape(found.summary()), soft_wrap=True, highlight=False)
    _tell_of(console, html, save)
    current().document(loads(found.to_json()))


def score(order: Order, metric: str, labels: str, save: Path | None) -> None:
    """Evaluates the model of a file, and prints the scores.

    Args:
        order: which model, and how it is quantized.
        metric: a name, or "file.py:function".
        labels: the name of the array of labels.
        save: the file to write as JSON.
    """
    config = order.require((save,))
    measure = metric_of(metric, trust=order.trust)
    program = load_exported(order.model, trust=order.trust)
    pairs, whole = load_labelled(order.data, program, labels, order.batch_size)
    calibration = whole if order.calibration is None else load_batches(order.calibration, program, order.batch_size)
    floats, artefact = quantized(program, calibration, order, config)
    found = evaluate(floats, artefact, pairs, measure)
    if save is not None:
        write_content(save, found.to_json().encode())
    console = current().console
    console.print(found.table())
    console.print(escape(found.summary()), soft_wrap=True, highlight=False)
    if order.calibration is None:
        console.print("Calibrated on the samples that are scored; pass --calibration for others.", soft_wrap=True)
    _tell_of(console, save)
    current().document(loads(found.to_json()))


def quantized(program: ExportedProgram, calibration: Any, order: Order, config: Any) -> tuple[fx.GraphModule, Artefact]:
    """Returns the float graph behind what a recipe does to it, and the artefact that is made of it."""
    floats, others = by_stage(recipe_of(order.recipe or ()))
    graph = working_copy(program.module())
    apply(floats, graph, calibration, None, get_quantizer(order.backend).set_global(config), progress=False)
    args, kwargs = program.example_inputs or ((), {})
    recipe = others if floats else order.recipe  # by name, it is not told which of its parts gain nothing
    artefact = quantize(
        graph, args, order.backend, calibration, config, example_kwargs=kwargs, recipe=recipe or (), progress=False
    )
    return graph, artefact


def _earlier(path: Path) -> Inspection:
    if kind_at(path) != "file":
        raise ArtefactError(f"There is no file '{path}' to compare with; write one with --save.")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({first_line(error)}); write it with --save.") from error
    return Inspection.from_json(text)


def _tell_of(console: Console, *paths: Path | None) -> None:
    written = [str(path) for path in paths if path is not None]
    if written:
        console.print(escape(f"Wrote {', '.join(written)}."), soft_wrap=True)
