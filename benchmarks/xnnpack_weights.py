"""Weights alone in integers or float16 on XNNPACK: size, noise and time beside the float program.

    python benchmarks/xnnpack_weights.py [--models resnet18 mobilenet_v2] [--rounds 20]

Models of torchvision with random weights on images of 96 x 96. Processor time of one thread, a call of each program in
turns.
"""

import argparse
import warnings
from collections.abc import Iterator
from functools import partial
from time import process_time

import stored
import torch
from rich.console import Console
from rich.table import Table
from xnnpack import interleaved
from xnnpack_models import make

import quantplug

CONFIGS = ("int8_weight_only", "float16")
COLUMNS = ("model", "of the float file", "dB from q/dq", "times the float program's time")


def rows(name: str, rounds: int) -> Iterator[tuple[str, ...]]:
    """Yields a line for each config of one model."""
    model, sample = make(name, 96, 0)
    inputs = sample(0)
    floats = quantplug.get_quantizer("xnnpack").backend.lower(torch.export.export(model, inputs).module(), inputs)
    for config in CONFIGS:
        made = quantplug.quantize(model, inputs, "xnnpack", config=config, progress=False)
        with torch.no_grad():
            noise = quantplug.sqnr(made(*inputs), made.reference(*inputs))
        before, after = interleaved(partial(floats, *inputs), partial(made, *inputs), rounds, process_time)
        share = made.program.nbytes / floats.nbytes
        yield f"{name}, {config}", f"{share:.3f}", f"{noise:.0f}", f"{after / before:.1f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["resnet18", "mobilenet_v2"])
    parser.add_argument("--rounds", type=int, default=20)
    stored.add_option(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table = Table(*COLUMNS)
    for name in options.models:
        for row in rows(name, options.rounds):
            table.add_row(*row)
    Console(width=120).print(table)
    stored.store(options.store, stored.rows_of(table), ("model",))


if __name__ == "__main__":
    main()
