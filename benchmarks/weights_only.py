"""Weights alone in integers: a block as of SmolLM2 on torch's kernels and through OpenVINO, beside float.

    python benchmarks/weights_only.py --threads 1

Every round calls all ways once in turn. Printed are the medians in microseconds, the medians of each round's ratio to
float in eager mode, the size of the file of float weights, and the decibels of the result to float's.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import stored
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantplug
from quantplug.core.specs.levels import sqnr

WIDE, INNER, HEADS, PAIRS = 576, 1536, 9, 3
# name -> backend, config, options of the config, options of the lowering
CONFIGS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "int8, x86": ("x86", "int8_weight_only", {}, {}),
    "int4, x86": ("x86", "int4_weight_only", {}, {}),
    "int8, openvino": ("openvino", "int8_weight_only", {}, {}),
    "int4, openvino": ("openvino", "int4_weight_only", {}, {}),
    "int4, groups of 64, openvino": ("openvino", "int4_weight_only", {"group_size": 64}, {}),
    "int4, bfloat16, openvino": ("openvino", "int4_weight_only", {}, {"float_dtype": torch.bfloat16}),
}


class Block(nn.Module):
    """Attention of grouped heads and a gated product, each behind an RMS norm; no positions, no cache."""

    def __init__(self) -> None:
        super().__init__()
        narrow = WIDE // HEADS * PAIRS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDE) for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(WIDE, n, bias=False) for n in (WIDE, narrow, narrow))
        self.out = nn.Linear(WIDE, WIDE, bias=False)
        self.gate, self.up = (nn.Linear(WIDE, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [1, n, 576] of [1, n, 576]."""
        y = self.norms[0](x)
        query, key, value = (
            each(y).unflatten(-1, (-1, WIDE // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        key, value = (each.repeat_interleave(HEADS // PAIRS, 1) for each in (key, value))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def ways(block: nn.Module, x: Tensor) -> dict[str, tuple[Callable[[Tensor], Any], int]]:
    """Returns what computes the block, by name, each with the bytes of its file."""
    found: dict[str, tuple[Callable[[Tensor], Any], int]] = {"float, eager": (block, 0)}
    floats = torch.export.export(block, (x,)).module()
    program = quantplug.get_quantizer("openvino").backend.lower(floats, (x,))
    found["float, openvino"] = (program, program.nbytes)
    for name, (backend, config, options, lowering) in CONFIGS.items():
        given = quantplug.get_quantizer(backend).backend.config(config, **options)
        made = quantplug.quantize(block, (x,), backend, config=given, progress=False, **lowering).program
        found[name] = (made, made.nbytes)
    return found


def measured(found: dict[str, tuple[Callable[[Tensor], Any], int]], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Returns the microseconds of each round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 5):
        for name, (run, _) in found.items():
            start = time.perf_counter()
            run(x)
            if number >= 5:  # the first ones fill caches
                times[name].append((time.perf_counter() - start) * 1e6)
    return times


def main() -> None:
    """Prints a table for one token and one for 128."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    stored.add_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    block = Block().eval()
    floats = sum(weight.nbytes for weight in block.parameters())
    for tokens in (1, 128):
        x = torch.randn(1, tokens, WIDE)
        with torch.no_grad():
            found, expected = ways(block, x), block(x)
            times = measured(found, x, args.rounds)
        shown = "1 token" if tokens == 1 else f"{tokens} tokens"
        print(shown)
        records = []
        for name, (run, size) in found.items():
            ratio = statistics.median(a / b for a, b in zip(times["float, eager"], times[name], strict=True))
            noise = sqnr(run(x), expected)
            print(
                f"  {name:30} {statistics.median(times[name]):8.0f} us  {ratio:5.2f} x  "
                f"{size / floats:5.3f} of float  {noise:6.1f} dB"
            )
            numbers = {
                "speed": round(ratio, 2),
                "share": round(size / floats, 3) if size else 1,
                "dB": round(noise, 1) if size else None,
            }
            records.append({"way": name, "tokens": shown, "threads": args.threads, **numbers})
        stored.store(args.store, records, ("way", "tokens", "threads"))


if __name__ == "__main__":
    main()
