"""Quantizers that are written with `get_source_partitions` work on default exports."""

import itertools
import operator
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import quantplug
from quantplug.annotators.presets import activation_spec
from quantplug.core.graph.sources import add_sources
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers.xnnpack import XNNPACK


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear, self.relu = nn.Conv2d(3, 3, 1), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.relu(self.conv(x)) + x)
        y = torch.relu(torch.add(y, x)) / 2
        y -= 1
        y = F.conv2d(F.relu(y), self.conv.weight) * 2
        y = F.max_pool2d(F.linear(self.linear(y), self.linear.weight), 2)
        y = F.gelu(torch.cat([y, y], 1)).relu()
        return torch.flatten(torch.matmul(y, y), 1)


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def sources(strict: bool) -> list[object]:
    module = torch.export.export(Everything(), (X,), strict=strict).module()
    add_sources(module)
    operators = [n for n in module.graph.nodes if n.op == "call_function"]
    return [n.meta["source_fn_stack"][-1][1] for n in operators]


def test_what_is_written_on_a_default_export_is_what_strict_export_records() -> None:
    assert sources(strict=False) == sources(strict=True)
    assert len(sources(strict=False)) > 15


FUNCTIONS = (
    *(F.sigmoid, F.tanh, F.relu, F.gelu, F.silu, F.hardsigmoid, F.logsigmoid, F.softplus, F.elu, F.hardswish),
    *(torch.sigmoid, torch.tanh, torch.relu, torch.special.expit, torch.linalg.norm, torch.fft.fft, torch.abs),
)


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_is_found_by_itself(function: Callable[[Tensor], Tensor], strict: bool) -> None:
    module = torch.export.export(Call(function), (X,), strict=strict).module()
    add_sources(module)
    assert list(get_source_partitions(module.graph, [function])) == [function]


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (lambda x: F.softmax(x, -1), F.softmax),
        (lambda x: F.threshold(x, 0.0, 0.0), F.threshold),
        (lambda x: F.pad(x, (1, 1)), F.pad),
        (lambda x: torch.softmax(x, -1), torch.softmax),
        (lambda x: torch.add(x, x), torch.add),
        (lambda x: x + x, operator.add),
    ],
)
def test_a_function_with_options_is_found_by_itself(function: Callable[[Tensor], Tensor], asked: object) -> None:
    module = torch.export.export(Call(function), (X,)).module()
    add_sources(module)
    assert list(get_source_partitions(module.graph, [asked])) == [asked]


class Reflected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = 1 - x + 1 / (x + 3) + 2**x + x**2
        return F.normalize(y // 2 + x[0], dim=1) + F.normalize(y, dim=1)


def test_reflected_operators_and_calls_of_many_operators_are_partitions_as_on_strict_export() -> None:
    wanted = [operator.sub, operator.truediv, operator.pow, operator.floordiv, operator.getitem, F.normalize]
    sizes = []
    for strict in (False, True):
        module = torch.export.export(Reflected(), (X,), strict=strict).module()
        add_sources(module)
        found = get_source_partitions(module.graph, wanted)
        sizes.append({kind: sorted(len(part.nodes) for part in parts) for kind, parts in found.items()})
    assert sizes[0] == sizes[1]
    assert set(sizes[0]) == set(wanted)


def test_each_call_of_a_module_is_a_partition_of_its_own() -> None:
    module = torch.export.export(Everything(), (X,)).module()
    assert len(get_source_partitions(module.graph, [nn.ReLU]).get(nn.ReLU, [])) < 2
    add_sources(module)
    assert len(get_source_partitions(module.graph, [nn.ReLU])[nn.ReLU]) == 2
    (convolution,) = get_source_partitions(module.graph, [nn.Conv2d])[nn.Conv2d]
    assert "conv_bias" in {node.name for node in convolution.params}


class TutorialQuantizer(Quantizer):
    """The sample of "How to Write a Quantizer for PyTorch 2 Export Quantization", as it stands there."""

    def annotate(self, gm: fx.GraphModule) -> fx.GraphModule:
        act_quantization_spec = activation_spec(observer="minmax")
        add_partitions = get_source_partitions(gm.graph, [operator.add, torch.add])
        for add_partition in itertools.chain(*add_partitions.values()):
            add_node = add_partition.output_nodes[0]
            input_act_qspec = act_quantization_spec
            output_act_qspec = act_quantization_spec
            input_qspec_map = {}
            input_act0 = add_node.args[0]
            input_qspec_map[input_act0] = input_act_qspec
            input_act1 = add_node.args[1]
            input_qspec_map[input_act1] = input_act_qspec
            add_node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map=input_qspec_map,
                output_qspec=output_act_qspec,
                _annotated=True,
            )
        return gm

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Sums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x + y, y)


