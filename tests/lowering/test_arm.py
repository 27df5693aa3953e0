"""Models on TOSA's reference model, held against our emulation of TOSA, and compiled by Vela for Ethos-U."""

import builtins
import inspect

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import Function, MobileNet, ResNet18, Transformer
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as torchao_convert
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare

import quantplug
from quantplug import convert_pt2e, get_quantizer, prepare_pt2e, quantize
from quantplug.core.errors import ArtefactError, ConfigError, LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.arm import lower
from quantplug.quantizers import arm

reference_model = pytest.importorskip("tosa_reference_model")
pytest.importorskip("ethosu.vela")
NPUS = ("ethos-u55-128", "ethos-u65-256", "ethos-u85-256")


def drawn(seed, *sizes):
    return torch.randn(*sizes, generator=torch.manual_seed(seed))


MAP, ROWS = drawn(1, 2, 8, 12, 12), drawn(2, 3, 10)
PAIR = (MAP, 3 * MAP.flip(2))
BATCHES = drawn(3, 2, 3, 5), drawn(4, 2, 5, 4)


def on_map(layer, after):
    """Returns a model that does something to what a layer yields, as moves and clamps follow what is quantized."""
    return Function(lambda m, a: after(m.layer(a)), layer=layer)


def with_large_biases():
    """Returns a layer whose biases are sums of more than the 24 bits that floats hold."""
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 32, 1)
    layer.bias.data *= 40
    return layer


CASES = {
    "conv_large_biases": (with_large_biases(), (MAP,)),
    "conv": (nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU()), (MAP,)),
    "conv_clamped": (nn.Sequential(nn.Conv2d(8, 6, 3, 2), nn.Hardtanh(-0.3, 0.4)), (MAP,)),
    "conv_groups": (nn.Sequential(nn.Conv2d(8, 6, 3, groups=2, bias=False), nn.ReLU6()), (MAP,)),
    "conv_depthwise": (nn.Conv2d(8, 16, 3, groups=8, dilation=2), (MAP,)),
    "conv_1d": (nn.Conv1d(8, 6, 3), (MAP[:, :, 0],)),
    "conv_transposed": (nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), (MAP,)),
    "products_then_sum": (
        *(Function(lambda m, a: m.c(a) + m.d(m.c(a)) * m.c(a), c=nn.Conv2d(8, 8, 1), d=nn.Conv2d(8, 8, 1)), (MAP,)),
    ),
    "linear": (nn.Sequential(nn.Linear(10, 6), nn.ReLU()), (ROWS,)),
    "matmul": (Function(lambda m, a, b: a @ b), (drawn(3, 3, 5), drawn(4, 5, 4))),
    "bmm": (Function(lambda m, a, b: torch.bmm(a, b)), BATCHES),
    "add": (Function(lambda m, a, b: torch.relu(a + b)), PAIR),
    "add_itself": (Function(lambda m, a: a + a), (MAP,)),
    "add_number": (Function(lambda m, a: a + 2.5), (MAP,)),
    "add_broadcast": (Function(lambda m, a, b: a + b[:, :, :1, :1]), PAIR),
    "sub": (Function(lambda m, a, b: a - b), PAIR),
    "mul": (Function(lambda m, a, b: a * b), PAIR),
    "maximum": (Function(lambda m, a, b: torch.maximum(a, b)), PAIR),
    "minimum": (Function(lambda m, a, b: torch.minimum(a, b)), PAIR),
    "cat": (Function(lambda m, a, b: torch.cat([a, b], 1)), PAIR),
    "max_pool": (nn.MaxPool2d(3, 2, 1), (MAP,)),
    "avg_pool": (nn.AvgPool2d(2), (MAP,)),
    "avg_pool_padded": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (MAP,)),
    "avg_pool_of_zeros_too": (nn.AvgPool2d((4, 3), 2, 1), (MAP,)),
    "mean": (Function(lambda m, a: a.mean((2, 3))), (MAP,)),
    "sum": (Function(lambda m, a: a.sum((1, 3))), (MAP,)),
    "softmax": (nn.Softmax(-1), (3 * ROWS,)),
    "layer_norm": (nn.LayerNorm(10), (ROWS,)),
    "clamp": (on_map(nn.Conv2d(8, 6, 1), lambda y: torch.cat([y.relu(), y], 1)), (MAP,)),
    "amax": (on_map(nn.Conv2d(8, 6, 1), lambda y: y.amax((1,), True)), (MAP,)),
    "pad": (on_map(nn.Conv2d(8, 6, 1), lambda y: F.pad(y, (1, 2, 0, 1))), (MAP,)),
    "permute": (on_map(nn.Conv2d(8, 6, 1), lambda y: y.permute(0, 2, 3, 1)), (MAP,)),
    "slice": (on_map(nn.Conv2d(8, 6, 1), lambda y: y[:, 1:4]), (MAP,)),
    "gelu_tanh": (nn.GELU("tanh"), (3 * MAP,)),
}
for _name in ("sigmoid", "tanh", "silu", "gelu", "hardswish", "hardsigmoid", "leaky_relu", "elu"):
    CASES[_name] = (Function(lambda m, a, name=_name: getattr(F, name)(a)), (3 * MAP,))
