"""The demo: a small CNN on real handwritten digits, from training to two real runtimes.

Before: nothing but the digits that scikit-learn ships. After: one table of accuracy, agreement, size and
speed, the explanation of every layer, and a picture of float against quantized activations.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, fx, nn

from quantplug.core.errors import ArtefactError
from quantplug.core.extras import extra_module
from quantplug.core.files.whole import kind_at, write_content, write_whole
from quantplug.core.report.compare import compare_layers
from quantplug.core.report.drawing import drawing, require_pictures
from quantplug.core.specs.levels import sqnr
from quantplug.flow import Artefact, export, quantize
from quantplug.xray.flow import inspect

BATCH = 64
_SUFFIX = {"xnnpack": ".pte", "x86": ".pt2"}


@dataclass(frozen=True)
class Digits:
    """8x8 grey images of digits: images float32 [N, 1, 8, 8] in 0..1, labels int64 [N]."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """Returns scikit-learn's digits, shuffled with a fixed seed: 1,413 to train on, 384 to test.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    found = extra_module("sklearn.datasets", "demo", "The demo").load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    split = len(images) - 6 * BATCH
    return Digits(images[:split], labels[:split], images[split:], labels[split:])


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Returns [N, C, H, W] for [N, C, H, W]."""
        y = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(x + self.bn2(self.conv2(y)))
        return out


class DigitNet(nn.Module):
    """A small residual CNN: float32 [N, 1, 8, 8] to logits [N, 10]."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.block1 = Residual(channels)
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1), nn.ReLU6())
        self.block2 = Residual(2 * channels)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = self.widen(self.pool(self.block1(self.stem(x))))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(self.block2(x), 1).flatten(1))
        return logits


def _batches(samples: Tensor) -> list[Tensor]:
    return [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]