@pytest.mark.few(1)
@pytest.mark.parametrize("strict", [False, True])
def test_q06_the_tutorials_source_partitions_quantize_a_program_of_a_default_export(strict: bool) -> None:
    x, y = X, X.flip(0) * 2
    module = torch.export.export(Sums(), (x, y), strict=strict).module()
    prepared = quantplug.prepare_pt2e(module, TutorialQuantizer())
    prepared(x, y)
    prepared(y, x)
    converted = quantplug.convert_pt2e(prepared)
    assert sum("add" in str(n.target) and "dequantize" in str(n.args) for n in converted.graph.nodes) == 2
    program = XNNPACK.lower(converted, (x, y))
    for a, b in ((x, y), (y, x)):
        assert float(sqnr(program(a, b), converted(a, b))) > 40
        assert 25 < float(sqnr(program(a, b), a + b + b)) < 70
    assert not any("source_fn_stack" in n.meta for n in module.graph.nodes if not strict)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.two, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.one(x)))
        return self.head(self.relu(self.two(y) + y).mean((2, 3)))


def test_torchaos_x86_quantizer_works_on_a_default_export() -> None:
    outputs = []
    for strict in (False, True):
        module = torch.export.export(Small().eval(), (X,), strict=strict).module()
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
        prepared = quantplug.prepare_pt2e(module, quantizer)
        prepared(X)
        converted = quantplug.convert_pt2e(prepared)
        assert sum("quantize_per_tensor" in str(n.target) for n in converted.graph.nodes) > 4
        outputs.append(converted(X))
    assert torch.equal(*outputs)


class FindsNothing(TutorialQuantizer):
    def annotate(self, gm: fx.GraphModule) -> fx.GraphModule:
        assert not get_source_partitions(gm.graph, [nn.LSTM])
        return gm


@pytest.mark.parametrize("prepare", [quantplug.prepare_pt2e, quantplug.prepare_qat_pt2e])
@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (FindsNothing, r"FindsNothing quantizes none of the model's 2 operators \(none of them has an annotation\)"),
        (
            lambda: quantplug.get_quantizer("xnnpack", strict=False),
            r"XNNPACKQuantizer quantizes none of the model's 2 operators \('\w+' .*: .+\); change",
        ),
    ],
    ids=["foreign", "ours"],
)
def test_a_quantizer_that_takes_nothing_is_told_in_one_sentence(prepare, quantizer, said: str) -> None:
    class Curves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(torch.cumsum(x, 1))

    module = torch.export.export(Curves(), (X,)).module()
    with pytest.warns(UserWarning, match=said) as caught:
        prepare(module, quantizer())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    if isinstance(quantizer(), quantplug.BackendQuantizer):
        with pytest.raises(quantplug.QuantplugError, match=r"of the model's 2 operators .* its scopes\.$") as error:
            prepare(module, quantplug.get_quantizer("xnnpack"))
        assert "\n" not in str(error.value)


def test_where_a_rule_was_near_its_reason_is_told_and_nothing_is_refused() -> None:
    module = torch.export.export(nn.Conv2d(4, 4, 3).eval(), (torch.randn(1, 4, 8, 8),)).module()
    quantizer = quantplug.get_quantizer("x86").set_global("int8_dynamic")
    with pytest.warns(UserWarning, match=r"model.s 1 operators \('conv2d' .*36 products .* too few") as caught:
        prepared = quantplug.prepare_pt2e(module, quantizer)
    assert len(caught) == 1
    assert not quantplug.explain(prepared).quantized


def test_what_is_meant_to_stay_float_is_not_told() -> None:
    module = torch.export.export(Small().eval(), (X,)).module()
    composed = quantplug.ComposableQuantizer([quantplug.get_quantizer("x86").set_global(None)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for quantizer in (quantplug.get_quantizer("xnnpack").set_global(None), composed):
            assert torch.equal(quantplug.prepare_pt2e(module, quantizer)(X), module(X))
        quantplug.prepare_pt2e(module, quantplug.get_quantizer("xnnpack"))
