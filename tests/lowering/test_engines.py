"""The fastest of several engines: every one that is chosen computes what the q/dq graph computes, and is timed once."""

import json
import os
import sys
import threading
import time
import warnings
from typing import Any

import planted_engines
import pytest
import stateful_models
import torch
from models import Function, reference
from torch import nn

import quantplug
from quantplug import ONNXProgram, OpenVINOProgram, X86Program
from quantplug.core.errors import ConfigError, LoweringError, QuantplugWarning
from quantplug.core.specs.levels import sqnr
from quantplug.lowering import processor
from quantplug.lowering.starting import starting
from quantplug.lowering.turns import Timed, best, in_turns
from quantplug.quantizers.framework.engines import Engine
from quantplug.quantizers.x86 import X86

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ENGINES = {"X86Program": "onednn", "OpenVINOProgram": "openvino", "ONNXProgram": "onnxruntime"}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache of the test's own, and no compiler: packages, which take long, are a row with its sentence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    planted_engines.ASKED.clear()
    return tmp_path / "quantplug" / "engines"


def net(channels=4):
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, channels, 3), nn.ReLU(), nn.Flatten(), nn.Linear(channels * 36, 5))
    return nn.Sequential(*parts).eval()


@pytest.fixture(scope="module")
def graph():
    return reference(net(), quantplug.get_quantizer("x86"), X)


def planted(*names):
    """Returns x86 with the planted engines of these names, in this order."""
    engines = {name: Engine(f"planted_engines:{name}", halves_products_alone=name == "honest") for name in names}
    return quantplug.derive(X86, "planted", engines=engines)


def kept(folder):
    (path,) = folder.iterdir()
    return path, json.loads(path.read_text())


def test_all_engines_run_one_graph_and_the_fastest_is_kept(tmp_path):
    artefact = quantplug.quantize(net(), (X,), "x86", [X], engine="auto", float_dtype=torch.float32, progress=False)
    times, program = artefact.report.engines, artefact.program
    rows = {row.engine: row for row in times.rows}
    assert list(rows) == ["onednn", "onednn_package", "openvino", "onnxruntime"]
    assert "no-such-compiler" in rows.pop("onednn_package").reason
    assert all(
        row.decibels > 40 and row.rounds >= 7 and row.low <= row.microseconds <= row.high for row in rows.values()
    )
    assert times.winner.engine == ENGINES[type(program).__name__]
    assert times.winner.ratio == 1
    assert all(row.ratio > 0.8 for row in rows.values())
    for data in (X, 2 * X):
        assert sqnr(artefact(data), artefact.reference(data)) > 40
    kind: Any = {"X86Program": X86Program, "OpenVINOProgram": OpenVINOProgram, "ONNXProgram": ONNXProgram}
    loaded = kind[type(program).__name__].load(artefact.save(tmp_path / "program"))
    assert torch.equal(loaded(X), artefact(X))
    text, page = artefact.report.text(), artefact.report.html()
    for row in times.rows:
        assert row.engine in text
        assert f"<td>{row.engine}</td>" in page
    assert "float32 (2, 3, 8, 8)" in times.summary()
    assert json.loads(artefact.report.json())["engines"]["rows"][0]["engine"] == "onednn"


def test_a_second_call_lowers_the_chosen_one_alone(graph):
    backend = planted("slow", "honest", "broken")
    first = backend.lower(graph, (X,), engine="auto")
    assert planted_engines.ASKED == ["slow", "honest", "broken"]
    assert first.engines.winner.engine == "honest"
    assert not first.engines.is_remembered
    planted_engines.ASKED.clear()
    second = backend.lower(graph, (X,), engine="auto")
    assert planted_engines.ASKED == ["honest"]
    assert second.engines.is_remembered
    assert second.engines.rows == first.engines.rows
    assert torch.equal(second(X), first(X))


@pytest.mark.slow
def test_what_times_do_not_depend_on_is_remembered_and_the_rest_is_not(graph):
    backend = planted("slow", "honest")
    other = reference(net(), quantplug.get_quantizer("x86"), 3 * X)  # scales of other data
    wide = reference(net(6), quantplug.get_quantizer("x86"), X)
    batch = torch.randn(4, 3, 8, 8)
    asked = []
    for converted, x in ((graph, X), (other, X), (wide, X), (reference(net(), quantplug.X86Quantizer(), batch), batch)):
        planted_engines.ASKED.clear()
        backend.lower(converted, (x,), engine="auto")
        asked.append(len(planted_engines.ASKED))
    assert asked == [2, 1, 2, 2]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        planted_engines.ASKED.clear()
        backend.lower(graph, (X,), engine="auto")
        assert len(planted_engines.ASKED) == 2
    finally:
        torch.set_num_threads(threads)


