"""Layers whose sizes no kernel of XNNPACK takes run outside of it, with the reason, and compute what they should."""

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr

LAYERS = {
    "factors that are rounded": (nn.Upsample(scale_factor=1.5, mode="bilinear"), (1, 8, 7, 5), "are rounded"),
    "a factor that is rounded": (nn.Upsample(scale_factor=(2, 0.7), mode="bilinear"), (2, 8, 7, 5), "are rounded"),
    "much output padding": (
        nn.ConvTranspose2d(8, 8, 5, (2, 1), (0, 1), output_padding=(2, 0), dilation=3),
        (2, 8, 12, 5),
        "output padding [2, 0] is not less than its stride [2, 1]",
    ),
}


def outside(layer, shape, backend):
    torch.manual_seed(0)
    calls = [torch.randn(*shape) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(8, 8, 1), layer, nn.Conv2d(8, 8, 1)).eval()
    artefact = quantplug.quantize(model, (calls[0],), "xnnpack", calls, quantizer=backend, progress=False)
    for x in calls:
        assert sqnr(artefact(x), artefact.reference(x)) > 33  # one step here and there; 10 to 24 where XNNPACK takes it
    return artefact.program.ops[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_what_no_kernel_takes_runs_outside(name):
    layer, shape, reason = LAYERS[name]
    found = outside(layer, shape, None)
    assert found.placement == "portable"
    assert reason in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_lowering_sees_what_another_quantizer_annotated(name):
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    layer, shape, reason = LAYERS[name]
    found = outside(layer, shape, XNNPACKQuantizer().set_global(get_symmetric_quantization_config()))
    assert found.placement == "portable"
    assert reason in found.reason


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layer",
    [nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=True), nn.Upsample((9, 4), mode="bilinear")],
    ids=["aligned corners", "sizes"],
)
def test_resizing_by_ratios_of_sizes_runs_in_integers(layer):
    assert outside(layer, (1, 8, 7, 5), None).placement == "int8"
