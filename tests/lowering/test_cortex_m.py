"""Models on CMSIS-NN kernels: lowered by ExecuTorch's passes, run on their Python form, compared with the graph."""

import builtins
import inspect

import pytest
import torch
from models import Function, MobileNet, ResNet18
from torch import nn

from quantplug import convert_pt2e, get_quantizer, prepare_qat_pt2e, quantize
from quantplug.core.errors import ConfigError, LoweringError
from quantplug.core.specs.levels import Level, sqnr
from quantplug.quantizers import cortex_m


def lowered(model, *inputs, **options):
    torch.manual_seed(0)
    return quantize(model.eval(), inputs, "cortex_m", [inputs], progress=False, **options)


def kernels(artefact):
    return [str(n.target).split(".")[1] for n in artefact.program.exported.graph.nodes if "cortex_m." in str(n.target)]


def step(artefact):
    quantize_nodes = [n for n in artefact.reference.graph.nodes if "quantize_per_tensor" in str(n.target)]
    return quantize_nodes[-1].args[1]


MAP = torch.randn(1, 4, 12, 12, generator=torch.manual_seed(1))
ROWS = torch.randn(3, 10, generator=torch.manual_seed(2))
BATCHED = torch.randn(2, 3, 5, generator=torch.manual_seed(3)), torch.randn(2, 5, 4, generator=torch.manual_seed(4))
CASES = {
    "conv": (nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()), (MAP,), "quantized_conv2d"),
    "conv_clamp": (nn.Sequential(nn.Conv2d(4, 6, 3, 2), nn.ReLU6()), (MAP,), "quantized_conv2d"),
    "conv_same": (nn.Conv2d(4, 6, 3, padding="same"), (MAP,), "quantized_conv2d"),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, bias=False), (MAP,), "quantized_depthwise_conv2d"),
    "linear": (nn.Sequential(nn.Linear(10, 6), nn.ReLU()), (ROWS,), "quantized_linear"),
    "add": (Function(lambda m, a, b: torch.relu(a + b)), (MAP, 3 * MAP.flip(2)), "quantized_add"),
    "mul": (Function(lambda m, a: m.c(a) * m.d(a), c=nn.Linear(10, 4), d=nn.Linear(10, 4)), (ROWS,), "quantized_mul"),
    "bmm": (Function(lambda m, a, b: torch.bmm(a, b)), BATCHED, "quantized_batch_matmul"),
    "max_pool": (nn.MaxPool2d(2), (torch.randn(1, 2, 32, 32),), "quantized_max_pool2d"),
    "avg_pool": (nn.AvgPool2d(2), (MAP,), "quantized_avg_pool2d"),
    "mean": (Function(lambda m, a: m.c(a).mean((2, 3)), c=nn.Conv2d(4, 6, 1)), (MAP,), "quantized_avg_pool2d"),
    "softmax": (nn.Softmax(-1), (ROWS,), "softmax"),
    "sigmoid": (nn.Sigmoid(), (ROWS,), "quantized_activation"),
    "tanh": (nn.Tanh(), (ROWS,), "quantized_activation"),
    "silu": (nn.SiLU(), (ROWS,), "quantized_activation"),
    "permute": (Function(lambda m, a: m.c(a).permute(0, 2, 3, 1), c=nn.Conv2d(4, 6, 1)), (MAP,), "transpose"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_every_row_runs_on_its_kernel_within_one_step_of_the_graph(case):
    model, inputs, kernel = CASES[case]
    artefact = lowered(model, *inputs)
    assert kernel in kernels(artefact)
    assert {op.placement for op in artefact.program.ops} == {"int8"}
    assert Level.ONE_STEP.objection(artefact(*inputs), artefact.reference(*inputs), step=step(artefact)) is None


@pytest.mark.slow
@pytest.mark.parametrize("model", [ResNet18(8, 10), MobileNet()], ids=["resnet18", "mobilenet"])
def test_whole_networks_stay_in_integers(model, tmp_path):
    x = torch.randn(1, 3, 32, 32, generator=torch.manual_seed(0))
    artefact = lowered(model, x)
    assert {op.placement for op in artefact.program.ops} == {"int8"}
    assert sqnr(artefact(x), artefact.reference(x)) > 40
    assert sqnr(artefact(x), model(x)) > 25
    saved = artefact.save(tmp_path / "model.pte")
    assert saved.read_bytes()[4:8] == b"ET12", "an ExecuTorch program by its magic"
    assert saved.stat().st_size == artefact.nbytes


@pytest.mark.slow
def test_what_the_kernels_do_not_take_stays_float_with_the_reason():
    for model, x, reason in (
        (nn.Conv2d(4, 4, 3, groups=2), MAP, "2 groups over 4 channels, the kernels take 1 or all"),
        (nn.MaxPool2d(3, ceil_mode=True), MAP, "the pooling is dilated or rounds sizes up"),
        (nn.Softmax(1), MAP, "it goes over dimension 1, the kernel along the last"),
        (Function(lambda m, a: a * a[:, :1]), MAP, "the kernel takes equal ones"),
    ):
        with_linear = nn.Sequential(model, nn.Flatten(), nn.LazyLinear(3)).eval()
        with_linear(x)
        artefact = lowered(with_linear, x)
        first = next(row for row in artefact.report.rows if not row.quantized and "slice" not in row.operator)
        assert reason in first.reason
        assert "portable" in {op.placement for op in artefact.program.ops}


@pytest.mark.slow
@pytest.mark.parametrize("after", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3)], ids=lambda it: it._get_name())
def test_an_image_without_a_batch_stays_float_with_the_reason(after):
    """Pooling of one ended in foreign errors, its convolution in -5 dB of the graph."""
    x = torch.randn(3, 12, 10)
    artefact = lowered(nn.Sequential(nn.Linear(10, 10), after), x)
    row = artefact.report.rows[1]
    assert not row.quantized
    assert row.reason.endswith("its input has 3 dimensions, the kernel takes batches of images")
    assert sqnr(artefact(x), artefact.reference(x)) > 40


