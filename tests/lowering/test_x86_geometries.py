"""Convolutions of any geometry on x86 against exact integers, and what keeps those float that oneDNN gets wrong."""

import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.graph.facts import operands
from quantplug.lowering.processor import highest_integer
from quantplug.lowering.x86 import X86Program
from quantplug.lowering.x86.geometry import objection

from x86_programs import alone, quantized  # isort: skip

onednn = torch.ops.onednn
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def sqnr(wanted, found):
    with torch.no_grad():
        return float(20 * torch.log10(wanted.norm() / (wanted - found).norm().clamp(min=1e-20)))


def layer(channels, made, kernel, **options):
    torch.manual_seed(0)
    return KINDS[len(kernel) - 1](channels, made, kernel, **options)


# One column of a result; over "2 of 3" steps the last pixels are read by none.
ONE_COLUMN = {
    "multiplier 2, steps (1, 2)": (layer(4, 8, (3, 3), stride=(1, 2), groups=4), (1, 4, 12, 3)),
    "multiplier 3, steps (1, 3)": (layer(8, 24, (2, 4), stride=(1, 3), groups=8), (3, 8, 12, 6)),
    "all channels, steps (2, 2)": (layer(32, 16, (3, 3), stride=2, padding=1), (1, 32, 20, 2)),
    "kernel as wide as its steps": (layer(24, 16, (4, 4), stride=4), (2, 24, 32, 7)),
    "dilated": (layer(24, 17, (3, 3), stride=(3, 2), dilation=(1, 2)), (3, 24, 17, 6)),
    "volume": (layer(4, 12, (3, 3, 3), stride=(3, 1, 4), groups=4), (1, 4, 5, 8, 3)),
}


