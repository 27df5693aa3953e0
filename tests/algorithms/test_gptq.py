"""GPTQ: weights whose integers keep more of a layer's result, over any quantizer and down to the file."""

import copy
import pickle

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    get_symmetric_quantization_config as executorch_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import settled
from torch import nn
from torchao.quantization.pt2e.quantizer import QuantizationSpec
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import quantplug
from quantplug.algorithms import gptq
from quantplug.algorithms.gptq import GPTQ
from quantplug.algorithms.rounding import target_of
from quantplug.core.errors import CalibrationError, ConfigError, ModelError
from quantplug.core.graph.facts import attribute, observer_of
from quantplug.core.observers import observer
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.xnnpack import XNNPACKQuantizer as OurXNNPACKQuantizer


def correlated(*shape, seed=0):
    """Returns inputs whose channels go together, as those of real layers do."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(shape[1], shape[1], generator=torch.Generator().manual_seed(7)) / shape[1] ** 0.5
    mix = mix + torch.ones_like(mix) / 2
    return torch.einsum("bc...,cd->bd...", torch.randn(*shape, generator=generator), mix).contiguous()


class Mixed(nn.Module):
    """Every kind of layer whose weight is rounded: plain, grouped, depthwise, dilated, over one dimension, linear."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Conv2d(8, 16, 3, padding=1, padding_mode="zeros")
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16, padding="same", dilation=2)
        self.grouped = nn.Conv2d(16, 16, (3, 2), groups=4, stride=2)
        self.rows = nn.Conv1d(16, 12, 3)
        self.linear = nn.Linear(12, 32)
        self.last = nn.Linear(32, 5)

    def forward(self, x):
        x = self.grouped(torch.relu(self.depthwise(torch.relu(self.plain(x))))).flatten(2)
        return self.last(torch.relu(self.linear(self.rows(x).mean(2))))


def low_bits(name, per_channel, bits=4):
    """Returns the x86 config with weights of few bits: its kernels store them as bytes."""
    base = quantplug.get_x86_quantization_config()
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    axis = 0 if per_channel else None
    low = -(2 ** (bits - 1))
    weight = QuantizationSpec(torch.int8, observer(name, per_channel), low, -low - 1, scheme, axis)
    return type(base)(base.input_activation, base.output_activation, weight, base.bias)