DILATED = {
    "whole": nn.Conv2d(4, 8, 3, padding=2, dilation=(2, 3)),
    "depthwise": nn.Conv2d(4, 8, (3, 2), stride=(1, 2), dilation=2, groups=4),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DILATED)
def test_dilated_convolutions_run_in_integers(name):
    artefact = lowered(nn.Sequential(DILATED[name], nn.ReLU()), MAP)
    assert {op.placement for op in artefact.program.ops} == {"int8"}
    for x in (MAP, torch.randn_like(MAP)):
        assert (artefact(x) - artefact.reference(x)).abs().max() <= step(artefact) * 1.01


FLOATS = {
    "divided by 3 whatever its window": nn.AvgPool2d((2, 1), (1, 2), divisor_override=3),
    "uneven for an even kernel size": nn.Conv2d(4, 4, (1, 2), padding="same", groups=4),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("reason", FLOATS)
def test_windows_that_the_kernels_do_not_have_stay_float_with_the_reason(reason):
    artefact = lowered(nn.Sequential(nn.Conv2d(4, 4, 1), FLOATS[reason], nn.Sigmoid()), MAP)
    assert reason in artefact.report.rows[1].reason
    assert [op.placement for op in artefact.program.ops] == ["int8", "portable", "int8"]
    assert sqnr(artefact(MAP), artefact.reference(MAP)) > 40


@pytest.mark.slow
def test_linear_weights_are_per_tensor_and_convolutions_per_channel():
    artefact = lowered(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(600, 3)), MAP)
    targets = [str(node.target) for node in artefact.reference.graph.nodes]
    assert sum("dequantize_per_channel" in target for target in targets) == 2, "weight and bias of the convolution"


@pytest.mark.slow
def test_the_core_is_chosen_by_name():
    assert lowered(CASES["linear"][0], ROWS, cpu="cortex-m4")(ROWS).shape == (3, 6)
    with pytest.raises(ConfigError, match="There is no core 'cortex-m99'"):
        lowered(CASES["linear"][0], ROWS, cpu="cortex-m99")
    with pytest.raises(ConfigError, match="have one shape, found dynamic_shapes"):
        lowered(CASES["linear"][0], ROWS, dynamic_shapes=({0: torch.export.Dim("batch")},))


