"""From a model to a program: what the quantizer annotates runs on integer kernels and agrees with the q/dq graph."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.core.errors import ConfigError, ConvertError
from quantplug.core.qdq.integer_io import boundary_qparams, quantized_inputs
from quantplug.lowering.xnnpack import XNNPACKProgram
from quantplug.quantizers.framework.capabilities import capability_table
from quantplug.quantizers.framework.derived import derive
from quantplug.quantizers.framework.quantizer import BackendQuantizer
from quantplug.quantizers.xnnpack import INTEGER_STATES, WIDE_RANGES, XNNPACK

IMAGE = (1, 4, 8, 8)


def layer() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


def flow(model: nn.Module, *shapes: tuple[int, ...], backend="xnnpack", config: str | None = None, minimum=40.0):
    """Quantizes, lowers and compares with the q/dq graph on inputs that nothing has seen."""
    torch.manual_seed(1)
    examples = tuple(torch.randn(*shape) for shape in shapes)
    calibration = None if config else [examples] * 2
    artefact = quantplug.quantize(model.eval(), examples, backend, calibration, config, progress=False)
    fresh = tuple(torch.randn(*shape) for shape in shapes)
    assert decibels(artefact(*fresh), artefact.reference(*fresh)) >= minimum
    return artefact


# Every function between two convolutions, so that integers come and go.
INTEGER = {
    "maximum": lambda x: torch.maximum(x, x * 0.5),
    "minimum": lambda x: torch.minimum(x, x * 0.5),
    "abs": torch.abs,
    "neg": torch.neg,
    "add and relu6": lambda x: F.relu6(x + x * 0.5),
    "sub and hardtanh": lambda x: F.hardtanh(x - x * 0.5),
    "mul and clamp": lambda x: (x * x).clamp(-0.5, 0.5),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bilinear, aligned corners": lambda x: F.interpolate(x, size=(11, 5), mode="bilinear", align_corners=True),
    "rrelu": lambda x: F.rrelu(x),
    "silu": F.silu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 2.0),
    "elu with scales": lambda x: torch.ops.aten.elu(x, 1.5, 0.8, 0.5),
    "hardsigmoid": F.hardsigmoid,
    "channel halves": lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    "squeeze and excite": lambda x: x * F.hardsigmoid(x.mean((2, 3), keepdim=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGER)
def test_between_convolutions_the_domain_stays_integer(name):
    net = Net(lambda s, x: s.b(INTEGER[name](s.a(x))), a=layer(), b=layer())
    artefact = flow(net, IMAGE)
    assert artefact.program.counts.f32 == 0
    assert artefact.program.counts.portable == 0
    assert artefact.program.delegates == 1


@pytest.mark.slow
def test_wide_ranges_run_on_integer_kernels_when_a_backend_adds_them():
    wide = derive(XNNPACK, "xnnpack_wide", add=WIDE_RANGES)
    quantizer = type("Wide", (BackendQuantizer,), {"backend": wide})()
    net = Net(lambda s, x: s.b(torch.exp(s.a(x))) / (torch.sqrt(s.c(x).abs() + 1.0)), a=layer(), b=layer(), c=layer())
    artefact = flow(net, IMAGE, backend=quantizer, minimum=35.0)
    assert artefact.program.counts.f32 == 0
    assert flow(net, IMAGE).program.counts.f32 > 0


RECURRENT = {
    "LSTM": (nn.LSTM(8, 16, batch_first=True), (1, 3, 8)),
    "GRU": (nn.GRU(8, 16, batch_first=True), (1, 3, 8)),
    "RNN": (nn.RNN(8, 16, batch_first=True), (1, 3, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_one_delegate_of_integer_layers_and_float_states(name):
    recurrent, shape = RECURRENT[name]
    net = Net(lambda s, x: s.fc(s.r(x)[0][:, -1]), r=recurrent, fc=nn.Linear(16, 4))
    counts = flow(net, shape).program.counts
    # One linear layer for the whole sequence, one for each step after the first, whose state is known; the classifier.
    assert (counts.int8, counts.delegates, counts.portable) == (1 + 2 + 1, 1, 0)
    assert counts.f32 > 0
    states = derive(XNNPACK, "xnnpack_states", add=INTEGER_STATES)
    quantizer = type("States", (BackendQuantizer,), {"backend": states})()
    counts = flow(net, shape, backend=quantizer).program.counts
    assert (counts.f32, counts.delegates, counts.portable) == (0, 1, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_float_states_keep_what_a_float_recurrence_keeps(kind):
    def signal(quantizer) -> float:
        prepared = quantplug.prepare_pt2e(torch.export.export(net, (batches[0],)).module(), quantizer)
        for x in batches:
            prepared(x)
        converted = quantplug.convert_pt2e(prepared)
        return sum(decibels(converted(x), net(x)) for x in batches) / len(batches)

    torch.manual_seed(0)
    net = Net(lambda s, x: s.fc(s.r(x)[0]), r=kind(16, 32, batch_first=True), fc=nn.Linear(32, 5)).eval()
    batches = [torch.randn(1, 6, 16) for _ in range(8)]
    states = derive(XNNPACK, "xnnpack_states", add=INTEGER_STATES)
    floats = signal(quantplug.get_quantizer("xnnpack").set_global("int8").set_module_type(kind, None))
    default = signal(quantplug.get_quantizer("xnnpack"))
    assert default > floats - 4.0
    assert default > signal(type("States", (BackendQuantizer,), {"backend": states})()) + 1.0


def test_the_documents_table_is_what_the_backend_declares():
    text = (Path(__file__).parents[2] / "docs" / "xnnpack.md").read_text()
    assert capability_table(quantplug.capabilities("xnnpack")) in text


PRODUCTS = {
    "addmm": lambda s, x: torch.addmm(s.b, x.view(-1, 16), s.w).view(2, 8, 24),
    "mm": lambda s, x: torch.mm(x.view(-1, 16), s.w),
    "matmul": lambda s, x: x @ s.w,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_a_constant_matrix_are_linear_layers(name):
    torch.manual_seed(0)
    net = Net(PRODUCTS[name], w=nn.Parameter(torch.randn(16, 24)), b=nn.Parameter(torch.randn(24)))
    counts = flow(net, (2, 8, 16)).program.counts
    assert (counts.int8, counts.f32, counts.delegates, counts.portable) == (1, 0, 1, 0)


@pytest.mark.slow
def test_a_local_response_norm_and_a_volume_run():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.LocalResponseNorm(3), nn.Conv2d(8, 4, 3))
    assert next(o.placement for o in flow(model, IMAGE).program.ops if "conv2d" in o.target) == "int8"
    volume = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2))
    program = flow(volume, (1, 3, 4, 6, 6)).program
    assert {o.placement for o in program.ops if "conv2d" in o.target} == {"int8"}
    # The volume's own zero padding stands before the first quantized operator, where the input is still float.
    assert [o.placement for o in program.ops if "constant_pad" in o.target] == ["float"]
    assert (program.counts.f32, program.delegates) == (1, 1)


@pytest.mark.slow
def test_a_dynamic_linear_behind_a_convolution_runs():
    flow(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(6, 4)), (1, 3, 8, 8), config="int8_dynamic", minimum=30.0)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "limit"), [("int4_dynamic", 0.16), ("int4_dynamic_groups", 0.16)])
def test_four_bit_linear_layers_run_and_are_small(config, limit):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    artefact = flow(model, (3, 256), config=config, minimum=30.0)
    stored = sum(p.numel() * 4 for p in model.parameters())
    assert artefact.nbytes <= limit * stored
    assert artefact.program.counts.int8 == 2


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8_weight_only", "int4_weight_only"])
def test_weight_only_linear_layers_need_no_calibration(config):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    artefact = flow(model, (3, 256), config=config, minimum=100.0)
    assert artefact.nbytes <= 0.3 * sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.slow
def test_layers_without_four_bit_kernels_stay_float_and_say_why():
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8))
    report = flow(model, (3, 48), config="int4_dynamic_groups", minimum=30.0).report
    assert any("48 input channels are no multiple of the group of 32" in row.reason for row in report.rows)
    both = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 8))
    report = flow(both, IMAGE, config="int4_dynamic", minimum=30.0).report
    assert any("four bits are those of linear" in row.reason for row in report.rows)
    with pytest.raises(ConfigError, match="multiple of 32"):
        XNNPACK.config("int4_dynamic_groups", group_size=24)


@pytest.mark.slow
def test_e03_integer_inputs_and_outputs():
    quantizer = quantplug.get_quantizer("xnnpack").set_io(input=torch.int8, output=torch.int8)
    model, x = nn.Sequential(layer(), nn.ReLU(), layer()).eval(), torch.randn(*IMAGE)
    artefact = quantplug.quantize(model, (x,), quantizer, [(x,)], progress=False)
    integers = quantized_inputs(artefact.reference, (x,))[0]
    assert isinstance(artefact.program, XNNPACKProgram)
    assert artefact.program.counts.converts == 0
    assert torch.equal(artefact(integers), artefact.reference(integers))
    scale, zero_point = boundary_qparams(artefact.reference)[1][0][:2]
    assert decibels((artefact(integers).float() - zero_point) * scale, model(x)) > 25


def test_e03_an_input_that_is_read_in_float_cannot_be_integer():
    net, x = Net(lambda s, x: s.a(x) + x.softmax(-1), a=layer()), torch.randn(*IMAGE)
    quantizer = quantplug.get_quantizer("xnnpack").set_io(input=torch.int8)
    prepared = quantplug.prepare_pt2e(torch.export.export(net.eval(), (x,)).module(), quantizer)
    prepared(x)
    with pytest.raises(ConvertError, match=r"softmax.*reads it in float"):
        quantplug.convert_pt2e(prepared)
    with pytest.raises(ConfigError, match="integer dtype"):
        quantizer.set_io(output=torch.float16)


@pytest.mark.slow
def test_attention_under_a_mask_of_run_time_before_a_reshape_and_a_product():
    """As GPT-2 has it; tracing took the reshape for a view, which ExecuTorch's products have no strides for."""

    def attend(s, x, mask):
        query, key, value = (t.view(2, 8, 2, 16).transpose(1, 2) for t in s.all(x).split(32, 2))
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :].bool())
        found = found.transpose(1, 2).contiguous().reshape(2, 8, -1).contiguous()
        return s.last(torch.addmm(s.bias, found.view(-1, 32), s.weight).view(2, 8, 32))

    net = Net(attend, all=nn.Linear(32, 96), last=nn.Linear(32, 8)).eval()
    net.weight, net.bias = nn.Parameter(torch.randn(32, 32) * 0.1), nn.Parameter(torch.randn(32))
    data = [(torch.randn(2, 8, 32), torch.tensor([[1.0] * 8, [1.0] * keep + [0.0] * (8 - keep)])) for keep in (8, 5, 2)]
    artefact = quantplug.quantize(net, data[0], "xnnpack", data, progress=False)
    for x, mask in data:
        assert decibels(artefact(x, mask), artefact.reference(x, mask)) > 40
        assert decibels(artefact(x, mask), net(x, mask)) > 20


@pytest.mark.slow
def test_masks_and_positions_are_constants_and_attention_is_products():
    def attend(s, x):
        positions = torch.arange(x.shape[1], device=x.device)
        seen = positions[:, None] >= positions[None]
        return s.o(F.scaled_dot_product_attention(s.q(x), s.k(x), s.v(x), attn_mask=seen))

    layers = {name: nn.Linear(16, 16) for name in "qkvo"}
    program = flow(Net(attend, **layers), (1, 8, 16)).program
    assert program.counts.portable == 0
    assert program.delegates == 1