@pytest.mark.parametrize("name", ONE_COLUMN)
def test_a_result_of_one_column_is_computed_rightly_in_integers(name, tmp_path):
    model, shape = ONE_COLUMN[name]
    calls = [torch.randn(*shape) for _ in range(2)]
    reference, program = quantized(nn.Sequential(model, nn.ReLU()), *calls[:1])
    assert {found.placement for found in program.ops} == {"int8"}
    loaded = X86Program.load(program.save(tmp_path / "program.pt2"))
    for x in calls:
        wanted = reference(x)
        assert sqnr(wanted, program(x)) > 55
        assert torch.equal(program(x), loaded(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_COLUMN)
def test_a_result_of_one_column_is_right_in_a_package(name, tmp_path):
    model, shape = ONE_COLUMN[name]
    calls = [torch.randn(*shape) for _ in range(2)]
    reference, program = quantized(nn.Sequential(model, nn.ReLU()), *calls[:1])
    compiled = program.compile()
    packaged = alone(program.package(tmp_path / "package.pt2"), *((x,) for x in calls))
    for x, theirs in zip(calls, packaged, strict=True):
        assert sqnr(reference(x), compiled(x)) > 55
        assert sqnr(reference(x), theirs) > 55


class Residual(nn.Module):
    """Two branches that narrow an image to a column, and their sum."""

    def __init__(self):
        super().__init__()
        self.long, self.short = layer(8, 8, (3, 3), stride=2, padding=1), layer(8, 8, (1, 1), stride=2)
        self.last = layer(8, 4, (3, 3), padding=1)

    def forward(self, x):
        return self.last((self.long(x) + self.short(x)).relu())


def test_a_residual_sum_of_one_column():
    calls = [torch.randn(2, 8, 12, 2) for _ in range(2)]
    reference, program = quantized(Residual(), *calls[:1])
    assert all(sqnr(reference(x), program(x)) > 55 for x in calls)


def opened(model, sizes, calls):
    """Returns the q/dq graph of a model of open sizes, calibrated on all calls, and its program."""
    quantizer = quantplug.get_quantizer("x86")
    prepared = quantplug.prepare_pt2e(
        torch.export.export(model.eval(), (calls[0],), dynamic_shapes=sizes).module(), quantizer
    )
    for x in calls:
        prepared(x)
    reference = quantplug.convert_pt2e(prepared)
    program = quantizer.backend.lower(reference, (calls[0],), dynamic_shapes=sizes)
    return reference, program


def test_open_sizes_that_may_be_one_column_wide():
    """torch leaves a result of one column open where the module has no convolution that it traced otherwise."""
    model = nn.Sequential(layer(4, 8, (3, 4), stride=(1, 4), groups=4), nn.ReLU())
    sizes = ({2: torch.export.Dim("height", min=4, max=64), 3: torch.export.Dim("width", min=8, max=64)},)
    calls = [torch.randn(1, 4, 16, width) for width in (16, 8, 21)]
    reference, program = opened(model, sizes, calls)
    assert all(sqnr(reference(x), program(x)) > 55 for x in calls)


STRIDES = {
    "line": (layer(24, 8, (1,), stride=4), (3, 24, 20)),
    "image": (layer(40, 16, (1, 1), stride=2), (2, 40, 9, 8)),
    "one way": (layer(72, 24, (1, 1), stride=(1, 3)), (1, 72, 5, 20)),
    "volume": (layer(17, 8, (1, 1, 1), stride=(2, 1, 2)), (1, 17, 5, 4, 7)),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_over_pixels_of_a_rest_of_channels_take_the_pixels_first(name, tmp_path):
    model, shape = STRIDES[name]
    calls = [torch.randn(*shape) for _ in range(2)]
    reference, program = quantized(nn.Sequential(model, nn.ReLU()), *calls[:1])
    assert {found.placement for found in program.ops} == {"int8"}
    (kernel,) = (node for node in program.module.graph.nodes if "qconv_pointwise" in str(node.target))
    assert set(operands(kernel)["stride"]) == {1}
    loaded = X86Program.load(program.save(tmp_path / "program.pt2"))
    for x in calls:
        assert sqnr(reference(x), program(x)) > 55
        assert torch.equal(program(x), loaded(x))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pixels_are_taken_first_of_open_sizes(compiled):
    model = nn.Sequential(layer(24, 8, (3, 3), padding=1), nn.ReLU(), layer(8, 16, (1, 1), stride=2), nn.ReLU())
    sizes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    calls = [torch.randn(*size) for size in ((2, 24, 9, 12), (1, 24, 4, 5), (3, 24, 7, 20))]
    reference, program = opened(model, sizes, calls)
    assert isinstance(program, X86Program)
    run = program.compile() if compiled else program
    assert all(sqnr(reference(x), run(x)) > 55 for x in calls)


def wrong_results(count):
    """Returns how many calls of an int8 program differ from its reference, over memory that was used before."""
    torch.manual_seed(0)
    model, x = nn.Sequential(layer(24, 8, (1,), stride=4), nn.ReLU()), torch.randn(3, 24, 20)
    reference, program = quantized(model, x)
    wanted, wrong = reference(x), 0
    for _ in range(count):
        used = [torch.randint(0, 255, (10 ** random.randint(2, 5),), dtype=torch.uint8) for _ in range(20)]
        del used
        wrong += sqnr(wanted, program(x)) < 55
    return wrong


@pytest.mark.slow
def test_strides_over_pixels_are_right_on_avx2():
    """The kernels of AVX2 read beyond 24 channels: without the spelling about one call of a hundred is wrong."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, __file__, "strides", "1500"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 of 1500"


FLOAT = {
    "dilation": (layer(4, 8, (3, 3), padding=(1, 4), dilation=(1, 4)), (1, 4, 9, 3), "dilation"),
    "padding": (layer(4, 8, (2, 2), padding=2), (1, 4, 9, 9), "wider than the kernel reaches"),
    "flat volume": (layer(4, 8, (3, 3, 3), padding=1), (1, 4, 1, 8, 8), "depth of 1"),
    "tiles": (layer(32, 16, (4, 4), stride=4), (1, 32, 16, 16), "AMX"),
    "wide": (layer(16, 16, (1, 8)), (1, 16, 4, 20), "AMX"),
    "long steps": (layer(3, 8, (9,), stride=9, padding=4), (1, 3, 27), "over padding"),
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", FLOAT)
def test_what_the_kernels_get_wrong_stays_float_and_explain_says_it_before_calibration(name, strict):
    model, shape, reason = FLOAT[name]
    x = torch.randn(*shape)
    quantizer = quantplug.get_quantizer("x86")
    prepared = quantplug.prepare_pt2e(torch.export.export(model.eval(), (x,), strict=strict).module(), quantizer)
    (row,) = (row for row in quantplug.explain(prepared).rows if "conv" in row.operator)
    assert reason in row.reason


@pytest.mark.parametrize("name", FLOAT)
def test_the_lowering_checks_what_another_quantizer_annotated(name):
    model, shape, reason = FLOAT[name]
    x = torch.randn(*shape)
    quantizer = quantplug.get_quantizer("tensorrt")
    prepared = quantplug.prepare_pt2e(torch.export.export(model.eval(), (x,)).module(), quantizer)
    prepared(x)
    reference = quantplug.convert_pt2e(prepared)
    program = quantplug.get_quantizer("x86").backend.lower(reference, (x,))
    assert reason in next(found.reason for found in program.ops if found.placement == "float")
    assert sqnr(reference(x), program(x)) > 55


def geometry(r):
    """Returns a random convolution: sizes of input and weight, stride, padding, dilation, groups."""
    dims = r.choice((1, 2, 2, 2, 2, 3))
    kernel = [r.choice((1, 2, 3, 3, 4, 5, 7, 8, 12) if dims < 3 else (1, 2, 3, 3, 4, 5)) for _ in range(dims)]
    stride = [r.choice((1, 1, 1, 2, 2, 3, 4)) for _ in kernel]
    dilation = [r.choice((1, 1, 1, 1, 2, 3, 4)) for _ in kernel]
    if r.random() < 0.3:
        stride, dilation = list(kernel), [1] * dims
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = [r.choice((0, 0, reached // 2, r.randint(0, reached))) for reached in reach]
    sizes = [r.choice((1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 33) if dims < 3 else (1, 2, 3, 5, 8)) for _ in kernel]
    numbers = (1, 2, 3, 4, 5, 8, 16, 17, 24, 32, 48)
    groups = r.choice((1, 1, 2, 3, 4, 8, 17))
    inner = r.choice(numbers) if groups == 1 else r.choice((1, 1, 1, 2, 4, 16))
    made = groups * (r.choice(numbers) if groups == 1 else r.choice((1, 1, 2, 3, 8)))
    fits = all(z + 2 * p > reached for z, p, reached in zip(sizes, padding, reach, strict=True))
    given = ((r.choice((1, 3)), groups * inner, *sizes), (made, inner, *kernel), (stride, padding, dilation, groups))
    return given if fits else geometry(r)


def difference(r, size, weight, given):
    """Returns how far a kernel is from exact integers, spelled as `geometry.step_aside` does."""
    stride = given[0]
    x = torch.randint(0, highest_integer() + 1, size, dtype=torch.uint8)
    w = torch.randint(-127, 128, weight, dtype=torch.int8)
    bias = torch.randint(-1000, 1000, weight[:1]).float() if r.random() < 0.5 else None
    zero_point, relu = r.choice((0, 100, highest_integer())), len(weight) < 5 and r.random() < 0.5
    wanted = CONVOLUTIONS[len(weight) - 3](
        x.double() - zero_point, w.double(), None if bias is None else bias.double(), *given
    )
    columns = len(stride) > 1 and wanted.shape[-1] == 1 and weight[-1] > 1
    if max(weight[2:]) == 1 and given[-1] == 1 and 1 <= weight[1] % 16 <= 8:
        for dimension, step in enumerate(stride, 2):
            x = x.unfold(dimension, 1, step).squeeze(-1)
        stride, size = [1] * len(stride), tuple(x.shape)
    geometry = ([*stride[:-1], 1] if columns else stride, *given[1:])
    scales, zeros = torch.ones(weight[0]), torch.zeros(weight[0], dtype=torch.int32)
    packed = onednn.qconv_prepack(w, scales, 1.0, zero_point, *geometry, r.choice((list(size), None)))
    args = (packed, scales, zeros, bias, *geometry, 1.0, 0, torch.float32, "relu" if relu else "none", [0.0], "")
    if r.random() < 0.5:
        found = onednn.qconv_pointwise(x, 1.0, zero_point, *args)
    else:
        found = onednn.qconv_pointwise.tensor(x, torch.tensor(1.0), torch.tensor(zero_point), *args)
    if columns:
        found = found[..., :1]
    return float((found.double() - (wanted.relu() if relu else wanted)).abs().max())


def sweep(seed, count):
    """Compares kernels of random geometries that no objection is known to; returns how many, and the wrong ones."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    tried, wrong = 0, []
    while tried < count:
        size, weight, given = geometry(r)
        if objection(size, weight, given) is None:
            tried += 1
            print(size, weight, given, flush=True)  # what a process that dies was about
            found = difference(r, size, weight, given)
            if not found < 4:
                wrong.append((size, weight, given, found))
    return tried, wrong


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "ALL"])
def test_every_geometry_that_nothing_is_said_against_is_right(instructions):
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    for seed in range(4):
        done = subprocess.run(
            [sys.executable, __file__, str(seed), "400"], env=environment, capture_output=True, text=True, check=False
        )
        last = "\n".join(done.stdout.splitlines()[-2:])
        assert done.returncode == 0, last
        assert last.endswith("(400, [])"), last


if __name__ == "__main__":
    if sys.argv[1] == "strides":
        print(f"{wrong_results(int(sys.argv[2]))} of {sys.argv[2]}")
    else:
        print(sweep(int(sys.argv[1]), int(sys.argv[2])))
