"""State of prepared models: saved and loaded in the middle of calibration, by names that say what is observed."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.qdq.format import differences

WEIGHT = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0)


class Linears(Quantizer):
    """Quantizes some linear layers by number."""

    def __init__(self, observer: Any, numbers: tuple[int, ...] = (0, 1)) -> None:
        self.act = QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)
        self.numbers = numbers

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        linears = [n for n in model.graph.nodes if n.target is torch.ops.aten.linear.default]
        for number in self.numbers:
            x, weight, _ = linears[number].args
            linears[number].meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({x: self.act, weight: WEIGHT}, self.act)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


def exported() -> fx.GraphModule:
    torch.manual_seed(0)
    return torch.export.export(Mlp().eval(), (torch.randn(2, 4),)).module()


@pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver])
def test_calibration_goes_on_after_a_load(observer: Any) -> None:
    batches = [torch.randn(2, 4) * k for k in (1, 2, 3, 4)]
    whole, half, rest = (prepare_pt2e(exported(), Linears(observer)) for _ in range(3))
    for batch in batches:
        whole(batch)
    for batch in batches[:2]:
        half(batch)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    rest.load_state_dict(torch.load(file))
    for batch in batches[2:]:
        rest(batch)
    assert differences(convert_pt2e(whole), convert_pt2e(rest)) == []


def test_a_load_into_other_annotations_is_refused() -> None:
    """torchao numbers its observers: the same load succeeds there and puts the ranges on other tensors."""
    one, other = (prepare_pt2e(exported(), Linears(MinMaxObserver, (number,))) for number in (0, 1))
    one(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="activation_post_process_x"):
        other.load_state_dict(one.state_dict())


def test_keys_name_the_observed_tensors() -> None:
    prepared = prepare_pt2e(exported(), Linears(MinMaxObserver))
    observed = {k.split(".")[0] for k in prepared.state_dict() if k.startswith("activation_post_process_")}
    assert observed == {
        f"activation_post_process_{tensor}"
        for tensor in ("x", "one_weight", "linear", "relu", "two_weight", "linear_1")
    }


def test_a_converted_model_loads_its_own_state() -> None:
    models = []
    for scale in (1.0, 5.0):
        prepared = prepare_pt2e(exported(), Linears(MinMaxObserver))
        prepared(torch.randn(2, 4) * scale)
        models.append(convert_pt2e(prepared))
    models[1].load_state_dict(models[0].state_dict())
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
