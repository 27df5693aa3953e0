"""What prepare inserts, and what it leaves alone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import ConvertError, ModelError
from quantplug.core.graph.facts import is_observer, observer_of
from quantplug.core.graph.meta import CONFLICTS
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS, QUANTIZE_OPS

ACT = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0)


class Written(Quantizer):
    """Annotates each operator by a function from node to (input specs, output spec)."""

    def __init__(self, write: Callable[[fx.Node], tuple[dict[fx.Node, Any], Any] | None], sharing: bool = True) -> None:
        self.write, self.sharing = write, sharing

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            found = self.write(node) if node.op == "call_function" else None
            if found:
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(*found, self.sharing, True)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


def everything(node: fx.Node) -> tuple[dict[fx.Node, Any], Any]:
    return {n: WEIGHT if n.op == "get_attr" else ACT for n in node.all_input_nodes[:2]}, ACT


def exported(model: nn.Module, *inputs: Any, **options: Any) -> fx.GraphModule:
    return torch.export.export(model.eval(), inputs, **options).module()


def calls(model: fx.GraphModule) -> list[fx.Node]:
    return [n for n in model.graph.nodes if observer_of(n) is not None]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def test_b13_a_producer_and_its_consumer_share_one_observer() -> None:
    prepared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(everything))
    relu = next(n for n in prepared.graph.nodes if n.name == "relu")
    (observed,) = relu.users
    assert observer_of(observed) is not None
    assert [u.name for u in observed.users] == ["linear_1"]


def test_q10_implicit_sharing_can_be_turned_off() -> None:
    shared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(everything))
    apart = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(everything, sharing=False))
    assert len(calls(apart)) == len(calls(shared)) + 2


class Cats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.cat([self.one(x), self.two(x)], 1)
        return torch.cat([first, x], 1)


def shared_cat(node: fx.Node) -> tuple[dict[fx.Node, Any], Any] | None:
    if node.target is torch.ops.aten.conv1d.default:
        return {node.all_input_nodes[0]: ACT}, ACT
    first, *rest = node.all_input_nodes
    same = SharedQuantizationSpec((first, node))
    return {first: ACT, **dict.fromkeys(rest, same)}, same


def test_q09_sharing_is_transitive_over_two_concatenations() -> None:
    prepared = prepare_pt2e(exported(Cats(), torch.randn(1, 2, 3)), Written(shared_cat))
    assert len({id(observer_of(n)) for n in calls(prepared)}) == 1
    assert len({n.target for n in calls(prepared)}) == 1


def test_a_group_whose_first_member_only_refers_to_another_works() -> None:
    """torchao asserts: it looks the observer up before the point that has the spec was visited."""

    def write(node: fx.Node) -> Any:
        if node.name == "linear":
            return {}, SharedQuantizationSpec(next(n for n in node.graph.nodes if n.name == "linear_1"))
        return ({}, ACT) if node.name == "linear_1" else None

    prepared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(write))
    assert len({observer_of(n) for n in calls(prepared)}) == 1


def bias_spec(weight: fx.Node, node: fx.Node) -> DerivedQuantizationSpec:
    def derive(sources: list[Any]) -> tuple[Tensor, Tensor]:
        scales = [s.calculate_qparams()[0] for s in sources]
        scale = scales[0] * scales[1]
        return scale, torch.zeros_like(scale, dtype=torch.int32)

    points = [(node.args[0], node), (weight, node)]
    return DerivedQuantizationSpec(points, derive, torch.int32, qscheme=torch.per_channel_symmetric, ch_axis=0)


def derived(node: fx.Node) -> Any:
    if node.target is not torch.ops.aten.linear.default:
        return None
    x, weight, bias = node.all_input_nodes
    return {bias: bias_spec(weight, node), x: ACT, weight: WEIGHT}, ACT


def test_q12_a_bias_derives_its_scale_whatever_the_order_of_the_map() -> None:
    prepared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(derived))
    prepared(torch.randn(2, 4))
    converted = convert_pt2e(prepared)
    linear = next(n for n in converted.graph.nodes if n.name == "linear")
    x, weight, bias = linear.args
    state = converted.state_dict()
    weight_scale, bias_scale = state[weight.args[1].target], state[bias.args[1].target]
    torch.testing.assert_close(bias_scale, x.args[1] * weight_scale)
    assert state[bias.args[0].target].dtype == torch.int32


class TwoUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(100 * torch.relu(self.fc(x)))


def test_a_bias_of_two_calls_has_two_scales() -> None:
    """One tensor, two derivations: sharing them is wrong by the ratio of the activation scales."""
    x = torch.randn(8, 4)
    prepared = prepare_pt2e(exported(TwoUses(), x), Written(derived))
    expected = prepared(x)
    converted = convert_pt2e(prepared)
    scales = {n.args[2].args[1].target for n in converted.graph.nodes if n.target is torch.ops.aten.linear.default}
    assert len(scales) == 2
    assert (converted(x) - expected).norm() < 0.03 * expected.norm()


def test_two_observers_on_one_tensor_are_reported() -> None:
    other = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)

    def write(node: fx.Node) -> Any:
        return ({}, ACT) if node.name == "relu" else ({node.args[0]: other}, None) if node.name == "linear_1" else None

    prepared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(write))
    assert [type(observer_of(n)) for n in calls(prepared)] == [MinMaxObserver]
    (conflict,) = CONFLICTS.get(prepared) or ()
    assert "linear_1" in conflict
    assert "relu" in conflict


class Keyword(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.add.Tensor(x, other=y)


def test_a_keyword_tensor_is_observed() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    prepared = prepare_pt2e(exported(Keyword(), x, y), Written(everything))
    prepared(x, y)
    converted = convert_pt2e(prepared)
    add = next(n for n in converted.graph.nodes if n.name == "add")
    assert all(n.target in DEQUANTIZE_OPS for n in add.all_input_nodes)
    assert len(add.all_input_nodes) == 2


def test_the_callers_module_stays_as_it_was() -> None:
    x = torch.randn(2, 4)
    module = exported(Chain(), x)
    code, state = module.code, {k: v.clone() for k, v in module.state_dict().items()}
    for prepare in (prepare_pt2e, prepare_qat_pt2e):
        prepared = prepare(module, Written(everything))
        prepared(x)
        with torch.no_grad():
            for parameter in convert_pt2e(prepared).half().parameters():
                parameter.zero_()
        prepared.half()
    assert module.code == code
    assert not any(Q_ANNOTATION_KEY in n.meta for n in module.graph.nodes)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)
        assert value.dtype == torch.float32


def test_training_writes_into_parameters_of_its_own() -> None:
    x = torch.randn(2, 4)
    module = exported(Chain(), x)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    prepared = prepare_qat_pt2e(module, Written(everything))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1.0)
    prepared(x).sum().backward()
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_two_preparations_of_one_export_are_independent() -> None:
    x = torch.randn(2, 4)
    module = exported(Chain(), x)
    one, other = (prepare_pt2e(module, Written(everything)) for _ in range(2))
    one(x)
    with pytest.raises(ValueError, match="seen no data"):
        convert_pt2e(other)
    assert not {id(m) for m in one.modules() if is_observer(m)} & {id(m) for m in other.modules() if is_observer(m)}


def test_what_is_prepared_or_converted_is_not_prepared_again() -> None:
    prepared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Written(everything))
    with pytest.raises(ModelError, match="prepared already"):
        prepare_pt2e(prepared, Written(everything))
    prepared(torch.randn(2, 4))
    with pytest.raises(ModelError, match="converted already"):
        prepare_pt2e(convert_pt2e(prepared), Written(everything))
    with pytest.raises(ModelError, match=r"module\(\)"):
        prepare_pt2e(torch.export.export(Chain(), (torch.randn(2, 4),)), Written(everything))  # type: ignore[arg-type]
    with pytest.raises(ConvertError, match="without observers"):
        convert_pt2e(exported(Chain(), torch.randn(2, 4)))


class Accumulator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.view(4).add_(x)
        return self.total * 2


def test_a_buffer_that_is_written_is_observed_as_data_and_still_written() -> None:
    module = exported(Accumulator(), torch.ones(4))
    prepared = prepare_pt2e(module, Written(lambda node: (dict.fromkeys(node.all_input_nodes, ACT), ACT)))
    for _ in range(3):
        prepared(torch.ones(4))
    converted = convert_pt2e(prepared)
    before = converted.state_dict()["total"].clone()
    converted(torch.ones(4))
    torch.testing.assert_close(converted.state_dict()["total"], before + 1)
    assert module.state_dict()["total"].sum() == 0


class Wide(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x + i for i in range(self.count)])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_tensor_may_have_thousands_of_consumers(count: int) -> None:
    """torchao's union-find recurses; replacing one input after the other would be quadratic."""
    x = torch.randn(2)
    prepared = prepare_pt2e(exported(Wide(count), x), Written(everything))
    prepared(x)
    converted = convert_pt2e(prepared)
    dequantized = [n for n in converted.graph.nodes if n.target in DEQUANTIZE_OPS]
    assert len(dequantized) == 2 * count + 1
    assert sum(n.target in QUANTIZE_OPS for n in converted.graph.nodes) == count + 2


