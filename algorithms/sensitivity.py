"""Sensitivity: which quantized operators the error of a model's output comes from.

Before: a prepared, calibrated graph, of any quantizer, and batches. After: the same graph, and for each quantized
operator how far the output lies from float where this operator alone is quantized, largest first.

An operator's own quantization is that of its weight and bias, its inputs and its output, with the numbers that convert
would write; what is fused to it belongs to it. A tensor between two operators is rounded for both of them: either alone
would round it, and neither gets rid of that rounding by becoming float alone. Operators that move numbers in a scale
that others found are none of their own. Noise is measured by the signal-to-quantization-noise ratio of the output, to
which operators contribute about independently (Lin et al., "Fixed Point Quantization of Deep Convolutional Networks",
arXiv:1511.06393, who choose each layer's bits by it), so that the shares of the sum tell what to change first.

Where a backend's kernels compute otherwise than the graph says, programs are measured: each is made of the graph in
which one operator alone is quantized.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, fx

from quantplug.algorithms.isolated import Outputs, one_at_a_time, outputs, rounding_only
from quantplug.algorithms.operators import QuantizedGraph, QuantizedOperator, quantized_graph
from quantplug.core.calibration.node_by_node import batches_of
from quantplug.core.calibration.observer_places import require_observers
from quantplug.core.calibration.outputs import floats_of
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError, ModelError, first_line
from quantplug.core.files.typed import typed
from quantplug.core.files.whole import write_whole
from quantplug.core.graph.facts import describe, module_path
from quantplug.core.report.drawing import drawing
from quantplug.core.specs.levels import decibels as decibels_of

Runnable: TypeAlias = Callable[[fx.GraphModule], Callable[..., Any]]
"""Makes of a converted graph what runs, which is called with a batch."""

SAMPLES = 64
# Batches side by side: activations of so many are in memory, and weights are rounded once for them.
_TOGETHER = 8
# Bars of a picture that can still be read on one page.
_BARS = 40


@dataclass(frozen=True)
class OperatorNoise:
    """What one operator does to the output when it alone is quantized.

    Attributes:
        node: its name in the graph.
        module_path: dotted path of the module it was traced in.
        operator: the operator, such as "conv2d".
        share: its noise as a share of the sum over all operators, 0 to 1.
        noise: energy of the output's error over energy of the output.
    """

    node: str
    module_path: str
    operator: str
    share: float
    noise: float

    @property
    def decibels(self) -> float:
        """The output's signal-to-quantization-noise ratio in decibels; infinite where nothing is lost."""
        return decibels_of(1, self.noise)


