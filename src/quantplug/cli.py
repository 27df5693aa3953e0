"""The command line: `quantplug demo`, `backends`, `quantize`, `inspect`, `evaluate`, `llm`, `explain` and others.

Errors on what the user passed are one sentence on the error stream and exit code 2; a disk that is full or an output
that is gone ends with code 1, Ctrl-C with 130.
"""

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quantplug.core.errors import ConfigError, QuantplugError
from quantplug.screen import current, listed, say, with_screen

if TYPE_CHECKING:
    from torch import fx

    from quantplug.core.report.explain import Report
    from quantplug.lowering.emulation.mismatch import Mismatch
    from quantplug.lowering.program import Program
    from quantplug.quantizers.framework.registry import Registered


class _CommandLine(typer.Typer):
    """Commands that all have `--json`, `--quiet` and `--verbose`."""

    def command(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Returns what registers a function as a command."""
        register = super().command(*args, **kwargs)
        return lambda function: register(with_screen(function))


# Plain text: the frames of rich cut off long options in narrow terminals, and take a third of the time to answer.
app = _CommandLine(no_args_is_help=True, rich_markup_mode=None)


def _backend_names() -> list[str]:
    """Returns what a shell completes `--backend` with."""
    from quantplug.quantizers.framework.names import names

    return names()


BackendOption = Annotated[
    str,
    typer.Option("--backend", "-b", help="A name that `quantplug backends` lists.", autocompletion=_backend_names),
]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL.pt2", help="What torch.export.save wrote.")]
ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="A config of the backend.")]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Also read pickles in MODEL.pt2, which can run any code of its author's.")
]
ReportOption = Annotated[Path | None, typer.Option(help="Write the report to this .html or .json file.")]


def _show_version(asked: bool) -> None:
    if asked:
        from quantplug import __version__

        sys.stdout.write(f"quantplug {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Quantize exported PyTorch models for real kernels."""


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for artefacts, picture and report.")] = Path("out")) -> None:
    """Train a small CNN on handwritten digits, quantize it for both backends, run it and show what happened."""
    from quantplug.demo import run

    screen = current()
    shown = run(out, screen.console)
    screen.document(shown.document())


@app.command()
def backends() -> None:
    """List the backends that are installed."""
    from quantplug.quantizers.framework.registry import backends as registered

    screen = current()
    found = [_described(entry) for entry in registered()]
    lines = [[", ".join(cell) if isinstance(cell, tuple) else cell for cell in each.values()] for each in found]
    screen.console.print(listed(screen.console, list(found[0]), lines))
    screen.document({"backends": found})


def _described(entry: "Registered") -> dict[str, Any]:
    """Returns the cells of a backend by their headings; "-" for what a broken one cannot tell."""
    from quantplug.quantizers.framework.capabilities import dtypes_of, modes_of

    known = {"backend": entry.name, "package": entry.distribution, "version": entry.version}
    if entry.quantizer is None:
        return known | dict.fromkeys(("modes", "dtypes", "configs"), "-") | {"summary": f"broken: {entry.problem}"}
    backend = entry.quantizer.backend
    names = tuple(backend.configs)
    told = {"modes": modes_of(backend, names), "dtypes": dtypes_of(backend, names), "configs": names}
    return known | told | {"summary": backend.summary}


@app.command()
def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend and its module, such as my_npu.")],
    out: Annotated[Path, typer.Option(help="The folder to write the package's folder into.")] = Path(),
) -> None:
    """Write a package for a backend of your own, which passes the conformance kit as it is."""
    from quantplug.scaffold import new_backend as write_package

    folder, console = write_package(name, out), current().console
    console.print(escape(f"Wrote {folder}; install it with `pip install -e {folder}`,"), soft_wrap=True)
    console.print(f"then let `pytest --quantplug-backend {name}` judge it.", soft_wrap=True)
    current().document({"folder": str(folder)})


