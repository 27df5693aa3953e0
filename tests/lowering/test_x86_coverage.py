"""What x86 claims beyond products: averages, clamps, embeddings, weights alone; each on integers, as declared."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from x86_programs import quantized

import quantplug
from quantplug.core.specs.levels import Level, sqnr
from quantplug.lowering.processor import highest_integer
from quantplug.lowering.x86 import X86Program

IMAGE = (2, 6, 12, 12)


def placements(program, *names):
    return {op.placement for op in program.ops if op.target.split(".")[1].rstrip("_") in names}


def step(reference):
    """The scale of the last quantization."""
    return next(n.args[1] for n in reversed(reference.graph.nodes) if "dequantize_per_tensor" in str(n.target))


class Between(nn.Module):
    """A function of an image between two convolutions, or at the end."""

    def __init__(self, function, channels=6):
        super().__init__()
        self.function, self.one, self.two = function, nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(channels, 4, 1)

    def forward(self, x):
        return self.two(self.function(F.relu(self.one(x))))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda y: y.mean((2, 3), keepdim=True), "mean"),
        (lambda y: y.mean(-1, keepdim=True), "mean"),
        (lambda y: F.adaptive_avg_pool2d(y, 1), "adaptive_avg_pool2d"),
        (lambda y: F.adaptive_avg_pool2d(y, (3, 4)), "adaptive_avg_pool2d"),
        (lambda y: F.avg_pool2d(y, 2), "avg_pool2d"),
        (lambda y: F.avg_pool2d(y, 3, 1, 1), "avg_pool2d"),
        (lambda y: F.avg_pool2d(y, (2, 3), (1, 2), divisor_override=5), "avg_pool2d"),
        (lambda y: F.avg_pool2d(y, 3, 2, count_include_pad=False), "avg_pool2d"),
    ],
)
def test_averages_between_convolutions_run_on_integers_within_a_step(function, name):
    reference, program = quantized(Between(function), torch.randn(IMAGE))
    assert placements(program, name) == {"int8"}
    assert [op.target for op in program.ops if op.placement != "int8"] == []
    for x in (torch.randn(IMAGE), torch.randn(IMAGE) * 3):
        assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=40) is None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda y: F.avg_pool2d(y, 3, 2, 1, count_include_pad=False), "leaves the padding out"),
        (lambda y: F.avg_pool2d(y, 3, 2, ceil_mode=True), "rounds sizes up"),
        (lambda y: F.adaptive_avg_pool2d(y, 5), "no equal windows"),
    ],
)
def test_averages_of_unequal_windows_are_not_claimed(function, reason):
    model = torch.export.export(Between(function).eval(), (torch.randn(IMAGE),)).module()
    prepared = quantplug.prepare_pt2e(model, quantplug.get_quantizer("x86"))
    (row,) = [row for row in quantplug.explain(prepared).rows if "avg_pool" in row.operator]
    assert not row.quantized
    assert reason in row.reason


def test_an_average_of_a_float_tensor_stays_float():
    """The mean of squares in a normalization would lose its small numbers, and to quantize takes longer."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    _, program = quantized(Norm(), torch.randn(4, 16))
    assert placements(program, "linear") == {"int8"}
    assert placements(program, "mean", "pow") == {"float"}


