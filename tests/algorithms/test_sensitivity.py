"""Sensitivity: what each operator does to the output, against models in which it alone is quantized."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    get_symmetric_quantization_config as executorch_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stateful_models import FEATURES, Average, Cache, Slots
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import quantplug
from quantplug.algorithms.sensitivity import Sensitivity, sensitivity
from quantplug.core.errors import ArtefactError, CalibrationError, ConfigError, ModelError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.emulation import KernelSet, Numerics, Row
from quantplug.lowering.emulation.rows import products, quantizations
from quantplug.quantizers.framework.quantizer import BackendQuantizer

WIDTH = 32


class Block(nn.Module):
    """A layer behind a norm, which stays float, so that each block rounds tensors of its own."""

    def __init__(self, outlier=1.0):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.norm.weight[0] *= outlier
            self.layer.weight[:, 0] /= outlier

    def forward(self, x):
        return x + torch.tanh(self.layer(self.norm(x)))


class Planted(nn.Module):
    """Blocks of which one reads a channel with numbers a hundred times as large as the others'."""

    def __init__(self, bad=1, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(100.0 if place == bad else 1.0) for place in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Images(nn.Module):
    """Convolutions with what is fused to them, a residual sum, movement between layers, and operators in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x):
        x = self.first(x)
        x = torch.relu_(self.second(x).add_(x))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def batches(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def foreign(name):
    if name == "executorch":
        return XNNPACKQuantizer().set_global(executorch_config(is_per_channel=True))
    if name == "torchao":
        return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    return quantplug.get_quantizer(name)


def prepared_with(model, quantizer, data, prepare=quantplug.prepare_pt2e, strict=False):
    is_exported = isinstance(model, torch.fx.GraphModule)
    exported = model if is_exported else torch.export.export(model, (data[0],), strict=strict).module()
    prepared = prepare(exported, quantizer)
    with torch.no_grad():
        for batch in data:
            prepared(batch)
    return prepared


def level(quantized, model, data):
    """Returns the decibels of a converted graph's outputs over all batches."""
    with torch.no_grad():
        return sqnr(torch.cat([quantized(x) for x in data]), torch.cat([model(x) for x in data]))


@pytest.mark.few(3)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("prepare", [quantplug.prepare_pt2e, torchao_prepare])
@pytest.mark.parametrize("name", ["xnnpack", "executorch", "torchao", "x86"])
def test_a_planted_culprit_is_the_first_row_and_most_of_the_noise(name, prepare, strict):
    data = batches(16, WIDTH)
    prepared = prepared_with(Planted().eval(), foreign(name), data, prepare, strict)
    found = sensitivity(prepared, data)
    assert found.rows[0].module_path == "blocks.1.layer"
    assert found.rows[0].share > 0.9
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert [row.noise for row in found.rows] == sorted((row.noise for row in found.rows), reverse=True)
    assert found.decibels == pytest.approx(level(quantplug.convert_pt2e(prepared), Planted().eval(), data), abs=1e-3)


def alone(name, path, config):
    """Returns a quantizer that takes one module."""
    if name == "executorch":
        return XNNPACKQuantizer().set_module_name(path, executorch_config(is_per_channel=True))
    if name == "torchao":
        chosen = get_default_x86_inductor_quantization_config()
        return X86InductorQuantizer().set_module_name_qconfig(path, chosen)
    return quantplug.get_quantizer(name).set_global(None).set_module_name(path, config)


@pytest.mark.filterwarnings("ignore:Backend 'x86' stores weights in 8 bits")
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("executorch", ""),
        ("torchao", ""),
        *(("xnnpack", name) for name in ("int8", "int8_dynamic", "int4_dynamic_groups", "float16")),
        *(("x86", name) for name in ("int8", "int8_dynamic", "int4_weight_only", "float16")),
    ],
)
def test_each_row_is_what_a_model_loses_in_which_only_this_operator_is_quantized(name, config):
    data = batches(16, WIDTH)
    model = torch.export.export(Planted().eval(), (data[0],)).module()
    quantizer = foreign(name)
    if isinstance(quantizer, BackendQuantizer):
        quantizer.set_global(None).set_module_type(nn.Linear, config)
    found = sensitivity(prepared_with(model, quantizer, data), data)
    rows = {row.module_path: row for row in found.rows if row.operator == "linear"}
    assert set(rows) == {f"blocks.{place}.layer" for place in range(3)}
    for path, row in rows.items():
        only = quantplug.convert_pt2e(prepared_with(model, alone(name, path, config), data))
        assert row.decibels == pytest.approx(level(only, model, data), abs=1e-3), path


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["xnnpack", "x86", "executorch", "torchao"])
def test_fused_pieces_and_operators_in_place_are_told_as_a_model_of_that_piece_alone(name):
    model, data = Images().eval(), batches(8, 3, 8, 8)
    found = sensitivity(prepared_with(model, foreign(name), data), data)
    first = next(row for row in found.rows if row.operator == "conv2d" and row.module_path == "first.0")
    only = quantplug.convert_pt2e(prepared_with(model, alone(name, "first", "int8"), data))
    if name == "xnnpack":  # alone x86 writes float where nobody reads integers; the others' scopes do not take a piece
        assert first.decibels == pytest.approx(level(only, model, data), abs=1e-3)
    head = next(row for row in found.rows if row.module_path == "head")
    only = quantplug.convert_pt2e(prepared_with(model, alone(name, "head", "int8"), data))
    assert head.decibels == pytest.approx(level(only, model, data), abs=1e-3)


