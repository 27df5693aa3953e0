"""Quantizers that declare nothing: honest ones pass every check, a planted fault fails the check that is about it."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from quantplug.conformance import CANDIDATE_CHECKS, Candidate, judging_of, verdicts
from quantplug.core.errors import ConfigError

ATEN = torch.ops.aten
ACT = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
KEY = "quantization_annotation"


def weight(axis: int) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, axis)


class Plain(Quantizer):
    """Annotates linear layers, joins and relus as one would by hand."""

    relus: tuple[Any, ...] = (ATEN.relu.default, ATEN.relu_.default)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function":
                annotation = self.decide(node, model)
                if annotation is not None:
                    node.meta[KEY] = annotation
        return model

    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        if node.target == ATEN.linear.default:
            return QuantizationAnnotation({node.args[0]: ACT, node.args[1]: self.weight()}, self.output(node))
        if node.target == ATEN.cat.default:
            return self.join(node)
        return QuantizationAnnotation({node.args[0]: ACT}, self.output(node)) if node.target in self.relus else None

    def weight(self) -> Any:
        return weight(0)

    def output(self, node: Any) -> Any:
        return ACT

    def join(self, node: Any) -> QuantizationAnnotation:
        first, *others = node.args[0]
        same = SharedQuantizationSpec((first, node))
        return QuantizationAnnotation({first: ACT, **dict.fromkeys(others, same)}, same)

    def validate(self, model: fx.GraphModule) -> None:
        pass


def reasons(factory: Any, row: str, check: str, lowering: Any = None) -> list[str]:
    """Returns what a check finds wrong with a row."""
    trials, checks, judge = judging_of(Candidate("tried", factory, lowering), row)
    assert check in checks
    found = [judge(trial, check) for trial in trials]
    return [verdict.reason for verdict in found if verdict.status == "failed"]


@pytest.mark.slow
def test_an_honest_quantizer_passes_every_check() -> None:
    found = list(verdicts(Candidate("plain", Plain, lambda converted, inputs: converted), "linear", "cat", "relu"))
    assert {check for _, check, verdict in found if verdict.status == "failed"} == set()
    passed = {check for _, check, verdict in found if verdict.status == "passed"}
    assert passed == set(CANDIDATE_CHECKS) - {"delegated"}  # the lowering does not tell
    assert {name.split("-")[1] for name, *_ in found} == {"linear", "cat", "relu"}


class AnnotatesInputs(Plain):
    """Asks for integers as a model's inputs, also where no operator that reads them is annotated."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="placeholder"):
            node.meta[KEY] = QuantizationAnnotation(output_qspec=ACT)
        return super().annotate(model)


def test_an_input_that_is_annotated_is_asked_for() -> None:
    """The kit accused CortexMQuantizer, which does so beside convolutions that it leaves float."""
    assert reasons(AnnotatesInputs, "conv2d-relu", "unasked") == []


class WithBias(Plain):
    """Annotates the biases of linear layers too, in the scale of their sums."""

    factor = 1.0

    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        annotation = super().decide(node, model)
        if annotation is not None and node.target == ATEN.linear.default and len(node.args) > 2:
            sources = [(node.args[0], node), (node.args[1], node)]
            ends = (torch.int32, -(2**31), 2**31 - 1, torch.per_channel_symmetric, 0)
            annotation.input_qspec_map[node.args[2]] = DerivedQuantizationSpec(sources, self.of_sum, *ends)
        return annotation

    def of_sum(self, observers: Any) -> Any:
        scales = [observer.calculate_qparams()[0] for observer in observers]
        product = scales[0] * scales[1] * self.factor
        return product, torch.zeros_like(product, dtype=torch.int32)


def test_biases_in_the_scale_of_their_sums_are_what_kernels_read() -> None:
    assert reasons(WithBias, "linear", "biases") == []
    assert reasons(WithBias, "linear", "together") == []