@pytest.mark.parametrize(
    "clamp", [F.relu, F.relu6, F.hardtanh, lambda y: y.clamp(-0.3, 0.4), lambda y: y.clamp(max=0.2)]
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_clamp_behind_a_pooled_tensor_is_one_of_integers(dims, clamp):
    """The clamp comes behind a view, so that no kernel takes it in."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = convolution(3, 4, 1), convolution(2, 2, 1)

        def forward(self, x):
            return self.two(clamp(self.one(x)[:, 1:3]))

    x = torch.randn(2, 3, *[4] * dims)
    reference, program = quantized(Lone(), x)
    assert {op.placement for op in program.ops} == {"int8"}
    assert torch.allclose(program(x * 2), reference(x * 2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("activation", [F.relu, F.relu6, F.hardtanh, lambda y: y.clamp(-0.3, 0.4)])
def test_a_convolution_over_volumes_ends_in_any_clamp(activation):
    class Volumes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv3d(3, 8, 3), nn.Conv3d(8, 4, 3)

        def forward(self, x):
            return activation(self.two(activation(self.one(x))))

    x = torch.randn(2, 3, 7, 7, 7)
    reference, program = quantized(Volumes(), x)
    assert {op.placement for op in program.ops} == {"int8"}
    assert Level.ONE_STEP.objection(program(x), reference(x), step=step(reference)) is None


@pytest.mark.parametrize("activation", [F.relu, F.relu6, F.hardtanh, F.hardswish, F.silu])
def test_a_convolution_over_one_dimension_ends_in_all_that_images_end_in(activation):
    class Signal(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv1d(3, 8, 3, padding=1, stride=2), nn.Conv1d(8, 4, 3, groups=2, dilation=2)

        def forward(self, x):
            return activation(self.two(activation(self.one(x))))

    x = torch.randn(2, 3, 40)
    reference, program = quantized(Signal(), x)
    assert {op.placement for op in program.ops} == {"int8"}
    assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=45) is None


@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_of_one_sample_runs_as_that_of_a_batch(dims, config):
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    one, two = convolution(3, 8, 3, padding=1), convolution(8, 4, 3)
    x = torch.randn(3, *[8] * dims)
    reference, program = quantized(nn.Sequential(one, nn.ReLU(), two), x, config=config)
    assert config != "int8" or {op.placement for op in program.ops} == {"int8"}
    assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=60) is None
    assert torch.allclose(
        program(x), quantized(nn.Sequential(one, nn.ReLU(), two), x[None], config=config)[1](x[None])[0]
    )


@pytest.mark.parametrize("dims", [1, 3])
def test_a_residual_sum_over_other_than_images_stays_float_and_runs(dims):
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = convolution(4, 4, 3, padding=1), convolution(4, 4, 1)

        def forward(self, x):
            return self.two(F.relu(self.one(x) + x))

    x = torch.randn(2, 4, *[6] * dims)
    reference, program = quantized(Sum(), x)
    assert placements(program, "add") == {"float"}
    assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=40) is None


class Overwritten(nn.Module):
    """Writes through a view of a tensor that is read afterwards."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.write = write

    def forward(self, x):
        y = self.first(x).relu_()
        self.write(y)
        return self.second(y) + y


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y[:, :4].mul_(0.5),
        lambda y: y[:, 2:].clamp_(0.1, 0.3),
        lambda y: y[..., 0].fill_(1.0),
        lambda y: y.permute(0, 1, 3, 2)[:, 1].add_(1.0),
    ],
)
def test_what_is_written_through_a_view_is_read_through_its_base(write):
    x = torch.randn(2, 3, 12, 12)
    reference, program = quantized(Overwritten(write), x)
    assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=60) is None


