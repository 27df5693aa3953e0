"""Weights and tables in float16 that no row is about, in the files of x86 and OpenVINO: size, numbers, report."""

import copy
from typing import Any

import pytest
import torch
from models import Function, exported
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import quantplug
from quantplug.core.qdq.nodes import CAST_OP
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.openvino import OpenVINOProgram
from quantplug.lowering.x86 import X86Program

BACKENDS = ("x86", "openvino")
LOADED = {"x86": X86Program.load, "openvino": OpenVINOProgram.load}


def weight(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-2] ** 0.5)


def sequences():
    return torch.randn(2, 4, 128)


def indices():
    return torch.randint(0, 900, (3, 7))


def of_cells(m, x):
    state = x.new_zeros(x.shape[0], 384)
    for step in range(x.shape[1]):
        state = m.cell(x[:, step], state)
    return state


def of_lstm_cells(m, x):
    state = x.new_zeros(x.shape[0], 256), x.new_zeros(x.shape[0], 256)
    for step in range(x.shape[1]):
        state = m.cell(x[:, step], state)
    return state[0]


def mixed(m, x):
    return m.turns(F.relu(m.conv(x.transpose(1, 2))).transpose(1, 2))[0] * m.scale


def tied(m, ids):
    return m.words(ids).mean(1) @ m.words.weight.T


# name: (model, inputs, what the report says of these operators)
CASES = {
    "gru": (lambda: Function(lambda m, x: m.turns(x)[0], turns=nn.GRU(128, 384, batch_first=True)), sequences, "gru"),
    "lstm": (
        lambda: Function(lambda m, x: m.turns(x)[0], turns=nn.LSTM(128, 256, 2, bidirectional=True, batch_first=True)),
        sequences,
        "lstm",
    ),
    "rnn": (lambda: Function(lambda m, x: m.turns(x)[0], turns=nn.RNN(128, 512, batch_first=True)), sequences, "rnn"),
    "gru cells": (lambda: Function(of_cells, cell=nn.GRUCell(128, 384)), sequences, "gru_cell"),
    "lstm cells": (lambda: Function(of_lstm_cells, cell=nn.LSTMCell(128, 256)), sequences, "lstm_cell"),
    "einsum": (
        lambda: Function(lambda m, x: torch.einsum("bti,hij->bhtj", x, m.w), w=weight(8, 128, 256)),
        sequences,
        "einsum",
    ),
    "matmul": (
        lambda: Function(lambda m, x: torch.tanh(x @ m.w) @ m.back.T, w=weight(128, 512), back=weight(128, 512)),
        sequences,
        "linear",  # a product by a parameter is one
    ),
    "bmm": (lambda: Function(lambda m, x: torch.bmm(x, m.w), w=weight(2, 128, 512)), sequences, "bmm"),
    "arithmetic": (
        lambda: Function(lambda m, x: x * m.w + m.v, w=weight(512, 4, 128), v=weight(512, 4, 128)),
        lambda: torch.randn(512, 4, 128),
        "mul.Tensor",
    ),
    "tables": (
        lambda: Function(
            lambda m, i: m.w.index_select(0, i.flatten()).view(3, 7, 128) + m.v[i % 500],
            w=weight(900, 128),
            v=weight(500, 128),
        ),
        indices,
        "index",
    ),
    "mix": (
        lambda: Function(
            mixed,
            conv=nn.Conv1d(128, 256, 3, padding=1),
            turns=nn.GRU(256, 320, batch_first=True),
            scale=weight(4, 320),
        ),
        sequences,
        "gru",
    ),
    "tied": (lambda: Function(tied, words=nn.Embedding(900, 128)), indices, "embedding"),
}


def rounded(model):
    """Returns the model with every matrix rounded to float16."""
    model = copy.deepcopy(model)
    for value in (*model.parameters(), *model.buffers()):
        if value.dim() > 1:
            value.data = value.data.half().float()
    return model


def in_float(model, inputs, backend):
    quantizer = quantplug.get_quantizer(backend).set_global(None)
    converted = quantplug.convert_pt2e(quantplug.prepare_pt2e(exported(model, *inputs), quantizer))
    return quantizer.backend.lower(converted, inputs)