class WrongBias(WithBias):
    factor = 2.0


class ForgetsTheInput(Plain):
    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        annotation = super().decide(node, model)
        if annotation is not None and node.target == ATEN.linear.default:
            del annotation.input_qspec_map[node.args[0]]
        return annotation


class JoinsTheFirst(Plain):
    def join(self, node: Any) -> QuantizationAnnotation:
        first = node.args[0][0]
        return QuantizationAnnotation({first: ACT}, SharedQuantizationSpec((first, node)))


class FirstCallOnly(Plain):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        super().annotate(model)
        seen = set[str]()
        for node in model.graph.find_nodes(op="call_function", target=ATEN.linear.default):
            if node.args[1].target in seen:
                del node.meta[KEY]
            seen.add(node.args[1].target)
        return model


class WrongAxis(Plain):
    def weight(self) -> Any:
        return weight(1)


class ForgetsInPlace(Plain):
    relus = (ATEN.relu.default,)


class SeveralScales(Plain):
    def join(self, node: Any) -> QuantizationAnnotation:
        return QuantizationAnnotation(dict.fromkeys(node.args[0], ACT), ACT)


class ChangesTheGraph(Plain):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in list(model.graph.nodes):
            if node.target == ATEN.relu.default:
                node.target, node.args = ATEN.clamp_min.default, (node.args[0], 0.0)
        return super().annotate(model)

    relus = (ATEN.clamp_min.default,)


class ChangesTheFunction(Plain):
    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if node.target == ATEN.relu.default:
                node.target = ATEN.abs.default
        return model

    relus = (ATEN.relu.default, ATEN.abs.default)


class Moody(Plain):
    turns = itertools.count()

    def output(self, node: Any) -> Any:
        return QuantizationSpec(torch.int8, MinMaxObserver, -128 + next(self.turns) % 7, 127, torch.per_tensor_affine)


class Learning(Plain):
    """The same object annotates otherwise the second time, a new one as the first."""

    called = 0

    def output(self, node: Any) -> Any:
        return HISTOGRAM if self.called > 1 else ACT

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        self.called += 1
        return super().annotate(model)


HISTOGRAM = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)


class OutOfRange(Plain):
    def output(self, node: Any) -> Any:
        return FixedQParamsQuantizationSpec(torch.int8, 1 / 64, 300, -128, 127, torch.per_tensor_affine)


class WrongZeroPoint(Plain):
    """As if the range of a relu began below zero, and ended early."""

    def output(self, node: Any) -> Any:
        return FixedQParamsQuantizationSpec(torch.int8, 3 / 255, 100, -128, 127, torch.per_tensor_affine)


class OfAnotherInput(Plain):
    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        annotation = super().decide(node, model)
        if annotation is not None and node.target in self.relus:
            annotation.input_qspec_map[node] = ACT
        return annotation


class ByWhatExportNotes(Plain):
    """Only strict export notes the functions and modules that were called."""

    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        return super().decide(node, model) if "source_fn_stack" not in node.meta else None


class OnlyKnownSizes(Plain):
    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        return super().decide(node, model) if isinstance(node.meta["val"].shape[0], int) else None


class Refuses(Plain):
    def validate(self, model: fx.GraphModule) -> None:
        raise ArithmeticError("the moon is not full")


class AnnotatesLate(Plain):
    def validate(self, model: fx.GraphModule) -> None:
        for node in model.graph.find_nodes(op="call_function", target=ATEN.linear.default):
            node.meta[KEY].input_qspec_map[node.args[0]] = ACT

    def decide(self, node: Any, model: fx.GraphModule) -> QuantizationAnnotation | None:
        annotation = super().decide(node, model)
        if annotation is not None and node.target == ATEN.linear.default:
            del annotation.input_qspec_map[node.args[0]]
        return annotation


