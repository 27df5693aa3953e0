"""Peak of resident memory of the algorithms that round and correct, beside the exported model and its data.

    python benchmarks/long_data.py [--samples 256] [--batch 4] [--algorithms gptq biases smooth]

A small convolutional net on large images: its activations are many times its weights. Each algorithm runs in a process
of its own (Linux), over a loader that makes its batches as they are asked for.
"""

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantplug

ALGORITHMS: dict[str, Any] = {
    "gptq": quantplug.GPTQ,
    "biases": quantplug.CorrectBiases,
    "smooth": lambda samples: quantplug.Smooth(alpha=0.5, samples=samples),
}


def resident(field: str) -> float:
    """Returns MB of this process's memory from Linux's status file: "VmRSS" now, "VmHWM" at its peak."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 1024


def net() -> nn.Module:
    """Returns a net with activations of 3 MB a layer and image."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


def images(samples: int, batch: int) -> Iterator[Tensor]:
    """Yields batches of images."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(samples // batch):
        yield torch.randn(batch, 3, 160, 160, generator=generator)


def peak_of(name: str, samples: int, batch: int) -> None:
    """Prints the peak of memory above the model, and seconds."""
    first = next(images(batch, batch))
    graph = torch.export.export(net(), (first,)).module()
    if name != "smooth":
        graph = quantplug.prepare_pt2e(graph, quantplug.get_quantizer("xnnpack").set_global("int8"))
        quantplug.calibrate(graph, [first], progress=False)
    gc.collect()
    before, started = resident("VmRSS"), time.perf_counter()
    # Sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    ALGORITHMS[name](samples=samples).apply(graph, images(samples, batch))
    print(resident("VmHWM") - before, time.perf_counter() - started)


def main() -> None:
    """Prints a line for each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--peak-of", choices=list(ALGORITHMS), help="measure one in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        peak_of(options.peak_of, options.samples, options.batch)
        return
    given = ["--samples", str(options.samples), "--batch", str(options.batch)]
    for name in options.algorithms:
        command = [sys.executable, __file__, "--peak-of", name, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, seconds = (float(found) for found in done.stdout.split()[-2:])
        print(f"{name:8} {options.samples} images: peak {peak:+6.0f} MB, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