def train(digits: Digits, epochs: int = 12) -> DigitNet:
    """Returns a trained network in eval mode; a few seconds on two cores."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DigitNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, epochs=epochs, steps_per_epoch=-(-len(digits.train) // BATCH)
        )
        for _ in range(epochs):
            for chosen in _batches(torch.randperm(len(digits.train))):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(digits.train[chosen]), digits.train_labels[chosen])
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
    return model.eval()


@dataclass(frozen=True)
class Figures:
    """What was measured of one form of the model, over the test images.

    Attributes:
        model: its dtype and backend.
        accuracy: share of right answers, 0 to 1.
        agreement: share of answers that are those of the float model.
        decibels: signal-to-quantization-noise ratio of the logits against the float model.
        size: bytes of the file, of the float model those of its weights.
        speed: times as fast as the float model.
    """

    model: str
    accuracy: float
    agreement: float
    decibels: float
    size: int
    speed: float

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        compared = (
            (f"{self.agreement * 100:.1f} %", f"{self.decibels:.1f} dB") if self.decibels < math.inf else ("", "")
        )
        return (
            *(self.model, f"{self.accuracy * 100:.1f} %", *compared),
            *(f"{self.size / 1e3:.0f} kB", f"{self.speed:.1f}x"),
        )


@dataclass(frozen=True)
class Shown:
    """What the demo made and measured.

    Attributes:
        artefacts: by backend.
        figures: a row for each form of the model.
        written: the files.
    """

    artefacts: dict[str, Artefact]
    figures: tuple[Figures, ...]
    written: tuple[Path, ...]

    def document(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        reports = {backend: json.loads(artefact.report.json()) for backend, artefact in self.artefacts.items()}
        figures = [asdict(row) for row in self.figures]
        return {"figures": figures, "written": [str(path) for path in self.written], "reports": reports}


def run(out: Path, console: Console) -> Shown:
    """Trains, quantizes for every backend, measures, prints and writes what a reader wants to look at.

    Args:
        out: folder for the artefacts, the picture, the reports and the inspection; made if it does not exist.
        console: where to print.

    Returns:
        The artefacts and what was measured of them.

    Raises:
        ArtefactError: `out` is a file, or cannot be made.
        ConfigError: scikit-learn or matplotlib is not installed.
    """
    require_pictures()
    digits = load_digits()
    if kind_at(out) not in ("nothing", "folder"):
        raise ArtefactError(f"'{out}' is a file; give a folder to write to.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtefactError(f"Folder '{out}' cannot be made ({error.strerror}); give another.") from error
    with console.status("Training a CNN on 1,413 handwritten digits ..."):
        model = train(digits)
    example = (digits.test[:BATCH],)
    calibration = _batches(digits.train[: 8 * BATCH])
    artefacts = {}
    for backend, suffix in _SUFFIX.items():
        with console.status(f"Quantizing for {backend} ..."):
            artefacts[backend] = quantize(model, example, backend, calibration, progress=False)
            artefacts[backend].save(out / f"digits{suffix}")
            page = artefacts[backend].report.html(f"digits on {backend}")
            write_content(out / f"report_{backend}.html", page.encode())
    half = quantize(model, example, "x86", config="float16", progress=False)
    half.save(out / "digits_float16_x86.pt2")
    exported = export(model, example)
    rows = {"float16, x86": half} | {f"int8, {name}": artefact for name, artefact in artefacts.items()}
    figures = measured(model, exported, rows, digits)
    console.print(comparison(figures, len(digits.test)))
    console.print(artefacts["xnnpack"].report.table())
    console.print(artefacts["xnnpack"].report.summary())
    with console.status("Looking inside of what runs on x86 ..."):
        found = inspect(model, artefacts["x86"], [example])
    write_content(out / "inspection_x86.html", found.html("Inside of digits on x86").encode())
    picture = out / "activations.png"
    draw_layers(exported, artefacts["xnnpack"].reference, example, picture)
    written = tuple(sorted(out.iterdir()))
    console.print(escape(f"Wrote {', '.join(map(str, written))}."), soft_wrap=True)
    return Shown(artefacts, figures, written)


def measured(
    model: nn.Module, exported: fx.GraphModule, artefacts: dict[str, Artefact], digits: Digits
) -> tuple[Figures, ...]:
    """Returns accuracy, agreement, noise, size and speed of the float model, then of each artefact.

    Args:
        model: the float model.
        exported: its graph, which speeds are relative to.
        artefacts: what was made of it, by the name of the row.
        digits: whose test images are run.
    """
    with torch.no_grad():
        expected = _logits(exported, digits)
        right = _share(expected.argmax(1) == digits.test_labels)
        rows = [Figures("float32, PyTorch", right, 1.0, math.inf, _weight_bytes(model), 1.0)]
        for name, artefact in artefacts.items():
            found = _logits(artefact, digits)
            right = _share(found.argmax(1) == digits.test_labels)
            agreement = _share(found.argmax(1) == expected.argmax(1))
            speed = _speedup(artefact, exported, digits.test[:BATCH])
            rows.append(Figures(name, right, agreement, float(sqnr(found, expected)), artefact.nbytes, speed))
    return tuple(rows)


def comparison(figures: Iterable[Figures], images: int) -> Table:
    """Returns the table of what was measured over so many test images."""
    table = Table(title=f"Handwritten digits, {images} test images", box=box.SIMPLE_HEAD)
    for heading in ("model", "accuracy", "agrees with float", "SQNR", "size", "speed"):
        table.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for row in figures:
        table.add_row(*row.cells())
    return table


def _logits(runs: Callable[[Tensor], Any], digits: Digits) -> Tensor:
    return torch.cat([runs(batch) for batch in _batches(digits.test)])


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())


def _weight_bytes(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def _speedup(fast: Callable[[Tensor], Any], slow: Callable[[Tensor], Any], batch: Tensor) -> float:
    """Median time of `slow` over that of `fast` on one batch, measured in turn."""
    times: dict[Callable[[Tensor], Any], list[float]] = {fast: [], slow: []}
    for _ in range(30):
        for candidate, taken in times.items():
            start = time.perf_counter()
            candidate(batch)
            taken.append(time.perf_counter() - start)
    return statistics.median(times[slow][3:]) / statistics.median(times[fast][3:])


def draw_layers(exported: fx.GraphModule, reference: fx.GraphModule, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Draws, for every layer, quantized against float activations, and writes the picture.

    Args:
        exported: the float graph.
        reference: the q/dq graph made of it.
        inputs: positional inputs of both.
        path: the .png to write.
    """
    layers = compare_layers(exported, reference, inputs)
    columns = 4
    rows = -(-len(layers) // columns)
    with drawing(3 * columns, 2.7 * rows) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, (name, (expected, found)) in zip(panels, layers.items(), strict=False):
            x, y = expected.flatten(), found.flatten()
            panel.hexbin(x, y, gridsize=60, bins="log", cmap="viridis", mincnt=1)
            limits = (float(x.min()), float(x.max()))
            panel.plot(limits, limits, color="#d9822b", linewidth=0.8)
            panel.set_title(f"{name}: {sqnr(found, expected):.1f} dB")
        for panel in panels[len(layers) :]:
            panel.set_visible(False)
        figure.suptitle("Quantized (vertical) against float (horizontal) activations, per layer")
        write_whole(path, lambda unfinished: figure.savefig(unfinished, dpi=110))
