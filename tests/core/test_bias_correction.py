"""Bias correction: the means of quantized layers are those of the float layers."""

import copy

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    get_symmetric_quantization_config as executorch_config,
)
from torch import nn
from torchao.quantization.pt2e.quantizer import QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

import quantplug
from quantplug.core.calibration import bias_correction
from quantplug.core.calibration.bias_correction import correct_biases
from quantplug.core.errors import CalibrationError, ConfigError, ModelError
from quantplug.core.graph.meta import FLOATS
from quantplug.core.observers import observer
from quantplug.core.report.compare import node_values
from quantplug.core.specs.levels import sqnr


def low_bit_config():
    base = quantplug.get_x86_quantization_config()
    weight = QuantizationSpec(torch.int8, observer("minmax"), -4, 3, torch.per_tensor_symmetric)
    return type(base)(base.input_activation, base.output_activation, weight, base.bias)


def calibrated(seed=0):
    """Returns a float graph, the same prepared with 3-bit weights and calibrated, and the data."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    ).eval()
    data = [torch.rand(16, 3, 8, 8) for _ in range(3)]
    exported = torch.export.export(model, (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(low_bit_config()))
    quantplug.calibrate(prepared, data, progress=False)
    return exported, prepared, data


def parameters(prepared):
    return {name: value.detach().clone() for name, value in prepared.named_parameters()}


def test_means_of_every_layer_are_those_of_float_and_the_output_is_closer():
    exported, prepared, data = calibrated()
    before = quantplug.convert_pt2e(prepared)
    weights = copy.deepcopy(exported.state_dict())
    changes = correct_biases(prepared, data)
    after = quantplug.convert_pt2e(prepared)
    assert len(changes) == 3
    assert all(change > 0 for change in changes.values())
    expected = torch.cat([exported(batch) for batch in data])
    assert (
        sqnr(torch.cat([after(b) for b in data]), expected) > sqnr(torch.cat([before(b) for b in data]), expected) + 2
    )
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in weights.items())
    for name in changes:
        found, wanted = ([node_values(g, (b,), {name})[name] for b in data] for g in (after, exported))
        kept = [d for d in range(found[0].dim()) if d != 1]
        drift = torch.cat(found).mean(kept) - torch.cat(wanted).mean(kept)
        scale = torch.cat(wanted).std()
        # The biases themselves move values across a rounding threshold here and there.
        assert drift.abs().max() < 0.02 * scale, name


class Residual(nn.Module):
    """Blocks one behind the other, whose shifts the sums hand on."""

    def __init__(self, blocks=8, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        for first, second in zip(self.first, self.second, strict=True):
            x = (second(first(x).relu()) + x).relu()
        return self.last(x.mean((2, 3)))


@pytest.mark.slow
def test_layers_in_front_of_residual_sums_give_the_sums_their_means(monkeypatch):
    """Compared by itself a layer leaves the shift of what it is added to: deep residual networks got worse."""
    model, batches = Residual().eval(), [torch.rand(16, 3, 8, 8) for _ in range(8)]
    exported = torch.export.export(model, (batches[0],)).module()
    sums = [node.name for node in exported.graph.nodes if str(node.target).startswith("aten.add")]

    def drift():
        prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(low_bit_config()))
        quantplug.calibrate(prepared, batches, progress=False)
        assert len(correct_biases(prepared, batches)) == 18
        graphs, shifts = (quantplug.convert_pt2e(prepared), exported), []
        for name in sums:
            means = [
                torch.cat([node_values(g, (b,), {name})[name] for b in batches[:4]]).mean((0, 2, 3)) for g in graphs
            ]
            shifts.append((means[0] - means[1]).abs().max())
        return float(torch.stack(shifts).mean())

    at_the_sums = drift()
    monkeypatch.setattr(bias_correction, "_sums", lambda *given: {})
    assert at_the_sums < 0.5 * drift()


def test_quantize_corrects_biases_by_an_option():
    exported, _, data = calibrated()
    plain, corrected = (
        quantplug.quantize(exported, (data[0],), "x86", data, low_bit_config(), progress=False, correct_bias=correct)
        for correct in (False, True)
    )
    expected = exported(data[0])
    assert sqnr(corrected(data[0]), expected) > sqnr(plain(data[0]), expected) + 2
    for once, words in ((iter(data), "a list_iterator, which can be read only once"), (None, "found none")):
        with pytest.raises(ConfigError, match=words):
            quantplug.quantize(exported, (data[0],), "x86", once, "int8_weight_only", correct_bias=True)


class Folded(Quantizer):
    """One of a user's own: whatever torchao's takes, without its word about batch norms."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def annotate(self, model):
        return self.inner.annotate(model)

    def validate(self, model):
        self.inner.validate(model)


