"""Weights of four bits with one scale an output channel on XNNPACK: where its kernels compute what the graph does."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import MappingType, PerGroup
from torchao.quantization.pt2e._affine_quantization import AffineQuantizedMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import quantplug
from quantplug.core.specs.levels import sqnr


def layers(channels):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, channels), nn.ReLU(), nn.Linear(channels, 6)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3, 13, 33])
@pytest.mark.parametrize("config", ["int4_dynamic", "int4_weight_only"])
def test_odd_input_channels_compute_what_their_graph_does(channels, config):
    """With scales of run time they were at -3 to 2 dB from the second row on, with one row at times right."""
    example = torch.randn(5, 8)
    artefact = quantplug.quantize(layers(channels), (example,), "xnnpack", config=config, progress=False)
    for x in (example, torch.randn(5, 8)):
        assert sqnr(artefact(x), artefact.reference(x)) > 100
    second = artefact.report.row("linear_1")
    assert second.quantized == (config == "int4_weight_only")
    if not second.quantized:
        wanted = f"its {channels} input channels are odd, the kernel reads weights of four bits in pairs"
        assert second.reason.endswith(wanted)


@pytest.mark.slow
def test_odd_channels_of_an_open_batch_are_right_for_every_batch():
    batch = torch.export.Dim("batch", min=1, max=16)
    artefact = quantplug.quantize(
        layers(13), (torch.randn(3, 8),), "xnnpack", config="int4_dynamic", dynamic_shapes=({0: batch},), progress=False
    )
    for rows in (1, 2, 16):
        x = torch.randn(rows, 8)
        assert sqnr(artefact(x), artefact.reference(x)) > 100


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int4_dynamic", "int4_weight_only"])
def test_a_single_weight_of_four_bits_stays_float_with_the_reason(config):
    """The runtime ended the process on loading it."""
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1), nn.Linear(1, 4)).eval()
    artefact = quantplug.quantize(model, (torch.randn(3, 8),), "xnnpack", config=config, progress=False)
    assert artefact.report.row("linear_1").reason.endswith(
        "its weight is a single number, which the runtime does not read in four bits"
    )
    x = torch.randn(3, 8)
    assert sqnr(artefact(x), artefact.reference(x)) > 100


@pytest.mark.slow
def test_weights_of_four_bits_beside_calibrated_inputs_are_told():
    """Their kernels store 8 bits; the file was as large as that of int8, and nobody was told."""
    backend = quantplug.get_quantizer("xnnpack").backend
    config = replace(backend.config("int8"), weight=backend.config("int4_dynamic").weight)
    x = torch.randn(5, 8)
    with pytest.warns(
        UserWarning, match="Backend 'xnnpack' stores weights in 8 bits: the config's fewer bits for 'linear'"
    ):
        artefact = quantplug.quantize(nn.Linear(8, 6).eval(), (x,), "xnnpack", [x], config, progress=False)
    assert sqnr(artefact(x), artefact.reference(x)) > 40
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name in ("int8", "int4_dynamic", "int4_weight_only", "int4_dynamic_groups"):
            exported = torch.export.export(nn.Linear(32, 6).eval(), (torch.randn(5, 32),)).module()
            quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack").set_global(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_dynamic", "int4_weight_only"])
def test_weights_of_a_range_within_four_bits_are_stored_in_four(name, tmp_path):
    """Weights of -7..7 took 8 bits in the file, and the report said 4."""
    backend = quantplug.get_quantizer("xnnpack").backend
    config = backend.config(name)
    config = replace(config, weight=replace(config.weight, quant_min=-7))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 33)).eval()
    x = torch.randn(5, 256)
    artefact = quantplug.quantize(model, (x,), "xnnpack", config=config, progress=False)
    floats = 4 * sum(value.numel() for value in model.parameters())
    assert artefact.save(tmp_path / "model.pte").stat().st_size < 0.16 * floats
    for inputs in (x, torch.randn(5, 256)):
        assert sqnr(artefact(inputs), artefact.reference(inputs)) > 100


def in_groups(name, low, high):
    """A config with weights in groups of a range of the user's own, as torchao's observer writes them."""
    config = quantplug.get_quantizer("xnnpack").backend.config(name)
    made = AffineQuantizedMinMaxObserver.with_args(
        mapping_type=MappingType.SYMMETRIC,
        target_dtype=torch.int8,
        granularity=PerGroup(32),
        quant_min=low,
        quant_max=high,
        eps=torch.finfo(torch.float32).eps,
    )
    return replace(config, weight=QuantizationSpec(torch.int8, made, low, high))


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high"), [(-7, 7), (-4, 3)])
def test_weights_in_groups_of_a_range_within_four_bits_lower(low, high, tmp_path):
    """Lowering ended in "Only 4b group quantization is supported"."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval(), torch.randn(5, 256)
    config = in_groups("int4_dynamic_groups", low, high)
    artefact = quantplug.quantize(model, (x,), "xnnpack", config=config, progress=False)
    floats = 4 * sum(value.numel() for value in model.parameters())
    assert artefact.save(tmp_path / "model.pte").stat().st_size < 0.17 * floats
    for inputs in (x, torch.randn(5, 256)):
        assert sqnr(artefact(inputs), artefact.reference(inputs)) > 40


@pytest.mark.parametrize(
    ("name", "low", "high", "reason"),
    [
        ("int4_dynamic_groups", -127, 127, "its weights are -127..127, and the kernel"),
        ("int4_weight_only", -8, 7, "whose kernel takes inputs quantized at run time"),
        ("int8", -8, 7, "whose kernel takes inputs quantized at run time"),
    ],
)
def test_weights_in_groups_that_no_kernel_reads_stay_float_with_the_reason(name, low, high, reason):
    """Lowering failed on a missing operator of the runtime or on an assertion."""
    model = torch.export.export(nn.Linear(64, 32).eval(), (torch.randn(3, 64),)).module()
    quantizer = quantplug.get_quantizer("xnnpack").set_global(in_groups(name, low, high))
    row = quantplug.explain(quantplug.prepare_pt2e(model, quantizer)).row("linear")
    assert not row.quantized
    assert reason in row.reason