def converted(model, inputs, quantizer):
    return quantplug.convert_pt2e(quantplug.prepare_pt2e(exported(model, *inputs), quantizer))


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_e13_files_of_any_model_are_half_of_floats(case, backend, tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    build, inputs, operator = CASES[case]
    model = build().eval()
    artefact = quantplug.quantize(model, (inputs(),), backend, config="float16", progress=False)
    path = artefact.save(tmp_path / "half.bin")
    full = in_float(model, (inputs(),), backend).save(tmp_path / "float.bin")
    assert path.stat().st_size <= 0.55 * full.stat().st_size
    program, expected = LOADED[backend](path), rounded(model)
    for _ in range(3):  # kernels that leave something behind are wrong from the second call on
        x = inputs()
        assert sqnr(program(x), expected(x)) > 100
        assert sqnr(program(x), artefact.reference(x)) > 100
        assert 50 < sqnr(program(x), model(x)) < 90
    about = [row for row in artefact.report.rows if row.operator.startswith(operator)]
    assert about
    assert any(row.quantized and "float16" in row.how for row in about)
    told = {op.node: op.reason for op in artefact.program.ops}
    assert "it computes in float32, from a weight in float16" in {told[row.node] for row in about}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_e13_a_scope_keeps_a_recurrent_layer_and_a_table_in_float32(backend, tmp_path):
    pytest.importorskip("openvino")

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = weight(128, 128)

        def forward(self, x):
            return x @ self.table

    torch.manual_seed(0)
    model = Function(
        lambda m, x: m.last(m.one(m.other(x)[0])[0]),
        one=nn.GRU(128, 128, batch_first=True), other=nn.GRU(128, 128, batch_first=True), last=Part(),
    ).eval()  # fmt: skip
    quantizer = quantplug.get_quantizer(backend).set_global("float16").set_module_name("one", None)
    x = sequences()
    artefact = quantplug.quantize(model, (x,), quantizer, progress=False)
    how = {row.module_path: row for row in artefact.report.rows if row.operator.startswith(("gru", "linear"))}
    assert [how[path].quantized for path in ("other", "one", "last")] == [True, False, True]
    assert "set to float by module name 'one'" in how["one"].reason
    expected = copy.deepcopy(model)
    for part in (expected.other, expected.last):
        part.load_state_dict(rounded(part).state_dict())
    program = LOADED[backend](artefact.save(tmp_path / "model.bin"))
    for given in (x, sequences()):
        assert sqnr(program(given), expected(given)) > 100


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_e13_a_matrix_that_the_model_writes_stays_what_it_is(backend, tmp_path):
    pytest.importorskip("openvino")

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.randn(64, 64))
            self.w = weight(64, 64)

        def forward(self, x):
            self.seen.add_((x @ self.w).mean(0))
            return x @ self.seen

    model, x = Memory().eval(), torch.randn(3, 64)
    expected = rounded(model)
    expected.seen.copy_(model.seen)
    artefact = quantplug.quantize(model, (x,), backend, config="float16", progress=False)
    assert [row.quantized for row in artefact.report.rows if row.operator in ("linear", "matmul")] == [True, False]
    program = LOADED[backend](artefact.save(tmp_path / "model.bin"))
    for _ in range(3):
        x = torch.randn(3, 64)
        assert sqnr(program(x), expected(x)) > 100


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda w: w[0, 0].fill_(-1e5), "its weight has 100000, the limit of torch.float16 is 65504"),
        (lambda w: w.copy_(torch.arange(64 * 64.0).view(64, 64)), "whole numbers, of which torch.float16 holds"),
    ],
)
def test_e13_what_float16_does_not_hold_stays_float_and_says_so(spoil, reason):
    model, x = (
        Function(lambda m, x: torch.einsum("bi,ij->bj", x @ m.w, m.v), w=weight(64, 64), v=weight(64, 64)),
        torch.ones(2, 64),
    )
    with torch.no_grad():
        spoil(model.v)
    prepared = quantplug.prepare_pt2e(exported(model, x), quantplug.get_quantizer("x86").set_global("float16"))
    rows = {row.operator: row for row in quantplug.explain(prepared).rows}
    assert rows["linear"].quantized
    assert not rows["einsum"].quantized
    assert reason in rows["einsum"].reason
    assert quantplug.convert_pt2e(prepared)(x).isfinite().all()


