"""Scales that are trained: the same integers, nearer to the float model's outputs, over any quantizer."""

import copy
import math

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    get_symmetric_quantization_config as executorch_config,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as torchao_convert
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationAnnotation, Quantizer

import quantplug
from quantplug.algorithms import kept, stretches, train_scales
from quantplug.algorithms import trainable as trainable_module
from quantplug.algorithms.train_scales import TrainScales
from quantplug.algorithms.trainable import Trainable
from quantplug.algorithms.weights import weights_of
from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.specs.levels import sqnr


class Language(nn.Module):
    """Tokens in, logits out; the table is the head too if it is tied."""

    def __init__(self, tied=False, width=64, words=96):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.table.weight.data.mul_(0.2)
        self.head.weight.data.mul_(3)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(nn.functional.gelu(up(norm(x).cumsum(1) / 4)))
        return self.head(self.norms[-1](x))


def texts(count=16, first=0):
    return [torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(first + n)) for n in range(count)]


def prepared_language(tied=False, config="int4_dynamic_groups", backend="xnnpack"):
    model = Language(tied).eval()
    exported = torch.export.export(model, (texts(1)[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer(backend).set_global(config))
    quantplug.calibrate(prepared, texts(), progress=False)
    return model, prepared


def distances(graph, model, batches=None):
    """Returns decibels and the divergence of the softmax on texts that nobody has seen."""
    batches = texts(16, 1000) if batches is None else batches
    with torch.no_grad():
        found, wanted = (torch.cat([run(ids) for ids in batches]) for run in (graph, model))
    one, other = (each.double().log_softmax(-1).reshape(-1, each.shape[-1]) for each in (found, wanted))
    return sqnr(found, wanted), float(nn.functional.kl_div(one, other, log_target=True, reduction="batchmean"))


def integers(converted):
    """Returns the tensors of integers that a converted graph holds."""
    return {name: value for name, value in converted.named_buffers() if value.dtype == torch.int8}


TRAINED = TrainScales(epochs=7, rate=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_outputs_on_new_texts_are_nearer_to_float(tied):
    model, prepared = prepared_language(tied)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    decibels, divergence = distances(quantplug.convert_pt2e(prepared), model)
    found = TRAINED.apply(prepared, texts())
    now, less = distances(quantplug.convert_pt2e(prepared), model)
    assert (len(found.scales), len(found.vectors)) == (5, 7)  # four biases, three norms' weights: their biases are 0
    assert "5 layers and 7 biases and norms" in str(found)
    assert now > decibels + 0.3
    assert less < 0.93 * divergence
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_gradients_are_those_of_the_model_that_convert_makes():
    """Of weights alone that are rounded: finite differences of the loss tell the slopes of scales and biases."""
    _, prepared = prepared_language(config="int4_weight_only", backend="x86")
    trainable = Trainable(prepared, weights_of(prepared)[0])
    (ids,) = texts(1)

    def loss():
        return trainable.result((ids,))[0].double().square().sum()

    loss().backward()
    for trained in trainable.parameters():
        direction, values = trained.grad.sign(), []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                trained.add_(direction, alpha=step)
                values.append(float(loss()))
                trained.sub_(direction, alpha=step)
        assert float((trained.grad * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-3, rel=0.02)


def test_no_weight_is_kept_for_the_way_back(monkeypatch):
    """A layer keeps what it multiplies for the gradient of its input: of all layers that would be a second model."""
    _, prepared = prepared_language()
    trainable = Trainable(prepared, weights_of(prepared)[0])
    sizes, kept = {each.start.numel() for each in trainable.scaled}, []
    pack = trainable._packed

    def packed(saved):
        kept.append(pack(saved))
        return kept[-1]

    monkeypatch.setattr(trainable, "_packed", packed)
    trainable.result((texts(1)[0],))[0].sum().backward()
    started = {each.start.untyped_storage().data_ptr() for each in trainable.scaled}
    tensors = [each for each in kept if isinstance(each, torch.Tensor)]
    assert not [each for each in tensors if each.numel() in sizes and each.untyped_storage().data_ptr() not in started]
    assert len(kept) - len(tensors) >= 5
    assert all(each.trained.grad.any() for each in trainable.scaled)


class Counting(nn.Module):
    """Counts its calls in a buffer, which the result depends on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
            self.calls.add_(1)
        return x * self.calls


def gradients(prepared, batch, monkeypatch):
    """Returns gradients of what is trained, how many bytes wait for them, and in how many stretches the graph is."""
    trainable, kept = Trainable(prepared, weights_of(prepared)[0]), {}
    pack = trainable._packed

    def packed(saved):
        found = pack(saved)
        if isinstance(found, torch.Tensor):
            kept[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        return found

    monkeypatch.setattr(trainable, "_packed", packed)
    trainable.result((batch,))[0].square().sum().backward()
    return [each.grad for each in trainable.parameters()], sum(kept.values()), len(trainable._stretches)


@pytest.mark.parametrize("kind", ["dynamic", "tied", "static"])
def test_what_is_computed_again_has_the_same_gradients_and_keeps_less(kind, monkeypatch):
    batch = rows(1)[0] if kind == "static" else texts(1)[0]
    prepared = prepared_perceptron()[1] if kind == "static" else prepared_language(tied=kind == "tied")[1]
    whole, kept, count = gradients(prepared, batch, monkeypatch)
    monkeypatch.setattr(stretches, "BUDGET", 2**11)
    again, less, more = gradients(prepared, batch, monkeypatch)
    assert count == 1
    assert more > 2
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    assert all(each.any() for each in again)
    assert less < 0.7 * kept


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest memory holds that an operator fills with floats, on the way back too."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            memory = found.untyped_storage()
            self.numbers = max(self.numbers, 0 if memory.data_ptr() in given else memory.nbytes() // found.itemsize)
        return found


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_large_head_is_never_there_whole_and_has_the_same_gradients(has_bias, monkeypatch):
    model = Language(words=960).eval()  # the head, 960 x 64, is larger than all else by far
    if has_bias:
        model.head = nn.Linear(64, 960)
    exported = torch.export.export(model, (texts(1)[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack").set_global("int4_dynamic_groups"))
    quantplug.calibrate(prepared, texts(2), progress=False)
    whole, _, _ = gradients(prepared, texts(1)[0], monkeypatch)
    monkeypatch.setattr(trainable_module, "_BLOCK", 100 * 64)
    trainable = Trainable(prepared, weights_of(prepared)[0])
    with Largest() as largest:
        found = trainable.result((texts(1)[0],))[0]
        found.square().sum().backward()
    assert largest.numbers == found.numel() < 960 * 64
    parts = [each.grad for each in trainable.parameters()]
    assert all((one - other).norm() < 1e-4 * one.norm() for one, other in zip(whole, parts, strict=True))
    assert all(each.any() for each in parts)
    assert all(parameter.grad is None for parameter in prepared.parameters())  # of the table of embeddings neither


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_is_trained_begins_as_convert_rounds(bits):
    """The greatest weight of a channel may be halfway between two integers."""
    _, prepared = prepared_perceptron(bits)
    trainable = Trainable(prepared, weights_of(prepared)[0])
    with torch.no_grad():
        assert torch.equal(trainable.result((rows(1)[0],))[0], torchao_convert(prepared)(rows(1)[0]))


def test_what_writes_its_buffers_is_computed_once(monkeypatch):
    monkeypatch.setattr(stretches, "BUDGET", 2**8)
    _, prepared = prepared_perceptron(4, Counting().eval())
    calls = prepared.calls.clone()
    found, _, count = gradients(prepared, rows(1)[0], monkeypatch)
    assert count == 1
    assert all(each.any() for each in found)
    assert torch.equal(prepared.calls, calls)
    assert TRAINED.apply(prepared, rows()).before is not None


def test_outputs_of_any_size_are_measured():
    """Such as boxes in pixels: their softmax is 0 almost everywhere."""
    model, prepared = prepared_perceptron(3, nn.Sequential(perceptron(), Scale(5000.0)).eval())
    _, divergence = distances(torchao_convert(copy.deepcopy(prepared)), model, rows()[7:])
    found = TRAINED.apply(prepared, rows())
    assert divergence > 1
    assert found.before.divergence == pytest.approx(divergence, rel=1e-4)


class Scale(nn.Module):
    """Multiplies by a number."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


def small(bits, per_channel=True):
    """Returns ExecuTorch's quantizer with weights of so many bits."""
    low = -(2 ** (bits - 1))
    config = executorch_config(is_per_channel=per_channel, weight_qmin=low, weight_qmax=-low - 1)
    return XNNPACKQuantizer().set_global(config)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def rows(count=8, first=0):
    return [torch.randn(16, 16, generator=torch.Generator().manual_seed(first + seed)) for seed in range(count)]


def prepared_perceptron(bits=3, model=None, prepare=torchao_prepare):
    model = perceptron() if model is None else model
    prepared = prepare(torch.export.export(model, (rows(1)[0],)).module(), small(bits))
    for batch in rows():
        prepared(batch)
    return model, prepared


@pytest.mark.slow
def test_behind_gptq_no_integer_changes_and_float_is_what_it_was_before(monkeypatch):
    monkeypatch.setattr(train_scales._Measured, "is_better_than", lambda *given: True)
    model, prepared = prepared_perceptron()
    quantplug.GPTQ(scales=False, sweeps=0).apply(prepared, rows())
    rounded = quantplug.convert_pt2e(prepared)
    found = TrainScales(epochs=14, rate=5e-3).apply(prepared, rows())
    trained = quantplug.convert_pt2e(prepared)
    # Without the weights of before, what GPTQ rounded would stand for float, and be nearer to it than it is.
    (before, divergence), (after, _) = (distances(graph, model, rows()[-1:]) for graph in (rounded, trained))
    assert found.before.decibels == pytest.approx(before, abs=1e-3)
    assert found.before.divergence == pytest.approx(divergence, rel=1e-3)
    assert found.after.decibels == pytest.approx(after, abs=1e-3)
    assert after != before
    ours, theirs = integers(trained), integers(rounded)
    assert len(ours) == 3
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
def test_over_executorchs_quantizer_and_torchaos_prepare_and_convert():
    model, prepared = prepared_perceptron()
    before = torchao_convert(copy.deepcopy(prepared))
    found = TrainScales(epochs=14, rate=5e-3).apply(prepared, rows())
    after = torchao_convert(prepared)
    assert len(found.scales) == 3
    wanted = torch.cat([model(x) for x in rows(8, 100)])
    decibels = [sqnr(torch.cat([graph(x) for x in rows(8, 100)]), wanted) for graph in (before, after)]
    assert decibels[1] > decibels[0] + 0.5


@pytest.mark.slow
def test_weights_of_eight_bits_are_left_and_said_so():
    _, prepared = prepared_perceptron(bits=8)
    found = TrainScales().apply(prepared, rows())
    assert not found.scales
    assert set(found.left.values()) == {"its weight has more than 5 bits"}
    assert str(found) == "No scale was trained: its weight has more than 5 bits."


def test_a_model_without_numbers_in_its_result_is_left_as_it_is():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = perceptron()

        def forward(self, x):
            return self.layers(x).argmax(-1)

    _, prepared = prepared_perceptron(model=Choosing().eval())
    found = TrainScales().apply(prepared, rows())
    assert set(found.left.values()) == {"the model returns no floats"}
    assert not found.scales


@pytest.mark.slow
def test_what_held_back_batches_do_not_confirm_is_not_kept():
    _, prepared = prepared_perceptron()
    state = {key: value.clone() for key, value in prepared.state_dict().items()}
    # One batch is seen, whose outputs are fitted at a rate that spoils all others.
    found = TrainScales(epochs=64, rate=0.2).apply(prepared, rows(2))
    assert not found.scales
    assert str(found).startswith("No trained scale was kept: held-back batches keep ")
    assert all(torch.equal(value, state[key]) for key, value in prepared.state_dict().items())


@pytest.mark.slow
def test_two_runs_give_the_same_bits_whatever_torchs_generator_and_gradients_say():
    states = []
    for seed in range(2):
        _, prepared = prepared_perceptron()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with torch.inference_mode() if seed else torch.no_grad():
            TrainScales(epochs=2, rate=5e-3).apply(prepared, rows())
        assert torch.equal(before, torch.get_rng_state())
        states.append(list(torchao_convert(prepared).state_dict().values()))
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@pytest.mark.slow
def test_a_run_that_ended_early_goes_on_and_ends_with_the_same_bits(tmp_path, monkeypatch):
    algorithm, path = TrainScales(epochs=2, rate=5e-3), tmp_path / "run"
    keeping = TrainScales(epochs=2, rate=5e-3, checkpoint=path)
    _, whole = prepared_perceptron()
    assert algorithm.apply(whole, rows()).scales
    monkeypatch.setattr(kept, "_PAUSE", 0)
    backward, calls = train_scales._backward, []

    def counted(loss):
        calls.append(loss)
        if len(calls) == 6:
            raise KeyboardInterrupt
        backward(loss)

    monkeypatch.setattr(train_scales, "_backward", counted)
    _, prepared = prepared_perceptron()
    state = {key: value.clone() for key, value in prepared.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        keeping.apply(prepared, rows())
    assert path.exists()
    assert all(torch.equal(value, state[key]) for key, value in prepared.state_dict().items())
    with pytest.raises(CalibrationError, match=r"was written for another model .*batches"):
        keeping.apply(prepared, rows(first=50))
    with pytest.raises(CalibrationError, match=r"was written for another model .*options"):
        TrainScales(epochs=3, rate=5e-3, checkpoint=path).apply(prepared, rows())
    with pytest.raises(CalibrationError, match=r"was written for another model .*options"):
        quantplug.GPTQ(checkpoint=path).apply(prepared, rows())
    keeping.apply(prepared, rows())
    assert len(calls) == 6 + 14 - 5  # of fourteen steps five were made
    assert not path.exists()
    ours, theirs = torchao_convert(prepared).state_dict(), torchao_convert(whole).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.slow
def test_batches_of_inference_mode_are_trained_on_as_others_are():
    found = []
    for mode in (False, True):
        with torch.inference_mode(mode):
            batches = [batch * 1 for batch in rows()]
        assert batches[0].is_inference() == mode
        _, prepared = prepared_perceptron(model=nn.Sequential(nn.LayerNorm(16), *perceptron()).eval())
        TrainScales(epochs=2, rate=5e-3).apply(prepared, batches)
        found.append(list(torchao_convert(prepared).state_dict().values()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class FixedScale(Quantizer):
    """Weights of linear layers in a scale that is given."""

    def annotate(self, model):
        fixed = FixedQParamsQuantizationSpec(torch.int8, 1 / 32, 0, -8, 7, torch.per_tensor_symmetric)
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                node.meta["quantization_annotation"] = QuantizationAnnotation({node.args[1]: fixed}, _annotated=True)
        return model

    def validate(self, model):
        pass


def test_a_scale_that_is_given_stays_behind_gptq_too():
    exported = torch.export.export(perceptron(), (rows(1)[0],)).module()
    prepared = torchao_prepare(exported, FixedScale())
    prepared(rows(1)[0])
    quantplug.GPTQ().apply(prepared, rows())
    found = TrainScales(epochs=2).apply(prepared, rows())
    assert not found.scales
    assert set(found.left.values()) == {"its scale is given"}


class Bare(nn.Module):
    """Ends in an operator that has no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = perceptron()

    def forward(self, x):
        return torch.ops.quantplug_tests.twice(self.layers(x))


@torch.library.custom_op("quantplug_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.slow
def test_what_cannot_be_trained_is_a_sentence_and_changes_nothing():
    _, prepared = prepared_perceptron()
    state = {key: value.clone() for key, value in prepared.state_dict().items()}
    bad = [*rows(3), torch.full((16, 16), math.nan)]
    with pytest.raises(CalibrationError, match="NaN or infinity in what the model returns; take the batch out"):
        TrainScales(epochs=1).apply(prepared, bad)
    with pytest.raises(CalibrationError, match="holds some of them back, takes 2 or more batches, and the loader"):
        TrainScales().apply(prepared, rows(1))
    assert all(torch.equal(value, state[key]) for key, value in prepared.state_dict().items())
    _, prepared = prepared_perceptron(model=Bare().eval())
    with pytest.raises(CalibrationError, match=r"an operator without a gradient .*twice.*; leave it out of the recipe"):
        TrainScales(epochs=1).apply(prepared, rows())
    with pytest.raises(ConfigError, match="a rate between 0 and 1, found 2; leave it out"):
        TrainScales(rate=2)
    with pytest.raises(ConfigError, match="a number of epochs from 1 on, found 0; leave it out"):
        TrainScales(epochs=0)
