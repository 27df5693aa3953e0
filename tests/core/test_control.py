"""Training through control flow: gradients reach the submodels, fake quantizes see values, convert has operators."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.experimental import control_flow
from torch import Tensor, fx, nn
from torch._higher_order_ops import scan, while_loop
from torchao.quantization.pt2e import FakeQuantize, MovingAverageMinMaxObserver, disable_fake_quant
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.graph.control import IN_PYTHON
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_qat_pt2e
from quantplug.core.specs.levels import sqnr

FAKE = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
ACT = QuantizationSpec(torch.int8, FAKE, -128, 127, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(torch.int8, FAKE, -127, 127, torch.per_tensor_symmetric)


class Linears(Quantizer):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            x, weight, _ = node.args
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({x: ACT, weight: WEIGHT}, ACT, _annotated=True)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


class Branches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: F.relu(self.one(v)), lambda v: self.two(v), (x,))


class Mapped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return control_flow.map(lambda row: self.two(F.relu(self.one(row))), x)


class Looped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def step(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.tanh(self.two(self.one(value)))

        return while_loop(lambda count, value: count < 3, step, (torch.tensor(0), x))[1]


class Scanned(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            following = torch.tanh(self.one(row) + self.two(carry))
            return following, following.clone()

        last, steps = scan(step, torch.zeros(2, 4), x)
        return steps + last


MODELS = (Branches, Mapped, Looped, Scanned)


def trained(model: type[nn.Module], x: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the export and the model prepared for training from it."""
    torch.manual_seed(0)
    with torch.no_grad():  # export of a while_loop refuses gradients
        module = torch.export.export(model(), (x,)).module()
    return module, prepare_qat_pt2e(module, Linears())


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MODELS)
def test_training_reaches_the_layers_of_submodels(model: type[nn.Module]) -> None:
    x = torch.randn(3, 2, 4).abs()
    module, prepared = trained(model, x)
    floats = prepare_off(prepared)
    with torch.no_grad():
        torch.testing.assert_close(floats(x), module(x))
    before = {name: value.clone() for name, value in prepared.named_parameters()}
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for sign in (1, -1, 1, -1):
        optimizer.zero_grad()
        prepared(sign * x).square().mean().backward()
        optimizer.step()
    moved = {name: not torch.equal(value, before[name]) for name, value in prepared.named_parameters()}
    assert all(moved.values()), moved
    with torch.no_grad():
        converted = convert_pt2e(prepared.eval())
        assert any(n.target in IN_PYTHON for n in converted.graph.nodes)
        for sign in (1, -1):
            assert sqnr(converted(sign * x), prepared(sign * x)) > 20
        exported = torch.export.export(converted, (x,)).module()
        torch.testing.assert_close(exported(x), converted(x), rtol=0, atol=0)


def prepare_off(prepared: fx.GraphModule) -> Any:
    """Returns a copy that rounds nothing."""
    return copy.deepcopy(prepared).apply(disable_fake_quant)