def prepared_mixed(quantizer, batches):
    exported = torch.export.export(Mixed().eval(), (batches[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    quantplug.calibrate(prepared, batches, progress=False)
    return exported, prepared


def weights_in(converted):
    """Returns by layer, or look-up in a table, the dequantized weight of a converted graph."""
    found = {}
    for node in converted.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and any(kind in name for kind in ("conv", "linear", "embedding")):
            values = node.all_input_nodes["embedding" not in name]
            if values.op != "call_function":  # a float table
                continue
            args = [attribute(converted, str(a.target)) if isinstance(a, torch.fx.Node) else a for a in values.args]
            found[node.name] = values.target(*args, **values.kwargs)
    return found


BATCHES = [correlated(8, 8, 9, 9, seed=seed) for seed in range(3)]


@pytest.mark.filterwarnings("ignore:Backend 'x86' stores weights in 8 bits")
@pytest.mark.few(1)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_every_kind_of_layer_gets_integers_that_keep_more_and_convert_stores_just_them(per_channel, name):
    quantizer = quantplug.get_quantizer("x86").set_global(low_bits(name, per_channel))
    exported, prepared = prepared_mixed(quantizer, BATCHES)
    nearest = quantplug.convert_pt2e(prepared)
    before = {key: value.clone() for key, value in exported.state_dict().items()}
    found = GPTQ().apply(prepared, BATCHES)
    assert len(found) == 6
    assert found.left == {}
    assert all(layer.after >= layer.before for layer in found.values())
    assert sum(layer.after > layer.before + 1 for layer in found.values()) >= 5, str(found)
    converted = quantplug.convert_pt2e(prepared)
    for node, weight in weights_in(converted).items():
        call = next(n for n in prepared.graph.nodes if n.name == node).args[1]
        assert torch.equal(weight, attribute(prepared, call.args[0].target))
    fresh = [correlated(8, 8, 9, 9, seed=seed) for seed in range(10, 14)]
    wanted = torch.cat([exported(x) for x in fresh])
    gain = sqnr(torch.cat([converted(x) for x in fresh]), wanted) - sqnr(torch.cat([nearest(x) for x in fresh]), wanted)
    assert gain > 2
    assert all(torch.equal(value, exported.state_dict()[key]) for key, value in before.items())


@pytest.mark.filterwarnings("ignore:Backend 'x86' stores weights in 8 bits")
@pytest.mark.parametrize("batched", [True, False])
def test_a_layers_error_is_what_its_result_really_lacks(batched):
    """The decibels are told of one layer by products of its inputs; here they are measured on its results."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(8, 6, 3, groups=2, stride=2, padding=1).eval(), correlated(16, 8, 19, 19)
    x = x if batched else x[0]
    quantizer = quantplug.get_quantizer("x86").set_global(low_bits("minmax", per_channel=True, bits=3))
    exported = torch.export.export(layer, (x,)).module()
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    quantplug.calibrate(prepared, [x], progress=False)

    def level():
        weight = weights_in(quantplug.convert_pt2e(prepared))["conv2d"]
        kept = nn.functional.conv2d(x, weight, None, 2, 1, 1, 2)
        return sqnr(kept, nn.functional.conv2d(x, layer.weight, None, 2, 1, 1, 2))

    before = level()
    found = GPTQ().apply(prepared, [x])["conv2d"]
    assert found.before == pytest.approx(before, abs=0.05)
    assert found.after == pytest.approx(level(), abs=0.05)
    assert found.after > before + 1


@pytest.mark.filterwarnings("ignore:Backend 'x86' stores weights in 8 bits")
@pytest.mark.parametrize("config", ["int4_dynamic_groups", "per channel", "per tensor"])
def test_scales_and_integers_fitted_to_each_other_keep_more_than_gptq_alone(config):
    """On inputs that the weights were not rounded on; wide enough for blocks of scales."""
    backend = "x86" if config.startswith("per") else "xnnpack"
    chosen = low_bits("minmax", config == "per channel") if backend == "x86" else config
    model, data, fresh = perceptron(), [correlated(256, 64, seed=0)], correlated(256, 64, seed=9)
    exported = torch.export.export(model, (data[0],)).module()
    levels = []
    for sweeps in (0, 3):
        prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer(backend).set_global(chosen))
        quantplug.calibrate(prepared, data, progress=False)
        GPTQ(sweeps=sweeps).apply(prepared, data)
        weights = weights_in(quantplug.convert_pt2e(prepared))
        levels.append(sqnr(fresh @ weights["linear"].T, fresh @ model[0].weight.T))
    assert levels[1] > levels[0] + 0.15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Backend 'x86' stores weights in 8 bits")
def test_a_layer_makes_up_for_what_rounding_changed_before_it(monkeypatch):
    """On inputs that nothing was rounded on; without it each layer keeps to a float weight that reads other numbers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    data, fresh = [correlated(16, 8, 9, 9, seed=seed) for seed in range(8)], correlated(16, 8, 9, 9, seed=50)
    model = settled(nn.Sequential(*layers), torch.cat(data))
    exported, levels = torch.export.export(model, (data[0],)).module(), []
    for makes_up in (False, True):
        if not makes_up:
            monkeypatch.setattr(gptq, "target_of", lambda matrix, *_: matrix)
        prepared = quantplug.prepare_pt2e(
            exported, quantplug.get_quantizer("x86").set_global(low_bits("minmax", per_channel=True, bits=3))
        )
        quantplug.calibrate(prepared, data, progress=False)
        GPTQ().apply(prepared, data)
        levels.append(sqnr(quantplug.convert_pt2e(prepared)(fresh), model(fresh)))
        monkeypatch.undo()
    assert levels[1] > levels[0] + 0.5


@pytest.mark.parametrize("samples", [8, 32, 128])
def test_chance_is_not_made_up_for(samples):
    """What changed has nothing to do with what is read now: no step helps, though of few samples one seems to."""
    columns, errors = 24, torch.zeros(2)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        now, change, matrix = (
            torch.randn(*shape, generator=generator)
            for shape in ((2, samples, columns), (2, samples, columns), (1, 4, columns))
        )
        target = target_of(matrix, (now.mT @ now)[:, None], (change.mT @ now)[:, None], 0.01)
        fresh, changed = torch.randn(2, 500, columns, generator=generator)
        wanted = (fresh + changed) @ matrix[0].T
        errors += torch.stack([(fresh @ weight[0].T - wanted).square().mean() for weight in (matrix, target)])
    assert errors[1] < errors[0] * 1.05


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 24)),
    rows=st.integers(1, 40),
    bits=st.integers(2, 8),
    per_channel=st.booleans(),
    seed=st.integers(0, 2**16),
)
@pytest.mark.filterwarnings("ignore:Backend 'x86' stores weights in 8 bits")
def test_no_layer_is_further_from_float_than_rounding_to_nearest_leaves_it(shape, rows, bits, per_channel, seed):
    """Also of fewer inputs than columns, of columns that are never read, and of weights of zero."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(shape[1], shape[0], bias=False).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(shape, generator=generator))
        layer.weight[0] *= seed % 2
    x = torch.randn(rows, shape[1], generator=generator)
    x[:, :: 1 + seed % 5] *= seed % 3
    x[0, 0] = 1.0
    quantizer = quantplug.get_quantizer("x86").set_global(low_bits("minmax", per_channel, bits))
    prepared = quantplug.prepare_pt2e(torch.export.export(layer, (x,)).module(), quantizer)
    quantplug.calibrate(prepared, [x], progress=False, dead="report", constant="report")
    wanted = layer(x)
    errors = []
    for algorithm in (None, GPTQ()):
        if algorithm:
            algorithm.apply(prepared, [x])
        weight = weights_in(quantplug.convert_pt2e(prepared))["linear"]
        errors.append(float((x @ weight.T - wanted).square().sum()))
    assert errors[1] <= errors[0] * (1 + 1e-4) + 1e-9


def perceptron(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "config"),
    [("x86", "int4_weight_only"), ("xnnpack", "int4_dynamic_groups"), ("xnnpack", "int4_dynamic")],
)
def test_the_file_that_a_user_gets_is_nearer_to_float(backend, config):
    model, data = perceptron(), [correlated(64, 64, seed=seed) for seed in range(2)]
    fresh = correlated(64, 64, seed=9)
    plain, rounded = (
        quantplug.quantize(model, (data[0],), backend, data, config, progress=False, recipe=recipe)
        for recipe in ((), [GPTQ()])
    )
    assert sqnr(rounded(fresh), model(fresh)) > sqnr(plain(fresh), model(fresh)) + 3
    assert rounded.nbytes == pytest.approx(plain.nbytes, rel=0.01)


def foreign(name):
    if name == "executorch":
        return XNNPACKQuantizer().set_global(executorch_config(is_per_channel=True, weight_qmin=-7, weight_qmax=7))
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["executorch", "torchao"])
def test_other_libraries_quantizers_gain_too(name):
    model, data = perceptron(), [correlated(64, 64, seed=seed) for seed in range(2)]
    exported = torch.export.export(model, (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, foreign(name))
    quantplug.calibrate(prepared, data, progress=False)
    found = GPTQ().apply(prepared, data)
    assert len(found) == 3
    assert all(layer.after > layer.before + 1 for layer in found.values())
    converted = quantplug.convert_pt2e(prepared)
    for node, weight in weights_in(converted).items():
        call = next(n for n in prepared.graph.nodes if n.name == node).args[1]
        assert torch.equal(weight, attribute(prepared, call.args[0].target))


class Tied(nn.Module):
    """A layer that is read twice, and a table that is the head of a model too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(24, 32), nn.Linear(32, 32), nn.Linear(32, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.layer(torch.relu(self.layer(self.table(tokens)))))