def test_a_summand_in_transposed_memory_is_added_rightly():
    """torch's MultiheadAttention hands on transposed memory; the kernel read it as if it were contiguous."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            y = x.transpose(0, 1) * 2
            return F.layer_norm(self.fc(x.transpose(0, 1)) + y, (16,))

    x = torch.randn(5, 2, 16)
    reference, program = quantized(Transposed(), x)
    torch.testing.assert_close(program(x), reference(x), rtol=1e-4, atol=1e-4)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 8)

    def forward(self, indices):
        return self.fc(self.words(indices))


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic", "int8_weight_only"])
def test_an_embedding_looks_integers_up_and_is_exact(config, tmp_path):
    tables_too = [(nn.Embedding, "int8_weight_only")]
    reference, program = quantized(Words(), torch.randint(50, (2, 7)), config=config, types=tables_too)
    assert placements(program, "embedding") == {"int8"}
    tables = [tensor for tensor in program.module.state_dict().values() if tensor.dim() == 2 and len(tensor) == 50]
    assert {tensor.dtype for tensor in tables if tensor.shape[1] == 16} == {torch.int8}
    class_of = {str(n.target) for n in program.module.graph.nodes}
    assert "quantized_decomposed.dequantize_per_channel.default" not in class_of or config == "int8_weight_only"
    for indices in (torch.arange(14).view(2, 7), torch.randint(50, (2, 7))):
        assert Level.APPROXIMATE.objection(program(indices), reference(indices), decibels=60) is None
    loaded = X86Program.load(program.save(tmp_path / "words.pt2"))
    assert torch.equal(loaded(indices), program(indices))


@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
def test_an_embedding_keeps_its_floats_where_activations_are_quantized(config):
    reference, _ = quantized(Words(), torch.randint(50, (2, 7)), config=config)
    row = quantplug.explain(reference).row("embedding")
    assert not row.quantized
    assert row.reason.endswith("it has no activation to quantize; give it a weight-only config")


def test_a_lone_embedding_is_exact():
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 16)

        def forward(self, indices):
            return self.words(indices)

    indices = torch.arange(50).reshape(5, 10)
    reference, program = quantized(Lone(), indices, config="int8_weight_only")
    assert torch.equal(program(indices), reference(indices))


@pytest.mark.parametrize("rows", [(1,), (2, 3), (40,)])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_alone_are_read_as_integers_where_few_rows_make_that_faster(rows, bias):
    x = torch.randn(*rows, 768)
    reference, program = quantized(nn.Sequential(nn.Linear(768, 1024, bias=bias)), x, config="int8_weight_only")
    (linear,) = program.ops
    if rows == (40,):
        assert (linear.placement, linear.reason[:12]) == ("float", "with 40 rows")
        assert torch.equal(program(x), reference(x))
    else:
        assert linear.placement == "int8"
        assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=45) is None


def test_weights_whose_rows_the_kernel_would_read_beyond_stay_float():
    _, program = quantized(nn.Sequential(nn.Linear(1001, 1024)), torch.randn(1, 1001), config="int8_weight_only")
    assert "no multiple of 16" in program.ops[0].reason


@pytest.mark.parametrize("config", ["int8", "int8_dynamic", "int8_weight_only"])
def test_strict_and_default_exports_give_the_same_operators_and_numbers(config):
    torch.manual_seed(0)
    model = nn.Sequential(Between(lambda y: F.avg_pool2d(y, 2)), nn.Hardswish(), nn.Flatten(), nn.Linear(144, 16))
    x = torch.randn(IMAGE)
    programs = [quantized(model, x, config=config, strict=strict)[1] for strict in (False, True)]
    default, strictly = ([(op.target, op.placement) for op in program.ops] for program in programs)
    assert default == strictly
    assert torch.equal(programs[0](x), programs[1](x))


def test_pieces_of_a_chunk_stay_integers():
    """ShuffleNet's units: one half passes by, the other goes through convolutions."""

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.one, self.head = nn.Conv2d(6, 8, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            left, right = F.relu(self.stem(x)).chunk(2, dim=1)
            y = torch.cat([left, F.relu(self.one(right))], 1)
            return self.head(y.view(2, 2, 4, 12, 12).transpose(1, 2).reshape(2, 8, 12, 12))

    reference, program = quantized(Unit(), torch.randn(IMAGE))
    assert {op.placement for op in program.ops} == {"int8"}
    x = torch.randn(IMAGE)
    assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=45) is None


