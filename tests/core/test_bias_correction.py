"""Bias correction: the means of quantized layers are those of the float layers."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import quantplug
from quantplug.core.bias_correction import correct_biases
from quantplug.core.compare import node_values, sqnr
from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.observers import observer


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


def test_limit_and_errors():
    _, prepared, data = calibrated()
    with pytest.raises(CalibrationError, match="yielded no batch"):
        correct_biases(prepared, [])
    with pytest.raises(CalibrationError, match="has shape"):
        correct_biases(prepared, [data[0][:, :, :4]])
    few = correct_biases(copy.deepcopy(prepared), data, limit=1)
    assert few == correct_biases(copy.deepcopy(prepared), data[:1])
    assert few != correct_biases(prepared, data)


class TwoUses(nn.Module):
    """A layer that is called twice, and one without a bias."""

    def __init__(self):
        super().__init__()
        self.shared, self.bare = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.bare(self.shared(self.shared(x)))


def test_layers_without_a_bias_of_their_own_are_left_alone():
    torch.manual_seed(0)
    data = [torch.randn(4, 8)]
    exported = torch.export.export(TwoUses().eval(), (data[0],)).module()
    prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(low_bit_config()))
    quantplug.calibrate(prepared, data, progress=False)
    assert correct_biases(prepared, data) == {}
