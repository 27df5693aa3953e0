"""A plan survives JSON, compares, and gives the same quantization when it is replayed on a re-export."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer import Quantizer

import quantplug
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.errors import AnnotationError, ArtefactError
from quantplug.quantizers.x86 import X86

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(3, width, 1)
        self.fc = nn.Linear(2 * width, 5)

    def forward(self, x):
        y = torch.relu(self.bn(self.conv(x))) + self.shortcut(x)
        y = torch.cat([y, torch.sigmoid(y)], 1)
        return self.fc(torch.nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


def _prepare(net, quantizer, strict=False):
    return quantplug.prepare_pt2e(torch.export.export(net, (X,), strict=strict).module(), quantizer)


def _finish(prepared):
    quantplug.calibrate(prepared, [X], progress=False)
    return quantplug.convert_pt2e(prepared)


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_read_from_json_replays_on_a_re_export(net, backend, strict):
    prepared = _prepare(net, quantplug.get_quantizer(backend))
    plan = plan_of(prepared)
    read = Plan.from_json(plan.json())
    assert read == plan
    assert isinstance(read.quantizer(), Quantizer)
    replayed = _prepare(net, read.quantizer(), strict)
    assert plan_of(replayed).differences(plan) == []
    assert torch.equal(_finish(replayed)(X), _finish(prepared)(X))


def test_a_plan_of_weights_in_groups_is_read_from_json():
    model = torch.export.export(nn.Linear(64, 4), (torch.randn(2, 64),)).module()
    plan = plan_of(quantplug.get_quantizer("xnnpack").set_global("int4_dynamic_groups").annotate(model))
    assert Plan.from_json(plan.json()) == plan
    assert "PerGroup" in plan.json()


def test_a_plan_tells_who_decided_what_and_why(net):
    plan = plan_of(_prepare(net, quantplug.get_quantizer("xnnpack").set_global("int8").set_module_name("fc", None)))
    decided = {node.node: node.decided for node in plan.nodes}
    assert decided["conv:aten.conv2d.default#0"].rule == "conv_relu"
    assert decided["conv:aten.conv2d.default#0"].owner == "xnnpack"
    assert "module name 'fc'" in decided["fc:aten.linear.default#0"].reason
    assert plan.folds_batch_norm
    assert ":aten.cat.default#0" in next(group for group in plan.groups if any("tensors[0]" in p for p in group))


def test_derived_dependencies_are_listed(net):
    config = quantplug.get_symmetric_quantization_config(is_per_channel=True, int32_bias=True)
    plan = plan_of(_prepare(net, quantplug.get_quantizer("xnnpack").set_global(config)))
    bias = "fc:aten.linear.default#0<-bias"
    assert plan.derived[bias] == ("fc:aten.linear.default#0<-input", "fc:aten.linear.default#0<-weight")
    assert Plan.from_json(plan.json()) == plan


def test_differences_name_the_node_and_both_values(net):
    one = plan_of(_prepare(net, quantplug.get_quantizer("xnnpack").set_global("int8")))
    other = plan_of(_prepare(net, quantplug.get_quantizer("xnnpack").set_global("int8_per_tensor")))
    told = one.differences(other)
    assert any(text.startswith("fc:aten.linear.default#0: inputs") and "per_tensor_symmetric" in text for text in told)


def test_a_plan_works_for_a_foreign_quantizer(net):
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = _prepare(net, quantizer, strict=True)
    plan = Plan.from_json(plan_of(prepared).json())
    assert torch.equal(_finish(_prepare(net, plan.quantizer(), strict=True))(X), _finish(prepared)(X))


def test_a_plan_for_another_model_is_refused(net):
    plan = plan_of(_prepare(net, quantplug.get_quantizer("xnnpack")))
    with pytest.raises(AnnotationError, match="nodes that the model has not"):
        _prepare(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), plan.quantizer())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', "[" * 200_000])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ArtefactError, match="plan"):
        Plan.from_json(text)


def _planned(net):
    return json.loads(plan_of(_prepare(net, quantplug.get_quantizer("xnnpack"))).json())


def _first_spec(plan):
    return next(spec for node in plan["nodes"] for spec in node["inputs"].values() if "observer" in spec)


@pytest.mark.parametrize("name", ["os:system", "hostile_module:run", "torch.hub:load", "quantplug.cli:sys.exit", 3])
@pytest.mark.parametrize("place", ["observer", "transform", "limits"])
def test_a_plan_imports_and_calls_nothing_that_is_not_known(net, tmp_path, monkeypatch, name, place):
    (tmp_path / "hostile_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(*a, **k): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = _planned(net)
    if place == "observer":
        _first_spec(plan)["observer"] = {"call": {"name": name}, "with": {}}
    elif place == "transform":
        plan["transforms"] = [{"functions": [name], "outside": []}]
    else:
        plan["nodes"][0]["limits"] = {"make": {"name": name}, "with": {"command": "true"}}
    with pytest.raises((AnnotationError, ArtefactError), match="plan") as error:
        _prepare(net, Plan.from_json(json.dumps(plan)).quantizer())
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def _broken(plan, how):
    node = plan["nodes"][0]
    if how == "a node is a number":
        plan["nodes"][0] = 5
    elif how == "inputs are a list":
        node["inputs"] = [1]
    elif how == "a key is missing":
        del node["annotated"]
    elif how == "a kind is strange":
        _first_spec(plan)["kind"] = "other"
    elif how == "an observer is missing":
        del _first_spec(plan)["observer"]
    elif how == "a dtype is no dtype":
        _first_spec(plan)["dtype"] = {"torch": "load"}
    elif how == "it is deep":
        for _ in range(400):
            node["limits"] = {"tuple": [node["limits"]]}
    return plan


HOWS = ["a node is a number", "inputs are a list", "a key is missing", "a kind is strange", "an observer is missing"]


@pytest.mark.parametrize("how", [*HOWS, "a dtype is no dtype"])
def test_a_malformed_plan_is_one_sentence(net, how):
    plan = json.dumps(_broken(_planned(net), how))
    with pytest.raises((AnnotationError, ArtefactError), match="plan") as error:
        _prepare(net, Plan.from_json(plan).quantizer())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.slow
def test_what_is_registered_may_be_named_by_a_plan_of_another_process(net, tmp_path):
    """The observer of a user's own module: refused where nobody knows it, used where it was registered."""
    (tmp_path / "mine.py").write_text(
        "from torchao.quantization.pt2e import MinMaxObserver\nclass Mine(MinMaxObserver):\n    pass\n"
    )
    plan = _planned(net)
    _first_spec(plan)["observer"] = {"call": {"name": "mine:Mine"}, "with": {}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = (
        "import sys; from quantplug.core.annotation.plan import Plan\n"
        "from quantplug.core.specs.written import named_value\n"
        "from quantplug.core.specs.written import register_for_plans; from quantplug import QuantplugError\n"
        "value = {'call': {'name': 'mine:Mine'}, 'with': {}}\n"
        "try: named_value(value)\n"
        "except QuantplugError as error: print('register_for_plans' in str(error), 'mine' in sys.modules)\n"
        "import mine; register_for_plans(mine.Mine); print(named_value(value)().__class__ is mine.Mine)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True"]


def test_a_rewrite_of_a_function_is_found_in_the_process_that_named_it(net):
    def nothing(model):
        return model

    kind = type("Own", (quantplug.BackendQuantizer,), {"backend": quantplug.derive(X86, "own", transforms=(nothing,))})
    plan = plan_of(quantplug.prepare_pt2e(torch.export.export(net, (X,)).module(), kind()))
    assert "<locals>" in plan.transforms[0].functions[0]
    replayed = quantplug.prepare_pt2e(torch.export.export(net, (X,)).module(), Plan.from_json(plan.json()).quantizer())
    assert plan_of(replayed) == plan