for _name in ("exp", "log", "rsqrt", "reciprocal"):
    CASES[_name] = (Function(lambda m, a, name=_name: getattr(torch, name)(a)), (MAP.abs() + 0.1,))


class SideBySide(nn.Module):
    """Several cases in one model, each with inputs of its own."""

    def __init__(self, names):
        super().__init__()
        self.cases = nn.ModuleList(CASES[name][0] for name in names)
        self.inputs = tuple(CASES[name][1] for name in names)

    def forward(self, inputs):
        return [case(*given) for case, given in zip(self.cases, inputs, strict=True)]


def _arms_own():
    from executorch.backends.arm.ethosu import EthosUCompileSpec
    from executorch.backends.arm.quantizer import EthosUQuantizer, get_symmetric_quantization_config

    quantizer = EthosUQuantizer(EthosUCompileSpec("ethos-u85-256"))
    return quantizer.set_global(get_symmetric_quantization_config())


def _xnnpacks():
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer

    quantizer = xnnpack_quantizer.XNNPACKQuantizer()
    return quantizer.set_global(xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=True))


QUANTIZERS = {
    "ours for another target": lambda: get_quantizer("xnnpack"),
    "Arm's": _arms_own,
    "XNNPACK's of ExecuTorch": _xnnpacks,
}


def lowered(model, *inputs, **options):
    torch.manual_seed(0)
    return quantize(model.eval(), inputs, "arm", [inputs], progress=False, **options)


def differing(artefact, *inputs, **scales):
    """Returns how many elements differ between the reference model and our emulation, in calls beside each other."""
    emulated = quantplug.emulate(artefact.reference, inputs, "tosa")
    assert {op.placement for op in emulated.ops if op.node not in portable(artefact)} == {"int8"}
    found = 0
    for factor in (1.0, 0.3, 2.5):  # the last leaves the calibrated range
        given = torch.utils._pytree.tree_map(lambda x, factor=factor: factor * x, inputs)
        pairs = zip(*(torch.utils._pytree.tree_leaves(each(*given)) for each in (artefact, emulated)), strict=True)
        found += sum(int((one != other).sum()) for one, other in pairs)
    return found


def portable(artefact):
    return {op.node: op.reason for op in artefact.program.ops if op.placement == "portable"}


QUICK = ("conv", "products_then_sum", "avg_pool", "sigmoid")


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["16a8w", "int8"])
def test_no_element_differs_from_the_emulation(config):
    model = SideBySide(QUICK)
    artefact = lowered(model, model.inputs, config=config, target="tosa")
    assert portable(artefact) == {}
    assert differing(artefact, model.inputs) == 0


def steps_apart(found, expected):
    """The largest difference, in the least difference of two values that there are."""
    return float((found - expected).abs().max() / expected.unique().diff().min())