@dataclass(frozen=True)
class Sensitivity:
    """Where the error of a quantized model's output comes from.

    Attributes:
        rows: one for each quantized operator, the largest noise first.
        noise: of the model with all operators quantized together; energy of the error over that of the output.
        left: by node name why another quantized operator has no row.
    """

    rows: tuple[OperatorNoise, ...]
    noise: float
    left: dict[str, str] = field(default_factory=dict)

    @property
    def decibels(self) -> float:
        """The output's signal-to-quantization-noise ratio with all operators quantized, in decibels."""
        return decibels_of(1, self.noise)

    def row(self, node: str) -> OperatorNoise:
        """Returns the row of a node by its name; KeyError if it has none."""
        return {row.node: row for row in self.rows}[node]

    def table(self) -> Table:
        """Returns the rows as a rich table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("node", overflow="fold")
        table.add_column("operator", overflow="fold")
        table.add_column("module", overflow="fold")
        table.add_column("share of noise", justify="right")
        table.add_column("dB alone", justify="right")
        for row in self.rows:
            # Without it rich would read "[ab]" in a path as markup and leave it out.
            names = map(escape, (row.node, row.operator, row.module_path))
            table.add_row(*names, f"{row.share:.1%}", f"{row.decibels:.1f}")
        return table

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=160, no_color=True).print(self.table())
        told = f"; {len(self.left)} others have no rounding of their own" if self.left else ""
        return f"{out.getvalue()}{len(self.rows)} operators, together {self.decibels:.1f} dB{told}."

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Sensitivity":
        """Returns what `to_json` wrote.

        Raises:
            ArtefactError: the text is none of it.
        """
        try:
            found: Sensitivity = typed(json.loads(text), Sensitivity, "it")
        except (ValueError, RecursionError) as error:
            raise ArtefactError(
                f"The text is no sensitivity ({first_line(error)}); write one with Sensitivity.to_json."
            ) from error
        return found

    def plot(self, path: str | Path) -> Path:
        """Draws the operators with the most noise as bars, and returns the picture's path.

        Args:
            path: the .png to write; it appears whole or not at all.

        Raises:
            ArtefactError: the folder does not exist, or the file cannot be written.
            ConfigError: matplotlib is not installed.
        """
        rows = self.rows[:_BARS]
        with drawing(8, 1 + 0.2 * max(len(rows), 4)) as figure:
            panel = figure.subplots()
            bars = panel.barh(range(len(rows)), [100 * row.share for row in rows], color="#2f6f8f")
            panel.bar_label(bars, [f"{row.decibels:.1f} dB" for row in rows], padding=3)
            panel.set_yticks(range(len(rows)), [f"{row.module_path or row.node} ({row.operator})" for row in rows])
            panel.invert_yaxis()
            panel.set_xlabel("share of the noise, per cent")
            panel.set_title(f"Operators quantized alone; all together {self.decibels:.1f} dB")
            return write_whole(Path(path), lambda unfinished: figure.savefig(unfinished, dpi=110, format="png"))


@torch.inference_mode(False)
def sensitivity(
    prepared: fx.GraphModule,
    loader: Iterable[Any],
    *,
    inputs: Callable[[Any], Any] | None = None,
    samples: int = SAMPLES,
    run: Runnable | None = None,
) -> Sensitivity:
    """Measures of each quantized operator how much of the output's error is its own.

    Each batch goes through the model three times, in float, with all quantized, and in float again; and beside the last
    of them once for each operator, from where it stands to the end. The model is not changed, buffers that it writes
    included.

    Args:
        prepared: a calibrated model, of any quantizer, from our prepare or torchao's.
        loader: batches as for `calibrate`; random inputs have no use here.
        inputs: picks the model's inputs out of a batch, as for `calibrate`.
        samples: batches are taken until they hold so many samples.
        run: makes of a converted graph what is measured in its place, such as
            `lambda graph: backend.lower(graph, (batch,))` for real kernels, or `backend.emulate`. It is called once
            with all quantized and once for each operator; each batch goes through what it returns, and through the
            float graph. A `restart` that this has is called before each batch.

    Raises:
        ModelError: `prepared` is not a prepared graph module, is prepared for training, or returns nothing that has an
            error; or what `run` makes of it returns something else.
        ConfigError: `run` is no function that returns one.
        CalibrationError: it is not calibrated, there is no batch, one does not fit the model, or outputs are not
            finite or all zero.
    """
    model = require_observers(prepared, "sensitivity")
    if run is not None and not callable(run):
        raise ConfigError(f"run takes a function of a converted graph, found {type(run).__name__}; leave it out.")
    with batches_of(model, loader, samples, inputs, least=1, step="sensitivity") as batches, torch.no_grad():
        graph = quantized_graph(model)
        return _result(graph, _of_graph(graph, batches) if run is None else _of_programs(graph, batches, run))


@dataclass(frozen=True)
class _Energies:
    """Of the float outputs, and of what all operators and each alone change in them."""

    signal: float
    together: float
    alone: dict[QuantizedOperator, float]


def _of_graph(graph: QuantizedGraph, batches: Sequence[tuple[Any, ...]]) -> _Energies:
    together, signal, alone = 0.0, 0.0, dict.fromkeys(graph.operators, 0.0)
    for start in range(0, len(batches), _TOGETHER):
        group = list(batches[start : start + _TOGETHER])
        wanted = _finite_outputs(graph, group, start)
        signal += sum(map(_energy, wanted))
        together += _error(outputs(graph, group, graph.pairs), wanted)
        for operator, found in one_at_a_time(graph, group):
            alone[operator] += _error(found, wanted)
    return _Energies(signal, together, alone)


def _of_programs(graph: QuantizedGraph, batches: Sequence[tuple[Any, ...]], run: Runnable) -> _Energies:
    wanted = [_finite_outputs(graph, [batch], place) for place, batch in enumerate(batches)]

    def error(active: Collection[fx.Node]) -> float:
        program = _made(run, rounding_only(graph, active))
        return sum(_error(_returned(program, *pair), pair[1]) for pair in zip(batches, wanted, strict=True))

    alone = {operator: error(operator.pairs) for operator in graph.operators}
    return _Energies(sum(_energy(value) for values in wanted for value in values), error(graph.pairs), alone)


def _made(run: Runnable, graph: fx.GraphModule) -> Callable[..., Any]:
    program = run(graph)
    if not callable(program):
        raise ConfigError(
            f"run returned {type(program).__name__}, which cannot be called; return the program that it makes."
        )
    return program


def _returned(program: Callable[..., Any], batch: tuple[Any, ...], wanted: Outputs) -> Outputs:
    """Returns a program's outputs for a batch, with the random numbers that the float graph got."""
    restart: Callable[[], None] = getattr(program, "restart", lambda: None)
    restart()
    with torch.random.fork_rng(devices=[]):
        found = floats_of(program(*batch))
    shapes, expected = ([tuple(value.shape) for value in values] for values in (found, wanted))
    if shapes != expected:
        raise ModelError(
            f"What run made returns tensors of shapes {shapes}, and the float graph {expected}; return all that the "
            "graph returns."
        )
    return found