def test_e13_infinity_and_truth_values_are_exact_in_half():
    mask = torch.full((64, 64), -torch.inf).triu(1)
    model, x = Function(lambda m, x: torch.softmax(x + m.mask, -1), mask=nn.Parameter(mask)), torch.randn(64, 64)
    artefact = quantplug.quantize(model.eval(), (x,), "x86", config="float16", progress=False)
    assert artefact.report.row("add").quantized
    torch.testing.assert_close(artefact(x), model(x))


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_e13_training_recurrent_layers_with_float16_is_the_cast(layer):
    torch.manual_seed(0)
    model = Function(lambda m, x: m.turns(x)[0], turns=layer(128, 64, batch_first=True))
    x, quantizer = sequences(), quantplug.get_quantizer("x86").set_global("float16")
    prepared = quantplug.prepare_qat_pt2e(exported(model, x), quantizer)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    prepared(x).square().mean().backward()
    optimizer.step()
    trained = [value.detach().clone() for value in prepared.parameters()]
    graph = quantplug.convert_pt2e(prepared)
    for parameter, value in zip(model.parameters(), trained, strict=True):
        assert not torch.equal(parameter, value)
        parameter.data = value.half().float() if value.dim() > 1 else value
    for given in (x, sequences()):
        torch.testing.assert_close(graph(given), model(given))


def test_e13_batch_norms_of_many_channels_keep_their_statistics_in_training():
    model = nn.Sequential(nn.BatchNorm1d(5000), nn.Linear(5000, 4))
    quantizer, x = quantplug.get_quantizer("x86").set_global("float16"), torch.randn(4, 5000) + 3
    prepared = quantplug.prepare_qat_pt2e(exported(model, x), quantizer)
    prepared(x)
    assert prepared.get_buffer("0.running_mean").mean() > 0.25


def test_e13_weights_of_a_loop_are_widened_once():
    build, inputs, _ = CASES["gru cells"]
    x = inputs()
    quantizer = quantplug.get_quantizer("x86").set_global("float16")
    program: Any = quantizer.backend.lower(converted(build().eval(), (x,), quantizer), (x,))
    widened = [node for node in program.portable.graph.nodes if node.target is torch.ops.aten.to.dtype]
    assert len(widened) == 2
    assert not [node for node in program.module.graph.nodes if node.target in (CAST_OP, torch.ops.aten.to.dtype)]


def test_e13_what_is_computed_from_halves_alone_is_computed_when_a_program_is_loaded(tmp_path):
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64)), nn.ReLU()).eval()
    x = torch.randn(3, 64)
    artefact = quantplug.quantize(model, (x,), "x86", config="float16", progress=False)
    program = X86Program.load(artefact.save(tmp_path / "model.pt2"))
    assert {str(node.target) for node in program.module.graph.nodes if node.op == "call_function"} <= {
        "aten.linear.default", "aten.relu.default", "aten.relu_.default", "aten._assert_tensor_metadata.default",
    }  # fmt: skip
    for given in (x, torch.randn(3, 64)):
        assert sqnr(program(given), artefact.reference(given)) > 100


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["float16", "int8_weight_only"])
@pytest.mark.parametrize("sum_of", [lambda c, x: c + x, lambda c, x: torch.sigmoid(c) * x])
@torch.no_grad()
def test_openvino_products_of_constants_are_right_at_every_call(config, sum_of, tmp_path):
    """It computed them once, into memory that what followed wrote to; of integers it compiled none."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = Function(lambda m, x: sum_of(m.key(m.query), x), key=nn.Linear(64, 128), query=weight(2, 64)).eval()
    artefact = quantplug.quantize(model, (torch.randn(2, 128),), "openvino", config=config, progress=False)
    program = OpenVINOProgram.load(artefact.save(tmp_path / "model.bin"))
    for _ in range(3):
        x = torch.randn(2, 128)
        assert sqnr(program(x), artefact.reference(x)) > 45
        assert sqnr(artefact(x), artefact.reference(x)) > 45
