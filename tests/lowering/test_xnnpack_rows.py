"""Scales of run time on XNNPACK: the graph, the program and the emulation choose one a row, or one a sample."""

import pytest
import torch
from qdq_graphs import Net, TensorWeight, Weight, dynamic, graph_of
from torch import Tensor, nn
from torch.nn import functional as F

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.emulation import emulate
from quantplug.lowering.x86 import lower as lower_x86
from quantplug.lowering.xnnpack import lower
from quantplug.lowering.xnnpack.runtime import Method

# One layer agrees beyond 130 dB. Behind it a last bit may move an integer across a tie, which alone is 45 dB of a row.
AGREED = 35.0


class Encoder(nn.Module):
    """Tokens that are looked up, normed, attended to and averaged."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 32)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.softmax(q @ k.transpose(1, 2) / 32**0.5, -1) @ v)
        return (x + self.narrow(F.gelu(self.wide(x)))).mean(1)


class Layers(nn.Module):
    """Two linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Images(nn.Module):
    """Two convolutions, of which one has groups."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, 2, padding=1), nn.Conv2d(16, 8, 3, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def fading(*shape: int) -> Tensor:
    """Numbers of which each row is smaller than the one before: one scale for all would lose the last ones."""
    return torch.randn(shape) * torch.logspace(2, -3, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))


def converted(model: nn.Module, x: Tensor, config: str = "int8_dynamic", *, strict: bool = False, **options):
    exported = torch.export.export(model.eval(), (x,), strict=strict, **options).module()
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    return quantplug.convert_pt2e(quantplug.prepare_pt2e(exported, quantizer))


def worst(found: Tensor, expected: Tensor) -> float:
    """Decibels of the row, or the sample, that is the farthest away."""
    return min(sqnr(*pair) for pair in zip(found.detach(), expected.detach(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("model", "shape"),
    [(Layers, (6, 32)), (Layers, (6, 5, 32)), (Layers, (6, 2, 5, 32)), (Images, (6, 8, 12, 12))],
)
def test_every_row_keeps_its_precision_in_the_graph_and_in_the_saved_program(model, shape, strict, tmp_path):
    torch.manual_seed(0)
    net = model()
    reference = converted(net, fading(*shape), strict=strict)
    program = lower(reference, (fading(*shape),))
    program.save(tmp_path / "rows.pte")
    loaded = Method((tmp_path / "rows.pte").read_bytes(), None)
    for x in (fading(*shape), fading(*shape).flip(0).contiguous()):
        assert worst(reference(x), net(x)) > 30.0
        assert worst(loaded([x])[0], net(x)) > 30.0
        assert worst(loaded([x])[0], reference(x)) > AGREED
    layers = [op for op in program.ops if "conv2d" in op.target or "linear" in op.target]
    assert [(op.placement, op.reason) for op in layers] == [("int8", "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "decibels"), [("int8_dynamic", AGREED), ("int4_dynamic", AGREED), ("int4_dynamic_groups", AGREED)]
)
def test_an_encoder_of_open_sizes_agrees_with_its_graph_at_every_length(config, decibels):
    """Groups keep 40 dB: the kernel holds their scales in bfloat16."""
    torch.manual_seed(0)
    net, tokens = Encoder().eval(), torch.randint(0, 40, (4, 12))
    sizes = ({0: torch.export.Dim("batch", min=2, max=8), 1: torch.export.Dim("length", min=2, max=16)},)
    reference = converted(net, tokens, config, dynamic_shapes=sizes)
    program = lower(reference, (tokens,), dynamic_shapes=sizes)
    for shape in ((4, 12), (2, 5), (8, 16)):
        tokens = torch.randint(0, 40, shape)
        assert worst(program(tokens), reference(tokens)) > decibels
        assert abs(sqnr(reference(tokens), net(tokens)) - sqnr(program(tokens), net(tokens))) < 0.5


@pytest.mark.slow
def test_images_of_a_single_number_stay_float_with_the_reason():
    """torchao takes a range for each number for one range of them all; the graph did not run."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 4, 1), nn.Hardsigmoid(), nn.Conv2d(4, 2, 1)).eval()
    x = torch.randn(3, 1, 6, 6)
    artefact = quantplug.quantize(model, (x,), "xnnpack", config="int8_dynamic", progress=False)
    first, second = (row for row in artefact.report.rows if row.operator.startswith("conv"))
    assert first.reason.endswith("each of its images is a single number, which has no range")
    assert second.quantized
    for images in (x, torch.randn(3, 1, 6, 6)):
        assert sqnr(artefact(images), artefact.reference(images)) > 60


