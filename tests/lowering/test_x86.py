"""A q/dq graph against its lowering to oneDNN kernels: whole models, saving, loading, errors."""

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as torchao_x86

import quantplug
from quantplug.core.errors import ArtefactError, LoweringError, ModelError
from quantplug.lowering.processor import kernels_saturate
from quantplug.lowering.x86 import X86Program, lower


@torch.no_grad()
def sqnr(reference, found):
    noise = (reference - found).pow(2).sum().clamp_min(1e-30)
    return float(10 * torch.log10(reference.pow(2).sum() / noise))


def converted(model, inputs, *, dynamic_shapes=None, is_dynamic=False):
    """The reference: torchao's own quantizer, which needs strict export, and torchao's own flow."""
    exported = torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic_shapes, strict=True)
    config = torchao_x86.get_default_x86_inductor_quantization_config(
        is_dynamic=is_dynamic, reduce_range=kernels_saturate()
    )
    prepared = prepare_pt2e(exported.module(), torchao_x86.X86InductorQuantizer().set_global(config))
    with torch.no_grad():
        prepared(*inputs)
    return convert_pt2e(prepared)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.two(self.relu(self.one(x)))
        out += x
        return self.relu(out)


class Network(nn.Module):
    """The pieces of a ResNet, with a depthwise stage."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Residual(16), Residual(16))
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6(), nn.Conv2d(16, 32, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.depthwise(self.blocks(self.stem(x)))
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 32, 32),)
    model = converted(Network(), inputs, dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    return model, inputs, lower(model, inputs, dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))


def kernels(program):
    return [str(node.target) for node in program.module.graph.nodes if "onednn" in str(node.target)]


@pytest.mark.slow
def test_r20_every_convolution_and_linear_is_a_onednn_operator(network):
    _, _, program = network
    assert len(kernels(program)) == 8
    assert not [
        n
        for n in program.module.graph.nodes
        if n.target in (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
    ]


def test_a_lowered_network_agrees_with_its_reference(network):
    model, inputs, program = network
    assert sqnr(model(*inputs), program(*inputs)) > 40


def test_integers_flow_between_kernels_without_conversion(network):
    _, _, program = network
    conversions = [n for n in program.module.graph.nodes if n.target is torch.ops.aten.to.dtype]
    # the input, the int32 sum of the mean, and the mean
    assert len(conversions) == 3


def test_what_has_no_integer_kernel_is_reported_with_its_reason():
    inputs = (torch.randn(2, 3, 8, 8),)
    program = lower(converted(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax(1), nn.Conv2d(8, 4, 1)), inputs), inputs)
    floats = {operator.target: operator.reason for operator in program.ops if operator.placement != "int8"}
    assert set(floats) == {"aten.softmax.int"}
    assert "no integer kernel" in floats["aten.softmax.int"]


def test_another_batch_size_runs_where_export_left_it_open(network):
    model, _, program = network
    inputs = (torch.randn(5, 3, 32, 32),)
    assert sqnr(model(*inputs), program(*inputs)) > 40


class AnyNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, *tensors):
        return self.linear(tensors[0]) + self.linear(tensors[1])


class Nested(AnyNumber):
    def forward(self, named, listed):
        return super().forward(named["x"], listed[0])


BATCH = {0: torch.export.Dim("batch", min=1, max=64)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "take", "dynamic_shapes"),
    [
        (AnyNumber, lambda x: (x, x), ((BATCH, BATCH),)),
        (AnyNumber, lambda x: (x, x), {"tensors": (BATCH, BATCH)}),
        (Nested, lambda x: ({"x": x}, [x]), {"named": {"x": BATCH}, "listed": [BATCH]}),
    ],
)
def test_sizes_stay_open_in_a_saved_program_whatever_the_form_of_the_inputs(model, take, dynamic_shapes, tmp_path):
    inputs = take(torch.randn(2, 8))
    exported = torch.export.export(model().eval(), inputs, dynamic_shapes=dynamic_shapes).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
    quantplug.calibrate(prepared, [inputs])
    backend = quantplug.get_quantizer("x86").backend
    program = backend.lower(quantplug.convert_pt2e(prepared), inputs, dynamic_shapes=dynamic_shapes)
    loaded = X86Program.load(program.save(tmp_path / "once.pt2"))
    again = X86Program.load(loaded.save(tmp_path / "twice.pt2"))
    for size in (1, 5):
        more = take(torch.randn(size, 8))
        assert torch.equal(again(*more), program(*more))


def test_an_empty_batch_gives_empty_outputs(network):
    model, _, program = network
    nothing = program(torch.randn(0, 3, 32, 32))
    assert nothing.shape == model(torch.randn(0, 3, 32, 32)).shape
    assert nothing.dtype == torch.float32


def test_an_empty_batch_whose_output_is_not_empty_is_refused():
    batch = ({0: torch.export.Dim("batch", min=0, max=64)},)
    inputs = (torch.randn(2, 8),)

    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(x).sum(0)

    program = lower(converted(Total(), inputs, dynamic_shapes=batch), inputs, dynamic_shapes=batch)
    with pytest.raises(ArtefactError, match=r"outputs have shapes \[\(4,\)\]"):
        program(torch.randn(0, 8))


def test_running_does_not_change_the_input_nor_later_results(network):
    _, inputs, program = network
    before = inputs[0].clone()
    first = program(*inputs).clone()
    assert torch.equal(program(*inputs), first)
    assert torch.equal(inputs[0], before)


def test_a_saved_program_loads_and_gives_the_same_numbers(network, tmp_path):
    _, inputs, program = network
    path = program.save(tmp_path / "model.pt2")
    loaded = X86Program.load(path)
    assert torch.equal(loaded(*inputs), program(*inputs))
    assert loaded.ops == program.ops
    more = torch.randn(3, 3, 32, 32)
    assert torch.equal(loaded(more), program(more))


def test_a_saved_program_keeps_integer_weights_only(tmp_path):
    inputs = (torch.randn(1, 1024),)
    program = lower(converted(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)), inputs), inputs)
    assert program.nbytes < 1.1 * 1024 * 1536


def test_lowering_leaves_the_converted_model_alone(network):
    model, inputs, _ = network
    code, numbers = model.code, model(*inputs)
    names = {name for name, _ in model.named_buffers()}
    lower(model, inputs)
    assert model.code == code
    assert {name for name, _ in model.named_buffers()} == names
    assert torch.equal(model(*inputs), numbers)


def test_our_quantizer_on_a_default_export_lowers_every_convolution_and_linear():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 32, 32),)
    exported = torch.export.export(Network().eval(), inputs)
    prepared = quantplug.prepare_pt2e(exported.module(), quantplug.get_quantizer("x86"))
    with torch.no_grad():
        prepared(*inputs)
    model = quantplug.convert_pt2e(prepared)
    program = lower(model, inputs)
    assert len(kernels(program)) == 8
    assert sqnr(model(*inputs), program(*inputs)) > 40


def test_a_module_that_is_not_exported_is_refused():
    with pytest.raises(ModelError, match="Network"):
        lower(Network(), (torch.randn(1, 3, 32, 32),))  # type: ignore[arg-type]


def test_a_model_with_observers_is_refused():
    inputs = (torch.randn(1, 3, 32, 32),)
    exported = torch.export.export(Network().eval(), inputs, strict=True)
    config = torchao_x86.get_default_x86_inductor_quantization_config()
    prepared = prepare_pt2e(exported.module(), torchao_x86.X86InductorQuantizer().set_global(config))
    with pytest.raises(LoweringError, match="convert_pt2e"):
        lower(prepared, inputs)


def test_a_float_model_lowers_and_says_that_nothing_is_integer():
    inputs = (torch.randn(1, 3, 32, 32),)
    model = torch.export.export(Network().eval(), inputs).module()
    program = lower(model, inputs)
    assert {operator.placement for operator in program.ops} == {"float"}
    torch.testing.assert_close(program(*inputs), model(*inputs))


def test_loading_what_is_no_program_names_the_file(tmp_path):
    with pytest.raises(ArtefactError, match=r"missing\.pt2"):
        X86Program.load(tmp_path / "missing.pt2")
    (tmp_path / "junk.pt2").write_bytes(b"junk")
    with pytest.raises(ArtefactError, match=r"junk\.pt2"):
        X86Program.load(tmp_path / "junk.pt2")


def test_saving_into_a_missing_folder_is_refused(network, tmp_path):
    with pytest.raises(ArtefactError, match="There is no folder"):
        network[2].save(tmp_path / "missing" / "model.pt2")


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(), nn.SiLU(), nn.GELU()])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_activations_behind_convolutions_over_any_dimensions(dims, activation):
    torch.manual_seed(0)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(convolution(3, 8, 3), activation, convolution(8, 4, 3)).eval()
    x = torch.randn(2, 3, *[9] * dims)
    artefact = quantplug.quantize(model, (x,), "x86", [x], progress=False)
    assert sqnr(artefact.reference(x), artefact(x)) > 40
    assert all(op.placement == "int8" for op in artefact.program.ops if "conv" in op.target)