class Recurrence(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.fc = steps, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = torch.tanh(self.fc(x))
        return x


def all_shared(node: fx.Node) -> tuple[dict[fx.Node, Any], Any]:
    """Every output shares with its input, so that one group spans the whole chain."""
    first = node.all_input_nodes[0]
    spec = ACT if first.op == "placeholder" else SharedQuantizationSpec(first)
    return {first: spec}, SharedQuantizationSpec((first, node))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1200, 2000])
def test_a_recurrence_of_thousands_of_steps_in_one_group(steps: int) -> None:
    x = torch.randn(1, 2)
    prepared = prepare_pt2e(exported(Recurrence(steps), x), Written(all_shared))
    assert len({observer_of(n) for n in calls(prepared)}) == 1
    prepared(x)
    assert torch.isfinite(convert_pt2e(prepared)(x)).all()


def test_the_callback_sees_and_replaces_observers() -> None:
    class Fixing(Written):
        def prepare_obs_or_fq_callback(self, model: fx.GraphModule, found: dict[Any, nn.Module]) -> None:
            for point in found:
                if isinstance(point, fx.Node) and point.name == "relu":
                    found[point] = MinMaxObserver(dtype=torch.uint8, quant_min=0, quant_max=15)

    prepared = prepare_pt2e(exported(Chain(), torch.randn(2, 4)), Fixing(everything))
    relu = next(n for n in prepared.graph.nodes if n.name == "relu")
    assert any(getattr(observer_of(u), "quant_max", None) == 15 for u in relu.users)


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_e13_half_precision_weights_are_stored_as_halves(dtype: torch.dtype) -> None:
    half = QuantizationSpec(dtype, PlaceholderObserver)
    x = torch.randn(2, 64)
    module = exported(Halving(), x)

    def write(node: fx.Node) -> Any:
        return {n: half for n in node.all_input_nodes if n.op == "get_attr"}, None

    converted = convert_pt2e(prepare_pt2e(module, Written(write)))
    size = sum(v.nbytes for v in converted.state_dict().values())
    assert size <= 0.55 * sum(v.nbytes for v in module.state_dict().values())
    assert {v.dtype for v in converted.state_dict().values()} == {dtype}
    expected = nn.functional.linear(x, *(module.state_dict()[k].to(dtype).float() for k in ("fc.weight", "fc.bias")))
    torch.testing.assert_close(converted(x), expected)


def test_deepcopy_of_a_prepared_model_is_independent() -> None:
    x = torch.randn(2, 4)
    prepared = prepare_pt2e(exported(Chain(), x), Written(everything))
    twin = copy.deepcopy(prepared)
    prepared(x)
    with pytest.raises(ValueError, match="seen no data"):
        convert_pt2e(twin)
    twin(x)
    torch.testing.assert_close(convert_pt2e(twin)(x), convert_pt2e(prepared)(x), rtol=0, atol=0)