def test_movement_has_no_row_and_is_told_why():
    model, data = Images().eval(), batches(8, 3, 8, 8)
    found = sensitivity(prepared_with(model, quantplug.get_quantizer("xnnpack"), data), data)
    assert {row.operator for row in found.rows} == {"conv2d", "add_.Tensor", "linear"}
    assert set(found.left) == {"max_pool2d", "flatten"}
    assert "another operator rounds" in found.left["flatten"]


def test_movement_that_goes_on_is_what_the_operator_before_rounds():
    """As between a projection and the attention that stays float behind it."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.query = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            split = self.query(x).view(4, 4, 4, WIDTH // 4).transpose(1, 2)
            return torch.softmax(split @ split.transpose(2, 3), -1)

    data = batches(4, 4, WIDTH)
    found = sensitivity(prepared_with(Heads().eval(), quantplug.get_quantizer("xnnpack"), data), data)
    assert [row.module_path for row in found.rows] == ["query"]
    assert {"view", "transpose"} <= set(found.left)


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [2, 4])
def test_passes_are_three_and_for_each_operator_the_rest_of_one(blocks):
    data = batches(4, WIDTH, count=3)
    prepared = prepared_with(Planted(blocks=blocks).eval(), quantplug.get_quantizer("x86"), data)
    with Calls() as calls:
        found = sensitivity(prepared, data)
    operators = len(found.rows)
    whole, last, rests = 2 * blocks, blocks - 1, blocks * (blocks + 1) // 2
    # One norm a block, which runs in every pass; the rest of a pass begins behind the norm of its block.
    assert operators == blocks
    assert calls.counts["aten.native_layer_norm.default"] == len(data) * (whole + last + 1 + rests - blocks)
    passes = calls.counts["aten.native_layer_norm.default"] / (blocks * len(data))
    assert passes < operators / 2 + 4 < 2 * operators + 20


class Counted:
    """Lowers graphs, and counts them and the calls of what they become."""

    def __init__(self, lower, *inputs):
        self.lower, self.inputs = lower, inputs
        self.made = self.calls = 0

    def __call__(self, graph):
        self.made += 1
        program = self.lower(graph, self.inputs)

        def run(*batch):
            self.calls += 1
            return program(*batch)

        return run


def lowered(name, data):
    """Returns what makes a program of a quantizer's graph on real kernels."""
    backend = {"executorch": "xnnpack", "torchao": "x86"}.get(name, name)
    return Counted(quantplug.get_quantizer(backend).backend.lower, data[0])


