"""What a composition must not lose: limits, the borders of transforms, which batch norms were folded; and its plan."""

from dataclasses import replace

import pytest
import torch
from compositions import BACKBONE, HEAD, Images, Toy, X, converted, mixed, owners
from models import exported
from torch import nn

import quantplug
from quantplug import ComposableQuantizer, Region, explain, get_quantizer
from quantplug.annotators.linear import linear
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.errors import CalibrationError, ConfigError
from quantplug.core.graph.meta import LIMITS
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.framework.quantizer import BackendQuantizer

INT8 = DTypeWithConstraints(torch.int8, scale_max_upper_bound=1e-3)
WEIGHT = DTypeWithConstraints(torch.int8)
NARROW = Backend(
    name="narrow",
    annotators=(linear(activations=("relu",)),),
    dtypes=(DTypeConfig("int8", input=INT8, output=INT8, weight=WEIGHT),),
    lowering="quantplug.lowering.reference:lower",
)


class Narrow(BackendQuantizer):
    backend = NARROW


def prepared(model, quantizer, x=X):
    found = quantplug.prepare_pt2e(exported(model, x), quantizer)
    quantplug.calibrate(found, [x, -x], progress=False)
    return found


def limited(model):
    return {node.name: LIMITS.get(node).owner for node in model.graph.nodes if LIMITS.on(node)}


OF_BOTH = {
    **dict.fromkeys(("linear", "relu_1", "linear_1"), "narrow"),
    **dict.fromkeys(("conv2d", "relu", "conv2d_1"), "xnnpack"),
}


# Limits.


def test_limits_stay_with_the_quantizer_whose_annotation_stays():
    quantizer = ComposableQuantizer().add(Narrow(), HEAD, precedence=1).add(get_quantizer("xnnpack"), precedence=0)
    model = exported(Images().eval(), X)
    quantizer.annotate(model)
    assert limited(model) == OF_BOTH


def test_a_piece_that_the_composition_refuses_leaves_no_limits_of_its_own():
    region = Region(filter=lambda node: node.name != "relu_1")
    model = exported(Images().eval(), X)
    ComposableQuantizer().add(get_quantizer("x86"), HEAD, precedence=1).add(Narrow(), region, precedence=0).annotate(
        model
    )
    assert set(limited(model).values()) == set(owners(model).values()) == {"x86"}


def test_a_second_composition_leaves_the_limits_of_the_first():
    model = exported(Images().eval(), X)
    ComposableQuantizer().add(Narrow(), HEAD).annotate(model)
    ComposableQuantizer().add(get_quantizer("xnnpack"), BACKBONE).annotate(model)
    assert limited(model) == OF_BOTH


@pytest.mark.parametrize("replayed", [False, True])
def test_b08_limits_are_held_against_calibrated_numbers_also_when_a_plan_is_replayed(replayed):
    quantizer = ComposableQuantizer().add(Narrow(), HEAD, precedence=1).add(get_quantizer("xnnpack"), precedence=0)
    model = Images().eval()
    if replayed:
        quantizer = Plan.from_json(plan_of(prepared(model, quantizer)).json()).quantizer()
    with pytest.raises(CalibrationError, match="breaks scale_max_upper_bound of backend 'narrow'"):
        quantplug.convert_pt2e(prepared(model, quantizer))


def test_a_limit_that_another_quantizer_does_not_have_is_no_violation_of_the_composition():
    short = DTypeConfig("int16", input=torch.int16, output=torch.int16, weight=torch.int8)
    odd = replace(NARROW, name="odd", dtypes=(), annotators=(linear(activations=("relu",)).accepting(short),))

    class Odd(BackendQuantizer):
        backend = replace(odd, configs={"int8": quantplug.get_symmetric_quantization_config})

    quantizer = ComposableQuantizer([Odd(strict=False), get_quantizer("xnnpack")])
    report = explain(quantizer.annotate(exported(Images().eval(), X)))
    assert report.row("linear").owner == "xnnpack"
    assert report.violations == ()


# Transforms.