def _finite_outputs(graph: QuantizedGraph, group: Sequence[tuple[Any, ...]], start: int) -> Outputs:
    found = outputs(graph, group)
    if not found:
        raise ModelError(
            "sensitivity compares outputs of floating point, and the model returns none; let it return what its "
            "decision is made from."
        )
    wrong = next((place for place, value in enumerate(found) if not bool(value.isfinite().all())), None)
    if wrong is not None:
        index = start + wrong * len(group) // len(found)
        raise CalibrationError(
            f"The float model's output for batch {index} has NaN or infinity; take the batch out that makes them."
        )
    return found


def _result(graph: QuantizedGraph, found: _Energies) -> Sensitivity:
    signal, together, alone = found.signal, found.together, found.alone
    if signal == 0:
        raise CalibrationError("The float model's outputs are all zero on these batches; pass batches that it answers.")
    wrong = next((operator.node for operator, noise in alone.items() if not math.isfinite(noise)), None)
    if wrong is not None or not math.isfinite(together):
        where = "the model as a whole" if wrong is None else describe(wrong)
        raise CalibrationError(
            f"Quantizing {where} makes NaN or infinity of the output; leave it float, or choose a wider dtype."
        )
    total = sum(alone.values()) or 1.0
    rows = (_row(operator.node, noise / total, noise / signal) for operator, noise in alone.items())
    return Sensitivity(tuple(sorted(rows, key=lambda row: -row.noise)), together / signal, graph.left)


def _row(node: fx.Node, share: float, noise: float) -> OperatorNoise:
    operator = str(node.target).removeprefix("aten.").removesuffix(".default")
    return OperatorNoise(node.name, module_path(node), operator, share, noise)


def _energy(value: Tensor) -> float:
    return float(value.double().square().sum())


def _error(found: Outputs, wanted: Outputs) -> float:
    return sum(_energy(one.double() - other.double()) for one, other in zip(found, wanted, strict=True))
