"""Backends that claim what they do not keep: each wrong claim fails the check that is about it, and no other."""

import copy
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec

from quantplug.annotators.activation import own_range
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.conformance import CHECKS, verdicts
from quantplug.core.annotation.annotator import Annotator
from quantplug.core.errors import ConfigError
from quantplug.core.graph.meta import LIMITS
from quantplug.core.patterns.language import anything, op, value
from quantplug.core.patterns.rules import Rule
from quantplug.core.qdq.qparams import qparams
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.core.specs.levels import Level
from quantplug.lowering.emulation import KernelSet, rows
from quantplug.lowering.program import Program
from quantplug.lowering.rules import lower_by_rules
from quantplug.quantizers.framework.derived import derive

sys.path.insert(0, str(Path(__file__).parent.parent / "plugin_package" / "src"))
from tiny_npu import TINY_NPU, to_kernel

(HONEST,) = TINY_NPU.annotators


def failed(backend, *rules):
    """Returns the checks that fail, each with one reason."""
    found = [(check, verdict) for _, check, verdict in verdicts(backend, *rules)]
    assert {check for check, _ in found} == set(CHECKS)
    return {check: verdict.reason for check, verdict in found if verdict.status == "failed"}


def lying(**changes):
    return derive(TINY_NPU, "liar", **changes)


def with_row(row):
    return replace(TINY_NPU, name="liar", annotators=(row,))


def deciding(change):
    """The honest row with another decision: `change` gets the honest annotations and the match."""
    return replace(HONEST, decide=lambda match, config: change(HONEST.decide(match, config), match))


@pytest.mark.slow
def test_r01_r02_b26_an_honest_backend_of_60_lines_passes_every_check():
    lines = (Path(__file__).parent.parent / "plugin_package" / "src" / "tiny_npu" / "__init__.py").read_text()
    assert len(lines.splitlines()) <= 60
    statuses = [(check, verdict.status) for _, check, verdict in verdicts(TINY_NPU)]
    assert {check for check, status in statuses if status == "passed"} == set(CHECKS) - {"emulated", "rescaled"}
    skipped = {("emulated", "skipped"), ("rescaled", "skipped")}
    assert set(statuses) - {(check, "passed") for check in CHECKS} == skipped


@pytest.mark.slow
def test_b26_to_share_a_scale_and_to_use_an_own_one_fails_the_output():
    assert failed(with_row(replace(HONEST, output="shared"))) == {
        "output": "the row declares its output 'shared', the annotation makes it 'own'"
    }


@pytest.mark.slow
def test_b26_a_wrong_kind_of_output_fails_the_output():
    def shared(annotations, match):
        annotations[match.root].output_qspec = SharedQuantizationSpec((match["a"], match["op"]))
        return annotations

    # A sum in the scale of its smaller operand is cut off, by two ways of calibrating at two places.
    assert set(failed(with_row(deciding(shared)))) == {"output", "parity"}
    assert set(failed(with_row(replace(HONEST, output="fixed")))) == {"output"}


class Off(Program):
    """A program whose every result is one step too high."""

    def __init__(self, program, step):
        self.program, self.step, self.ops = program, step, program.ops

    def __call__(self, *inputs):
        return torch.utils._pytree.tree_map(lambda y: y + self.step(y), self.program(*inputs))

    def save(self, path):
        return self.program.save(path)

    @property
    def nbytes(self):
        return self.program.nbytes


def one_step(y):
    """The smallest difference between two results."""
    values = y.unique()
    return (values[1:] - values[:-1]).min()


@pytest.mark.slow
def test_r08_exact_and_one_step_off_fails_the_level():
    lowering = lambda converted, inputs: Off(TINY_NPU.lower(converted, inputs), one_step)  # noqa: E731
    honest = with_row(HONEST.within(Level.ONE_STEP))
    assert failed(replace(honest, lowering=lowering)) == {}
    exact = with_row(HONEST.within(Level.EXACT))
    assert "declared: exact" in failed(replace(exact, lowering=lowering))["level"]
    assert set(failed(replace(exact, lowering=lowering))) == {"level"}


class Emulated(torch.nn.Module):
    """The sum of two integer tensors as tiny_npu computes it, up to how it rounds."""

    def __init__(self, match, rounded):
        super().__init__()
        self.params = [qparams(node) for node in (match["one"], match["other"], match.root)]
        self.clamps, self.rounded = "relu" in match, rounded

    def forward(self, *integers):
        *inputs, out = self.params
        pairs = zip(integers, inputs, strict=True)
        real = sum((x.float() - given.zero_point) * (given.scale / out.scale) for x, given in pairs)
        steps = self.rounded(real).relu() if self.clamps else self.rounded(real)
        return (steps + out.zero_point).clamp(-128, 127).to(torch.int8)


