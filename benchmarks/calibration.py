"""What calibration costs: time over the float forward, range search, memory, each beside torchao's observers.

    python benchmarks/calibration.py [--models resnet50 chain] [--batches 8] [--rounds 3] [--threads 1]

Float forward and calibration of the same batches alternate in one process (A B A B); printed are the
ratios of medians of CPU seconds, which other processes on the machine disturb least. The search for ranges,
which convert starts, stands beside it. Prepared models come from
torchao's own prepare with ExecuTorch's XNNPACKQuantizer, so that only the observers differ. The memory
table runs each number of batches in a process of its own.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import stored
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils import QuantizationConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver as TorchaoHistogram
from torchao.quantization.pt2e import MinMaxObserver as TorchaoMinMax
from torchao.quantization.pt2e import PerChannelMinMaxObserver as TorchaoPerChannelMinMax
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from quantplug.core.calibration.calibrate import calibrate
from quantplug.core.calibration.observer_places import observer_places
from quantplug.core.observers import observer
from quantplug.core.observers.together import find_ranges

OURS = ("minmax", "histogram", "percentile", "mse", "entropy")
THEIRS: dict[str, Any] = {"torchao minmax": TorchaoMinMax, "torchao histogram": TorchaoHistogram}


def chain(blocks: int, channels: int = 8, size: int = 8) -> tuple[nn.Module, Tensor]:
    """Returns a chain of tiny conv-bn-relu blocks, where every microsecond of an observer shows, and one batch."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers).eval(), torch.randn(1, channels, size, size)


class Bottleneck(nn.Module):
    """The three-convolution block of He et al. 2015, table 1."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        sizes = ((inside, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in sizes)
        shortcut = (nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(*shortcut) if stride != 1 or inside != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = torch.relu(y) if i < 2 else y
        return torch.relu(y + self.shortcut(x))


def resnet50() -> nn.Module:
    """Returns ResNet-50 with random weights (its batch norms scaled so that signals keep their size)."""
    blocks: list[nn.Module] = []
    inside = 64
    for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for i in range(count):
            blocks.append(Bottleneck(inside, width, 2 if stage and i == 0 else 1))
            inside = 4 * width
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)).eval()


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Returns a model with random weights and one batch: "chain", or "resnet50" at batch 8."""
    torch.manual_seed(0)
    return chain(200) if name == "chain" else (resnet50(), torch.randn(8, 3, 224, 224))


def prepared(model: nn.Module, batch: Tensor, kind: str) -> fx.GraphModule:
    """Returns the model with observers of one kind on activations and min-max observers on weights."""
    constructor = THEIRS[kind] if kind in THEIRS else observer(kind)
    weights = TorchaoPerChannelMinMax if kind in THEIRS else observer("minmax", per_channel=True)
    activation = QuantizationSpec(
        torch.int8, constructor, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_affine
    )
    weight = QuantizationSpec(
        torch.int8, weights, quant_min=-127, quant_max=127, qscheme=torch.per_channel_symmetric, ch_axis=0
    )
    quantizer = XNNPACKQuantizer().set_global(QuantizationConfig(activation, activation, weight, None))
    return prepare_pt2e(torch.export.export(model, (batch,)).module(), quantizer)


def seconds(run: Callable[[], Any]) -> float:
    """Returns the CPU time of one call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def forward_ratio(model: nn.Module, kind: str, batches: list[Tensor], rounds: int) -> tuple[float, float, float]:
    """Returns calibration over float time, seconds of range search, and observers searched."""
    floating = prepared_float(model, batches[0])
    observed = prepared(model, batches[0], kind)
    blank = copy.deepcopy(observed.state_dict()) if kind in THEIRS else None

    def plain() -> None:
        with torch.no_grad():
            for batch in batches:
                floating(batch)

    def calibrated() -> None:
        if blank is None:
            calibrate(observed, batches, progress=False)
        else:
            with torch.no_grad():
                for batch in batches:
                    observed(batch)

    observers = [p.observer for p in observer_places(observed) if not p.of_constants]

    def searched() -> None:
        if blank is None:
            for module in observers:
                module.seen = module.seen._replace(found=None)  # forgets the range that was found
            find_ranges(observers)  # type: ignore[arg-type]
        else:
            for module in observers:
                module.calculate_qparams()

    plain()
    calibrated()
    search = seconds(searched)
    runs = [(seconds(plain), seconds(calibrated)) for _ in range(rounds)]
    ratio = statistics.median(b for _, b in runs) / statistics.median(a for a, _ in runs)
    return ratio, search, float(len(observers))


def prepared_float(model: nn.Module, batch: Tensor) -> fx.GraphModule:
    """Returns the float graph that calibration is compared with: the exported model with batch norms folded."""
    return prepare_pt2e(torch.export.export(model, (batch,)).module(), XNNPACKQuantizer())


def speed_table(name: str, count: int, rounds: int, kinds: list[str]) -> Table:
    """Returns the table of one model."""
    model, batch = build(name)
    batches = [torch.randn_like(batch) for _ in range(count)]
    table = Table("observer", "calibration / float", "search, s", "observers", title=f"{name}, {count} batches")
    for kind in kinds:
        ratio, search, searched = forward_ratio(model, kind, batches, rounds)
        table.add_row(kind, f"{ratio:.2f}", f"{search:.3f}", f"{searched:.0f}")
        Console(stderr=True).print(f"{name} {kind}: {ratio:.2f}, search {search:.3f} s of {searched:.0f}")
    return table


def peak_memory(kind: str, count: int) -> float:
    """Returns the peak resident memory in MB of a process that calibrates resnet50 on so many batches of one image.

    What getrusage says would begin with the memory of the process that started this one.
    """
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[3]); import calibration as c; "
        "from quantplug.core.calibration.calibrate import calibrate; model, _ = c.build('resnet50'); "
        "batch = torch.randn(1, 3, 224, 224); observed = c.prepared(model, batch, sys.argv[1]); "
        "calibrate(observed, (torch.randn(1, 3, 224, 224) for _ in range(int(sys.argv[2]))), progress=False); "
        "from memory import resident; print(resident('VmHWM'))"
    )
    command = [sys.executable, "-c", code, kind, str(count), __file__.rpartition("/")[0] or "."]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["chain", "resnet50"])
    parser.add_argument("--observers", nargs="*", default=[*OURS, *THEIRS])
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs="*", type=int, default=[10, 200], help="numbers of batches")
    stored.add_option(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    console = Console()
    for name in arguments.models:
        table = speed_table(name, arguments.batches, arguments.rounds, arguments.observers)
        console.print(table)
        rows = stored.rows_of(table, model=name, batches=f"{arguments.batches} batches")
        stored.store(arguments.store, rows, ("model", "batches", "observer"))
    if arguments.memory:
        table = Table("observer", *(f"{n} batches, MB" for n in arguments.memory), title="peak memory, resnet50")
        for kind in ("minmax", "mse"):
            table.add_row(kind, *(f"{peak_memory(kind, n):.0f}" for n in arguments.memory))
        console.print(table)


if __name__ == "__main__":
    main()
