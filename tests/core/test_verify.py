"""Annotations that cannot be carried out are refused before anything is inserted, with one clear sentence."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantplug.core.errors import AnnotationError, QuantplugError
from quantplug.core.observers.sharing import observer_key, tensor_key
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e
from quantplug.core.qdq.nodes import DEQUANTIZE_OPS, QUANTIZE_OPS

ACT = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)


class Written(Quantizer):
    """Writes the annotations that a function makes from the nodes by name."""

    def __init__(self, write: Callable[[dict[str, fx.Node]], dict[str, Any]]) -> None:
        self.write = write

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        nodes = {n.name: n for n in model.graph.nodes}
        for name, annotation in self.write(nodes).items():
            nodes[name].meta[Q_ANNOTATION_KEY] = annotation
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.embed = nn.Embedding(4, 4)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        low, high = self.fc(x).split(2, dim=1)
        return torch.cat([low, high], 1) + self.embed(i)


def small() -> fx.GraphModule:
    inputs = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    return torch.export.export(Small().eval(), inputs).module()


def refusal(write: Callable[[dict[str, fx.Node]], dict[str, Any]]) -> str:
    module = small()
    before = str(module.graph)
    with pytest.raises(AnnotationError) as caught:
        prepare_pt2e(module, Written(write))
    assert str(module.graph) == before
    assert not any(Q_ANNOTATION_KEY in n.meta for n in module.graph.nodes)
    return str(caught.value)


def annotated(inputs: dict[Any, Any] | None = None, output: Any = None) -> QuantizationAnnotation:
    return QuantizationAnnotation(inputs or {}, output, _annotated=True)


def spec(**changes: Any) -> QuantizationSpec:
    given_fields = {
        "dtype": torch.int8,
        "observer_or_fake_quant_ctr": MinMaxObserver,
        "qscheme": torch.per_tensor_affine,
    }
    return QuantizationSpec(**{**given_fields, **changes})


def fixed(**changes: Any) -> FixedQParamsQuantizationSpec:
    return FixedQParamsQuantizationSpec(**{"dtype": torch.int8, "scale": 0.1, "zero_point": 0, **changes})


REFUSED = {
    "a key that is no input": (lambda n: {"add": annotated({n["x"]: ACT})}, "no input"),
    "an integer tensor": (lambda n: {"embedding": annotated({n["i"]: ACT})}, "torch.int64"),
    "several outputs": (lambda n: {"split": annotated(output=ACT)}, "getitem"),
    "a range outside of the dtype": (lambda n: {"add": annotated(output=spec(quant_min=0, quant_max=255))}, "0..255"),
    "an empty range": (lambda n: {"add": annotated(output=spec(quant_min=3, quant_max=3))}, "ascending"),
    "an unknown dtype": (lambda n: {"add": annotated(output=spec(dtype=torch.int64))}, "torch.int64"),
    "an axis that is not there": (
        lambda n: {
            "linear": annotated(
                {
                    n["fc_bias"]: spec(
                        observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
                        qscheme=torch.per_channel_symmetric,
                        ch_axis=1,
                    )
                }
            )
        },
        "axis 1",
    ),
    "a fixed zero point outside": (lambda n: {"add": annotated(output=fixed(zero_point=300))}, "300"),
    "a negative scale": (lambda n: {"add": annotated(output=fixed(scale=-1.0))}, "-1.0"),
    "an infinite scale": (lambda n: {"add": annotated(output=fixed(scale=float("inf")))}, "inf"),
    "a cycle of two": (
        lambda n: {
            "cat": annotated(output=SharedQuantizationSpec(n["add"])),
            "add": annotated(output=SharedQuantizationSpec(n["cat"])),
        },
        "shares it back",
    ),
    "a dangling reference": (lambda n: {"add": annotated(output=SharedQuantizationSpec(n["cat"]))}, "no annotation"),
    "another dtype under a shared spec": (
        lambda n: {
            "linear": annotated(output=spec(dtype=torch.uint8)),
            "split": annotated({n["linear"]: SharedQuantizationSpec(n["add"])}),
            "add": annotated(output=ACT),
        },
        "torch.uint8",
    ),
    "derived from nothing": (
        lambda n: {
            "add": annotated(
                output=DerivedQuantizationSpec([n["cat"]], lambda o: o[0].calculate_qparams(), torch.int32)
            )
        },
        "not quantized",
    ),
    "derived from itself": (
        lambda n: {
            "add": annotated(
                output=DerivedQuantizationSpec([n["add"]], lambda o: o[0].calculate_qparams(), torch.int32)
            )
        },
        "depends on itself",
    ),
    "dynamic per channel": (
        lambda n: {
            "linear": annotated(
                {
                    n["x"]: spec(
                        observer_or_fake_quant_ctr=PlaceholderObserver,
                        qscheme=torch.per_channel_affine,
                        is_dynamic=True,
                        ch_axis=0,
                    )
                }
            )
        },
        "choose_qparams",
    ),
    "an observer that rejects its spec": (
        lambda n: {"add": annotated(output=spec(qscheme=torch.per_channel_affine, ch_axis=0))},
        "MinMaxObserver",
    ),
    "no spec at all": (lambda n: {"add": annotated(output="int8")}, "str"),
    "no annotation at all": (lambda n: {"add": {"output": ACT}}, "dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_q04_illegal_annotations_are_refused(name: str) -> None:
    write, words = REFUSED[name]
    message = refusal(write)
    assert words in message
    assert message.count("'") >= 2  # it names a node


def test_errors_name_the_module() -> None:
    assert "module 'fc'" in refusal(lambda n: {"linear": annotated(output=spec(quant_min=0, quant_max=255))})


def test_equal_specs_of_separately_made_observers_compare_equal() -> None:
    one, other = (spec(observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=0.5)) for _ in range(2))
    assert one != other  # torchao's view
    assert (tensor_key(one), observer_key(one)) == (tensor_key(other), observer_key(other))
    assert observer_key(one) != observer_key(spec(observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=0.25)))
    assert tensor_key(one) != tensor_key(fixed())


OPERATIONS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "relu": lambda a, b: torch.relu(a),
    "cat": lambda a, b: torch.cat([a, b], 0)[:3],
    "reshape": lambda a, b: a.reshape(4, 3).reshape(3, 4),
    "matmul": lambda a, b: a @ b.transpose(0, 1) @ b,
}


class Drawn(nn.Module):
    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps, self.fc = steps, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.fc(x)]
        for name, first, second in self.steps:
            values.append(OPERATIONS[name](values[first % len(values)], values[second % len(values)]))
        return values[-1] + values[1]


STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), max_size=6)
CHOICES = st.lists(st.integers(0, 5), min_size=30, max_size=30)


def legal(choices: list[int]) -> Callable[[dict[str, fx.Node]], dict[str, Any]]:
    """Annotates by drawn numbers, only as the rules allow."""
    observed = [ACT, spec(dtype=torch.uint8), fixed()]

    def write(nodes: dict[str, fx.Node]) -> dict[str, Any]:
        written, numbers = {}, iter(choices * 4)
        for name, node in nodes.items():
            if node.op != "call_function":
                continue
            inputs = {n: observed[k] for n in node.all_input_nodes if (k := next(numbers)) < 3}
            k = next(numbers)
            output = SharedQuantizationSpec((next(iter(inputs)), node)) if inputs and k == 3 else None
            written[name] = annotated(inputs, observed[k] if k < 3 else output)
        return written

    return write


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, choices=CHOICES)
def test_legal_annotations_prepare_convert_and_run(steps: list[tuple[str, int, int]], choices: list[int]) -> None:
    """The float graph is untouched, preparing changes no value, every quantize has its dequantize."""
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    module = torch.export.export(Drawn(steps).eval(), (x,)).module()
    expected = module(x)
    prepared = prepare_pt2e(module, Written(legal(choices)))
    torch.testing.assert_close(prepared(x), expected, rtol=0, atol=0)
    converted = convert_pt2e(prepared)
    assert converted(x).shape == expected.shape
    for node in converted.graph.nodes:
        if node.target in QUANTIZE_OPS:
            assert all(user.target in DEQUANTIZE_OPS for user in node.users)
            assert all(user.args[1:] == node.args[1:] for user in node.users)
    file = io.BytesIO()
    torch.export.save(torch.export.export(converted, (x,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), converted(x), rtol=0, atol=0)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_illegal_annotations_end_in_our_own_errors(data: st.DataObject) -> None:
    """Whatever stands in an annotation, it is carried out or refused with an error of ours."""
    dtypes = (torch.int8, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64, torch.bool)
    schemes = (None, torch.per_tensor_affine, torch.per_tensor_symmetric, torch.per_channel_affine)
    low, high = sorted((data.draw(st.integers(-300, 300)), data.draw(st.integers(-300, 300))))

    def drawn_spec(nodes: list[fx.Node]) -> Any:
        kind = data.draw(st.integers(0, 4))
        dtype, scheme = data.draw(st.sampled_from(dtypes)), data.draw(st.sampled_from(schemes))
        if kind == 0:
            return fixed(dtype=dtype, scale=data.draw(st.floats(-1, 1)), zero_point=low, quant_max=high)
        if kind == 1:
            return SharedQuantizationSpec(data.draw(st.sampled_from(nodes)))
        if kind == 2:
            return DerivedQuantizationSpec(
                [data.draw(st.sampled_from(nodes))], lambda o: o[0].calculate_qparams(), dtype
            )
        observer = data.draw(st.sampled_from((MinMaxObserver, PerChannelMinMaxObserver, HistogramObserver)))
        return spec(
            dtype=dtype,
            observer_or_fake_quant_ctr=observer,
            quant_min=low,
            quant_max=high,
            qscheme=scheme,
            ch_axis=data.draw(st.sampled_from((None, 0, 7))),
            is_dynamic=data.draw(st.booleans()),
        )

    def write(nodes: dict[str, fx.Node]) -> dict[str, Any]:
        ordered = list(nodes.values())
        names = data.draw(st.lists(st.sampled_from(sorted(nodes)), min_size=1, max_size=3, unique=True))
        return {
            name: annotated({data.draw(st.sampled_from(ordered)): drawn_spec(ordered)}, drawn_spec(ordered))
            for name in names
        }

    inputs = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    # Nothing but an error of ours may come out of it.
    with contextlib.suppress(QuantplugError):
        prepared = prepare_pt2e(small(), Written(write))
        prepared(*inputs)
        convert_pt2e(prepared)(*inputs)