def test_a_join_that_only_a_float_sum_reads_rounds_nothing():
    """A vision transformer's patches and class token, to which positions are added before anything is quantized."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 8)
            self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 10, 16))

        def forward(self, x):
            y = self.patches(x).flatten(2).transpose(1, 2)
            y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1) + self.positions
            return self.head(F.layer_norm(y, (16,)))

    reference, program = quantized(Patches(), torch.randn(2, 3, 12, 12))
    assert placements(program, "conv2d") == placements(program, "linear") == {"int8"}
    assert placements(program, "cat") == {"float"}
    assert "only float operators read its result" in quantplug.explain(reference).row("cat").reason
    written = [n for n in program.module.graph.nodes if n.target is torch.ops.onednn.qconv_pointwise.default]
    assert [n.args[-4] for n in written] == [torch.float32]


class Images(nn.Module):
    """A heavy convolution, one with a residual sum, a depthwise one, and one over one dimension."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, padding=1)
        self.depthwise, self.signal = nn.Conv2d(64, 64, 3, groups=64), nn.Conv1d(64, 128, 5)

    def forward(self, x):
        y = F.hardswish(self.one(x))
        y = self.depthwise(F.relu(self.two(y) + y))
        return F.silu(self.signal(y.flatten(2)))


def test_dynamic_convolutions_choose_their_parameters_at_run_time():
    reference, program = quantized(Images(), torch.randn(2, 3, 10, 10), config="int8_dynamic")
    assert [op.placement for op in program.ops if "conv" in op.target] == ["int8", "int8", "float", "int8"]
    for x in (torch.randn(2, 3, 10, 10), torch.randn(2, 3, 10, 10) * 50):
        assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=45) is None


def test_a_dynamic_convolution_with_little_to_do_is_not_claimed():
    model = torch.export.export(Images().eval(), (torch.randn(2, 3, 10, 10),)).module()
    quantizer = quantplug.get_quantizer("x86").set_global("int8_dynamic")
    rows = quantplug.explain(quantplug.prepare_pt2e(model, quantizer)).rows
    (reason,) = [row.reason for row in rows if row.operator == "conv2d" and not row.quantized]
    assert reason == "nearest rule 'conv': 9 products with each number, too few to quantize it at run time"


@pytest.mark.parametrize(
    "options", [{"reduce_range": True}, {"weight_bits": 7}, {"symmetric": True}, {"symmetric": True, "is_qat": True}]
)
def test_every_range_of_activations_runs_on_the_same_kernels(options):
    config = quantplug.get_quantizer("x86").backend.config("int8", **options)
    model = Between(lambda y: F.max_pool2d(y, 2))
    x = torch.randn(IMAGE)
    torch.manual_seed(0)
    exported = torch.export.export(model.eval(), (x,)).module()
    prepare = quantplug.prepare_qat_pt2e if options.get("is_qat") else quantplug.prepare_pt2e
    quantizer = quantplug.get_quantizer("x86").set_global(config)
    prepared = prepare(exported, quantizer)
    prepared(x)
    reference = quantplug.convert_pt2e(prepared)
    program: Any = quantizer.backend.lower(reference, (x,))
    assert {op.placement for op in program.ops} == {"int8"}
    assert 0 < program.pair <= (2 * 255 * 128 if "symmetric" in options and highest_integer() == 255 else 32767)
    assert Level.APPROXIMATE.objection(program(x), reference(x), decibels=45) is None


@pytest.mark.parametrize("symmetric", [False, True])
def test_small_weights_and_quiet_signals_use_all_integers(symmetric):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    batches = [1e-3 * torch.randn(32, 256) for _ in range(4)]
    config = quantplug.get_x86_quantization_config(symmetric=symmetric, weight_bits=7)
    artefact = quantplug.quantize(model, (batches[0],), "x86", batches, config, progress=False)
    weights = [found for found in artefact.reference.state_dict().values() if found.dtype == torch.int8]
    assert [int(weight.max()) for weight in weights] == [64, 64]
    assert sqnr(model(batches[0]), artefact(batches[0])) > 30


class Positions(nn.Module):
    """Adds what a layer makes of a constant table, as Swin v2 does with relative positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(4, 16))
        self.bias, self.layer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x) + self.bias(self.table)


@pytest.mark.parametrize("config", ["int8", "int8_dynamic", "int8_weight_only"])
def test_a_layer_of_constants_lowers_in_every_mode(config):
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    reference, program = quantized(Positions(), x, config=config)
    assert sqnr(reference(x), program(x)) > 40