def test_a_weight_with_two_readers_stays_one_and_a_table_stays_as_it_is_beside_the_head():
    tokens = [torch.randint(24, (4, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    exported = torch.export.export(Tied().eval(), (tokens[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, OurXNNPACKQuantizer().set_global("int4_dynamic"))
    found = GPTQ().apply(prepared, tokens)
    assert set(found) == {"linear", "linear_1", "linear_2"}
    assert found["linear_2"].after > found["linear_2"].before + 1
    table = prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)[0].args[0]
    assert torch.equal(attribute(prepared, table.target), exported.state_dict()["table.weight"])
    converted = quantplug.convert_pt2e(prepared)
    weights = weights_in(converted)
    assert torch.equal(weights["linear"], weights["linear_1"])
    given = {n.name: attribute(prepared, n.args[1].args[0].target) for n in prepared.graph.nodes if n.name in found}
    assert given["linear"] is given["linear_1"]
    assert all(torch.equal(weights[name], value) for name, value in given.items())


def test_a_weight_whose_integers_are_read_elsewhere_is_left_with_the_reason():
    model = nn.Sequential(nn.Embedding(24, 24), nn.Linear(24, 24, bias=False)).eval()
    model[1].weight = model[0].weight
    tokens = torch.randint(24, (4, 6))
    quantizer = quantplug.get_quantizer("x86").set_global("int8_weight_only")
    prepared = quantplug.prepare_pt2e(torch.export.export(model, (tokens,)).module(), quantizer)
    found = GPTQ().apply(prepared, [tokens])
    assert "reads its weight too" in found.left["linear"]


class Words(nn.Module):
    """Rows of a table, and what it makes of them as a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(48, 64), nn.Linear(64, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        rows = self.table(tokens)
        return rows, self.head(rows)


def test_a_head_is_rounded_anew_beside_a_table_in_other_groups():
    """As of language models with tied weights, whose tables have wider groups; each has scales of its own."""
    tokens, model = torch.randint(48, (4, 16)), Words().eval()
    quantizer = OurXNNPACKQuantizer().set_global("int4_dynamic_groups")
    quantizer.set_operator_type("embedding", quantizer.backend.config("int4_groups", group_size=64))
    prepared = quantplug.prepare_pt2e(torch.export.export(model, (tokens,)).module(), quantizer)
    before = quantplug.convert_pt2e(prepared)
    found = GPTQ().apply(prepared, [tokens])
    assert found["linear"].after > found["linear"].before + 1
    after = quantplug.convert_pt2e(prepared)
    (rows, nearest), (our_rows, ours), (true_rows, true) = before(tokens), after(tokens), model(tokens)
    assert sqnr(our_rows, true_rows) > sqnr(rows, true_rows) + 0.4
    assert found["embedding"].after == pytest.approx(sqnr(weights_in(after)["embedding"], model.table.weight), abs=0.01)
    assert sqnr(ours, true) > sqnr(nearest, true) + 0.5


def test_scales_stay_whatever_is_calibrated_or_copied_afterwards():
    model, data = perceptron(), [correlated(64, 64, seed=seed) for seed in range(2)]
    exported = torch.export.export(model, (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, OurXNNPACKQuantizer().set_global("int4_dynamic_groups"))
    GPTQ().apply(prepared, data)
    wanted = weights_in(quantplug.convert_pt2e(prepared))
    prepared(data[0] * 100)
    copied = copy.deepcopy(prepared)
    for graph in (prepared, copied):
        found = weights_in(quantplug.convert_pt2e(graph))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    call = next(n for n in prepared.graph.nodes if n.name == "linear").args[1]
    frozen = observer_of(call)
    again = pickle.loads(pickle.dumps(frozen))
    assert all(map(torch.equal, again.calculate_qparams(), frozen.calculate_qparams()))


def test_bad_input_is_a_sentence_and_changes_nothing():
    model, data = perceptron(), [correlated(64, 64)]
    exported = torch.export.export(model, (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, OurXNNPACKQuantizer().set_global("int4_dynamic"))
    before = {name: value.clone() for name, value in prepared.named_parameters()}
    with pytest.raises(CalibrationError, match="GPTQ takes 1 or more batches, and the loader yielded none"):
        GPTQ().apply(prepared, [])
    with pytest.raises(CalibrationError, match="NaN or infinity in what 'linear'"):
        GPTQ().apply(prepared, [data[0] * float("nan")])
    with pytest.raises(CalibrationError, match="expected"):
        GPTQ().apply(prepared, [data[0][:, :3]])
    with pytest.raises(ConfigError, match="positive damping, found -1"):
        GPTQ(damping=-1)
    with pytest.raises(ConfigError, match="sweeps from 0 on, found -1"):
        GPTQ(sweeps=-1)
    with pytest.raises(CalibrationError, match="found 0"):
        GPTQ(samples=0).apply(prepared, data)
    with pytest.raises(ModelError, match="GPTQ takes a prepared model"):
        GPTQ().apply(exported, data)
    trained = quantplug.prepare_qat_pt2e(exported, OurXNNPACKQuantizer().set_global("int8_dynamic"))
    with pytest.raises(ModelError, match="with which weights and biases train"):
        GPTQ().apply(trained, data)
    with pytest.raises(ConfigError, match="need calibration batches, found none"):
        quantplug.quantize(model, (data[0],), "xnnpack", config="int4_dynamic", recipe=[GPTQ()])
    assert all(torch.equal(value, before[name]) for name, value in prepared.named_parameters())


class Held(nn.Module):
    """A table that is no parameter."""

    table: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(24, 8))

    def forward(self, tokens):
        return self.layer(nn.functional.embedding(tokens, self.table))


def test_a_table_that_cannot_be_rounded_says_why():
    tokens = torch.randint(24, (4, 6))
    quantizer = quantplug.get_quantizer("x86").set_global("int8_weight_only")
    prepared = quantplug.prepare_pt2e(torch.export.export(Held().eval(), (tokens,)).module(), quantizer)
    found = GPTQ().apply(prepared, [tokens])
    assert {*found, *found.left} == {"linear", "embedding"}
    assert found.left["embedding"] == "its weight is no parameter"


def in_four_bits(model, tokens, *, table="int4_groups"):
    quantizer = OurXNNPACKQuantizer().set_global("int4_dynamic_groups").set_operator_type("embedding", table)
    return quantplug.prepare_pt2e(torch.export.export(model, (tokens,)).module(), quantizer)


def test_layers_make_up_for_the_rounding_of_a_table():
    """Rows that lie near a plane are rounded off it, which a layer behind them can undo in part."""
    torch.manual_seed(0)
    table, layer = nn.Embedding(96, 64), nn.Linear(64, 32)
    table.weight.data = torch.randn(96, 6) @ torch.randn(6, 64)
    model, given = nn.Sequential(table, layer).eval(), torch.randint(96, (8, 64)).split(2)
    tokens = given[0]
    aware, unaware = in_four_bits(model, tokens), in_four_bits(model, tokens, table=None)
    before = quantplug.convert_pt2e(aware)
    found = GPTQ().apply(aware, given)
    assert found["embedding"].after > found["embedding"].before + 0.5
    GPTQ().apply(unaware, given)
    after, other = quantplug.convert_pt2e(aware), quantplug.convert_pt2e(unaware)
    with torch.no_grad():
        wanted, rows = model(tokens), [graph(tokens) for graph in (before, after)]
        read = nn.functional.embedding(tokens, weights_in(after)["embedding"])
        mixed = nn.functional.linear(read, weights_in(other)["linear"], layer.bias)
    assert sqnr(rows[1], wanted) > sqnr(rows[0], wanted) + 1.5
    assert sqnr(rows[1], wanted) > sqnr(mixed, wanted) + 3


def test_each_look_up_in_a_table_reads_the_same_rounded_rows():
    tokens = torch.randint(48, (4, 16))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.layer = nn.Embedding(48, 64), nn.Linear(64, 32)

        def forward(self, tokens):
            return self.layer(self.table(tokens)) + self.layer(self.table(tokens.flip(1))).flip(1)

    prepared = in_four_bits(Twice().eval(), tokens)
    found = GPTQ().apply(prepared, [tokens])
    assert {"embedding", "embedding_1", "linear", "linear_1"} == set(found)
    converted = quantplug.convert_pt2e(prepared)
    weights = weights_in(converted)
    assert torch.equal(weights["embedding"], weights["embedding_1"])
    assert torch.allclose(converted(tokens), converted(tokens.flip(1)).flip(1), atol=1e-5)


class Outlier(nn.Module):
    """Two linear layers, with an activation between them that has an outlier or has none."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 8)
        self.register_buffer("outlier", torch.cat([torch.tensor([outlier]), torch.ones(31)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) * self.outlier)


@pytest.mark.parametrize(("outlier", "moves"), [(1e4, False), (1.0, True)])
def test_weights_of_many_bits_are_moved_where_the_outputs_gain(outlier, moves):
    """Behind an outlier a step of the activations hides what weights lose: outputs change by chance."""
    torch.manual_seed(1)
    data = [torch.randn(16, 32) @ torch.randn(32, 32).triu() for _ in range(3)]
    exported = torch.export.export(Outlier(outlier).eval(), (data[0],)).module()
    quantizer = quantplug.get_quantizer("xnnpack")
    if moves:
        quantizer.set_global(quantplug.get_symmetric_quantization_config(True, weight_qmin=-31, weight_qmax=31))
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    quantplug.calibrate(prepared, data, progress=False)
    before = {name: value.clone() for name, value in prepared.named_parameters()}
    found = GPTQ().apply(prepared, data)
    assert bool(found) == moves
    assert all("with weights rounded anew" in reason for reason in found.left.values())
    assert set(found.left) == (set() if moves else {"linear", "linear_1"})
    unmoved = all(torch.equal(value, before[name]) for name, value in prepared.named_parameters())
    assert unmoved != moves


def test_batches_that_come_twice_in_a_row_confirm_nothing():
    """Pieces of a text are like their neighbours: what one half of them asks for is held against the other half."""
    torch.manual_seed(3)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU()))).eval()
    batches = [torch.randn(20, 64) for _ in range(2)]
    found = []
    for loader in (batches, [batches[0], batches[0], batches[1], batches[1]]):
        exported = torch.export.export(model, (batches[0],)).module()
        ready = quantplug.prepare_pt2e(exported, OurXNNPACKQuantizer().set_global("int4_dynamic"))
        quantplug.calibrate(ready, loader, progress=False)
        GPTQ(samples=1000).apply(ready, loader)
        found.append(quantplug.convert_pt2e(ready)(batches[0]))
    assert torch.equal(*found)