class AnnotatesLess(Plain):
    def validate(self, model: fx.GraphModule) -> None:
        for node in model.graph.find_nodes(op="call_function", target=ATEN.relu.default):
            node.meta[KEY] = QuantizationAnnotation({}, ACT)


class FarZero(MinMaxObserver):
    def calculate_qparams(self) -> Any:
        return torch.tensor([0.01]), torch.tensor([200])


class ObservesFarZero(Plain):
    def output(self, node: Any) -> Any:
        return QuantizationSpec(torch.int8, FarZero, -128, 127, torch.per_tensor_affine)


class Unfinished(MinMaxObserver):
    def convert(self, *_: Any) -> Any:
        raise ArithmeticError("the tide is out")


class NotConverted(Plain):
    def output(self, node: Any) -> Any:
        return QuantizationSpec(torch.int8, Unfinished, -128, 127, torch.per_tensor_affine)


class OnlyInEvaluation(Plain):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        drops = model.graph.find_nodes(op="call_function", target=ATEN.dropout.default)
        return model if any(node.args[2] for node in drops) else super().annotate(model)

    relus = (ATEN.dropout.default,)


FAULTS = [
    (WrongAxis, "linear", "channels", "has its scales along axis 1; its outputs are along axis 0"),
    (ForgetsInPlace, "relu", "spelled", "written as in_place it is not annotated, as module it is"),
    (SeveralScales, "cat", "shared", "'cat' changes no number, and its ends have several scales and zero points"),
    (ChangesTheGraph, "relu", "untouched", "annotate() changes the graph"),
    (ChangesTheFunction, "relu", "untouched", "dB from the model"),
    (Moody, "relu", "deterministic", "annotates 'relu"),
    (Learning, "relu", "deterministic", "the same quantizer annotates 'relu"),
    (OutOfRange, "relu", "annotated", "zero point 300"),
    (WrongZeroPoint, "relu", "close", "dB from float; at 8 bits 20.2 are usual"),
    (OfAnotherInput, "relu", "annotated", "which is no input of"),
    (ByWhatExportNotes, "relu", "strict", "from strict export it is annotated in another way"),
    (OnlyKnownSizes, "relu", "dynamic", "with an open first dimension it is annotated in another way"),
    (OnlyInEvaluation, "dropout", "training", "in training mode it is annotated in another way"),
    (Refuses, "relu", "prepared", "ArithmeticError: the moon is not full"),
    (NotConverted, "relu", "converted", "ArithmeticError: the tide is out"),
    (AnnotatesLate, "linear", "unasked", "is quantized, which nobody annotated"),
    (AnnotatesLess, "relu", "carried_out", "and read in float"),
    (ObservesFarZero, "relu", "numbers", "a zero point outside of -128..127"),
    (WrongBias, "linear", "biases", "is added to a sum of scale"),
    (
        ForgetsTheInput,
        "linear",
        "together",
        "'linear' reads its weight in integers and its input in float; annotate both",
    ),
    (JoinsTheFirst, "cat", "together", "reads its operand 0 in integers and its operand 1 in float"),
    (FirstCallOnly, "linear", "together", "of 2 calls of 'linear' with the same parameters 1 are not annotated"),
]


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("quantizer", "row", "check", "sentence"), FAULTS, ids=lambda case: getattr(case, "__name__", "")
)
def test_a_planted_fault_of_a_quantizer_fails_the_check_that_is_about_it(
    quantizer: Any, row: str, check: str, sentence: str
) -> None:
    found = reasons(quantizer, row, check)
    assert any(sentence in reason for reason in found), found


def off(steps: float) -> Any:
    """A lowering whose program is off by so many steps of the output's scale."""

    def lower(converted: fx.GraphModule, inputs: Any) -> Any:
        scales: Any = [leaf.args[1] for leaf in converted.graph.output_node().all_input_nodes]
        return lambda *x: [y[0] + steps * scale for y, scale in zip(converted(*x), scales, strict=True)]

    return lower