@app.command()
def quantize(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The artefact to write.")],
    backend: BackendOption = "xnnpack",
    calibration: Annotated[Path | None, typer.Option(metavar="DATA.npz", help="Arrays [samples, ...].")] = None,
    config: ConfigOption = None,
    observer: Annotated[
        str | None, typer.Option(help="How ranges are found: histogram, minmax, percentile, mse, entropy.")
    ] = None,
    weight_observer: Annotated[str | None, typer.Option(help="The same of weights; minmax by default.")] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help="Of x86: 7 for machines without VNNI; what this one needs by default.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="What keeps accuracy: fast (a few passes over the data), accurate (longer).")
    ] = None,
    correct_bias: Annotated[
        bool,
        typer.Option("--correct-bias", help="Let biases undo the mean error of rounding."),
    ] = False,
    bias_samples: Annotated[
        int | None, typer.Option(min=1, help="Correct biases with so many calibration samples; 128 by default.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Of x86: onednn, onednn_package, openvino, onnxruntime; auto for the fastest here."),
    ] = None,
    time_anew: Annotated[
        bool, typer.Option("--time-anew", help="Time engines though an earlier choice is remembered.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many calibration batches.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a batch; that of the export by default.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show bars with the time left, on a terminal.")] = True,
    report: ReportOption = None,
    trust: TrustOption = False,
) -> None:
    """Quantize an exported model and lower it to a backend's kernels."""
    from quantplug.algorithms.recipe import recipe_of
    from quantplug.core.files.whole import require_writable
    from quantplug.core.report.engines import HEADINGS as ENGINE_HEADINGS
    from quantplug.files import load_batches, load_exported, require_apart
    from quantplug.flow import quantize as quantize_model
    from quantplug.quantizers.framework.registry import get_quantizer

    # Names are checked before files are read.
    named = {"observer": observer, "weight_observer": weight_observer, "weight_bits": weight_bits}
    options = {name: value for name, value in named.items() if value is not None}
    target = get_quantizer(backend).backend
    chosen = target.config(config, **options)
    engines = _engines(engine)
    anew: dict[str, Any] = {"time_anew": True} if time_anew else {}
    target.require_lowering_options(anew, engines)
    recipe_of(recipe or ())
    require_apart((model, calibration), (out, report))
    for path in filter(None, (out, report)):
        require_writable(path)
    _require_kind(report, ".html", ".json")
    program = load_exported(model, trust=trust)
    batches = load_batches(calibration, program, batch_size) if calibration else None
    biases = bias_samples or correct_bias
    artefact = quantize_model(
        program,
        None,
        backend,
        batches,
        chosen,
        limit=limit,
        progress=progress,
        correct_bias=biases,
        recipe=recipe or (),
        engine=engines,
        **anew,
    )
    artefact.save(out)
    _write_report(artefact.report, report, model.name)
    screen = current()
    screen.console.print(artefact.report.table())
    screen.console.print(artefact.report.summary())
    if artefact.report.engines is not None:
        headings, rows = ENGINE_HEADINGS, [row.cells for row in artefact.report.engines.rows]
        screen.console.print(listed(screen.console, headings, rows))
        screen.console.print(escape(artefact.report.engines.summary()), soft_wrap=True)
    for done in artefact.applied:
        screen.console.print(escape(str(done)), soft_wrap=True)
    size, before = out.stat().st_size, model.stat().st_size
    sizes = f"{size / 1e6:.2f} MB; the exported model has {before / 1e6:.2f} MB"
    screen.console.print(escape(f"Wrote {out} ({sizes})."), soft_wrap=True)
    files = {"out": str(out), "bytes": size, "model_bytes": before}
    screen.document({**files, "applied": [str(done) for done in artefact.applied], "report": _parts(artefact.report)})


def _engines(named: str | None) -> str | list[str] | None:
    """Returns one engine or several that commas part."""
    return named.split(",") if named is not None and "," in named else named


@app.command()
def llm(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a GGUF file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .pte for xnnpack, .pt2 for x86.")],
    backend: BackendOption = "xnnpack",
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A config of the backend, or float32; 8da4w on xnnpack.")
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Config of embedding tables: int4_groups (beside 8da4w), int8_groups, float32.")
    ] = None,
    cache: Annotated[str, typer.Option(help="Keys and values in float32, or in int8 with a scale a row.")] = "float32",
    attention: Annotated[
        str | None, typer.Option(help="aten, or executorch (xnnpack) or filled (x86), by default where they can be.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="What keeps accuracy: fast, accurate.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="A text; its last quarter is held back, and scored.")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Positions of the cache.")] = 512,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many pieces of the text to calibrate.")] = None,
    score: Annotated[int, typer.Option(min=1, help="Pieces of 128 tokens to score.")] = 4,
    progress: Annotated[bool, typer.Option(help="Show bars with the time left, on a terminal.")] = True,
) -> None:
    """Quantize a language model with its cache, and measure it."""
    from quantplug.language.command import Order, convert

    kinds, screen = (backend, config, table, cache, attention), current()
    order = Order(model, out, *kinds, recipe, calibration, context, limit, score, progress)
    figures = convert(order, screen.console)
    screen.document({"out": str(out), **asdict(figures)})


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL.pte", help="What `quantplug llm` wrote.")],
    tokenizer: Annotated[Path, typer.Option(help="The folder or GGUF file that the model came from.")],
    prompt: Annotated[str, typer.Option(help="The text to go on with.")],
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="As many as the cache holds by default.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token, more draws.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn.")] = None,
) -> None:
    """Print the text behind a prompt, as it is generated."""
    from quantplug.language.command import talk

    screen, text = current(), ""
    for piece in talk(model, tokenizer, prompt, max_new_tokens, temperature, seed):
        text += piece
        if screen.is_read:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if screen.is_read:
        sys.stdout.write("\n")
    screen.document({"text": text})


