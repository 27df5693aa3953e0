"""Functions by name: imported when they are first called, and called as the functions would be."""

import importlib
import sys

import pytest
import torch

import quantplug
from quantplug.core.annotation.plan import Plan, plan_of
from quantplug.core.specs import written
from quantplug.plugin import Backend, linear, named

LOWERING = "quantplug.plugin:lower_to_reference"


def test_a_named_function_is_called_as_the_function_itself():
    joined = named("posixpath:join")
    assert joined("a", "b") == "a/b"
    assert joined == named("posixpath:join") != named("posixpath:split")
    assert len({joined, named("posixpath:join")}) == 1
    assert repr(joined) == "named('posixpath:join')"


def test_what_a_declaration_names_is_imported_when_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "heavy_runtime.py").write_text("def few(match, config):\n    return 'the runtime says no'\n")
    monkeypatch.syspath_prepend(tmp_path)
    configs = {"int8": quantplug.get_symmetric_quantization_config}
    backend = Backend("lazy", (linear().where(named("heavy_runtime:few")),), configs, LOWERING)
    quantizer = type("Lazy", (quantplug.BackendQuantizer,), {"backend": backend})()
    assert "heavy_runtime" not in sys.modules
    model = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),)).module()
    with pytest.warns(UserWarning, match="the runtime says no"):
        quantplug.prepare_pt2e(model, quantizer)
    assert "heavy_runtime" in sys.modules


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_colon", "names no function"),
        ("no.such.module:f", "is not there .* correct the name"),
        ("posixpath:no_such_function", "is not there"),
        ("posixpath:sep", "is a str; name a function"),
    ],
)
def test_a_wrong_name_is_one_sentence(name, said):
    with pytest.raises(quantplug.ConfigError, match=said):
        named(name)("a")


def test_every_name_that_a_built_in_backend_declares_is_there():
    for name in ("xnnpack", "x86", "openvino", "tensorrt", "cortex_m", "arm", "native", "embedding"):
        backend = quantplug.get_quantizer(name).backend
        declared = [*backend.transforms, backend.weight_bits, *(c for row in backend.rows for c in row.constraints)]
        for found in declared:
            if isinstance(found, type(named("a:b"))):
                assert callable(found.function), found


def test_a_plan_names_what_is_ours_without_its_place():
    """Where a class stands in the package may change; plans that were written before are read after."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, 2))
    exported = torch.export.export(model.eval(), (torch.randn(1, 3, 8, 8),)).module()
    for name in ("xnnpack", "x86"):
        text = plan_of(quantplug.prepare_pt2e(exported, quantplug.get_quantizer(name))).json()
        assert "quantplug:" in text
        assert "quantplug." not in text
        assert Plan.from_json(text).json() == text


def test_no_two_things_of_ours_have_one_name_in_plans():
    for name in ("xnnpack", "x86", "cortex_m"):
        quantplug.get_quantizer(name)
    own = [place for place in written._LIBRARIES if place.startswith("quantplug.")]
    classes = [
        found
        for place in own
        for found in vars(importlib.import_module(place)).values()
        if getattr(found, "__module__", "") == place
    ]
    names = [found.__qualname__ for found in classes if isinstance(found, type)]
    assert len(names) == len(set(names)) > 10
    functions = {
        name.partition(":")[2]
        for name, found in written._REGISTERED.items()
        if name.startswith("quantplug:") and not isinstance(found, type)
    }
    assert functions.isdisjoint(names)