@pytest.mark.slow
@pytest.mark.parametrize("config", ["int8", "16a8w"])
def test_no_element_of_any_declared_operator_differs_from_the_emulation(config):
    model = SideBySide(CASES)
    artefact = lowered(model, model.inputs, config=config)
    assert all("comes from" in reason for reason in portable(artefact).values())  # moves of what is float yet
    assert differing(artefact, model.inputs) == 0
    for one, expected in zip(artefact(model.inputs), artefact.reference(model.inputs), strict=True):
        # Averages of a few integers are ties, which go one step elsewhere.
        assert sqnr(one, expected) > 28 or steps_apart(one, expected) < 1.01


class KeywordNet(nn.Module):
    """The depthwise-separable net of MLPerf Tiny for keywords: 49 steps of 10 MFCC, 12 classes."""

    def __init__(self):
        super().__init__()

        def block(*layers, channels=64):
            return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())

        self.stem = block(nn.Conv2d(1, 64, (10, 4), 2, (5, 1)))
        pairs = [(nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 64, 1)) for _ in range(4)]
        self.blocks = nn.Sequential(*(block(layer) for pair in pairs for layer in pair))
        self.head = nn.Linear(64, 12)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.head(F.avg_pool2d(x, x.shape[2:]).flatten(1))


NETWORKS = {
    "resnet18": (lambda: ResNet18(8, 10), (1, 3, 32, 32)),
    "mobilenet": (MobileNet, (1, 3, 32, 32)),
    "keywords": (KeywordNet, (1, 1, 49, 10)),
    "transformer": (Transformer, (1, 9, 16)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("resnet18", "int8"),
        ("resnet18", "16a8w"),
        ("mobilenet", "16a8w"),
        ("keywords", "int8"),
        ("transformer", "int8"),
    ],
)
def test_whole_networks_are_one_graph_that_vela_compiles(name, config, tmp_path):
    torch.manual_seed(0)
    build, sizes = NETWORKS[name]
    model, x = build().eval(), drawn(5, *sizes)
    artefact = lowered(model, x, config=config)
    assert portable(artefact) == {}
    assert len(artefact.program.tosa) == 1
    assert differing(artefact, x) == 0
    assert sqnr(artefact(x), model(x)) > (24 if config == "int8" else 35)
    assert artefact.program.estimate.cycles > 0
    saved = artefact.save(tmp_path / "model.pte")
    assert saved.read_bytes()[4:8] == b"ET12", "an ExecuTorch program by its magic"
    assert saved.stat().st_size == artefact.nbytes
    assert b"EthosUBackend" in saved.read_bytes()


@pytest.mark.slow
def test_every_npu_has_a_program_and_larger_ones_take_fewer_cycles():
    x = drawn(5, 1, 1, 49, 10)
    torch.manual_seed(0)
    model = KeywordNet().eval()
    artefact = lowered(model, x, target=NPUS[0])
    programs = [artefact.program, *(lower(artefact.reference, (x,), target=target) for target in NPUS[1:])]
    assert [program.target for program in programs] == list(NPUS)
    assert all(op.placement == "int8" for program in programs for op in program.ops)
    first, second, third = (program.estimate for program in programs)
    assert first.cycles > second.cycles > third.cycles > 0
    assert first.macs >= 2_000_000
    assert torch.equal(programs[0](x), programs[2](x))


def test_a_tosa_file_is_what_the_program_runs(tmp_path):
    artefact = lowered(*LINEAR, target="tosa")
    path = artefact.save(tmp_path / "model.tosa")
    quantized = next(n for n in artefact.reference.graph.nodes if "quantize_per_tensor" in n.name)
    integers = torch.ops.quantized_decomposed.quantize_per_tensor(ROWS, *quantized.args[1:])
    outputs, status = reference_model.run(path.read_bytes(), [integers.numpy()])
    assert status == reference_model.GraphStatus.TOSA_VALID
    scale, zero_point = next(
        n for n in reversed(artefact.reference.graph.nodes) if "dequantize_per_tensor" in n.name
    ).args[1:3]
    expected = (outputs[0].astype(numpy.int32) - zero_point) * scale
    assert torch.allclose(artefact(ROWS), torch.from_numpy(expected).float())
    with pytest.raises(ArtefactError, match=r"TOSA alone has no '.pte' file, .*target='ethos-u55-128'"):
        artefact.save(tmp_path / "model.pte")
    with pytest.raises(LoweringError, match=r"Input 0 of the program is torch.float32 \(3, 10\), found"):
        artefact(ROWS[:2])


