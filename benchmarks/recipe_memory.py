"""Peak of resident memory of each algorithm of the recipe "accurate" on a language model, above the exported model.

    python benchmarks/recipe_memory.py --data PATH [--samples 16]

PATH is the folder of trained models that `language.py` measures; the model is SmolLM2 in `int4_dynamic_groups` for
XNNPACK (Linux). What algorithms before have left counts, such as weights that are rounded beside those of float.
"""

import argparse
import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from data_folder import module_of
from memory import resident
from rich.console import Console
from rich.table import Table
from vision import torchvision_models

import quantplug
from quantplug.algorithms.recipe import apply, by_stage, recipe_of
from quantplug.core.graph.working_copy import working_copy


class Meter:
    """Measures one step after the other."""

    def __init__(self) -> None:
        gc.collect()
        self.before = resident("VmRSS")
        self.table = Table("algorithm", "peak MiB", "left MiB", "s", "what it did")

    def step(self, name: str, run: Any) -> Any:
        """Runs a step and adds its row."""
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
        started = time.process_time()
        found = run()
        peak, left = (f"{resident(field) - self.before:.0f}" for field in ("VmHWM", "VmRSS"))
        said = "; ".join(map(str, found)) if isinstance(found, list) else str(found)
        self.table.add_row(name, peak, left, f"{time.process_time() - started:.0f}", said)
        return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=16)
    given = parser.parse_args()
    torchvision_models()  # transformers imports torchvision, which needs its operators
    folder = module_of(given.data, "language")
    model, batches = folder.load("smollm2"), folder.chunks("calibration")[: given.samples]
    exported = torch.export.export(model, (batches[0],)).module()
    floats, others = by_stage(recipe_of("accurate"))
    meter = Meter()
    graph = working_copy(exported)
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int4_dynamic_groups")
    for each in floats:
        step = partial(apply, [each], graph, batches, None, quantizer, progress=True)
        meter.step(type(each).__name__, step)
    prepared = quantplug.prepare_pt2e(graph, quantizer)
    quantplug.calibrate(prepared, batches, progress=False)
    for each in others:
        step = partial(apply, [each], prepared, batches, None, quantizer, progress=True)
        meter.step(type(each).__name__, step)
    meter.step("convert", lambda: type(quantplug.convert_pt2e(prepared)).__name__)
    Console(width=160).print(meter.table)
    held = sum(weight.nbytes for weight in model.parameters()) / 2**20
    print(
        f"The model's parameters take {held:.0f} MiB; {torch.get_num_threads()} threads, seconds are of the processor."
    )


if __name__ == "__main__":
    main()
