"""Latency of x86 engines beside each other: fp32 eager, our three ways, torchao's flow.

    python benchmarks/x86.py resnet18 mlp --batch 1 8 --threads 1 2 --package

Every round calls all engines once in turn (A B C, A B C ...), so load on the machine meets all of them alike.
Printed are ratios to fp32 eager of the medians over the rounds, with the quartiles of the ratio of each round.
Random weights: SQNR compares engines, it says nothing about accuracy.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantplug
from quantplug.lowering.x86 import X86Program, lower

Run = Callable[..., Any]


def mlp() -> nn.Module:
    """Two layers of 4,096: bound by memory bandwidth at batch 1."""
    return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))


def encoder() -> nn.Module:
    """Four layers of the size of bert-base."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def build(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a model by name, in eval mode with lively activations, and an input."""
    torch.manual_seed(0)
    if name == "mlp":
        return mlp().eval(), (torch.randn(batch, 4096),)
    if name == "encoder":
        return encoder().eval(), (torch.randn(batch, 128, 768),)
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 224, 224))  # statistics as after training: activations keep their size
    return model.eval(), (torch.randn(batch, 3, 224, 224),)


def ours(model: nn.Module, inputs: tuple[Tensor, ...], *, autotune: bool) -> X86Program:
    """Quantizes and lowers with quantplug."""
    prepared = quantplug.prepare_pt2e(torch.export.export(model, inputs).module(), quantplug.get_quantizer("x86"))
    with torch.no_grad():
        prepared(*inputs)
    return lower(quantplug.convert_pt2e(prepared), inputs, autotune=autotune)


def torchao(model: nn.Module, inputs: tuple[Tensor, ...]) -> torch.fx.GraphModule:
    """Quantizes with torchao's own quantizer, which needs strict export."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, inputs, strict=True).module(), quantizer)
    with torch.no_grad():
        prepared(*inputs)
    return convert_pt2e(prepared)


def engines(model: nn.Module, inputs: tuple[Tensor, ...], chosen: argparse.Namespace) -> dict[str, Run]:
    """Returns every engine by name; the first is what the others are compared with."""
    found: dict[str, Run] = {"fp32 eager": model}
    started = time.perf_counter()
    program = ours(model, inputs, autotune=chosen.autotune)
    print(f"  quantized and lowered in {time.perf_counter() - started:.1f} s, {program.nbytes / 1e6:.1f} MB")
    found["quantplug eager"] = program
    if chosen.package:
        path = program.package(Path(tempfile.mkdtemp()) / "model.pt2")
        found["quantplug package"] = torch._inductor.aoti_load_package(str(path))
    if chosen.peers:
        reference = torchao(model, inputs)
        found["torchao graph, our lowering"] = lower(reference, inputs)
        with torch._inductor.config.patch(freezing=True):
            compiled = torch.compile(reference)
            compiled(*inputs)
        found["torchao compiled"] = compiled
    return found


def rounds(found: dict[str, Run], inputs: tuple[Tensor, ...], repeats: int) -> dict[str, list[float]]:
    """Calls all engines in turn; returns seconds by engine, one for each round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(repeats + 3):
        for name, run in found.items():
            started = time.perf_counter()
            run(*inputs)
            if number >= 3:
                times[name].append(time.perf_counter() - started)
    return times


def sqnr(reference: Tensor, found: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    return float(10 * torch.log10(reference.pow(2).sum() / (reference - found).pow(2).sum().clamp_min(1e-30)))


def compare(name: str, batch: int, threads: int, chosen: argparse.Namespace) -> None:
    """Prints one table."""
    torch.set_num_threads(threads)
    print(f"{name}, batch {batch}, {threads} threads")
    model, inputs = build(name, batch)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        found = engines(model, inputs, chosen)
        times = rounds(found, inputs, chosen.repeats)
        reference = model(*inputs)
        first = times["fp32 eager"]
        for engine, taken in times.items():
            each = sorted(a / b for a, b in zip(first, taken, strict=True))
            quarter = len(each) // 4
            ratio = statistics.median(first) / statistics.median(taken)
            print(
                f"  {engine:28s} x {ratio:5.2f} ({each[quarter]:.2f} - {each[-quarter - 1]:.2f})  "
                f"{statistics.median(taken) * 1e3:8.2f} ms  SQNR {sqnr(reference, found[engine](*inputs)):6.1f} dB"
            )


def main() -> None:
    """Reads the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="mlp, encoder, or a classifier of torchvision.models")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--package", action="store_true", help="also compile ahead of time (a minute, needs g++)")
    parser.add_argument("--peers", action="store_true", help="also torchao's flow (compiles)")
    parser.add_argument("--autotune", action="store_true")
    chosen = parser.parse_args()
    for name in chosen.models:
        for batch in chosen.batch:
            for threads in chosen.threads:
                compare(name, batch, threads, chosen)


if __name__ == "__main__":
    main()
