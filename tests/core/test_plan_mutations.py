"""Plans from anybody: whatever a plan's file says, it replays or is refused in one sentence of the project's own."""

import copy
import json
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import quantplug
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.errors import QuantplugError
from quantplug.core.observers import observer


class Tiny(nn.Module):
    """Sharing (cat, add), fixed numbers (sigmoid), a bias, per-channel weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(8, 32)

    def forward(self, x):
        y = torch.relu(self.conv(x))
        y = torch.cat([y + y, torch.sigmoid(y)], 1)
        return self.fc(y.mean((2, 3)))


IMAGES = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
ROWS = torch.linspace(-1, 1, 2 * 64).reshape(2, 64)


def _foreign():
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def _observed(name, **options):
    """Returns XNNPACK's config whose activations have an observer of ours."""
    config = quantplug.get_symmetric_quantization_config(is_per_channel=True)
    spec = replace(config.input_activation, observer_or_fake_quant_ctr=observer(name, **options))
    return quantplug.get_quantizer("xnnpack").set_global(replace(config, input_activation=spec, output_activation=spec))


def _int32_bias():
    config = quantplug.get_symmetric_quantization_config(is_per_channel=True, int32_bias=True)
    return quantplug.get_quantizer("xnnpack").set_global(config)


def _of(backend, config):
    return lambda: quantplug.get_quantizer(backend).set_global(config)


SOURCES = {
    "x86": (Tiny, IMAGES, _of("x86", "int8")),
    "xnnpack": (Tiny, IMAGES, _int32_bias),
    "dynamic": (Tiny, IMAGES, _of("xnnpack", "int8_dynamic")),
    "groups": (lambda: nn.Linear(64, 4), ROWS, _of("xnnpack", "int4_dynamic_groups")),
    "tensorrt": (Tiny, IMAGES, _of("tensorrt", "int8")),
    "cortex_m": (Tiny, IMAGES, _of("cortex_m", "int8")),
    "foreign": (Tiny, IMAGES, _foreign),
    "percentile": (Tiny, IMAGES, lambda: _observed("percentile", bins=64, percentile=99.0)),
    "average": (Tiny, IMAGES, lambda: _observed("moving_average", averaging_constant=0.5, power_of_two=True)),
}
DELETED = object()
NASTY = [
    *(DELETED, None, True, -1, 0, 7, 300, 2**40, 10**400, 0.5, -1e30, float("nan"), float("inf")),
    *("", "x", "input", [], [1], {}, {"x": 1}, {"tuple": [1, "x"]}, {"tuple": 3}, {"name": 3}, {"name": "os:system"}),
    *({"torch": "int8"}, {"torch": "int32"}, {"torch": "float64"}, {"torch": "float8_e4m3fn"}, {"torch": "load"}),
    *({"torch": "per_channel_affine"}, {"torch": "per_tensor_symmetric"}, {"torch": []}),
    {"name": "quantplug:product_of_scales"},
    {"name": "quantplug:split_is_slices"},
    {"name": "quantplug:register_for_plans"},
    {"name": "torchao.quantization.pt2e.observer:ObserverBase"},
    {"name": "torchao.quantization.pt2e.observer:AffineQuantizedObserverBase"},
    {"name": "torchao.quantization.pt2e.observer:PerChannelMinMaxObserver"},
    {"name": "torchao.quantization.pt2e.observer:RecordingObserver"},
    {"name": "torchao.quantization.pt2e.observer:FixedQParamsObserver"},
    {"name": "torchao.quantization.pt2e.observer:NoopObserver"},
    {"name": "torchao.quantization.pt2e.fake_quantize:FakeQuantize"},
    {"name": "torchao.quantization.pt2e.observer:get_block_size"},
    {"name": "torchao.quantization.pt2e.observer:torch.classes.nothing.here"},
    {"name": "quantplug:RowObserver"},
    {"name": "quantplug:MSEObserver"},
    {"name": "torchao.quantization.quant_primitives:MappingType.SYMMETRIC"},
    {"call": {"name": "torchao.quantization.pt2e.observer:MinMaxObserver"}, "with": {"eps": -1.0}},
    {"call": {"name": "quantplug:MinMaxObserver"}, "with": {"nonfinite": "x"}},
    {"make": {"name": "torchao.quantization.granularity:PerGroup"}, "with": {"group_size": 0}},
    {"make": {"name": "torchao.quantization.granularity:PerBlock"}, "with": {"block_size": {"tuple": [3, 0]}}},
    {"make": {"name": "quantplug:Rescale"}, "with": {"low": 3, "high": 1}},
    {"kind": "shared", "with": ":input#0"},
    {"kind": "shared", "with": "nowhere"},
    {"kind": "own", "dtype": {"torch": "int8"}, "observer": {"name": "torchao.quantization.pt2e:MinMaxObserver"}},
    {"kind": "fixed", "dtype": {"torch": "uint8"}, "scale": 0, "zero_point": 999},
    {"kind": "fixed", "dtype": {"torch": "float32"}, "scale": 1, "zero_point": 0},
    {"kind": "derived", "dtype": {"torch": "int32"}, "from": [], "function": {"name": "x:y"}},
    json.loads('{"tuple": [' * 300 + "]}" * 300),
]


