"""The flow as a user runs it: real export, real calibration, artefacts in their real runtimes."""

import copy
import errno
import os
import re
import threading
from typing import Any

import pytest
import torch
from models import Function, ResNet18, SampleModel, exported, observed, reference, settled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer

import quantplug
from quantplug import X86Quantizer, XNNPACKQuantizer, explain, get_quantizer, get_symmetric_quantization_config
from quantplug.annotators.convolution import convolution
from quantplug.annotators.elementwise import binary
from quantplug.annotators.linear import linear
from quantplug.annotators.pooling import pooling
from quantplug.annotators.shape import movement
from quantplug.core.errors import (
    ArtefactError,
    CalibrationError,
    ConfigError,
    ModelError,
    QuantplugError,
)
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program
from quantplug.plugin import annotate_with
from quantplug.quantizers.x86_config import get_x86_quantization_config

BACKENDS = ("xnnpack", "x86")
SIZE = (2, 3, 64, 64)


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return settled(ResNet18(16, 10), torch.randn(8, *SIZE[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_resnet18_through_both_backends(resnet, backend, strict):
    x = torch.randn(SIZE)
    model = exported(resnet, x, strict=strict)
    artefact = quantplug.quantize(model, (x,), backend, [(torch.randn(SIZE),), (x,)], progress=False)
    report = artefact.report
    for row in report.rows:
        if row.operator.startswith(("conv", "linear", "add", "max_pool", "adaptive_avg_pool")):
            assert row.quantized, row
    assert sum(row.quantized for row in report.rows) >= 48
    assert sqnr(artefact(x), artefact.reference(x)) > 40
    assert sqnr(artefact(x), resnet(x)) > 18


class Toy(Quantizer):
    """A toy quantizer in torchao's interface, written with our annotators."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def annotate(self, model):
        rules = (
            convolution(activations=("relu",)), linear(), binary("add"), pooling("max_pool2d"),
            pooling("adaptive_avg_pool2d"), movement(),
        )  # fmt: skip
        annotate_with(model, rules, self.config)
        return model

    def validate(self, model):
        pass


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_q13_resnet18_with_a_toy_quantizer_end_to_end(resnet, backend):
    x = torch.randn(SIZE)
    config = {"xnnpack": get_symmetric_quantization_config(True), "x86": get_x86_quantization_config()}[backend]
    converted = reference(resnet, Toy(config), x)
    lowered = get_quantizer(backend).backend.lower(converted, (x,))
    assert explain(converted).quantized == 49
    assert sqnr(lowered(x), converted(x)) > 40
    assert sum(op.placement == "int8" for op in lowered.ops) >= 20


@pytest.mark.slow
def test_e06_the_sample_model_stays_within_a_hundredth():
    torch.manual_seed(0)
    model, data = SampleModel().eval(), torch.rand(64, 3, 32, 32)
    for backend in BACKENDS:
        artefact = quantplug.quantize(model, (data[:4],), backend, data.split(4), progress=False)
        assert (artefact(data[:4]) - model(data[:4])).abs().max() < 1e-2
        assert artefact.report.quantized == len(artefact.report.rows)


def test_e07_a_float_layer_splits_the_model_into_two_islands_of_integers():
    model = Function(
        lambda m, x: m.three(torch.relu(m.two(torch.relu(m.one(x))))),
        one=nn.Conv2d(3, 4, 1), two=nn.Conv2d(4, 4, 1), three=nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    converted = reference(model, XNNPACKQuantizer().set_global("int8").set_module_name("two", None), X)
    report = explain(converted)
    rows = {row.module_path: row for row in report.rows if row.operator == "conv2d"}
    assert (rows["one"].quantized, rows["two"].quantized, rows["three"].quantized) == (True, False, True)
    assert report.islands == (("conv2d_1", "relu_1"),)
    crossings = [(b.kind, b.producer) for b in report.boundaries]
    assert [kind for kind, _ in crossings] == ["quantize", "dequantize", "quantize", "dequantize"]
    into, out = report.boundaries[1], report.boundaries[2]
    assert into.consumers == ("conv2d_1",)
    assert out.producer == "relu_1"
    assert out.elements == 4 * 64


def test_e16_calibrate_takes_a_loader_a_limit_and_a_progress_flag():
    loader = DataLoader(TensorDataset(torch.randn(12, 3, 8, 8)), batch_size=2)
    prepared = quantplug.prepare_pt2e(exported(small(), torch.randn(2, 3, 8, 8)), get_quantizer("xnnpack"))
    assert quantplug.calibrate(prepared, loader, limit=4, progress=False).batches == 4
    result = quantplug.calibrate(prepared, loader, progress=True)
    assert (result.batches, result.samples) == (6, 12)
    assert quantplug.convert_pt2e(prepared)(torch.randn(2, 3, 8, 8)).shape == (2, 5)


@pytest.mark.slow
def test_r20_lowered_to_native_kernels(tmp_path):
    programs: dict[str, Any] = {}
    for backend in BACKENDS:
        artefact = quantplug.quantize(small(), (X,), backend, [X], progress=False)
        assert {op.placement for op in artefact.program.ops} == {"int8"}
        programs[backend] = artefact.program
    kernels = [str(n.target) for n in programs["x86"].module.graph.nodes if n.op == "call_function"]
    assert any(name.startswith("onednn.qconv") for name in kernels)
    assert any(name.startswith("onednn.qlinear") for name in kernels)
    assert programs["xnnpack"].delegates == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_artefact_loads_and_gives_the_same(backend, tmp_path):
    artefact = quantplug.quantize(small(), (X,), backend, [X], progress=False)
    path = artefact.save(tmp_path / {"xnnpack": "model.pte", "x86": "model.pt2"}[backend])
    assert path.stat().st_size == artefact.nbytes or backend == "x86"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if backend == "xnnpack":
        from executorch.runtime import Runtime

        loaded = Runtime.get().load_program(str(path)).load_method("forward").execute([X])[0]
    else:
        from quantplug.lowering.x86 import X86Program

        loaded = X86Program.load(path)(X)
    assert torch.equal(loaded, artefact(X))


@pytest.mark.few(1)
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_save_leaves_no_half_written_artefact(tmp_path, monkeypatch, interruption):
    artefact = quantplug.quantize(small(), (X,), "xnnpack", [X], progress=False)
    target = tmp_path / "model.pte"
    target.write_bytes(b"the artefact of yesterday")

    def half(self, path):
        path.write_bytes(b"half of it")
        raise interruption

    monkeypatch.setattr(type(artefact.program), "save", half)
    with pytest.raises((KeyboardInterrupt, ArtefactError)) as raised:
        artefact.save(target)
    assert isinstance(interruption, type) or str(raised.value).endswith(
        "model.pte' cannot be written (disk full); free or change its place."
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model.pte"]
    assert target.read_bytes() == b"the artefact of yesterday"


def test_saving_where_there_is_no_folder_is_a_sentence(tmp_path):
    artefact = quantplug.quantize(small(), (X,), "x86", [X], progress=False)
    with pytest.raises(ArtefactError, match=r"There is no folder '.*nowhere' to write 'm.pt2' to; create it first"):
        artefact.save(tmp_path / "nowhere" / "m.pt2")
    with pytest.raises(ArtefactError, match="is a folder; give the path of a file"):
        artefact.save(tmp_path)


def test_saving_replaces_neither_a_pipe_nor_a_link(tmp_path):
    """Under root '/dev/null' itself would become a file."""
    artefact = quantplug.quantize(small(), (X,), "x86", [X], progress=False)
    pipe, there, link = tmp_path / "pipe", tmp_path / "there" / "m.pt2", tmp_path / "link.pt2"
    os.mkfifo(pipe)
    with pytest.raises(ArtefactError, match="is a device or a pipe, which a file would replace"):
        artefact.save(pipe)
    assert pipe.is_fifo()
    there.parent.mkdir()
    link.symlink_to(there)
    assert artefact.save(link) == link
    assert link.is_symlink()
    assert torch.equal(X86Program.load(there)(X), artefact(X))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_forms_of_model_and_inputs(backend):
    model = small()
    program = torch.export.export(model, (X,))
    forms: list[Any] = [(model, (X,)), (program, [X]), (program.module(), X)]
    outputs = [quantplug.quantize(form, inputs, backend, [X], progress=False)(X) for form, inputs in forms]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_dynamic_and_weight_only_configs_need_no_data():
    artefact = quantplug.quantize(small(), (X,), "x86", config="int8_dynamic")
    assert sqnr(artefact(X), artefact.reference(X)) > 25
    assert not XNNPACKQuantizer().set_global("int8_dynamic").needs_calibration
    assert XNNPACKQuantizer().needs_calibration
    assert not X86Quantizer().set_global("int8_weight_only").needs_calibration


def state(model):
    return (
        {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()},
        {name: module.training for name, module in model.named_modules()},
        {name: id(module) for name, module in model.named_modules()},
        str(model.graph) if isinstance(model, torch.fx.GraphModule) else "",
        {n.name: dict(n.meta) for n in model.graph.nodes} if isinstance(model, torch.fx.GraphModule) else {},
    )


def assert_unchanged(model, before):
    tensors, *rest = before
    found, *others = state(model)
    assert others == rest
    assert found.keys() == tensors.keys()
    for name, (identity, value) in tensors.items():
        assert found[name][0] == identity
        assert torch.equal(found[name][1], value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_users_model_is_not_changed(backend):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
    model[1].eval()  # mixed flags, as a partly frozen model has them
    before = state(model)
    quantplug.quantize(model, (X,), backend, [X], progress=False)
    assert_unchanged(model, before)


def test_a_submodule_left_in_training_mode_is_quantized_in_eval_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5)).eval()
    model[1].train()
    artefact = quantplug.quantize(model, (X,), "x86", [X], progress=False)
    assert sqnr(artefact(X), model[0](X)) > 30
    assert model[1].training


BAD = [
    (
        {"backend": "x86", "autotuned": True, "calibration": []},  # before it calibrates
        ConfigError,
        "lowering of backend 'x86' has no option 'autotuned' .did you mean 'autotune'.*; choose from",
    ),
    ({"model": 3}, ModelError, "takes an nn.Module or an exported program, found int"),
    ({"model": torch.fx.symbolic_trace(small())}, ModelError, "found one from torch.fx.symbolic_trace"),
    ({"backend": "xnpack"}, ConfigError, "no backend 'xnpack' .did you mean 'xnnpack'"),
    ({"backend": 5}, ConfigError, "backend takes a name or a quantizer of a backend, found int"),
    ({"config": "int9"}, ConfigError, "no config 'int9'; choose one of"),
    ({"config": 8}, ConfigError, "takes a QuantizationConfig, one of the names"),
    ({"backend": XNNPACKQuantizer(), "config": "int8"}, ConfigError, "backend is a quantizer and config was given too"),
    ({"backend": XNNPACKQuantizer().set_module_name("cnv", None)}, ConfigError, "'cnv' matches nothing"),
    ({"calibration": None}, ConfigError, "needs data; pass calibration=loader"),
    ({"calibration": []}, CalibrationError, "yielded no batch"),
    ({"calibration": X}, CalibrationError, "not an iterable of batches"),
    (
        {"calibration": [torch.randn(1, 3, 9, 9)]},
        CalibrationError,
        r"has shape \[1, 3, 9, 9\], expected \[1, 3, 8, 8\]",
    ),
    ({"calibration": [X.double()]}, CalibrationError, "dtype torch.float64, expected torch.float32"),
    ({"calibration": [(X, X)]}, CalibrationError, "has 2 inputs but the model takes 1"),
    ({"calibration": [X * float("nan")]}, CalibrationError, "holds NaN or infinity"),
    ({"calibration": [X], "limit": 0}, CalibrationError, "limit is 0"),
    ({"example_inputs": "x"}, ConfigError, "example_inputs takes a tuple of inputs, found str"),
    ({"example_inputs": (torch.randn(1, 4, 8, 8),)}, ModelError, "torch.export fails on Sequential"),
]


@pytest.mark.parametrize(("arguments", "kind", "sentence"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_one_sentence_and_changes_nothing(arguments, kind, sentence):
    given = {
        "model": small(),
        "example_inputs": (X,),
        "backend": "xnnpack",
        "calibration": [X],
        "progress": False,
    } | arguments
    before = state(given["model"]) if isinstance(given["model"], nn.Module) else None
    with pytest.raises(kind, match=sentence) as raised:
        quantplug.quantize(**given)
    assert isinstance(raised.value, QuantplugError)
    assert str(raised.value).count("\n") == 0
    assert str(raised.value).endswith(".")
    if before:
        assert_unchanged(given["model"], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_model_of_another_type_is_one_sentence(dtype):
    model, x = small().to(dtype), X.to(dtype)
    before = state(model)
    with pytest.raises(ModelError, match=rf"'conv2d' .*is {dtype}, not .*call model.float\(\)"):
        quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    assert_unchanged(model, before)


def test_a_graph_that_is_annotated_prepared_or_converted_already():
    prepared = observed(small(), get_quantizer("xnnpack"), X)
    for again in (prepared, quantplug.convert_pt2e(prepared)):
        with pytest.raises(ModelError, match="export it again"):
            quantplug.quantize(again, (X,), "xnnpack", [X], progress=False)


def test_a_quantizer_with_scopes_of_its_own():
    quantizer = X86Quantizer().set_global("int8").set_module_type(nn.Linear, None)
    artefact = quantplug.quantize(small(), (X,), quantizer, [X], progress=False)
    assert not artefact.report.row("linear").quantized
    assert {op.placement for op in artefact.program.ops if "linear" in op.target} == {"float"}


def test_what_a_lowering_returns_may_be_any_callable():
    """A backend whose lowering is not written yet returns the graph; `quantize` asked it for a program's attributes."""
    backend = quantplug.derive(X86Quantizer.backend, "mine", lowering=lambda model, inputs, dynamic_shapes=None: model)

    class Mine(quantplug.BackendQuantizer):
        pass

    Mine.backend = backend
    artefact = quantplug.quantize(small(), (X,), Mine(), [X], progress=False)
    assert artefact.report.row("linear").quantized
    assert torch.equal(artefact(X), artefact.reference(X))


def test_calling_from_threads_gives_the_same():
    artefact = quantplug.quantize(small(), (X,), "x86", [X], progress=False)
    expected, found = artefact(X), []
    threads = [threading.Thread(target=lambda: found.append(artefact(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(f, expected) for f in found)


def test_copies_of_annotations_are_not_shared_between_runs():
    """The same exported graph through two backends, one after the other."""
    model = exported(small(), X)
    before = copy.deepcopy(str(model.graph))
    for backend in BACKENDS:
        artefact = quantplug.quantize(model, (X,), backend, [X], progress=False)
        assert {row.owner for row in artefact.report.rows} == {backend}
    assert str(model.graph) == before
    assert not any(isinstance(v, QuantizationAnnotation) for n in model.graph.nodes for v in n.meta.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_a_model_of_one_sample_without_a_batch(backend, dims):
    torch.manual_seed(0)
    convolution, pool, average = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "MaxPool", "AdaptiveAvgPool"))
    layers = convolution(3, 8, 3, padding=1), nn.ReLU(), pool(2), convolution(8, 8, 3), nn.ReLU(), average(1)
    model = nn.Sequential(*layers, nn.Flatten(0), nn.Linear(8, 4)).eval()
    x = torch.randn(3, *[8] * dims)
    artefact = quantplug.quantize(model, (x,), backend, [(x,)], progress=False)
    assert sqnr(artefact(x), model(x)) > 30
    assert sqnr(artefact(x), artefact.reference(x)) > 60


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_a_recurrent_layer_over_sequences_of_open_length_is_refused_with_its_name(backend):
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    x, length = torch.randn(2, 5, 4), torch.export.Dim("length", min=2, max=20)
    with pytest.raises(ModelError, match="sequences of GRU 'layer' must have a static length"):
        quantplug.quantize(Tagger().eval(), (x,), backend, [x], dynamic_shapes=({1: length},), progress=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
def test_quantizing_in_inference_mode_gives_what_it_gives_outside(backend):
    model = small()
    expected = quantplug.quantize(model, (X,), backend, [X], progress=False)
    with torch.inference_mode():
        made = X * 1.0  # an inference tensor
        artefact = quantplug.quantize(model, (made,), backend, [made], progress=False)
        inside = artefact(made)
    assert torch.equal(inside, expected(X))
    assert torch.equal(artefact(X), expected(X))
    assert torch.equal(artefact.reference(X), expected.reference(X))


def inference_model():
    with torch.inference_mode():
        return small()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda: {"model": small().to("meta")}, "of the model is on the device 'meta'"),
        (lambda: {"model": inference_model()}, r"was made in torch.inference_mode\(\)"),
        (lambda: {"example_inputs": (X.to("meta"),)}, "An example input is on the device 'meta'"),
        (lambda: {"calibration": [X.to("meta")]}, "is on the device 'meta', which holds no numbers"),
        (lambda: {"config": "c" * 300}, "c{60}...c{60}'"),
        (lambda: {"backend": quantplug.get_quantizer("x86").set_module_name("m" * 300, None)}, "m{60}...m{60}'"),
    ],
    ids=["meta model", "inference model", "meta example", "meta batch", "long config", "long scope"],
)
def test_what_holds_no_numbers_and_names_without_end_are_one_short_sentence(arguments, said):
    given = {"model": small(), "example_inputs": (X,), "backend": "x86", "calibration": [X], "progress": False}
    with pytest.raises(quantplug.QuantplugError, match=said) as error:
        quantplug.quantize(**given | arguments())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino"])
def test_a_program_says_what_is_wrong_with_an_input_in_a_short_sentence(backend):
    artefact = quantplug.quantize(small(), (X,), backend, [X], progress=False)
    for wrong, said in ((X.to("meta"), "on the device 'meta'"), (X.numpy().repeat(30, 3), "ndarray")):
        with pytest.raises(quantplug.QuantplugError, match=said) as error:
            artefact(wrong)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500
    assert artefact(X).shape == artefact.reference(X).shape


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "xnnpack", "openvino", "native"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC], ids=["denied", "read-only", "full"])
def test_a_file_that_the_system_refuses_is_one_sentence_and_leaves_nothing(backend, code, tmp_path, monkeypatch):
    artefact = quantplug.quantize(small(), (X,), backend, [X], progress=False)
    (tmp_path / "model.bin").write_text("an earlier file")

    def refuse(*arguments, **named):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", refuse)
        with pytest.raises(
            quantplug.QuantplugError,
            match=re.escape(f"{tmp_path / 'model.bin'}' cannot be written ({os.strerror(code)})"),
        ) as error:
            artefact.save(tmp_path / "model.bin")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]
    assert (tmp_path / "model.bin").read_text() == "an earlier file"
