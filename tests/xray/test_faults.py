"""Faults planted into graphs of real models are named by layer and kind; sound models are not accused."""

import inspect

import pytest
import torch
from models import exported, observed
from planted_faults import PLANTS, clean, net, planted
from torch import nn

import quantplug
from quantplug.core.report import faults
from quantplug.core.report.layer_errors import measure_layers

FAMILIES = ("residual", "depthwise", "transformer", "mlp")
TARGETS = ("xnnpack", "x86")
CASES = [(name, backend) for name in PLANTS for backend in TARGETS]


def named_first(found):
    first = found.costliest()[0]
    return first.node, first.fault


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_the_planted_layer_is_named_first_and_its_fault_by_its_kind(name, backend):
    plant = PLANTS[name]
    floats, converted, x = planted(plant, backend)
    found = quantplug.inspect(floats, converted, [x])
    node, kind = named_first(found)
    assert kind == plant.kind
    assert node in (plant.layer, *plant.also)
    guilty = {plant.layer, *plant.also}
    assert {layer.node for layer in found.faults} <= guilty, "an innocent layer is accused"
    assert found.costliest()[0].remedy
    assert kind in found.costliest()[0].says


def test_at_least_twenty_kinds_of_damage_in_four_families_are_planted():
    assert len(PLANTS) >= 20
    assert {plant.net for plant in PLANTS.values()} == set(FAMILIES)
    kinds = {getattr(faults, name) for name in dir(faults) if name.isupper() and not name.startswith("_")}
    assert kinds - {plant.kind for plant in PLANTS.values()} == {faults.OTHER, faults.KERNEL, faults.NOT_FINITE}


@pytest.mark.few(3)
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_model_accuses_nobody(family, backend):
    floats, converted = clean(family, backend)
    found = quantplug.inspect(floats, converted, [net(family)[1]])
    assert found.faults == ()
    assert found.decibels() > 35
    assert all(layer.own["reference"] is not None for layer in found.layers)


@pytest.mark.parametrize("share", [0.05, 1e-4], ids=["some steps are left", "all are zero"])
def test_channels_below_the_smallest_scale_are_no_fault_of_the_graph(share):
    """As batch norms of trained models leave them: such channels are rounded as the config asks, by 2**-12."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    model[1].weight.data[5] = share
    x = torch.randn(8, 3, 12, 12)
    for _ in range(2):
        artefact = quantplug.quantize(model, (x,), "xnnpack", [x])
        assert quantplug.inspect(model, artefact, [x]).faults == ()


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8_per_tensor", "int8_dynamic", "int8_weight_only", "int4_weight_only"])
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_config_is_a_fault(family, backend, config):
    floats, converted = clean(family, backend, config)
    assert faults.faults(measure_layers(floats, converted, [(net(family)[1],)])) == {}


@pytest.mark.slow
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_strict_export_has_the_same_layers_with_the_same_figures(family, backend):
    x = net(family)[1]
    loose, strict = (
        measure_layers(*clean(family, backend, strict=strict), [(x,)]) for strict in (False, True)
    )  # fmt: skip
    assert faults.faults(strict) == {}
    assert [layer.piece.root.name for layer in strict.layers] == [layer.piece.root.name for layer in loose.layers]
    assert [layer.own for layer in strict.layers] == pytest.approx([layer.own for layer in loose.layers], rel=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["residual", "depthwise", "transformer"])
def test_tails_of_new_data_are_no_fault(family):
    floats, converted = clean(family, "xnnpack")
    x = net(family)[1]
    found = quantplug.inspect(floats, converted, [torch.randn_like(x) for _ in range(4)])
    assert max(layer.saturated for layer in found.layers) > 0.001
    assert found.faults == ()


def test_a_value_beyond_a_range_is_no_fault():
    """Of a few numbers one beyond a range is a large share, and tells nothing of the range."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8).clamp(-1, 1)
    converted = quantplug.convert_pt2e(observed(model, quantplug.get_quantizer("x86"), x))
    x[0, 0] = 1.5
    found = quantplug.inspect(model, converted, [x])
    assert found.layer("input_1").saturated == 1 / x.numel()
    assert found.faults == ()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANTS)