OTHERS = [
    ("executorch", ""),
    ("torchao", ""),
    ("xnnpack", "int8"),
    ("xnnpack", "int4_dynamic_groups"),
    ("x86", "float16"),
]


@pytest.mark.parametrize(
    ("name", "config", "strict"),
    [
        ("x86", "int8", True),
        *(pytest.param(*case, place % 2 == 0, marks=pytest.mark.slow) for place, case in enumerate(OTHERS)),
    ],
)
def test_of_programs_each_row_is_what_the_program_loses_in_which_only_this_operator_is_quantized(name, config, strict):
    data = batches(16, WIDTH, count=3)
    model = torch.export.export(Planted(blocks=2).eval(), (data[0],), strict=strict).module()
    quantizer = foreign(name)
    if isinstance(quantizer, BackendQuantizer):
        quantizer.set_global(None).set_module_type(nn.Linear, config)
    prepared, run = prepared_with(model, quantizer, data), lowered(name, data)
    together = lowered(name, data)(quantplug.convert_pt2e(prepared))  # torchao's observers of weights see them here
    before = everything(prepared)
    found = sensitivity(prepared, data, run=run)
    assert same(before, everything(prepared))
    assert run.made == len(found.rows) + 1
    assert run.calls == len(data) * run.made
    assert run.made + 1 <= 2 * len(found.rows) + 20  # the float graph is the one pass more
    assert found.rows[0].module_path == "blocks.1.layer" or config == "float16"
    assert found.decibels == pytest.approx(level(together, model, data), abs=1e-2)
    for row in (row for row in found.rows if row.operator == "linear"):
        only = quantplug.convert_pt2e(prepared_with(model, alone(name, row.module_path, config), data))
        assert row.decibels == pytest.approx(level(lowered(name, data)(only), model, data), abs=1e-2), row


