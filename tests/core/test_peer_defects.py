"""Defects of other cores, one test each, where no other file has it: we do the right thing or say what is wrong."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import (
    FakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    compare_results,
    extract_results_from_loggers,
    prepare_for_propagation_comparison,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import AnnotationError, CalibrationError, ConfigError, ModelError
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from quantplug.core.qdq.nodes import CAST_OP, DEQUANTIZE_OPS, QUANTIZE_OPS
from quantplug.core.specs.levels import sqnr

ACT = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0)
DYNAMIC = QuantizationSpec(torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True)
FAKE = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
TRAINED = QuantizationSpec(torch.int8, FAKE, -128, 127, torch.per_tensor_affine)


class Marked(Quantizer):
    """Annotates operators by name: the specs of activations, weights and the output."""

    def __init__(self, act: Any = ACT, weight: Any = WEIGHT, out: Any = ACT, names: tuple[str, ...] = ("linear",)):
        self.act, self.weight, self.out, self.names = act, weight, out, names

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if any(str(node.target).startswith(f"aten.{name}.") for name in self.names):
                inputs = {n: self.weight if n.op == "get_attr" else self.act for n in node.all_input_nodes[:2]}
                inputs = {n: spec for n, spec in inputs.items() if spec is not None}
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, self.out, _annotated=True)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.layers, *inputs)


def exported(model: nn.Module, *inputs: Any, training: bool = False, **options: Any) -> fx.GraphModule:
    return torch.export.export(model.train(training), inputs, **options).module()


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def quantized(model: nn.Module, x: Tensor, quantizer: Quantizer) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the float export and the converted model."""
    module = exported(model, x)
    prepared = prepare_pt2e(module, quantizer)
    prepared(x)
    return module, convert_pt2e(prepared)


def targets(model: fx.GraphModule) -> list[Any]:
    return [n.target for n in model.graph.nodes]


# Wrong results.


def test_an_embedding_index_stays_an_integer_beside_quantized_scalars() -> None:
    """torchao turns integer scalars into float constants, and the index breaks."""
    model = Calls(lambda layers, i: layers[0](i + 1) + 2, nn.Embedding(9, 4))
    i = torch.tensor([1, 2])
    module = exported(model, i)
    with pytest.raises(AnnotationError, match=r"torch\.int64"):
        prepare_pt2e(module, Marked(names=("add",)))
    prepared = prepare_pt2e(module, Marked(None, ACT, ACT, ("embedding",)))
    prepared(i)
    assert sqnr(convert_pt2e(prepared)(i), module(i)) > 30


def test_dropout_is_off_after_eval_and_on_after_train() -> None:
    """torchao resets p to 0.5 and leaves Dropout2d in training mode."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d(0.9), nn.Flatten(), nn.Dropout(0.2))
    x = torch.randn(2, 3, 8, 8)
    prepared = prepare_qat_pt2e(exported(model, x, training=True), Marked(TRAINED, TRAINED, None, ("conv2d",)))
    prepared(x)
    zeros = (prepared(x) == 0).float().mean()
    assert zeros > 0.5  # 0.9 of the channels, 0.2 of the rest
    prepared.eval()
    torch.testing.assert_close(prepared(x), prepared(x), rtol=0, atol=0)
    assert (prepared(x) == 0).float().mean() < 0.1


def test_nan_in_calibration_is_refused() -> None:
    x = torch.randn(2, 8)
    prepared = prepare_pt2e(exported(mlp(), x), Marked())
    prepared(torch.full_like(x, torch.nan))
    with pytest.raises(CalibrationError, match="NaN"):
        convert_pt2e(prepared)


def test_float8_ranges_are_those_of_float8() -> None:
    """torchao's default range is 0..15, that of a 4-bit integer."""
    spec = QuantizationSpec(torch.float8_e4m3fn, MinMaxObserver, qscheme=torch.per_tensor_symmetric)
    _, converted = quantized(mlp(), torch.randn(4, 8), Marked(spec, spec, None))
    limits = {n.args[-3:-1] for n in converted.graph.nodes if n.target in (*QUANTIZE_OPS, *DEQUANTIZE_OPS)}
    assert limits == {(-448, 448)}