def test_what_is_advised_against_a_fault_is_code_that_runs_and_covers_the_layer(name):
    plant = PLANTS[name]
    floats, converted, x = planted(plant, "x86")
    model, _ = net(plant.net)
    quantizer = quantplug.get_quantizer("x86").set_global(plant.config)
    prepared = observed(model, quantplug.get_quantizer("x86"), x)
    code = quantplug.inspect(floats, converted, [x]).costliest()[0].remedy
    exec(code, {"quantplug": quantplug, "quantizer": quantizer, "prepared": prepared, "batches": [x]})
    # A scope that covers nothing is an error in the quantizer's strict mode.
    quantplug.prepare_pt2e(exported(model, x), quantizer)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*quantizes none")
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("family", ["residual", "transformer"])
def test_what_is_advised_for_sound_layers_calls_what_there_is(family, backend, monkeypatch):
    floats, converted = clean(family, backend)
    x = net(family)[1]
    # XNNPACK's artefacts take seconds; x86's tell of layers that stay float, too.
    layers = quantplug.inspect(
        floats, converted, [x], backend=backend if backend == "x86" else None, times=False
    ).layers
    for name in ("quantize", "tune"):
        monkeypatch.setattr(quantplug, name, inspect.signature(getattr(quantplug, name)).bind, raising=False)
    quantizer = quantplug.get_quantizer(backend).set_global("int8")
    given = {
        "quantplug": quantplug,
        "quantizer": quantizer,
        "model": None,
        "example_inputs": (x,),
        "batches": [x],
        "torch": torch,
    }
    for code in {code for layer in layers for code in (layer.remedy, layer.slow_remedy)}:
        exec(code, given)
    quantplug.prepare_pt2e(floats, quantizer)


def test_leaving_the_costliest_layer_float_gains_what_was_said():
    """The decibels that a layer costs are those that the output gains without its rounding."""
    floats, converted = clean("mlp", "x86")
    model, x = net("mlp")
    before = quantplug.inspect(floats, converted, [x])
    costly = before.costliest()[0]
    quantizer = quantplug.get_quantizer("x86").set_global("int8").set_module_name(costly.module_path, None)
    after = quantplug.inspect(model, quantplug.convert_pt2e(observed(model, quantizer, x)), [x])
    # The float layer gives away neither its weight nor the rounding in front of it.
    assert after.decibels() - before.decibels() > before.gain(costly.node) - 0.5


def test_what_is_advised_of_a_layer_that_others_read_in_integers_gains_what_was_said():
    """Its readers round what it yields though it is float itself, so that they are named too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.SiLU(), nn.Conv2d(16, 4, 3)).eval()
    model[2].weight.data[0] *= 60
    x = torch.randn(8, 3, 12, 12)
    for _ in range(2):
        quantizer = quantplug.get_quantizer("xnnpack").set_global("int8")
        before = quantplug.inspect(model, quantplug.convert_pt2e(observed(model, quantizer, x)), [x])
        costly = next(layer for layer in before.by_noise() if "with what reads it" in layer.says)
        exec(costly.remedy, {"quantizer": quantizer})
        after = quantplug.inspect(model, quantplug.convert_pt2e(observed(model, quantizer, x)), [x])
        assert before.gain(costly.node) > 1
        assert after.decibels() - before.decibels() > before.gain(costly.node) - 0.5


def test_a_layer_costs_what_its_readers_in_integers_lose():
    """A norm behind a sum is read by a layer in integers, and in float by the next sum, which keeps all of it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    model, x = nn.Sequential(layer, nn.Linear(64, 5)).eval(), torch.randn(16, 16, 64)
    quantizer = quantplug.get_quantizer("x86").set_global("int8")
    before = quantplug.inspect(model, quantplug.convert_pt2e(observed(model, quantizer, x)), [x])
    (norm,) = (layer for layer in before.layers if layer.module_path.endswith("norm1"))
    quantizer = quantizer.set_module_name("0.linear1", None)
    after = quantplug.inspect(model, quantplug.convert_pt2e(observed(model, quantizer, x)), [x])
    gained = after.decibels() - before.decibels()
    assert 0 < before.gain(norm.node) < gained + 0.2