@app.command()
def explain(
    model: ModelArgument,
    backend: BackendOption = "xnnpack",
    config: ConfigOption = None,
    report: ReportOption = None,
    trust: TrustOption = False,
) -> None:
    """Show, for every operator, which rule would quantize it, or why none does; no data is needed."""
    from quantplug.core.files.whole import require_writable
    from quantplug.core.pt2e.prepare import prepare_pt2e
    from quantplug.core.report.explain import explain as explain_model
    from quantplug.files import load_exported, require_apart
    from quantplug.quantizers.framework.registry import get_quantizer

    quantizer = get_quantizer(backend, strict=False)  # it tells why nothing is quantized, too
    if config is not None:
        quantizer.set_global(config)
    _require_kind(report, ".html", ".json")
    require_apart((model,), (report,))
    if report is not None:
        require_writable(report)
    found = explain_model(prepare_pt2e(load_exported(model, trust=trust).module(), quantizer))
    _write_report(found, report, model.name)
    screen = current()
    screen.console.print(found.table())
    screen.console.print(found.summary())
    screen.document(_parts(found))


@app.command()
def sensitivity(
    model: ModelArgument,
    calibration: Annotated[Path, typer.Option(metavar="DATA.npz", help="Arrays [samples, ...].")],
    backend: BackendOption = "xnnpack",
    config: ConfigOption = None,
    program: Annotated[
        bool, typer.Option("--program", help="Measure a program of each operator on the backend's kernels: slower.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a batch; that of the export by default.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Draw it to this .png file, or write it to this .json.")] = None,
    trust: TrustOption = False,
) -> None:
    """Show which quantized operators the error of the model's output comes from."""
    from quantplug.algorithms.sensitivity import sensitivity as sensitivity_of
    from quantplug.core.calibration.calibrate import calibrate
    from quantplug.core.files.whole import require_writable, write_content
    from quantplug.core.pt2e.prepare import prepare_pt2e
    from quantplug.core.report.drawing import require_pictures
    from quantplug.files import load_batches, load_exported, require_apart
    from quantplug.quantizers.framework.registry import get_quantizer

    quantizer = get_quantizer(backend)
    if config is not None:
        quantizer.set_global(config)
    _require_kind(report, ".png", ".json")
    if report is not None and report.suffix == ".png":
        require_pictures()
    require_apart((model, calibration), (report,))
    if report is not None:
        require_writable(report)
    exported = load_exported(model, trust=trust)
    batches = load_batches(calibration, exported, batch_size)
    prepared = prepare_pt2e(exported.module(), quantizer)
    calibrate(prepared, batches)
    args, kwargs = exported.example_inputs or ((), {})

    def lower(graph: "fx.GraphModule") -> "Program":
        return quantizer.backend.lower(graph, args, example_kwargs=kwargs)

    found = sensitivity_of(prepared, batches, run=lower if program else None)
    if report is not None and report.suffix == ".png":
        found.plot(report)
    elif report is not None:
        write_content(report, found.to_json().encode())
    screen = current()
    screen.console.print(escape(str(found)), soft_wrap=True)
    screen.document(json.loads(found.to_json()))


ObserverOption = Annotated[
    str | None, typer.Option("--observer", help="How ranges are found: histogram, minmax, percentile, mse, entropy.")
]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Samples of a batch; that of the export by default.")
]
RecipeOption = Annotated[str, typer.Option("--recipe", help="What keeps accuracy: fast, accurate.")]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", metavar="DATA.npz", help="Other data to calibrate with.")
]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE.json", help="Write all that was found to this file.")
]