class Overflowing(nn.Module):
    """Layers of which the second adds numbers of one sign up, beyond what narrow accumulators hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            self.layers[1].weight.abs_()

    def forward(self, x):
        for layer in self.layers:
            x = layer(nn.functional.layer_norm(x, (WIDTH,)).abs())
        return x


def test_an_emulated_backend_shows_what_its_accumulators_lose_and_the_graph_does_not():
    narrow = Row("linear", products(Numerics(torch.int16, saturate=True), "linear"))
    kernels = KernelSet("narrow", (narrow,), (Row("quantize", quantizations()),))
    data, model = batches(16, WIDTH), Overflowing().eval()
    quantizer = quantplug.get_quantizer("xnnpack").set_global(None).set_module_type(nn.Linear, "int8")
    prepared = prepared_with(model, quantizer, data)

    def emulated(graph):
        return quantplug.emulate(graph, (data[0],), kernels)

    graph, found = sensitivity(prepared, data), sensitivity(prepared, data, run=emulated)
    assert graph.row("linear_1").decibels > 25
    assert found.row("linear_1").decibels < 5
    assert found.rows[0].module_path == "layers.1"
    for row in found.rows:
        only = quantplug.convert_pt2e(prepared_with(model, alone("xnnpack", row.module_path, "int8"), data))
        assert row.decibels == pytest.approx(level(emulated(only), model, data), abs=1e-3)


def test_programs_with_state_begin_each_batch_as_the_model_does():
    data = batches(1, FEATURES, count=3)

    def lower(graph):
        return quantplug.get_quantizer("x86").backend.lower(graph, (data[0],))

    for model in (Average, Slots, Cache):
        exported = torch.export.export(model().eval(), (data[0],)).module()
        prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
        quantplug.calibrate(prepared, data, progress=False)
        plain, found = sensitivity(prepared, data), sensitivity(prepared, data, run=lower)
        for row in plain.rows:
            assert found.row(row.node).decibels == pytest.approx(row.decibels, abs=0.5)


def test_open_sizes_and_containers_are_measured_in_programs():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, parts):
            hidden = torch.tanh(self.first(parts["left"])) + parts["right"]
            return {"out": self.last(hidden), "best": hidden.argmax(1)}

    sizes = {"parts": {"left": {0: torch.export.Dim("n")}, "right": {0: torch.export.Dim("n")}}}
    data = [({"left": torch.randn(n, 8), "right": torch.randn(n, 8)},) for n in (3, 5, 2)]
    exported = torch.export.export(Parts().eval(), data[0], dynamic_shapes=sizes).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
    quantplug.calibrate(prepared, data, progress=False)
    lower = quantplug.get_quantizer("x86").backend.lower
    plain, found = sensitivity(prepared, data), sensitivity(prepared, data, run=lambda graph: lower(graph, data[0]))
    assert {row.node for row in plain.rows} == {row.node for row in found.rows} >= {"linear", "linear_1"}
    for row in plain.rows:
        assert found.row(row.node).decibels == pytest.approx(row.decibels, abs=0.5)


def test_what_run_makes_is_checked_in_a_sentence():
    data = batches(4, WIDTH)
    prepared = prepared_with(Planted().eval(), quantplug.get_quantizer("x86"), data)
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        ("program", ConfigError, "run takes a function of a converted graph, found str"),
        (lambda graph: None, ConfigError, "run returned NoneType, which cannot be called"),
        (lambda graph: lambda x: graph(x)[1:], ModelError, r"returns tensors of shapes \[\(3, 32\)\]"),
    )
    for run, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            sensitivity(prepared, data, run=run)


def everything(module):
    """Returns the numbers of a model, those of its observers and its graph."""
    numbers = {name: value.detach().clone() for name, value in (*module.named_parameters(), *module.named_buffers())}
    observed = {name: value.clone() for name, value in quantplug.convert_pt2e(module).named_buffers()}
    graph = [(node.name, str(node.target), str(node.args)) for node in module.graph.nodes]
    return numbers, observed, graph


def same(one, other):
    pairs = [(held[name], later[name]) for held, later in zip(one[:2], other[:2], strict=True) for name in held]
    return all(torch.equal(*pair) for pair in pairs) and one[2] == other[2]


@pytest.mark.few(2)
@pytest.mark.parametrize("model", [Average, Slots, Cache])
def test_models_with_state_start_each_run_where_they_stand_and_stay_there(model):
    data = batches(1, FEATURES, count=3)
    exported = torch.export.export(model().eval(), (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86"))
    quantplug.calibrate(prepared, data, progress=False)
    before = everything(prepared)
    found = [sensitivity(prepared, data) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].rows
    assert same(before, everything(prepared))


class Noisy(nn.Module):
    """Random numbers between its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + torch.randn_like(x))


def test_random_operators_are_no_noise_of_quantization():
    data = batches(4, 8)
    prepared = prepared_with(Noisy().eval(), quantplug.get_quantizer("x86"), data)
    state = torch.get_rng_state()
    found = sensitivity(prepared, data)
    assert torch.equal(state, torch.get_rng_state())
    assert all(row.decibels > 30 for row in found.rows)