# Crashes.


def test_fixed_and_derived_specs_without_a_range_have_that_of_their_dtype() -> None:
    """torchao passes None on and fails in the first run."""

    class Defaults(Marked):
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            (linear,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
            x, weight, bias = linear.args
            derived = DerivedQuantizationSpec(
                [(x, linear), (weight, linear)],
                lambda found: (
                    found[0].calculate_qparams()[0] * found[1].calculate_qparams()[0],
                    torch.zeros(4, dtype=torch.int32),
                ),
                torch.int32,
                qscheme=torch.per_channel_symmetric,
                ch_axis=0,
            )
            fixed = FixedQParamsQuantizationSpec(torch.uint8, 1 / 64, 128)
            linear.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({x: fixed, weight: WEIGHT, bias: derived}, fixed)
            return model

    x = torch.rand(3, 4)
    module, converted = quantized(nn.Sequential(nn.Linear(4, 4)), x, Defaults())
    assert sqnr(converted(x), module(x)) > 25
    limits = {n.args[-3:] for n in converted.graph.nodes if n.target in DEQUANTIZE_OPS}
    assert (0, 255, torch.uint8) in limits
    assert (-(2**31), 2**31 - 1, torch.int32) in limits


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
        lambda: nn.utils.weight_norm(nn.Conv2d(3, 4, 3)),
        lambda: nn.Conv2d(3, 4, 3),
    ],
    ids=["weight_norm", "old weight_norm", "no statistics"],
)
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_are_computed_and_norms_without_statistics_work(layer: Callable[[], nn.Module], training: bool):
    tracked = hasattr(layer(), "weight_g") or hasattr(layer(), "parametrizations")
    model = nn.Sequential(layer(), nn.BatchNorm2d(4, track_running_stats=tracked), nn.ReLU())
    x = torch.randn(4, 3, 6, 6)
    specs = (TRAINED, TRAINED, TRAINED) if training else (ACT, WEIGHT, ACT)
    module = exported(model, x, training=training)
    prepared = (prepare_qat_pt2e if training else prepare_pt2e)(module, Marked(*specs, ("conv2d",)))
    prepared(x)
    prepared.eval()
    assert sqnr(convert_pt2e(prepared)(x), prepared(x)) > 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_activations_are_in_the_graph(dtype: torch.dtype) -> None:
    """torchao removes bfloat16 observers in silence."""
    half = QuantizationSpec(dtype, PlaceholderObserver)
    x = torch.randn(2, 8)
    module, converted = quantized(mlp(), x, Marked(half, half, None))
    assert targets(converted).count(CAST_OP) >= 4
    difference = sqnr(converted(x), module(x))
    assert 30 < difference < 100


def test_a_keyword_tensor_without_annotation_is_nobodys_business() -> None:
    model = Calls(lambda layers, x, y: layers[0](torch.ops.aten.add.Tensor(x, other=y)), nn.Linear(4, 4))
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    module = exported(model, x, y)
    prepared = prepare_pt2e(module, Marked())
    prepared(x, y)
    assert sqnr(convert_pt2e(prepared)(x, y), module(x, y)) > 30


def test_eval_and_train_work_at_every_stage() -> None:
    x = torch.randn(2, 8)
    prepared = prepare_pt2e(exported(mlp(), x), Marked())
    prepared(x)
    for model in (prepared, convert_pt2e(prepared)):
        assert torch.equal(model.train().eval()(x), model(x))


# What a reviewer would try.