@app.command()
def inspect(
    model: ModelArgument,
    data: Annotated[Path, typer.Option(metavar="DATA.npz", help=escape("Arrays [samples, ...] of the inputs."))],
    backend: BackendOption = "xnnpack",
    config: ConfigOption = None,
    observer: ObserverOption = None,
    recipe: RecipeOption = "",
    calibration: CalibrationOption = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures to this file.")] = None,
    save: SaveOption = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What --save wrote before: shown beside it on the page.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to look at.")] = 64,
    times: Annotated[
        bool, typer.Option("--times", help="Time each layer as a program of its own where the runtime tells no times.")
    ] = False,
    batch_size: BatchOption = None,
    trust: TrustOption = False,
) -> None:
    """Look inside: what each layer loses and how long it takes, what is wrong with it, and what to do."""
    from quantplug.xray.command import Order, look

    order = Order(model, data, backend, config, observer, recipe, calibration, batch_size, trust)
    look(order, html, save, compare, samples, times)


@app.command()
def evaluate(
    model: ModelArgument,
    data: Annotated[Path, typer.Option(metavar="LABELLED.npz", help="Arrays of the inputs, and one of labels.")],
    metric: Annotated[
        str, typer.Option(help="top1, top5, or my_metric.py:function of all outputs and labels (with --trust).")
    ] = "top1",
    labels: Annotated[str, typer.Option(help="The name of the array of labels.")] = "labels",
    backend: BackendOption = "xnnpack",
    config: ConfigOption = None,
    observer: ObserverOption = None,
    recipe: RecipeOption = "",
    calibration: CalibrationOption = None,
    save: SaveOption = None,
    batch_size: BatchOption = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the file of the metric; read pickles in MODEL.pt2 too.")
    ] = False,
) -> None:
    """Measure a metric of the float model, the q/dq graph and the artefact, with confidence intervals."""
    from quantplug.xray.command import Order, score

    order = Order(model, data, backend, config, observer, recipe, calibration, batch_size, trust)
    score(order, metric, labels, save)


@app.command()
def numerics(backend: BackendOption = "xnnpack") -> None:
    """Compare emulated integer kernels and the q/dq graph with the backend's real kernels, on this machine.

    XNNPACK takes a minute or two. Ends with code 1 if a kernel is not at its declared level.
    """
    from quantplug.lowering.emulation.mismatch import mismatches

    found, screen = mismatches(backend), current()
    headings = ("kernel", "declared", "elements", "emulation differs", "q/dq graph differs", "steps")
    screen.console.print(listed(screen.console, headings, [_cells(row) for row in found]))
    for row in found:
        if not row.holds:
            screen.console.print(f"'{row.row}' is not {row.level.value}: {row.emulated}.")
    screen.document({"kernels": [_figures(row) for row in found]})
    if not all(row.holds for row in found):
        raise typer.Exit(1)


def _cells(row: "Mismatch") -> tuple[str, ...]:
    graph = row.reference
    return (
        *(row.row, row.level.value, str(graph.elements)),
        *(str(row.emulated.differing), f"{graph.share:.3%}", f"{graph.steps:.0f}"),
    )


def _figures(row: "Mismatch") -> dict[str, Any]:
    graph = row.reference
    of_graph = {"elements": graph.elements, "graph_differs": graph.differing, "graph_steps": graph.steps}
    declared = {"kernel": row.row, "declared": row.level.value, "holds": row.holds}
    return {**declared, **of_graph, "emulation_differs": row.emulated.differing}


def _parts(report: "Report") -> Any:
    return json.loads(report.json())


def _require_kind(path: Path | None, *kinds: str) -> None:
    if path is not None and path.suffix not in kinds:
        raise ConfigError(f"The report '{path}' has no known kind; end its name in {' or '.join(kinds)}.")


def _write_report(report: "Report", path: Path | None, title: str) -> None:
    from quantplug.core.files.whole import write_whole

    if path is not None:
        text = report.html(title) if path.suffix == ".html" else report.json()
        write_whole(path, lambda unfinished: unfinished.write_text(text, "utf-8", "backslashreplace"))


def main() -> None:
    """Runs the command line; errors of quantplug's end it with one sentence and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except QuantplugError as error:
        say("error", str(error))
        sys.exit(2)
    except OSError as error:
        # What is left in the buffer of a full disk or a closed pipe would fail once more at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno != errno.EPIPE:
            where = f"'{error.filename}'" if error.filename else "the output"
            say("error", f"{where} fails ({error.strerror or error}); free or change its place.")
        sys.exit(1)
