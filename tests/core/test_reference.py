"""The format of the reference quantized model, and comparing two of them."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import quantize_pt2e as peer

from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.qdq.format import differences, is_reference_quantized, reference_defects
from quantplug.core.qdq.nodes import QUANTIZE_OPS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x)).flatten(1))


@pytest.fixture(scope="module", params=["static", "dynamic"])
def quantizer(request: pytest.FixtureRequest) -> XNNPACKQuantizer:
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=request.param == "dynamic")
    return XNNPACKQuantizer().set_global(config)


def converted(quantizer: Any, flow: Any = None) -> fx.GraphModule:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4)
    prepare, convert = flow or (prepare_pt2e, convert_pt2e)
    prepared = prepare(torch.export.export(Net().eval(), (x,)).module(), quantizer)
    prepared(x)
    return convert(prepared)


@pytest.mark.slow
def test_r04_ours_and_the_peers_models_are_of_the_format(quantizer: XNNPACKQuantizer) -> None:
    ours = converted(quantizer)
    assert reference_defects(ours) == []
    assert is_reference_quantized(ours)
    theirs = converted(quantizer, (peer.prepare_pt2e, peer.convert_pt2e))
    assert is_reference_quantized(theirs)
    assert differences(ours, theirs) == []


def test_r04_float_and_prepared_models_are_not() -> None:
    module = torch.export.export(Net().eval(), (torch.randn(2, 2, 4, 4),)).module()
    assert not is_reference_quantized(module)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    assert any("observes" in defect for defect in reference_defects(prepare_pt2e(module, quantizer)))


@pytest.fixture(scope="module")
def static_model() -> fx.GraphModule:
    return converted(XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True)))


def edited(model: fx.GraphModule, change: Any) -> list[str]:
    model = copy.deepcopy(model)
    change(model, next(n for n in model.graph.nodes if n.target in QUANTIZE_OPS))
    return reference_defects(model)


def test_r04_each_broken_rule_is_found(static_model: fx.GraphModule) -> None:
    def scale(model: fx.GraphModule, q: fx.Node) -> None:
        q.update_arg(1, -1.0)

    def zero_point(model: fx.GraphModule, q: fx.Node) -> None:
        q.update_arg(2, 500)

    def reader(model: fx.GraphModule, q: fx.Node) -> None:
        with model.graph.inserting_after(q):
            model.graph.call_function(torch.ops.aten.abs.default, (q,))

    def weights(model: fx.GraphModule, q: fx.Node) -> None:
        model.get_buffer("fc_weight_quantized").fill_(-128)

    def channels(model: fx.GraphModule, q: fx.Node) -> None:
        model.register_buffer("fc_weight_scale", torch.ones(3))

    found = {change.__name__: edited(static_model, change) for change in (scale, zero_point, reader, weights, channels)}
    words = {
        "scale": "finite and positive",
        "zero_point": "zero point outside",
        "reader": "no dequantize",
        "weights": "leaves the range",
        "channels": "3 scales for 4 channels",
    }
    for name, defects in found.items():
        assert any(words[name] in defect for defect in defects), (name, defects)


def test_differences_see_one_changed_parameter(static_model: fx.GraphModule) -> None:
    other = copy.deepcopy(static_model)
    assert differences(static_model, other) == []
    with torch.no_grad():
        other.get_buffer("fc_weight_quantized")[0, 0] += 1
    assert differences(static_model, other) != []