def forgetful(converted: fx.GraphModule, inputs: Any) -> Any:
    calls = itertools.count()
    return lambda *x: [y[0] + next(calls) for y in converted(*x)]


def failing(converted: fx.GraphModule, inputs: Any) -> Any:
    raise MemoryError("the device is full")


class Portable:
    left = {"relu": "aten::relu", "relu_1": "aten::relu"}  # noqa: RUF012

    def __init__(self, converted: fx.GraphModule, inputs: Any) -> None:
        self.converted = converted

    def __call__(self, *inputs: Any) -> Any:
        return self.converted(*inputs)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("lowering", "check", "sentence"),
    [
        (off(2), "level", "the program against the q/dq graph, on the calibration data: 2 steps off, 1 allowed"),
        (forgetful, "lowered", "the program yields other numbers when it runs again"),
        (failing, "lowered", "MemoryError: the device is full"),
        (Portable, "delegated", "is quantized, and left to the portable operator aten::relu"),
    ],
)
def test_a_planted_fault_of_a_lowering_fails_the_check_that_is_about_it(
    lowering: Any, check: str, sentence: str
) -> None:
    found = reasons(Plain, "relu", check, lowering)
    assert any(sentence in reason for reason in found), found


def test_a_program_may_be_off_by_the_steps_that_are_allowed() -> None:
    found = verdicts(Candidate("tried", Plain, off(2), steps=2), "relu")
    assert "failed" not in {verdict.status for _, check, verdict in found if check == "level"}


def raising() -> Any:
    raise OSError("no such device")


class Nothing(Plain):
    relus = ()


@pytest.mark.parametrize(
    ("quantizer", "options", "sentence"),
    [
        ("nowhere:Quantizer", {}, "The quantizer 'nowhere:Quantizer' is not there"),
        ("torch:nowhere", {}, "The quantizer 'torch:nowhere' is not there"),
        ("torch:float32", {}, "The quantizer 'float32' is a dtype; name a class or a function without arguments"),
        ("collections:OrderedDict", {}, "The factory of 'OrderedDict' makes a OrderedDict, no quantizer"),
        (f"{__name__}:raising", {}, "cannot be made (OSError: no such device); mend its factory"),
        (f"{__name__}:Plain", {"partitioners": ["torch:nowhere"]}, "The partitioner 'torch:nowhere' is not there"),
        (f"{__name__}:Plain", {"lowering": "torch:nowhere"}, "The lowering 'torch:nowhere' is not there"),
        (f"{__name__}:Plain", {"lowering": "a:b", "partitioners": ["a:c"]}, "give one of the two"),
        (f"{__name__}:Plain", {"steps": -1}, "steps is -1"),
    ],
)
def test_what_cannot_be_tried_is_one_sentence(
    quantizer: str, options: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, HERE))
    with pytest.raises(ConfigError) as raised:
        Candidate.named(quantizer, **options)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


class Module:
    Plain, raising = Plain, staticmethod(raising)


HERE: Any = Module


def test_nothing_annotated_and_unknown_operators_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"'tried' annotates none of the 10 forms .* returns it configured"):
        list(verdicts(Candidate("tried", Nothing), "relu"))
    with pytest.raises(ConfigError, match=r"no operator 'rleu' \(did you mean 'relu'\?\); it knows"):
        list(verdicts(Candidate("tried", Plain), "rleu"))


def pytest_run(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_on_the_command_line_a_wrong_name_is_a_usage_error(tmp_path: Path) -> None:
    status, said = pytest_run(tmp_path, "--quantplug-quantizer", "nowhere:Quantizer")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: The quantizer 'nowhere:Quantizer' is not there" in said
    status, said = pytest_run(tmp_path, "--quantplug-partitioner", "nowhere:Partitioner")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --quantplug-partitioner is about a quantizer, and none is given; add --quantplug-quantizer." in said