@pytest.mark.slow
def test_images_of_open_size_have_a_scale_each():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)), fading(4, 8, 12, 12)
    sizes = ({d: torch.export.Dim(f"size{d}", min=2, max=16) for d in (0, 2, 3)},)
    reference = converted(net, x, dynamic_shapes=sizes)
    program = lower(reference, (x,))
    for shape in ((4, 8, 12, 12), (3, 8, 9, 11)):
        x = fading(*shape)
        assert worst(reference(x), net(x)) > 30.0
        assert worst(program(x), reference(x)) > AGREED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "shape", "what"),
    [
        (lambda: Net(lambda s, x: F.linear(dynamic(x), s.w()), w=Weight(8, 16)), (6, 16), "row"),
        (lambda: Net(lambda s, x: F.linear(dynamic(x), s.w()), w=TensorWeight(8, 16)), (6, 2, 3, 16), "row"),
        (lambda: Net(lambda s, x: F.conv2d(dynamic(x), s.w()), w=Weight(8, 8, 3, 3)), (6, 8, 7, 7), "sample"),
    ],
)
def test_a_graph_with_one_scale_runs_with_one_a_row_and_its_operators_say_so(net, shape, what):
    """Such are torchao's and ExecuTorch's quantizers' graphs; one scale would leave the last rows nothing."""
    torch.manual_seed(0)
    model, x = net(), fading(*shape)
    graph = graph_of(model, x)
    program = lower(graph, (x,))
    assert program.sqnr > 100.0  # of what the kernels were asked for
    weighted = F.conv2d if what == "sample" else F.linear
    for values in (x, x.flip(0)):
        assert worst(graph(values), weighted(values, model.w())) < 10.0
        assert worst(program(values), weighted(values, model.w())) > 30.0
    told = [op.how for op in program.ops if op.placement == "int8" and ("linear" in op.target or "conv" in op.target)]
    assert told == [f"the kernel chooses a scale per {what}, the graph per tensor"]


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(6, 32), (6, 3, 32), (6, 2, 3, 32)])
def test_torchaos_rows_lower_whatever_their_rank(shape):
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    torch.manual_seed(0)
    model = Layers().eval()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))  # type: ignore[attr-defined]
    x = fading(*shape)
    graph = torch.export.export(model, (x,)).module()
    program = lower(graph, (x,))
    for values in (x, x.flip(0)):
        assert worst(program(values), graph(values)) > 40.0
    assert [op.placement for op in program.ops if "linear" in op.target] == ["int8", "int8"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "shape"), [(Layers, (6, 4, 32)), (Images, (5, 8, 12, 12))])
@pytest.mark.parametrize("config", ["int8_dynamic", "int4_dynamic", "int4_dynamic_groups"])
def test_r08_the_emulation_of_rows_has_the_kernels_arithmetic(model, shape, config):
    if model is Images and config != "int8_dynamic":
        pytest.skip("convolutions have no weights of four bits")
    torch.manual_seed(0)
    x = fading(*shape)
    reference = converted(model(), x, config)
    program, emulated = lower(reference, (x,)), emulate(reference, (x,), "xnnpack")
    for values in (x, fading(*shape)):
        assert worst(emulated(values), program(values)) > 120.0
        equal = (emulated(values) == program(values)).double().mean()
        assert equal > 0.5 > (reference(values) == program(values)).double().mean()
    assert [op.placement for op in emulated.ops if "relu" not in op.target] == ["int8", "int8"]


@pytest.mark.parametrize(("model", "shape", "what"), [(Layers, (6, 32), "row"), (Images, (4, 8, 12, 12), "sample")])
def test_x86_leaves_rows_float_says_why_and_computes_the_graph(model, shape, what):
    torch.manual_seed(0)
    x = fading(*shape)
    reference = converted(model(), x)
    program = lower_x86(reference, (x,))
    for values in (x, fading(*shape)):
        assert worst(program(values), reference(values)) > 60.0
    layers = [op for op in program.ops if "conv2d" in op.target or "linear" in op.target]
    assert {(op.placement, op.reason) for op in layers} == {
        ("float", f"its input has a scale per {what}, the kernel takes one for the tensor")
    }