def emulation(rounded, level=Level.EXACT):
    def rewrite(match):
        return rows.substitute(match, Emulated(match, rounded), (match["a"], match["b"]))

    (rule,) = TINY_NPU.lowering.keywords["rules"]
    return KernelSet("tiny_npu", (rows.Row("sums", (Rule(rule.pattern, rewrite),), level),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounded", "level", "sentence"),
    [
        (torch.round, Level.EXACT, None),
        (torch.floor, Level.EXACT, "declared: exact"),
        (torch.floor, Level.ONE_STEP, None),
        (lambda steps: steps.round() + 2, Level.ONE_STEP, "declared: one step"),
    ],
)
def test_r08_r23_an_emulation_that_the_kernels_contradict_fails_emulated(rounded, level, sentence):
    found = failed(lying(kernels=emulation(rounded, level)))
    assert set(found) == ({"emulated"} if sentence else set())
    assert sentence is None or sentence in found["emulated"]


@pytest.mark.slow
def test_r23_a_backend_emulates_its_own_kernels_by_the_set_that_it_names():
    statuses = {v.status for _, check, v in verdicts(lying(kernels=emulation(torch.round))) if check == "emulated"}
    assert statuses == {"passed"}
    assert derive(lying(kernels="x86"), "another", lowering=TINY_NPU.lowering).kernels is None
    with pytest.raises(ConfigError, match="Backend 'tiny_npu' names no kernels to emulate"):
        TINY_NPU.emulate(None, ())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has the kernels 3; give a KernelSet or its name"):
        lying(kernels=3)
    with pytest.raises(ConfigError, match="There are no kernels 'tiny_npu:NOWHERE' to emulate"):
        lying(kernels="tiny_npu:NOWHERE").emulate(None, ())


@pytest.mark.slow
def test_r05_an_operator_that_the_lowering_leaves_float_fails_delegated():
    found = failed(lying(add=(own_range("tanh"),)), "tanh")
    assert set(found) == {"delegated"}
    assert "'tanh' is claimed and runs float: no integer kernel" in found["delegated"]


@pytest.mark.slow
def test_an_annotator_that_decides_otherwise_each_time_fails_deterministic():
    turns = itertools.count()

    def moody(annotations, match):
        spec = annotations[match.root].output_qspec
        annotations[match.root].output_qspec = replace(spec, quant_min=-128 + next(turns) % 19)
        return annotations

    assert set(failed(with_row(deciding(moody)))) == {"deterministic"}


def test_b07_a_config_that_breaks_the_declared_limit_fails_limits():
    bound = DTypeWithConstraints(torch.int8, scale_min_lower_bound=1.0)
    tight = DTypeConfig("int8", bound, bound)
    found = failed(replace(TINY_NPU, name="liar", dtypes=(tight,), configs={"int8": get_symmetric_quantization_config}))
    assert set(found) == {"limits"}
    assert "breaks scale_min_lower_bound of backend 'liar'" in found["limits"]


@pytest.mark.slow
def test_b08_a_ratio_of_scales_that_calibration_cannot_keep_fails_limits():
    found = failed(with_row(HONEST.rescaling(10.0, 20.0, of="each")))
    assert set(found) == {"limits"}
    assert "the ratio of scales (each / output)" in found["limits"]


def narrow(match: Any) -> Any:
    """The kernel of a device that multiplies by less than 16."""
    node = to_kernel(match)
    one, other, ratios, *rest = cast("tuple[Any, ...]", node.args)
    node.args = (one, other, [min(ratio, 15.99) for ratio in ratios], *rest)
    return node


def rescaling(low, high, rewrite=to_kernel, *, or_float=False):
    (rule,) = TINY_NPU.lowering.keywords["rules"]
    lower = partial(lower_by_rules, rules=(Rule(rule.pattern, rewrite),), library="tiny_npu")
    return replace(with_row(HONEST.rescaling(low, high, "each", or_float=or_float)), lowering=lower)


@pytest.mark.slow
def test_a_kernel_that_rescales_less_than_its_row_declares_fails_rescaled():
    found = failed(rescaling(2**-10, 2**8, narrow), "add")
    assert set(found) == {"rescaled"}
    told = "just inside the greatest ratio of scales, at 252: the program against the q/dq graph"
    assert found["rescaled"].startswith(told)


@pytest.mark.few(1)
@pytest.mark.parametrize("rewrite", [to_kernel, narrow])
def test_a_kernel_that_rescales_as_its_row_declares_passes_rescaled(rewrite):
    backend = rescaling(2**-10, 2**4, rewrite)
    statuses = {verdict.status for _, check, verdict in verdicts(backend, "add") if check == "rescaled"}
    assert statuses == {"passed", "skipped"}


@pytest.mark.slow
def test_a_lowering_by_rules_computes_in_float_what_its_row_says():
    backend = rescaling(2**-10, 2**4, narrow, or_float=True)
    statuses = {verdict.status for _, check, verdict in verdicts(backend, "add") if check == "rescaled"}
    assert statuses == {"passed", "skipped"}


@pytest.mark.slow
def test_a_lowering_that_runs_integers_where_its_row_says_float_fails_rescaled():
    backend = rescaling(2**-10, 2**8, or_float=True)

    def heedless(converted, inputs):
        copied = copy.deepcopy(converted)
        for node in copied.graph.nodes:
            LIMITS.drop(node)
        return backend.lower(copied, inputs)

    found = failed(replace(backend, lowering=heedless), "add")
    assert set(found) == {"rescaled"}
    told = "beyond the least ratio of scales, at 0.000488: 'add' is not claimed and runs int8"
    assert found["rescaled"].startswith(told)


def test_b04_a_wrong_dtype_fails_limits():
    int16 = DTypeWithConstraints(torch.int16)
    row = HONEST.accepting(DTypeConfig("int16", input=int16, output=int16))
    found = failed(with_row(row))
    assert set(found) == {"limits"}
    assert "breaks dtype of backend 'liar': found int8, the limit is int16" in found["limits"]


def test_a_rule_that_takes_nothing_fails_annotated():
    found = failed(with_row(HONEST.where(lambda match, config: "the moon is not full")))
    assert set(found) == {"annotated"}
    assert "no form of rule 'add" in found["annotated"]
    assert "the moon is not full" in found["annotated"]


def test_an_annotation_that_cannot_be_carried_out_fails_verified():
    def of_no_input(annotations, match):
        annotations[match["op"]].input_qspec_map[match["op"]] = annotations[match.root].output_qspec
        return annotations

    assert set(failed(with_row(replace(deciding(of_no_input), dtypes=())))) == {"verified"}


@pytest.mark.slow
def test_what_does_not_survive_saving_fails_serialised(monkeypatch):
    monkeypatch.setattr(torch.export, "save", lambda program, where: where.write(b"gone"))
    found = failed(replace(TINY_NPU, name="liar", lowering=lambda c, i: Unsaved(TINY_NPU.lower(c, i))))
    assert set(found) == {"serialised"}


class Unsaved(Off):
    """An honest program that writes itself without torch.export.save."""

    def __init__(self, program):
        super().__init__(program, lambda y: 0)

    def save(self, path):
        path.write_bytes(b"a program")
        return path


@pytest.mark.slow
def test_a_lowering_that_fails_fails_lowered():
    def refuse(converted, inputs):
        raise MemoryError("the device is full")

    assert failed(replace(TINY_NPU, name="liar", lowering=refuse)) == {"lowered": "MemoryError: the device is full"}


@pytest.mark.slow
def test_training_that_ends_elsewhere_fails_parity():
    def wide_in_training(is_qat=False, **options):
        return get_symmetric_quantization_config(is_qat=is_qat, act_qmin=-2, act_qmax=1) if is_qat else (
            get_symmetric_quantization_config(**options)
        )  # fmt: skip

    assert set(failed(replace(TINY_NPU, name="liar", dtypes=(), configs={"int8": wide_in_training}))) == {"parity"}


@torch.library.custom_op("quantplug_lies::twist", mutates_args=())
def twist(x: torch.Tensor, turns: int) -> torch.Tensor:
    return x * turns


@twist.register_fake
def _(x, turns):
    return torch.empty_like(x)


class Twist(torch.nn.Module):
    def forward(self, x):
        return torch.ops.quantplug_lies.twist(x, 3)


@pytest.mark.slow
def test_an_operator_that_the_kit_does_not_know_asks_for_an_example():
    def decide(match, config):
        spec = config.input_activation
        return {match["op"]: QuantizationAnnotation({match["x"]: spec}, spec)}

    row = Annotator(
        "twist", (("twist", op("quantplug_lies::twist", x=value("x"), name="op", turns=anything())),), decide
    )
    found = failed(with_row(row))
    assert set(found) == {"shown"}
    assert found["shown"].endswith("show what the rule is about with .shown_by(function).")
    assert set(failed(with_row(row.shown_by(lambda: (Twist(), (torch.randn(2, 5),)))))) == {"delegated"}