@pytest.mark.parametrize("function", [lambda _, x: x, lambda _, x: torch.sin(x)], ids=["empty", "nothing to quantize"])
def test_a_model_with_nothing_to_quantize_stays_as_it_is(function: Callable[..., Any]) -> None:
    x = torch.randn(3)
    module, converted = quantized(Calls(function), x, Marked())
    torch.testing.assert_close(converted(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", ["x86", None, 8, object()])
def test_what_is_no_quantizer_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="takes a quantizer"):
        prepare_pt2e(exported(mlp(), torch.randn(2, 8)), wrong)


def test_an_observer_that_is_none_and_a_transform_that_returns_nothing_are_our_errors() -> None:
    module = exported(mlp(), torch.randn(2, 8))
    with pytest.raises(AnnotationError, match="nonsense"):
        prepare_pt2e(module, Marked(act=QuantizationSpec(torch.int8, "nonsense")))
    quantizer = Marked()
    quantizer.transform_for_annotation = lambda model: None
    with pytest.raises(ModelError, match="NoneType"):
        prepare_pt2e(module, quantizer)


@pytest.mark.parametrize("stage", ["annotate", "validate", "prepare_obs_or_fq_callback"])
def test_a_quantizer_that_raises_leaves_the_callers_graph_as_it_was(stage: str) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("of the quantizer")

    module = exported(mlp(), torch.randn(2, 8))
    code, quantizer = module.code, Marked()
    setattr(quantizer, stage, fails)
    with pytest.raises(KeyError, match="of the quantizer"):
        prepare_pt2e(module, quantizer)
    assert module.code == code
    assert not any(Q_ANNOTATION_KEY in n.meta for n in module.graph.nodes)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(6, 8))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache[position] = self.key(x)
        return F.softmax(self.query(x) @ self.cache.t(), -1) @ self.cache


def test_a_cache_of_keys_is_still_written_after_convert() -> None:
    torch.manual_seed(0)
    x, position = torch.randn(1, 8), torch.tensor([2])
    module = exported(Cache(), x, position)
    prepared = prepare_pt2e(module, Marked(names=("linear", "matmul")))
    prepared(x, position)
    converted = convert_pt2e(prepared)
    again = torch.export.export(copy.deepcopy(converted), (x, position)).module()
    for place in (3, 4):
        found = converted(x, torch.tensor([place]))
        assert converted.cache[place].abs().sum() > 0
        torch.testing.assert_close(again(x, torch.tensor([place])), found, rtol=0, atol=0)


def test_handles_of_the_numeric_debugger_lead_from_the_quantized_model_to_the_float_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    module = exported(mlp(), x)
    prepared = prepare_pt2e(module, Marked())
    prepared(x)
    reference, actual = (prepare_for_propagation_comparison(m) for m in (module, convert_pt2e(prepared)))
    reference(x)
    actual(x)
    found = compare_results(extract_results_from_loggers(reference), extract_results_from_loggers(actual))
    assert {summary.ref_node_name for summary in found.values()} >= {"linear", "relu", "linear_1"}
    assert all(result.sqnr > 25 for summary in found.values() for result in summary.results)


# Behaviours that partitioners rely on.


def test_an_annotated_reader_shares_its_dequantize_node_with_no_earlier_reader() -> None:
    """The operator that nobody annotated comes first and reads the first dequantize node."""
    model = Calls(lambda layers, x: (torch.sin(y := layers[0](x)), layers[1](y)), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    prepared = prepare_pt2e(exported(model, x), Marked())
    prepared(x)
    converted = convert_pt2e(prepared)
    (_, linear) = converted.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert list(linear.args[0].users) == [linear]


def test_tags_on_a_constant_are_on_what_holds_it_quantized() -> None:
    class Tagging(Marked):
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for node in model.graph.find_nodes(op="get_attr", target="0.weight"):
                node.meta["quantization_tag"] = "mine"
            return super().annotate(model)

    _, converted = quantized(mlp(), torch.randn(2, 8), Tagging(out=None))
    tagged = [n for n in converted.graph.nodes if n.meta.get("quantization_tag") == "mine"]
    assert [n.op for n in tagged] == ["get_attr"]