class Branches(nn.Module):
    """A layer before control flow, and one inside of each branch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x), (x,))


@pytest.mark.slow
def test_operators_in_control_flow_are_left_and_float():
    data = [batch + sign for sign in (-1, 1) for batch in batches(4, 8)]
    prepared = prepared_with(Branches().eval(), quantplug.get_quantizer("x86"), data)
    found = sensitivity(prepared, data)
    assert [row.node for row in found.rows] == ["linear"]
    assert len(found.left) == 2
    assert set(found.left.values()) == {"it stands in a submodel of control flow"}
    only = quantplug.convert_pt2e(prepared_with(Branches().eval(), alone("x86", "first", "int8"), data))
    assert found.rows[0].decibels == pytest.approx(level(only, Branches().eval(), data), abs=1e-3)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    widths=st.lists(st.integers(2, 20), min_size=2, max_size=5),
    config=st.sampled_from(["int8", "int8_dynamic"]),
    seed=st.integers(0, 2**16),
)
def test_rows_are_what_models_lose_in_which_one_layer_is_quantized_whatever_the_shapes(widths, config, seed):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(one, other), nn.ReLU()) for one, other in itertools.pairwise(widths)]
    data = batches(5, widths[0], seed=seed)
    model = torch.export.export(nn.Sequential(*layers, nn.Linear(widths[-1], 3)).eval(), (data[0],)).module()
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    found = sensitivity(prepared_with(model, quantizer, data), data)
    assert len(found.rows) == len(widths)
    for row in found.rows:
        piece = row.module_path.partition(".")[0]
        only = quantplug.convert_pt2e(prepared_with(model, alone("xnnpack", piece, config), data))
        assert row.decibels == pytest.approx(level(only, model, data), abs=1e-3)


def test_integer_ends_of_a_model_are_float_here():
    data = batches(8, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    quantizers = [quantplug.get_quantizer("xnnpack").set_global("int8") for _ in range(2)]
    quantizers[1].set_io(torch.int8, torch.int8)
    plain, integer = (sensitivity(prepared_with(model, quantizer, data), data) for quantizer in quantizers)
    assert plain == integer


@pytest.mark.slow
def test_a_table_a_picture_and_json(tmp_path):
    data = batches(8, WIDTH)
    found = sensitivity(prepared_with(Planted().eval(), quantplug.get_quantizer("xnnpack"), data), data)
    lines = str(found).splitlines()
    assert "blocks.1.layer" in lines[3]
    assert f"{found.rows[0].share:.1%}" in lines[3]
    assert f"together {found.decibels:.1f} dB" in lines[-1]
    assert Sensitivity.from_json(found.to_json()) == found
    assert found.plot(tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["noise.png"]
    with pytest.raises(ArtefactError, match="no folder"):
        found.plot(tmp_path / "missing" / "noise.png")
    for text in ("{", "{}", '{"rows": [1], "noise": 1}', found.to_json().replace('"share"', '"shares"')):
        with pytest.raises(ArtefactError, match="The text is no sensitivity"):
            Sensitivity.from_json(text)


def test_bad_input_is_a_sentence_and_changes_nothing():
    model, data = Planted().eval(), batches(4, WIDTH)
    exported = torch.export.export(model, (data[0],)).module()
    with pytest.raises(ModelError, match="sensitivity takes a prepared model"):
        sensitivity(exported, data)
    with pytest.raises(ModelError, match="takes an exported graph module, found Planted"):
        sensitivity(model, data)  # type: ignore[arg-type]
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    with pytest.raises(CalibrationError, match="have seen no data"):
        sensitivity(prepared, data)
    quantplug.calibrate(prepared, data, progress=False)
    before = everything(prepared)
    with pytest.raises(CalibrationError, match="sensitivity takes 1 or more batches, and the loader yielded none"):
        sensitivity(prepared, [])
    with pytest.raises(CalibrationError, match="batch 1 has NaN or infinity"):
        sensitivity(prepared, [data[0], data[0] * float("nan")])
    with pytest.raises(CalibrationError, match="found 0"):
        sensitivity(prepared, data, samples=0)
    trained = quantplug.prepare_qat_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    with pytest.raises(ModelError, match="with which weights and biases train"):
        sensitivity(trained, data)
    assert same(before, everything(prepared))
    decided = nn.Sequential(nn.Linear(WIDTH, 4), nn.Flatten()).eval()
    decided.forward = lambda x: decided[0](x).argmax(1)  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="the model returns none"):
        sensitivity(prepared_with(decided, quantplug.get_quantizer("x86"), data), data)
    silent = nn.Linear(WIDTH, 4).eval()
    nn.init.zeros_(silent.bias)
    prepared = prepared_with(silent, quantplug.get_quantizer("x86"), data)
    with pytest.raises(CalibrationError, match="all zero"):
        sensitivity(prepared, [data[0] * 0])