def _paths(value, path=()):
    """Yields where everything stands in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from _paths(each, (*path, key))


def _kind(path, value):
    """Returns what a place is alike to: a mutation of one of a kind is tried for all of them."""
    for key in path:
        value = value[key]
    return tuple(key for key in path if not isinstance(key, int)), json.dumps(value)


def _distinct_paths(plan):
    seen: dict[Any, Any] = {}
    for path in _paths(plan):
        seen.setdefault(_kind(path, plan), path)
    return list(seen.values())


def _mutated(plan, path, value):
    mutated = copy.deepcopy(plan)
    holder = mutated
    for key in path[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return mutated


class Source:
    """A model with its good plan; exported once, as prepare leaves an exported graph as it is."""

    def __init__(self, name):
        make, self.x, quantizer = SOURCES[name]
        torch.manual_seed(0)
        self.exported = torch.export.export(make().eval(), (self.x,)).module()
        self.plan = json.loads(plan_of(quantplug.prepare_pt2e(self.exported, quantizer())).json())
        names = [node["node"] for node in self.plan["nodes"]]
        points = [f"{node['node']}<-{operand}" for node in self.plan["nodes"] for operand in node["inputs"]]
        shared = [{"kind": "shared", "with": point} for point in (*names[-2:], *points[:3])]
        values = [*NASTY, *shared, *names[:2], *points[-2:], "conv#0", points]
        self.mutations = [(path, value) for path in _distinct_paths(self.plan) for value in values]

    def apply(self, plan, prepare=quantplug.prepare_pt2e):
        """Goes from a plan's text to a converted model."""
        prepared = prepare(self.exported, Plan.from_json(json.dumps(plan)).quantizer())
        quantplug.calibrate(prepared, [self.x], progress=False)
        quantplug.convert_pt2e(prepared)

    def outcome(self, path, value, prepare):
        """Returns what is wrong with how a mutation ends, or None."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.apply(_mutated(self.plan, path, value), prepare)
        except QuantplugError as error:
            return f"no sentence: {error}" if "\n" in str(error) or len(str(error)) > 900 else None
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        return None

    def try_all(self, mutations, prepare=quantplug.prepare_pt2e):
        found = {(path, str(value)[:80]): self.outcome(path, value, prepare) for path, value in mutations}
        return {what: outcome for what, outcome in found.items() if outcome}


@pytest.fixture(scope="module")
def sources():
    return {name: Source(name) for name in SOURCES}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SOURCES)
def test_a_changed_plan_replays_or_is_one_sentence(sources, name):
    source = sources[name]
    source.apply(source.plan)
    assert source.try_all(random.Random(name).sample(source.mutations, 400)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_every_changed_plan_replays_or_is_one_sentence(sources, name):
    source = sources[name]
    assert source.try_all(source.mutations) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x86", "xnnpack"])
def test_a_changed_plan_for_training_replays_or_is_one_sentence(sources, name):
    source = sources[name]
    mutations = random.Random(name).sample(source.mutations, 400)
    assert source.try_all(mutations, quantplug.prepare_qat_pt2e) == {}


@pytest.mark.slow
def test_a_process_that_made_no_plan_reads_those_of_every_quantizer(sources, tmp_path):
    """What a plan names is known there too: observers, functions, the rewrites of built-in backends."""
    (tmp_path / "plans.json").write_text(json.dumps([source.plan for source in sources.values()]))
    script = (
        "import json; from quantplug.core.annotation.plan import Plan\n"
        "for plan in json.load(open('plans.json')): print(len(Plan.from_json(json.dumps(plan)).nodes) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * len(SOURCES)


FUNCTIONS = [
    "quantplug.cli:main",
    "quantplug.cli:demo",
    "quantplug.core.annotation.plan:plan_of",
    "quantplug:plan_of",
    "executorch.extension.llm.tokenizers.setup:CMakeBuild",
    "executorch.util.collect_env:run",
    "torchao.quantization.pt2e.observer:get_block_size",
    "torchao.quantization.pt2e.observer:MinMaxObserver",
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", ["transform", "derived", "observer"])
def test_a_plan_calls_no_function_of_a_known_package(sources, name, place):
    plan = copy.deepcopy(sources["xnnpack"].plan)
    specs = [spec for node in plan["nodes"] for spec in node["inputs"].values()]
    if place == "transform":
        plan["transforms"] = [{"functions": [name], "outside": []}]
    elif place == "derived":
        next(spec for spec in specs if "function" in spec)["function"] = {"name": name}
    elif name.endswith("MinMaxObserver"):
        pytest.skip("it is an observer")
    else:
        next(spec for spec in specs if "observer" in spec)["observer"] = {"call": {"name": name}, "with": {}}
    before = set(sys.modules)
    with pytest.raises(QuantplugError, match=name) as error:
        Plan.from_json(json.dumps(plan))
    assert "\n" not in str(error.value)
    assert not [module for module in set(sys.modules) - before if module.startswith(("executorch", "quantplug.cli"))]