def test_a_missing_package_is_one_sentence(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name == "executorch.backends.cortex_m":
            raise ModuleNotFoundError("No module named 'tosa_serializer'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        LoweringError, match=r"missing \(No module named 'tosa_serializer'\); pip install 'quantplug\[cortex-m\]'"
    ):
        lowered(CASES["linear"][0], ROWS)


def test_a_third_target_is_a_page_of_declarations():
    assert len(inspect.getsource(cortex_m).splitlines()) <= 60
    assert get_quantizer("cortex_m").backend is cortex_m.CORTEX_M


CLAMPED = {
    "a hardtanh": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.Hardtanh()), (MAP,)),
    "in place": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.Hardtanh(-2, 0.5, inplace=True)), (MAP,)),
    "a linear layer": (nn.Sequential(nn.Linear(10, 6), nn.Hardtanh(-0.5, 3)), (ROWS,)),
    "a clamp": (Function(lambda m, a, b: (a + b).clamp(-0.25, 0.5)), (MAP, 3 * MAP.flip(2))),
    "a range shared with negative numbers": (
        *(Function(lambda m, a: torch.cat([m.c(a).relu(), a], 1), c=nn.Conv2d(4, 6, 1)), (MAP,)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CLAMPED)
def test_clamps_whose_bounds_lie_within_the_integers(case):
    """ExecuTorch's passes lost the quantization in front of them: -5 dB."""
    model, inputs = CLAMPED[case]
    artefact = lowered(model, *inputs)
    clamp = next(row for row in artefact.report.rows if any(n in row.operator for n in ("hardtanh", "clamp", "relu")))
    assert clamp.quantized
    clamps = next(op for op in artefact.program.ops if any(n in op.target for n in ("hardtanh", "clamp", "relu")))
    assert clamps.placement == "int8"
    for given in (inputs, [2 * x.flip(0) for x in inputs]):
        assert Level.ONE_STEP.objection(artefact(*given), artefact.reference(*given), step=step(artefact)) is None


IN_A_ROW = {
    "a product of a layer": (Function(lambda m, a, b: torch.bmm(m.c(a), b), c=nn.Linear(5, 5)), BATCHED),
    "a product of a curve": (Function(lambda m, a, b: torch.bmm(a.tanh(), b.sigmoid())), BATCHED),
    "a product of a product": (Function(lambda m, a, b: torch.bmm(a, torch.bmm(b, b.transpose(1, 2)))), BATCHED),
    "a layer over the rows of a map": (
        *(Function(lambda m, a: m.d(m.c(a).tanh()), c=nn.Conv2d(4, 4, 3), d=nn.Linear(10, 6)), (MAP,)),
    ),
    "a sum with ones": (Function(lambda m, a: m.c(a) + torch.ones(3, 6), c=nn.Linear(10, 6)), (ROWS,)),
    "a product with one number": (
        *(Function(lambda m, a: m.c(a) * torch.full_like(a, 3.0), c=nn.Linear(10, 10)), (ROWS,)),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", IN_A_ROW)
def test_operators_in_a_row(case):
    """ExecuTorch's passes trace operators of float on integers, and fold quantization into what yields one number."""
    model, inputs = IN_A_ROW[case]
    artefact = lowered(model, *inputs)
    assert "portable" not in {op.placement for op in artefact.program.ops if "transpose" not in op.target}
    for given in (inputs, [0.7 * x.flip(0) for x in inputs]):
        assert Level.ONE_STEP.objection(artefact(*given), artefact.reference(*given), step=step(artefact)) is None


@pytest.mark.slow
def test_what_the_graph_fills_and_writes_into_is_no_constant():
    def fill(m, a):
        filled = torch.zeros(3, 10)
        filled[:, :2] = a[:, :2]
        return m.c(a) + filled

    artefact = lowered(Function(fill, c=nn.Linear(10, 10)), ROWS)
    for x in (ROWS, ROWS.flip(0), ROWS):
        assert sqnr(artefact(x), artefact.reference(x)) > 40


@pytest.mark.slow
def test_what_was_trained_has_integer_biases():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(600, 3))
    with torch.no_grad():
        model[1].running_mean.uniform_(-2, 2)
        model[1].weight.uniform_(0.2, 3)
    quantizer = get_quantizer("cortex_m")
    quantizer.set_global(quantizer.backend.config(is_qat=True))
    prepared = prepare_qat_pt2e(torch.export.export(model.train(), (MAP,)).module(), quantizer)
    prepared(MAP)
    reference = convert_pt2e(prepared.eval())
    program = quantizer.backend.lower(reference, (MAP,))
    assert sqnr(program(MAP), reference(MAP)) > 40
