"""Why x86 claims an operator or leaves it float: the ways to compute it beside each other, in microseconds.

    python benchmarks/x86_kernels.py --threads 1

Every round calls all ways once in turn; printed are medians. "kernel" is what the lowering uses.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators of quantized_decomposed)
from torch import Tensor
from torch.nn import functional as F

aten, onednn, QD = torch.ops.aten, torch.ops.onednn, torch.ops.quantized_decomposed
Ways = dict[str, Callable[[], Any]]
PLAIN = (1.0, 0, torch.float32, "none", [0.0], "")
BYTES = (0.02, 100, torch.uint8, "none", [0.0], "")


def image(channels: int, size: int) -> Tensor:
    """Random bytes in channels-last memory."""
    x = torch.randint(0, 256, (1, channels, size, size), dtype=torch.uint8)
    return x.contiguous(memory_format=torch.channels_last)


def floats(x: Tensor, zero_point: int = 100, scale: float = 0.02) -> Tensor:
    """Dequantizes in as few passes as eager torch offers."""
    return x.to(torch.float32).sub_(zero_point).mul_(scale)


def integers(x: Tensor) -> Tensor:
    """Quantizes likewise."""
    return x.mul(50.0).round_().add_(100).clamp_(0, 255).to(torch.uint8)


def convolution(
    inside: int, outside: int, size: int, kernel: int, groups: int
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Returns a weight packed for the size of the image, its scales and the operands from zero points to groups."""
    weight = torch.randint(-127, 128, (outside, inside // groups, kernel, kernel), dtype=torch.int8)
    scales, geometry = torch.rand(outside), ([1, 1], [kernel // 2] * 2, [1, 1], groups)
    packed = onednn.qconv_prepack(weight, scales, 1.0, 0, *geometry, [1, inside, size, size])
    return packed, scales, (torch.zeros(outside, dtype=torch.int32), None, *geometry)


def means() -> Iterator[tuple[str, Ways]]:
    """The sum of integers against dequantizing first."""
    for channels, size in ((512, 7), (64, 56)):
        x = image(channels, size)
        yield (
            f"mean over {channels} x {size} x {size}",
            {
                "kernel": partial(lambda x: floats(x.sum((2, 3), dtype=torch.int32)), x),
                "dequantize, mean": partial(lambda x: floats(x).mean((2, 3)), x),
            },
        )


def averages() -> Iterator[tuple[str, Ways]]:
    """A depthwise convolution of ones against dequantizing, averaging, quantizing."""
    for channels, size, kernel, stride, padding in ((64, 56, 2, 2, 0), (256, 14, 2, 2, 0), (192, 35, 3, 1, 1)):
        x, geometry = image(channels, size), ([stride] * 2, [padding] * 2, [1, 1], channels)
        scales = torch.full((channels,), 1.0 / kernel**2)
        ones = torch.ones(channels, 1, kernel, kernel, dtype=torch.int8)
        packed = onednn.qconv_prepack(ones, scales, 0.02, 100, *geometry, list(x.shape))
        rest = (packed, scales, torch.zeros(channels, dtype=torch.int32), None, *geometry, *BYTES)
        window = (kernel, stride, padding)
        yield (
            f"avg_pool2d {kernel}x{kernel} over {channels} x {size} x {size}",
            {
                "kernel": partial(onednn.qconv_pointwise, x, 0.02, 100, *rest),
                "through float": partial(lambda x, w: integers(F.avg_pool2d(floats(x), *w)), x, window),
            },
        )


def sums() -> Iterator[tuple[str, Ways]]:
    """A sum of two quantized tensors, spelled out, against a float sum that is quantized."""
    a, b = image(64, 56), image(64, 56)
    x, y = floats(a), floats(b)
    yield (
        "sum of 64 x 56 x 56",
        {
            "float sum, quantized (what runs)": lambda: integers(x + y),
            "of integers": lambda: a.to(torch.float32).mul_(0.9).add_(b, alpha=0.4).round_().clamp_(0, 255).to(a.dtype),
            "dequantize, add, quantize": lambda: integers(floats(a) + floats(b)),
        },
    )


def embeddings() -> Iterator[tuple[str, Ways]]:
    """Rows of int8 and their scales against rows of float."""
    table, scales = torch.randint(-127, 128, (30522, 768), dtype=torch.int8), torch.rand(30522, 1)
    whole, indices = table * scales, torch.randint(0, 30522, (1, 128))
    yield (
        "embedding, 128 of 30522 x 768",
        {
            "kernel (23 MB)": lambda: F.embedding(indices, table).to(torch.float32).mul_(F.embedding(indices, scales)),
            "float table (94 MB)": lambda: F.embedding(indices, whole),
        },
    )


def weights_only() -> Iterator[tuple[str, Ways]]:
    """int8 weights read by a bfloat16 product against float weights."""
    for rows, inner, outer in ((1, 768, 3072), (4, 768, 3072), (16, 768, 3072), (32, 768, 3072), (1, 4096, 4096)):
        x, weight = torch.randn(rows, inner), torch.randint(-127, 128, (outer, inner), dtype=torch.int8)
        whole, ones, scales = weight.float(), torch.ones(outer, dtype=torch.bfloat16), torch.rand(outer)

        yield (
            f"weights only, {rows} x {inner} x {outer}",
            {"kernel": partial(_weight_only, x, weight, ones, scales), "float": partial(F.linear, x, whole)},
        )


def _weight_only(x: Tensor, weight: Tensor, ones: Tensor, scales: Tensor) -> Tensor:
    product: Tensor = aten._weight_int8pack_mm(x.to(torch.bfloat16), weight, ones)
    return product.to(torch.float32).mul_(scales)


def dynamic_convolutions() -> Iterator[tuple[str, Ways]]:
    """Range, quantization and kernel at run time against the float convolution."""
    for inside, outside, size, kernel, groups in (
        *((64, 64, 56, 3, 1), (256, 256, 14, 3, 1), (64, 256, 56, 1, 1), (64, 128, 56, 1, 1), (160, 960, 7, 1, 1)),
        (144, 144, 56, 3, 144),
    ):
        packed, scales, rest = convolution(inside, outside, size, kernel, groups)
        x = torch.randn(1, inside, size, size).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(outside, inside // groups, kernel, kernel)

        yield (
            f"dynamic conv {inside} to {outside}, {kernel}x{kernel}, {size}x{size}, {groups} groups",
            {
                "kernel": partial(_dynamic, x, packed, scales, *rest),
                "float": partial(F.conv2d, x, weight, None, *rest[2:]),
            },
        )


def _dynamic(x: Tensor, *rest: Any) -> Any:
    scale, zero = QD.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8)
    q = QD.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
    return onednn.qconv_pointwise.tensor(q, scale, zero, *rest, *PLAIN)


def attention() -> Iterator[tuple[str, Ways]]:
    """Products of two activations by the one integer product that needs no packed weight, against float."""
    for heads, steps, width in ((12, 128, 64), (12, 197, 64)):
        q, k, v = (torch.randn(1, heads, steps, width) for _ in range(3))
        a, b, c = (torch.randint(-127, 128, (heads, steps, width), dtype=torch.int8) for _ in range(3))

        yield (
            f"attention, {heads} x {steps} x {width}",
            {
                "float (what runs)": partial(F.scaled_dot_product_attention, q, k, v),
                "_int_mm": partial(_by_integers, a, b, c),
            },
        )


def _by_integers(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    scores = torch.stack([aten._int_mm(x, y.t()) for x, y in zip(a, b, strict=True)]).to(torch.float32).mul_(0.001)
    chances = torch.softmax(scores, -1).mul_(127.0).round_().to(torch.int8)
    products = [aten._int_mm(x, y) for x, y in zip(chances, c, strict=True)]
    return torch.stack(products).to(torch.float32).mul_(0.001)


FAMILIES = (means, averages, sums, embeddings, weights_only, dynamic_convolutions, attention)


@torch.inference_mode()
def timed(ways: Ways, rounds: int) -> dict[str, float]:
    """Returns the median microseconds of every way, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 5):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[5:]) * 1e6 for name, taken in times.items()}


def main() -> None:
    """Prints a line for each operator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    for family in FAMILIES:
        for name, ways in family():
            found = timed(ways, chosen.rounds)
            print(f"{name:48s}", "  ".join(f"{way} {taken:.0f}" for way, taken in found.items()), flush=True)


if __name__ == "__main__":
    main()
