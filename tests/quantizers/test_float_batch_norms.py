"""A convolution that a scope leaves float keeps its batch norm: nothing that is float is rewritten."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig, Quantizer

import quantplug
from quantplug import ComposableQuantizer, Region, get_quantizer
from quantplug.core.annotation.plan import plan_of
from quantplug.core.graph.meta import FOLDINGS

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
NOTHING = QuantizationConfig(None, None, None, None)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.ConvTranspose2d(8, 4, 3, padding=1), nn.BatchNorm2d(4)
        for norm in (self.bn1, self.bn2):
            norm.running_mean.uniform_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))


# Each leaves the first convolution float and quantizes the second, or the other way round.
FIRST: dict[str, Callable[[], Quantizer]] = {
    "module name": lambda: get_quantizer("xnnpack").set_global("int8").set_module_name("conv1", None),
    "default global": lambda: get_quantizer("xnnpack").set_module_name("conv1", None),
    "module type": lambda: get_quantizer("xnnpack").set_global("int8").set_module_type(nn.Conv2d, None),
    "operator type": lambda: get_quantizer("xnnpack").set_global("int8").set_operator_type("conv2d", None),
    "filter": lambda: get_quantizer("xnnpack").set_filter(lambda n: "conv2d" in str(n.target), None),
    "empty config": lambda: get_quantizer("xnnpack").set_global("int8").set_module_name("conv1", NOTHING),
    "only the second": lambda: get_quantizer("xnnpack").set_module_name("conv2", "int8"),
    "composed": lambda: ComposableQuantizer([get_quantizer("xnnpack").set_module_name("conv1", None)]),
    "region": lambda: ComposableQuantizer().add(get_quantizer("xnnpack"), Region(module="conv2")),
}


def exported(training: bool = False, strict: bool = False) -> fx.GraphModule:
    return torch.export.export(Two().train(training), (X,), strict=strict).module()


def norms(model: fx.GraphModule) -> list[fx.Node]:
    return [node for node in model.graph.nodes if "batch_norm" in str(node.target)]


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", FIRST)
def test_a_float_convolution_keeps_its_batch_norm(name: str, strict: bool) -> None:
    prepared = quantplug.prepare_pt2e(exported(strict=strict), FIRST[name]())
    (norm,) = norms(prepared)
    assert norm.args[0].args[1].target == "conv1.weight"
    assert torch.equal(prepared.get_parameter("conv1.weight"), Two().conv1.weight)
    first, second = FOLDINGS.get(prepared) or ()
    assert not first.folded
    assert second.folded
    assert "conv2d" in first.reason or "region" in first.reason
    prepared(X)
    converted = quantplug.convert_pt2e(prepared)
    assert len(norms(converted)) == 1
    assert "conv1.weight" in dict(converted.named_parameters())


NORM: dict[str, Callable[[], Quantizer]] = {
    "module name": lambda: get_quantizer("xnnpack").set_module_name("bn1", None),
    "module type": lambda: get_quantizer("x86").set_global("int8").set_module_type("BatchNorm2d", None),
    "operator type": lambda: get_quantizer("xnnpack").set_operator_type("batch_norm", None),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NORM)
def test_a_batch_norm_that_a_scope_names_stays_behind_its_quantized_convolution(name: str, training: bool) -> None:
    prepare = quantplug.prepare_qat_pt2e if training else quantplug.prepare_pt2e
    prepared = prepare(exported(training=training), NORM[name]())
    first, *_ = FOLDINGS.get(prepared, ())
    assert not first.folded
    prepared(X)
    converted = quantplug.convert_pt2e(prepared)
    assert norms(converted)
    assert "conv1.weight" not in dict(converted.named_parameters()), "the convolution is quantized"


# A region without the batch norm holds no whole piece of training.
@pytest.mark.parametrize("name", [name for name in FIRST if name != "region"])
def test_in_training_too(name: str) -> None:
    prepared = quantplug.prepare_qat_pt2e(exported(training=True), FIRST[name]())
    prepared(X).sum().backward()
    converted = quantplug.convert_pt2e(prepared.eval())
    (norm,) = norms(converted)
    assert norm.args[0].args[1].target == "conv1.weight"
    assert torch.equal(converted.get_parameter("conv1.weight"), Two().conv1.weight)


def test_all_float_is_the_model_as_it_was() -> None:
    module = exported()
    prepared = quantplug.prepare_pt2e(module, get_quantizer("xnnpack").set_global(None))
    assert torch.equal(prepared(X), module(X))
    assert len(norms(prepared)) == 2


def test_what_one_quantizer_leaves_float_another_may_fold() -> None:
    first = get_quantizer("xnnpack").set_module_name("conv1", None)
    prepared = quantplug.prepare_pt2e(exported(), ComposableQuantizer([first, get_quantizer("x86")]))
    assert norms(prepared) == []


def test_a_plan_keeps_the_same_batch_norms() -> None:
    prepared = quantplug.prepare_pt2e(exported(), FIRST["module name"]())
    replayed = quantplug.prepare_pt2e(exported(), plan_of(prepared).quantizer())
    assert len(norms(replayed)) == 1


@pytest.mark.slow
def test_a_mixed_program_runs(tmp_path) -> None:
    quantizer = FIRST["operator type"]()
    prepared = quantplug.prepare_pt2e(exported(), quantizer)
    prepared(X)
    converted = quantplug.convert_pt2e(prepared)
    program = quantizer.backend.lower(converted, (X,))
    for x in (X, torch.flip(X, (0,)) / 2):
        torch.testing.assert_close(program(x), converted(x), rtol=0, atol=0.05)


def test_the_counting_of_batches_is_no_operator_of_the_report() -> None:
    quantizer = get_quantizer("xnnpack").set_global("int8")
    prepared = quantplug.prepare_qat_pt2e(exported(training=True), quantizer)
    rows = quantplug.explain(prepared).rows
    assert [row.node for row in rows if "relu" in row.node] == ["relu"]
    assert not any("add_.Tensor" in str(row) for row in rows)