class Gated(nn.Module):
    """Two branches with silu, which XNNPACK's rewrites take apart and x86 fuses."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU())
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU())

    def forward(self, x):
        return self.head(self.backbone(x))


def operators(model):
    return [row.operator.partition(".")[0].rstrip("_") for row in explain(model).rows]


def test_transforms_are_confined_to_the_region_of_their_quantizer():
    reference = converted(Gated().eval(), mixed(), X)
    assert operators(reference) == ["conv2d", "sigmoid", "mul", "conv2d", "silu"]
    assert next(row.owner for row in explain(reference).rows if row.operator == "silu") == "x86"


def test_what_a_transform_makes_of_an_operator_is_in_the_region_that_the_operator_was_in():
    everything = ("conv2d", "silu")
    quantizer = ComposableQuantizer().add(get_quantizer("xnnpack"), Region(operator=everything))
    found = owners(converted(Gated().eval(), quantizer, X))
    assert {"sigmoid", "mul"} <= {name.partition("_")[0] for name in found}


def test_a_transform_changes_nothing_outside_even_if_it_tries():
    class Replacing(Toy):
        def transform_for_annotation(self, model):
            for node in [n for n in model.graph.nodes if n.target is torch.ops.aten.relu.default]:
                node.target = torch.ops.aten.relu6.default
            model.graph.eliminate_dead_code()
            model.recompile()
            return model

    quantizer = ComposableQuantizer().add(Replacing(), HEAD).add(get_quantizer("xnnpack"), BACKBONE)
    assert [name for name in operators(converted(Images().eval(), quantizer, X)) if "relu" in name] == ["relu", "relu6"]


def test_a_transform_that_fails_leaves_the_operators_outside_as_they_were():
    class Failing(Toy):
        def transform_for_annotation(self, model):
            raise RuntimeError("no")

    model = exported(Images().eval(), X)
    before = str(model.graph)
    with pytest.raises(RuntimeError, match="no"):
        ComposableQuantizer().add(Failing(), HEAD).transform_for_annotation(model)
    assert str(model.graph) == before


def test_a_region_that_covers_nothing_is_found_before_transforms_take_its_operators_away():
    quantizer = ComposableQuantizer().add(get_quantizer("xnnpack"), Region(operator="silu"))
    assert prepared(Gated().eval(), quantizer)
    with pytest.raises(ConfigError, match="operator type 'gelu' matches nothing"):
        prepared(Gated().eval(), ComposableQuantizer().add(get_quantizer("xnnpack"), Region(operator="gelu")))


# Plans.


class Unfolded(quantplug.XNNPACKQuantizer):
    backend = replace(quantplug.XNNPACKQuantizer.backend, name="unfolded", folds_batch_norm=False)


class Norms(nn.Module):
    """A batch norm in the backbone and one in the head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.SiLU())

    def forward(self, x):
        return self.head(self.backbone(x))


@pytest.mark.parametrize("unfolded", [BACKBONE, HEAD])
def test_a_plan_of_a_composition_folds_and_transforms_what_the_composition_did(unfolded):
    other = HEAD if unfolded is BACKBONE else BACKBONE
    quantizer = ComposableQuantizer().add(Unfolded(), unfolded).add(get_quantizer("x86"), other)
    model = Norms().eval()
    first = prepared(model, quantizer)
    plan = Plan.from_json(plan_of(first).json())
    assert plan == plan_of(first)
    assert plan.unfolded == (f"{unfolded.module}.1#0",)
    again = prepared(model, plan.quantizer())
    assert plan_of(again).differences(plan) == []
    reference = quantplug.convert_pt2e(first)
    assert torch.equal(quantplug.convert_pt2e(again)(X), reference(X))
    assert operators(reference).count("batch_norm") == 1
    assert operators(reference).count("silu") == 1


# Control flow.


class Chooses(nn.Module):
    """Two heads, of which `cond` runs one."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        features = self.backbone(x).mean((2, 3))
        return torch.cond(x.sum() > 0, lambda y: self.one(y), lambda y: self.other(y), (features,))


def test_a_composition_reaches_into_control_flow_and_keeps_its_limits_there():
    quantizer = (
        ComposableQuantizer()
        .add(get_quantizer("xnnpack"), BACKBONE, precedence=1)
        .add(Narrow(), Region(operator="linear"), precedence=0)
    )
    model = Chooses().eval()
    with pytest.raises(CalibrationError, match="breaks scale_max_upper_bound of backend 'narrow'"):
        quantplug.convert_pt2e(prepared(model, quantizer))
    wide = (
        ComposableQuantizer()
        .add(get_quantizer("xnnpack"), BACKBONE, precedence=1)
        .add(get_quantizer("x86"), Region(operator="linear"), precedence=0)
    )
    reference = quantplug.convert_pt2e(prepared(model, wide))
    found = [(row.operator, row.owner) for row in explain(reference).rows if row.quantized]
    assert ("conv2d", "xnnpack") in found
    assert found.count(("linear", "x86")) == 2
    assert quantplug.sqnr(reference(X), model(X)) > 25