def of_torchao():
    return X86InductorQuantizer().set_global(low_bit_config())


def of_executorch():
    config = executorch_config(is_per_channel=True, weight_qmin=-4, weight_qmax=3)
    return XNNPACKQuantizer().set_global(config)


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        pytest.param(of_torchao, "x86", id="torchao"),
        pytest.param(of_executorch, "xnnpack", id="executorch", marks=pytest.mark.slow),
        pytest.param(lambda: Folded(of_torchao()), "x86", id="own", marks=pytest.mark.slow),
    ],
)
def test_quantizers_of_others_gain_on_images_that_the_correction_did_not_see(make, backend):
    model = Residual(blocks=2).eval()
    data, unseen = ([torch.rand(16, 3, 8, 8) for _ in range(4)] for _ in range(2))
    exported = torch.export.export(model, (data[0],)).module()
    programs = [
        quantplug.quantize(exported, (data[0],), backend, data, quantizer=make(), progress=False, correct_bias=corrects)
        for corrects in (False, True)
    ]
    kept = [sqnr(torch.cat([p(x) for x in unseen]), torch.cat([exported(x) for x in unseen])) for p in programs]
    assert kept[1] > kept[0] + 2


def test_samples_and_errors():
    _, prepared, data = calibrated()
    weights = parameters(prepared)
    for few, words in (([], "yielded none"), (data[:1], "yielded 1 ")):
        with pytest.raises(CalibrationError, match=words):
            correct_biases(prepared, few)
    with pytest.raises(CalibrationError, match="has shape"):
        correct_biases(prepared, [*data, data[0][:, :, :4]])
    for wrong in (0, 2.5, True):
        with pytest.raises(CalibrationError, match="takes a number of samples from 1 on"):
            correct_biases(prepared, data, wrong)  # type: ignore[arg-type]
    assert all(torch.equal(value, prepared.get_parameter(name)) for name, value in weights.items())
    few = correct_biases(copy.deepcopy(prepared), data, samples=32)
    assert dict(few) == pytest.approx(dict(correct_biases(copy.deepcopy(prepared), data[:2])), rel=1e-4)
    assert dict(few) != pytest.approx(dict(correct_biases(prepared, data)), rel=1e-3)