def test_a_wrong_engine_is_never_chosen_however_fast(graph, folder):
    backend = planted("wrong", "honest")
    program = backend.lower(graph, (X,), engine="auto")
    rows = {row.engine: row for row in program.engines.rows}
    assert "dB of the q/dq graph" in rows["wrong"].reason
    assert rows["wrong"].microseconds is None
    assert program.engines.winner.engine == "honest"
    path, written = kept(folder)
    path.write_text(json.dumps({**written, "chosen": 0}))  # as if it had been chosen before
    planted_engines.ASKED.clear()
    again = backend.lower(graph, (X,), engine="auto")
    assert again.engines.winner.engine == "honest"
    assert planted_engines.ASKED == ["wrong", "wrong", "honest"]
    assert sqnr(again(X), graph(X)) > 40


@pytest.mark.few(2)
@pytest.mark.parametrize("content", ["{", "[]", '{"version": 1}', '{"version": 1, "rows": [], "chosen": 7}', "\udcff"])
def test_a_broken_choice_is_told_and_timed_anew(graph, folder, content):
    backend = planted("honest")
    backend.lower(graph, (X,), engine="auto")
    path, _ = kept(folder)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.warns(QuantplugWarning, match="timed anew"):
        assert not backend.lower(graph, (X,), engine="auto").engines.is_remembered
    assert backend.lower(graph, (X,), engine="auto").engines.is_remembered