LINEAR = CASES["linear"][0], ROWS


@pytest.mark.slow
def test_a_program_of_several_graphs_is_no_tosa_file(tmp_path):
    model = nn.Sequential(nn.Linear(10, 10), nn.Softplus(), nn.Linear(10, 10))
    artefact = lowered(model, ROWS)
    assert portable(artefact) == {"softplus": "no rule ends in aten.softplus.default"}
    with pytest.raises(ArtefactError, match=r"has 2 TOSA graphs, .* portable: \['softplus'\]"):
        artefact.save(tmp_path / "model.tosa")
    assert artefact.save(tmp_path / "model.pte").exists()


@pytest.mark.slow
def test_what_a_smaller_npu_lacks_has_the_partitioners_reason():
    model = nn.Sequential(nn.Conv2d(8, 4, 1), nn.AvgPool2d(5, 5), nn.Conv2d(4, 4, 1))
    reasons = portable(lowered(model, MAP, target="ethos-u55-128"))
    assert list(reasons) == ["avg_pool2d"]
    assert reasons["avg_pool2d"].endswith("Avgpool2d needs stride <= 3, got [5, 5]")
    assert portable(lowered(model, MAP)) == {}


@pytest.mark.slow
def test_a_window_over_the_whole_map_runs_on_every_npu():
    """ExecuTorch refused it: the stride of a window without one is its size, of which Ethos-U55 has up to 3."""
    model = nn.Sequential(nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    assert portable(lowered(model, MAP[:1], target="ethos-u55-128")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_both_ways_to_export_give_one_program(strict):
    exported = torch.export.export(CASES["conv"][0].eval(), (MAP,), strict=strict).module()
    prepared = prepare_pt2e(exported, get_quantizer("arm"))
    prepared(MAP)
    converted = convert_pt2e(prepared)
    program = lower(converted, (MAP,), target="tosa")
    assert {op.placement for op in program.ops} == {"int8"}
    assert sqnr(program(MAP), converted(MAP)) > 60
    assert torch.equal(program(MAP), program(MAP))


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["ours for another target", "Arm's", "XNNPACK's of ExecuTorch"])
def test_graphs_that_others_quantized_run_in_integers(quantizer):
    """What leaves no decision of ours was marked as nothing: all of it was portable."""
    model, x = nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(600, 3)).eval(), MAP
    exported = torch.export.export(model, (x,)).module()
    prepared = torchao_prepare(exported, QUANTIZERS[quantizer]())
    prepared(x)
    converted = torchao_convert(prepared)
    program = lower(converted, (x,), target="tosa")
    assert [op.placement for op in program.ops] == ["int8"] * 4
    assert sqnr(program(x), converted(x)) > 40


@pytest.mark.slow
def test_images_whose_channels_lie_last_give_the_same():
    artefact = lowered(*CASES["conv"][0:1], MAP.to(memory_format=torch.channels_last), target="tosa")
    assert torch.equal(artefact(MAP), artefact(MAP.to(memory_format=torch.channels_last)))


def test_other_targets_and_open_sizes_are_one_sentence():
    with pytest.raises(ConfigError, match=r"There is no target 'ethos-u55-127' .did you mean 'ethos-u55-128'"):
        lowered(*LINEAR, target="ethos-u55-127")
    with pytest.raises(ConfigError, match="have one shape, found dynamic_shapes"):
        lowered(*LINEAR, dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.mark.parametrize("missing", ["tosa_reference_model", "ethosu.vela.architecture_features"])
def test_a_missing_package_is_one_sentence(missing, monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name == missing:
            raise ModuleNotFoundError(f"No module named '{missing}'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LoweringError, match=r"missing \(No module named '.*'\); pip install 'quantplug\[arm\]'"):
        lowered(*LINEAR)


def test_the_declaration_is_a_page():
    assert len(inspect.getsource(arm).splitlines()) <= 80
    assert get_quantizer("arm").backend is arm.ARM
