"""Weights in float16, in the files that users get: their size, their numbers, and what the report says of them."""

import pytest
import torch
from models import Function, exported
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.errors import ConvertError, LoweringError, ModelError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program


class Texts(nn.Module):
    """Embeddings, an attention layer, and a head over the words; a million weights."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(2000, 192)
        self.layer = nn.TransformerEncoderLayer(192, 4, 512, batch_first=True)
        self.head = nn.Linear(192, 1000)

    def forward(self, ids):
        return self.head(self.layer(self.words(ids)).mean(1))


class Images(nn.Module):
    """Every kind of convolution; a million weights."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, stride=2, bias=False), nn.BatchNorm2d(64)
        self.depthwise, self.point = nn.Conv2d(64, 128, 3, groups=64), nn.Conv2d(128, 256, 1)
        self.grouped, self.wide = nn.Conv2d(256, 256, 3, groups=4), nn.Conv2d(256, 256, (1, 3), dilation=(1, 2))
        self.up, self.line = nn.ConvTranspose2d(256, 128, 2, 2), nn.Conv1d(128, 256, 5)
        self.cube = nn.Conv3d(1, 4, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = self.wide(F.relu(self.grouped(F.silu(self.point(self.depthwise(x))))))
        x = self.line(F.relu(self.up(x)).flatten(2))
        return self.cube(x[:, None, :64, :64, None].expand(-1, -1, -1, -1, 4))


def ids():
    return torch.randint(0, 2000, (2, 12))


def images():
    return torch.randn(2, 3, 32, 32)


CASES = {"texts": (Texts, ids), "images": (Images, images)}
LOADED = {"x86": X86Program.load, "openvino": OpenVINOProgram.load}


def made(case, backend):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    build, inputs = CASES[case]
    model = build().eval()
    return model, inputs, quantplug.quantize(model, (inputs(),), backend, config="float16", progress=False)


def runs(backend, path):
    if backend in LOADED:
        return LOADED[backend](path)
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    return lambda x: method.execute([x])[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("case", "backend"),
    [("texts", "xnnpack"), ("texts", "x86"), ("texts", "openvino"), ("images", "x86"), ("images", "openvino")],
)
def test_e13_e14_a_file_of_half_the_size_gives_the_models_numbers(case, backend, tmp_path):
    model, inputs, artefact = made(case, backend)
    path = artefact.save(tmp_path / "model.bin")
    assert path.stat().st_size <= 0.55 * 4 * sum(value.numel() for value in model.state_dict().values())
    program = runs(backend, path)
    for _ in range(2):
        x = inputs()
        found, expected = program(x), model(x)
        assert found.dtype == torch.float32
        assert sqnr(found, expected) > 55
        assert not torch.equal(found, expected)
        if backend != "xnnpack":  # which computes in float16 too
            assert sqnr(found, artefact.reference(x)) > 100
    weighted = [row for row in artefact.report.rows if row.operator.startswith(("conv", "linear", "embedding"))]
    assert len(weighted) >= 6
    assert all(row.quantized and "float16" in row.how for row in weighted)
    placed = {op.node: op for op in artefact.program.ops}
    told = [placed[row.node].reason for row in weighted if "embedding" not in row.operator or backend != "xnnpack"]
    assert set(told) == {
        "it computes in float16" if backend == "xnnpack" else "it computes in float32, from a weight in float16"
    }


def test_e13_grouped_convolutions_of_xnnpack_stay_float_and_say_why():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.ReLU()).eval()
    with pytest.raises(ModelError, match="which only linear layers read, and it has 2 groups"):
        quantplug.quantize(model, (torch.randn(1, 4, 8, 8),), "xnnpack", config="float16", progress=False)