def test_a_choice_of_another_format_is_not_read(graph, folder):
    backend = planted("honest")
    backend.lower(graph, (X,), engine="auto")
    path, written = kept(folder)
    path.write_text(json.dumps({**written, "version": 2, "rows": "otherwise"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantplugWarning)
        assert not backend.lower(graph, (X,), engine="auto").engines.is_remembered


def test_remembering_can_be_turned_off(graph, folder, monkeypatch):
    backend = planted("honest")
    backend.lower(graph, (X,), engine="auto", remember=False)
    monkeypatch.setenv("QUANTPLUG_REMEMBER", "0")
    backend.lower(graph, (X,), engine="auto")
    assert not folder.exists()
    monkeypatch.delenv("QUANTPLUG_REMEMBER")
    backend.lower(graph, (X,), engine="auto")
    assert not backend.lower(graph, (X,), engine="auto", time_anew=True).engines.is_remembered
    assert not backend.lower(graph, (X,), engine="auto", remember=False).engines.is_remembered
    assert backend.lower(graph, (X,), engine="auto").engines.is_remembered


def test_a_cache_that_cannot_be_written_is_told(graph, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(QuantplugWarning, match="not remembered.*QUANTPLUG_REMEMBER=0"):
        assert sqnr(planted("honest").lower(graph, (X,), engine="auto")(X), graph(X)) > 40


def test_engines_that_do_not_run_the_graph_are_rows_and_all_together_one_error(graph):
    program = planted("refusing", "broken", "honest").lower(graph, (X,), engine="auto")
    reasons = [row.reason for row in program.engines.rows]
    assert reasons == [
        "This engine has no convolutions; keep them float.",
        "it fails: RuntimeError: a library of the engine fell over",
        "",
    ]
    with pytest.raises(LoweringError) as error:
        planted("refusing", "broken", "wrong").lower(graph, (X,), engine="auto")
    for said in ("'refusing': This engine", "'broken': it fails", "'wrong': Output 0"):
        assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("onednn", X86Program),
        pytest.param("openvino", OpenVINOProgram, marks=pytest.mark.slow),
        pytest.param("onnxruntime", ONNXProgram, marks=pytest.mark.slow),
    ],
)
def test_an_engine_by_name_is_taken_untimed(graph, folder, name, kind):
    program = quantplug.get_quantizer("x86").backend.lower(graph, (X,), engine=name)
    assert type(program) is kind
    assert program.engines is None
    assert not folder.exists()
    assert sqnr(program(X), graph(X)) > 40


def test_names_that_are_none(graph, monkeypatch):
    backend = quantplug.get_quantizer("x86").backend
    assert type(backend.lower(graph, (X,), engine=["onednn"])) is X86Program
    wrong: list[Any] = ["openvin", 7, (), ["onednn", "onnxrt"]]
    for each in wrong:
        with pytest.raises(ConfigError, match=r"has no engine .*choose one of \['auto', 'onednn'"):
            quantplug.quantize(nn.Identity(), (X,), "x86", engine=each)  # told before the model is exported
    with pytest.raises(ConfigError, match="did you mean 'openvino'"):
        backend.lower(graph, (X,), engine="openvin")
    with pytest.raises(ConfigError, match=r"has no option 'autotun'.*did you mean 'autotune'"):
        backend.lower(graph, (X,), engine="auto", autotun=True)
    with pytest.raises(ConfigError, match="has no option 'opset'"):
        backend.lower(graph, (X,), engine="onednn", opset=20)
    with pytest.raises(ConfigError, match="one engine only"):
        quantplug.quantize(net(), (X,), "xnnpack", [X], engine="auto")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(
        LoweringError, match=r"openvino, which is not installed; run pip install 'quantplug\[openvino\]'"
    ):
        quantplug.quantize(nn.Identity(), (X,), "x86", engine="openvino")


@pytest.mark.parametrize("engines", [{"mine": "package:function"}, {"auto": Engine("package:function")}])
def test_a_declaration_of_what_is_no_engine_is_one_sentence(engines):
    with pytest.raises(ConfigError, match=r"of backend 'mine' is a \w+; give another name than 'auto' and an Engine"):
        quantplug.derive(X86, "mine", engines=engines)


def test_what_is_not_installed_is_a_row_with_the_line_that_installs_it(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    program = quantplug.get_quantizer("x86").backend.lower(graph, (X,), engine="auto")
    rows = {row.engine: row.reason for row in program.engines.rows}
    assert "pip install 'quantplug[openvino]'" in rows["openvino"]
    assert "pip install 'quantplug[onnx]'" in rows["onnxruntime"]
    assert type(program) is X86Program


def test_an_option_leaves_out_engines_that_do_not_have_it(graph):
    backend = quantplug.get_quantizer("x86").backend
    program = backend.lower(graph, (X,), engine=["onednn", "openvino"], constants={"rate": 7})
    assert isinstance(program, X86Program)
    assert program.constants == {"rate": 7}
    assert program.engines.rows[1].reason == "Engine 'openvino' has no option 'constants'."


@pytest.mark.parametrize("engine", ["onednn", pytest.param("openvino", marks=pytest.mark.slow)])
def test_a_state_is_what_the_model_began_with(engine):
    model = stateful_models.build(stateful_models.Slots)
    first, *more = stateful_models.calls(4)
    converted = reference(model, quantplug.get_quantizer("x86"), first)
    program = quantplug.get_quantizer("x86").backend.lower(converted, (first,), engine=[engine, "onnxruntime"])
    rows = {row.engine: row for row in program.engines.rows}
    assert rows[engine].rounds >= 7
    assert "keeps no state" in rows["onnxruntime"].reason
    expected = starting(converted)
    for x in (first, *more):
        assert sqnr(program(x), expected(x)) > 25


@pytest.mark.parametrize("engine", ["onednn", pytest.param("openvino", marks=pytest.mark.slow)])
def test_open_sizes_are_named_and_stay_open(engine):
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    data = torch.randn(6, 3, 8, 8)
    artefact = quantplug.quantize(net(), (X,), "x86", [X], dynamic_shapes=(batch,), engine=[engine], progress=False)
    assert "=2, 3, 8, 8)" in artefact.report.engines.inputs
    assert sqnr(artefact(data), artefact.reference(data)) > 40


@pytest.mark.slow
def test_several_inputs_and_inputs_by_name():
    model = Function(lambda m, x, y: m.a(x) + m.b(y), a=nn.Linear(16, 8), b=nn.Linear(16, 8)).eval()

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, *, scale):
            return self.inner(x, x * scale)

    x, scale = torch.randn(4, 16), torch.rand(4, 16)
    artefact = quantplug.quantize(
        Named().eval(), (x,), "x86", [{"x": x, "scale": scale}], example_kwargs={"scale": scale}, progress=False,
        engine=["onednn", "openvino", "onnxruntime"],
    )  # fmt: skip
    assert [row.reason for row in artefact.report.engines.rows if row.microseconds is None] == []
    assert artefact.report.engines.inputs == "float32 (4, 16), float32 (4, 16)"
    assert torch.equal(artefact(x, scale=scale), artefact(x, scale))
    assert sqnr(artefact(x, scale=scale), artefact.reference(x, scale=scale)) > 40


@pytest.mark.slow
def test_a_graph_of_another_quantizer():
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as torchao

    config = torchao.get_default_x86_inductor_quantization_config(reduce_range=processor.kernels_saturate())
    theirs = torchao.X86InductorQuantizer().set_global(config)
    artefact = quantplug.quantize(
        net(), (X,), "openvino", [X], quantizer=theirs, engine=["onednn", "openvino"], progress=False
    )
    assert [row.reason for row in artefact.report.engines.rows if row.microseconds is None] == []
    assert sqnr(artefact(X), artefact.reference(X)) > 40


@pytest.mark.slow
def test_float_parts_are_tried_in_bfloat16_where_the_processor_has_it(monkeypatch):
    x = torch.randn(2, 6, 16)
    model = Function(lambda m, x: m.read(x) @ x.transpose(1, 2), read=nn.Linear(16, 16))
    converted = reference(model, quantplug.get_quantizer("x86"), x)
    backend = planted("honest", "slow")  # of which one has the option

    def kinds(**options):
        program = backend.lower(converted, (x,), engine="auto", remember=False, **options)
        assert sqnr(program(x), converted(x)) > 25
        return [(row.engine, row.float_dtype) for row in program.engines.rows]

    whole, half = [("honest", "float32"), ("slow", "float32")], ("honest", "bfloat16")
    monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
    assert kinds() == whole
    monkeypatch.setattr(processor, "has_bfloat16", lambda: True)
    assert kinds() == [*whole, half]
    assert kinds(float_dtype=torch.float32) == whole
    assert kinds(float_dtype=torch.bfloat16) == [half, ("slow", "bfloat16")]
    with pytest.raises(LoweringError, match=r"choose torch\.float32 or torch\.bfloat16"):
        kinds(float_dtype=torch.float16)
    converted = reference(net(), quantplug.get_quantizer("x86"), X)  # no product stays float
    program = backend.lower(converted, (X,), engine="auto", remember=False)
    assert [(row.engine, row.float_dtype) for row in program.engines.rows] == whole
    whatever = quantplug.derive(X86, "whatever", engines={"honest": Engine("planted_engines:honest")})
    program = whatever.lower(converted, (X,), engine="auto", remember=False)  # one that halves more than products
    assert [(row.engine, row.float_dtype) for row in program.engines.rows] == [whole[0], half]


@pytest.mark.slow
def test_a_package_is_a_candidate_and_a_program(graph, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX")
    backend = quantplug.get_quantizer("x86").backend
    program = backend.lower(graph, (X,), engine=["onednn_package"])
    assert program.engines.winner.engine == "onednn_package"
    for data in (X, -X, X.to(memory_format=torch.channels_last)):
        assert sqnr(program(data), graph(data)) > 40
    loaded = torch._inductor.aoti_load_package(str(program.save(tmp_path / "package.pt2")))
    assert torch.equal(loaded(X), program(X))
    assert program.nbytes == os.path.getsize(tmp_path / "package.pt2")
    with pytest.raises(LoweringError, match="Input 0 of the program"):
        program(X[:1])
    images = X.to(memory_format=torch.channels_last)
    program = backend.lower(graph, (images,), engine="onednn_package")
    assert sqnr(program(X), graph(X)) > 40


def test_a_program_is_timed_when_the_threads_of_the_one_before_are_asleep():
    """ONNX Runtime's spin for 40 ms after a call, and took half of two cores from whatever came next."""
    spinning: list[threading.Thread] = []
    disturbed, a = [], torch.randn(300, 300)

    def spin():
        end = time.perf_counter() + 0.04
        while time.perf_counter() < end:
            a @ a

    def leaves_a_thread():
        if not any(thread.is_alive() for thread in spinning):
            spinning.append(threading.Thread(target=spin))
            spinning[-1].start()

    def comes_next():
        disturbed.append(any(thread.is_alive() for thread in spinning))

    in_turns([leaves_a_thread, comes_next])
    assert len(spinning) >= 7
    assert sum(disturbed) < len(disturbed) / 4  # on a loaded machine a thread that waits for its turn seems asleep


def test_turns_find_the_fastest_leave_the_slow_behind_and_prefer_the_first_of_equals():
    calls = [0, 0, 0]

    def sleeping(place, seconds):
        def run():
            calls[place] += 1
            time.sleep(seconds)

        return run

    found = in_turns([sleeping(0, 0.006), sleeping(1, 0.001), sleeping(2, 0.001)])
    assert found[0].is_far_behind
    assert len(found[0].seconds) == 7
    assert not found[1].is_far_behind
    assert best(found) in (1, 2)
    assert calls[1] > calls[0] > 7
    noisy = [Timed([1.0, 1.1] * 10), Timed([1.1, 1.0] * 10), Timed([0.5] * 4)]
    assert best(noisy[:2]) == 0
    assert best([noisy[1], noisy[0]]) == 0
    assert best([Timed([1.2, 1.1] * 10), Timed([1.0, 1.05] * 10)]) == 1
    assert best([Timed([1.02] * 9), Timed([1.0] * 9)]) == 0
    assert best([Timed([1.3, 1.1, 0.9] * 3), Timed([1.0] * 9)]) == 1  # though noise could have made the difference
    noisy[2].is_far_behind = True
    assert best(noisy) == 0