def test_batches_are_counted_by_their_samples():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.rand(64, 8)
    exported = torch.export.export(model, (x[:1],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(low_bit_config()))
    quantplug.calibrate(prepared, x.split(1), progress=False)
    read = []

    def loader():
        for batch in x.split(1):
            read.append(batch)
            yield {"pair": batch}

    correct_biases(prepared, loader(), 24, inputs=lambda batch: batch["pair"])
    assert len(read) == 24


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_correction_that_held_back_batches_do_not_confirm_is_not_kept(spoiled):
    """Half of the batches comes from elsewhere, so that the means of the other half say nothing about it."""
    _, prepared, data = calibrated()
    batches = [data[0], data[1]]
    batches[spoiled] = 30 * torch.rand(16, 3, 8, 8) - 25
    before = parameters(prepared)
    found = correct_biases(prepared, batches)
    assert not found
    assert found.after == found.before
    assert str(found).startswith("No bias was corrected: held-back batches keep")
    assert all(torch.equal(value, prepared.get_parameter(name)) for name, value in before.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_few_samples_confirm_only_what_holds_for_others(seed):
    """Of batches of one, three were held back, and a gain by chance was kept: up to half a decibel was lost."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, 16), *map(Skip, blocks), nn.Linear(16, 4)).eval()
    data, unseen = torch.randn(64, 8).split(1), torch.randn(256, 8)
    shapes = ({0: torch.export.Dim("batch", max=512)},)
    exported = torch.export.export(model, (torch.randn(2, 8),), dynamic_shapes=shapes).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack").set_global("int8_per_tensor"))
    quantplug.calibrate(prepared, data, progress=False)
    before = sqnr(quantplug.convert_pt2e(prepared)(unseen), exported(unseen))
    correct_biases(prepared, data, samples=6)
    assert sqnr(quantplug.convert_pt2e(prepared)(unseen), exported(unseen)) > before - 0.05


class Skip(nn.Module):
    """Adds what it is given to what its part makes of it."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return x + self.part(x)


def test_quantize_says_that_no_correction_was_kept_and_takes_a_number_of_samples():
    exported, _, data = calibrated()
    with pytest.warns(UserWarning, match="No bias was corrected"):
        quantplug.quantize(
            exported, (data[0],), "x86", [data[0], 30 * data[1] - 25], low_bit_config(), progress=False, correct_bias=32
        )


class Counting(nn.Module):
    """Counts its calls and adds the count to what it returns."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.last(torch.relu(self.first(x))) + self.calls


def test_a_state_does_not_advance():
    torch.manual_seed(0)
    data = [torch.rand(16, 8) for _ in range(4)]
    exported = torch.export.export(Counting().eval(), (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(low_bit_config()))
    quantplug.calibrate(prepared, data, progress=False)
    before = float(prepared.get_buffer("calls"))
    found = correct_biases(prepared, data)
    assert float(prepared.get_buffer("calls")) == before
    assert found.after >= found.before


class TwoUses(nn.Module):
    """A layer that is called twice, and one without a bias."""

    def __init__(self):
        super().__init__()
        self.shared, self.bare = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.bare(self.shared(self.shared(x)))


def test_layers_without_a_bias_of_their_own_are_left_alone():
    torch.manual_seed(0)
    data = [torch.randn(4, 8) for _ in range(2)]
    exported = torch.export.export(TwoUses().eval(), (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(low_bit_config()))
    quantplug.calibrate(prepared, data, progress=False)
    assert correct_biases(prepared, data) == {}


def test_a_model_that_trains_is_refused_in_a_sentence():
    """Its biases learn by themselves, and its batch norms go when it is converted."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(), torch.randn(2, 3, 8, 8)
    prepared = quantplug.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), quantplug.get_quantizer("x86"))
    prepared(x)
    with pytest.raises(
        ModelError, match=r"fake quantize '.*', with which weights and biases train by themselves; leave"
    ):
        correct_biases(prepared, [x, x])


def test_behind_rounded_weights_the_means_are_those_of_the_float_model():
    """What GPTQ rounded is no float model: to keep its means would leave the shift that the rounding made."""
    exported, prepared, data = calibrated()
    quantplug.GPTQ(scales=False, sweeps=0).apply(prepared, data)
    rounded = quantplug.convert_pt2e(prepared)
    found = correct_biases(prepared, data)
    wanted, before = (torch.cat([graph(batch) for batch in data[2:]]) for graph in (exported, rounded))
    assert found.before == pytest.approx(sqnr(before, wanted), abs=1e-3)
    after = quantplug.convert_pt2e(prepared)
    assert found.after == pytest.approx(sqnr(torch.cat([after(batch) for batch in data[2:]]), wanted), abs=0.3)
    assert len(after.meta.keys() & {FLOATS.key}) == 0