@pytest.mark.parametrize("backend", ["x86", "openvino"])
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("config", ["float16", "int8_weight_only"])
def test_e13_recurrent_layers_say_what_their_weights_are_stored_in(layer, config, backend):
    """The report said "no rule ends in aten.gru.input" beside a file as large as float's."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.turns, self.head = layer(16, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.turns(x)[0])

    exported = torch.export.export(Net().eval(), (torch.randn(2, 5, 16),)).module()
    report = quantplug.explain(quantplug.prepare_pt2e(exported, quantplug.get_quantizer(backend).set_global(config)))
    (row,) = [row for row in report.rows if row.module_path == "turns" and "zeros" not in row.operator]
    if config == "float16":
        assert row.how == "float16, float16 -> float"
    else:
        assert "it has no kernel of integers; backend 'xnnpack' takes recurrent layers as linear ones" in row.reason
        assert "its weight can be stored in torch.float16 alone, not in torch.int8" in row.reason


@pytest.mark.slow
def test_e13_numbers_that_float16_does_not_hold_are_told():
    """A program of zeros passed: its graph, computed in float16 as well, kept as little."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval()
    for layer in model:
        nn.init.normal_(layer.get_parameter("weight"), std=1e-5)
        nn.init.zeros_(layer.get_parameter("bias"))
    with pytest.raises(LoweringError, match=r"keeps .* dB .* float16 holds numbers from 6e-8 to 65504 only"):
        quantplug.quantize(model, (torch.randn(4, 64),), "xnnpack", config="float16", progress=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
def test_e13_tied_weights_are_stored_once(backend, tmp_path):
    pytest.importorskip("openvino")

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(4000, 256), nn.Linear(256, 4000, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    torch.manual_seed(0)
    model, x = Tied().eval(), ids()
    artefact = quantplug.quantize(model, (x,), backend, config="float16", progress=False)
    once = 2 * model.words.weight.numel()
    # A `.pte` keeps what XNNPACK reads in a packed segment of its own, so that a table there is stored again.
    limit = 2.05 if backend == "xnnpack" else 1.05
    assert artefact.save(tmp_path / "tied.bin").stat().st_size < limit * once
    for given in (x, ids()):
        assert sqnr(artefact(given), model(given)) > 55


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
def test_e13_scopes_of_float16_stand_beside_integers(backend):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16)).eval()
    batches = [torch.randn(8, 64) for _ in range(4)]
    quantizer = quantplug.get_quantizer(backend).set_global("int8").set_module_name("2", "float16")
    artefact = quantplug.quantize(model, (batches[0],), quantizer, batches, progress=False)
    how = {row.node: row.how for row in artefact.report.rows if row.operator == "linear"}
    assert [("float16" in text, ", int8" in text) for text in how.values()] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    for x in (batches[0], torch.randn(8, 64)):
        assert sqnr(artefact(x), artefact.reference(x)) > 40
        assert sqnr(artefact(x), model(x)) > 28
    if backend == "xnnpack":
        placed = {op.node: op.reason for op in artefact.program.ops}
        assert "beside integers" in placed["linear_1"]


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_e13_a_weight_beyond_float16_stays_float_and_says_its_number(backend):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[0].weight.data[0, 0] = 1e5
    prepared = quantplug.prepare_pt2e(
        exported(model, torch.randn(2, 8)), quantplug.get_quantizer(backend).set_global("float16")
    )
    report = quantplug.explain(prepared)
    assert "its weight has 100000, the limit of torch.float16 is 65504" in report.row("linear").reason
    assert report.row("linear_1").quantized
    assert quantplug.convert_pt2e(prepared)(torch.ones(2, 8)).isfinite().all()


def test_e13_a_constant_beyond_float16_that_a_foreign_quantizer_asks_for_is_one_sentence():
    from torchao.quantization.pt2e import PlaceholderObserver
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

    class Halves(Quantizer):
        def annotate(self, model):
            linear = next(node for node in model.graph.nodes if "linear" in str(node.target))
            spec = QuantizationSpec(torch.float16, PlaceholderObserver)
            linear.meta["quantization_annotation"] = QuantizationAnnotation({linear.args[1]: spec}, _annotated=True)
            return model

        def validate(self, model):
            pass

    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0].weight.data[0, 0] = -1e6
    prepared = quantplug.prepare_pt2e(exported(model, torch.randn(2, 4)), Halves())
    with pytest.raises(ConvertError, match=r"has 1e\+06, beyond what torch.float16 holds \(65504\)") as error:
        quantplug.convert_pt2e(prepared)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_e13_masks_of_the_least_float32_do_not_become_nan_on_xnnpack():
    def attend(m, x):
        scores = m.key(x) @ x.transpose(1, 2)
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return m.out(torch.softmax(scores.masked_fill(later, torch.finfo(torch.float32).min), -1) @ x)

    torch.manual_seed(0)
    model = Function(attend, key=nn.Linear(32, 32), out=nn.Linear(32, 32)).eval()
    artefact = quantplug.quantize(model, (torch.randn(2, 6, 32),), "xnnpack", config="float16", progress=False)
    for x in (torch.randn(2, 6, 32), torch.randn(2, 6, 32)):
        assert sqnr(artefact(x), model(x)) > 50


@pytest.mark.slow
def test_e13_a_state_keeps_its_type_on_xnnpack():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x):
            self.total.add_(self.linear(x).sum(0))
            return self.total * 1.0

    model = Running().eval()
    x = torch.randn(3, 8)
    artefact = quantplug.quantize(model, (x,), "xnnpack", config="float16", progress=False)
    assert "beside a state in float32" in next(op.reason for op in artefact.program.ops if op.node == "linear")
    for _ in range(3):
        assert sqnr(artefact(x), model(x)) > 55


def test_e13_training_with_float16_is_the_cast_and_nothing_else():
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    quantizer = quantplug.get_quantizer("x86").set_global("float16")
    prepared = quantplug.prepare_qat_pt2e(exported(nn.Sequential(layer, nn.ReLU()), x), quantizer)
    converted = quantplug.convert_pt2e(prepared)
    expected = F.relu(F.linear(x, layer.weight.half().float(), layer.bias))
    torch.testing.assert_close(converted(x), expected)
