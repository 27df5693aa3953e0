"""Backends: their names, their declarations, and what they say of themselves."""

import inspect
import warnings
from dataclasses import asdict
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from models import Function, exported
from torch import nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec, Quantizer

import quantplug
from quantplug import (
    Backend,
    BackendQuantizer,
    X86Quantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    explain,
    get_quantizer,
    prepare_pt2e,
)
from quantplug.annotators.linear import linear
from quantplug.annotators.presets import get_symmetric_quantization_config
from quantplug.core.errors import ConfigError, ModelError
from quantplug.core.observers import observer
from quantplug.core.specs.dtypes import DTypeConfig
from quantplug.quantizers import x86, xnnpack
from quantplug.quantizers.framework import names, registry

TOY = Backend("toy", (linear(),), {"int8": get_symmetric_quantization_config}, "quantplug.lowering.x86:lower")


def test_e15_r17_backends_by_name():
    assert isinstance(get_quantizer("xnnpack"), XNNPACKQuantizer)
    assert isinstance(get_quantizer("x86"), X86Quantizer)
    assert get_quantizer("x86") is not get_quantizer("x86")
    assert isinstance(get_quantizer("x86"), Quantizer)
    assert {entry.name for entry in quantplug.backends()} >= {"xnnpack", "x86"}


def test_e15_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"no backend 'xnpack' \(did you mean 'xnnpack'\?\); choose one of"):
        get_quantizer("xnpack")
    with pytest.raises(ConfigError, match="no backend '3'"):
        get_quantizer(3)  # type: ignore[arg-type]


def test_r17_plugins_are_found_and_broken_ones_do_not_hurt(monkeypatch):
    points = [
        EntryPoint("toy", f"{__name__}:TOY", names.GROUP),
        EntryPoint("broken", "no.such.module:X", names.GROUP),
        EntryPoint("wrong", "json:dumps", names.GROUP),
        EntryPoint("x86", "json:dumps", names.GROUP),
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: TOY if self.name == "toy" else _load(self))
    monkeypatch.setattr(names, "entry_points", lambda group: points)
    problems = {(e.name, e.problem) for e in registry.backends() if e.problem}
    assert {name for name, _ in problems} == {"broken", "wrong", "x86"}
    assert isinstance(get_quantizer("x86"), X86Quantizer)
    assert get_quantizer("toy").backend is TOY
    with pytest.raises(ConfigError, match=r"Backend 'broken' of package .* is broken: ModuleNotFoundError"):
        get_quantizer("broken")


_load = EntryPoint.load


def test_a_backend_without_configs_or_annotators_is_refused():
    with pytest.raises(ConfigError, match="Backend 'empty' declares no config"):
        Backend("empty", (linear(),), {}, "x:y")
    with pytest.raises(ConfigError, match="Backend 'empty' declares no annotator"):
        Backend("empty", (), {"int8": get_symmetric_quantization_config}, "x:y")


@pytest.mark.parametrize("name", ["xnnpack", "x86"])
def test_q01_capabilities_list_every_rule_as_data(name):
    quantizer = get_quantizer(name)
    rows = {row.rule: row for row in quantizer.capabilities()}
    assert len(rows) == len(quantizer.capabilities())
    assert rows["conv_relu"].operators[:2] == ("aten.conv1d.default", "aten.conv1d.padding")
    assert "aten.relu_.default" in rows["conv_relu"].operators
    of_tables = ("int4_groups", "int8_groups")
    assert rows["linear"].configs == tuple(config for config in quantizer.backend.configs if config not in of_tables)
    assert "int8_dynamic" not in rows["cat"].configs
    assert "int8" in rows["cat"].configs
    assert (rows["conv"].output, rows["max_pool2d"].output, rows["view"].output) == ("own", "shared", "shared")
    assert all(isinstance(v, str | tuple) for row in rows.values() for v in asdict(row).values())
    assert {row.output for row in rows.values()} <= {"own", "shared", "fixed", "float"}


def test_weights_in_groups_are_refused_where_no_kernel_has_them():
    groups = get_quantizer("xnnpack").backend.config("int4_dynamic_groups")
    model = torch.export.export(nn.Linear(64, 8), (torch.randn(2, 64),)).module()
    report = explain(get_quantizer("x86").set_global(groups).annotate(model))
    expected = "a scale for every 32 input channels, whose kernel takes float activations"
    assert report.row("linear").reason.endswith(expected)


ONE_OF_EACH = {
    "conv": lambda m, x: m.conv(x),
    "conv_relu": lambda m, x: torch.relu(m.conv(x)),
    "add": lambda m, x: x + x.exp(),
    "max_pool2d": lambda m, x: nn.functional.max_pool2d(x, 2),
    "mean": lambda m, x: m.conv(x).mean((2, 3), keepdim=True),
    "sigmoid": lambda m, x: torch.sigmoid(x),
    "tanh": lambda m, x: torch.tanh(x),
    "view": lambda m, x: m.conv(x).view(-1),
    "relu": lambda m, x: torch.relu(m.conv(x) + m.conv(x)).relu(),
    "cat": lambda m, x: torch.cat([x, x.exp()]),
}


@pytest.mark.parametrize("name", ["xnnpack", "x86"])
def test_q01_capabilities_tell_the_truth_about_the_output(name):
    quantizer = get_quantizer(name)
    rows = {row.rule: row for row in quantizer.capabilities()}
    kinds = {"SharedQuantizationSpec": "shared", "FixedQParamsQuantizationSpec": "fixed", "QuantizationSpec": "own"}
    checked = 0
    for rule, function in ONE_OF_EACH.items():
        if rule not in rows:
            continue
        # A quantized reader: kernels that can write float are only then asked for integers.
        read = lambda m, x: m.linear(torch.cat([function(m, x)] * 2).flatten())  # noqa: B023, E731
        conv, x = nn.Conv2d(3, 3, 1), torch.randn(1, 3, 8, 8)
        linear = nn.Linear(2 * function(SimpleNamespace(conv=conv), x).numel(), 1)
        model = exported(Function(read, conv=conv, linear=linear), x)
        get_quantizer(name).annotate(model)
        row = [r for r in explain(model).rows if r.rule == rule][0 if rule == "cat" else -1]
        spec = next(n for n in model.graph.nodes if n.name == row.node).meta["quantization_annotation"].output_qspec
        assert kinds[type(spec).__name__] == rows[rule].output, rule
        checked += 1
    assert checked >= 7


def test_the_quantizer_files_are_declarations():
    """A page or two, without matching or graph code: no loops, no branches, no torch.fx."""
    for module in (xnnpack, x86):
        source = inspect.getsource(module)
        assert len(source.splitlines()) < 140  # with the limits of their kernels
        assert not any(
            f"\n{indent}{word} " in source for word in ("for", "if", "while") for indent in ("", " " * 4, " " * 8)
        )
        assert "fx" not in source
        assert "node" not in source


def test_a_quantizer_of_ones_own_in_a_few_lines():
    class ToyQuantizer(BackendQuantizer):
        backend = TOY

    model = exported(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    ToyQuantizer().annotate(model)
    assert [row.rule for row in explain(model).rows] == ["linear_relu"] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_r11_half_precision_is_in_the_capability_table_and_honoured(dtype):
    declared = Backend(
        "half", (linear(),), dtypes=(DTypeConfig("half", weight=dtype),), lowering="quantplug.lowering.reference:lower"
    )

    class Half(BackendQuantizer):
        backend = declared

    (row,) = {row.dtypes for row in Half().capabilities()}
    assert row == (str(dtype).removeprefix("torch."),)
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    converted = convert_pt2e(prepare_pt2e(exported(nn.Sequential(layer).eval(), x), Half()))
    assert dtype in {value.dtype for value in converted.state_dict().values()}
    assert torch.equal(converted(x), nn.functional.linear(x, layer.weight.to(dtype).float(), layer.bias))


@pytest.mark.parametrize("backend", ["x86", "openvino", "cortex_m", "arm"])
def test_weights_of_fewer_bits_than_a_file_stores_are_told_before_calibration(backend):
    config = quantplug.get_symmetric_quantization_config(is_per_channel=True, weight_qmin=-8, weight_qmax=7)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval()
    exported = torch.export.export(model, (torch.randn(1, 3, 8, 8),)).module()
    with pytest.warns(UserWarning, match=r"weights in 8 bits: .* 'conv2d', 'conv2d_1' cost accuracy") as seen:
        quantplug.prepare_pt2e(exported, quantplug.get_quantizer(backend).set_global(config))
    assert len([one for one in seen if "stores weights" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bits in (7, 8):
            whole = quantplug.get_x86_quantization_config(weight_bits=bits)
            quantplug.prepare_pt2e(exported, quantplug.get_quantizer("x86").set_global(whole))
        linear = torch.export.export(nn.Linear(64, 64).eval(), (torch.randn(2, 64),)).module()
        quantplug.prepare_pt2e(linear, quantplug.get_quantizer("xnnpack").set_global("int4_dynamic"))


def asked_for(activation, low, weight=torch.int8):
    high = low + 2 ** (8 * activation.itemsize) - 1
    ends = (-127, 127) if weight is torch.int8 else (0, 255)
    own, of_channels = observer("moving_average"), observer("minmax", per_channel=True)
    acts = QuantizationSpec(activation, own, low, high, torch.per_tensor_affine)
    weights = QuantizationSpec(weight, of_channels, *ends, torch.per_channel_symmetric, 0)
    return QuantizationConfig(acts, acts, weights, None)


@pytest.mark.parametrize(
    ("backend", "config", "reason"),
    [
        ("xnnpack", asked_for(torch.int16, -(2**15)), "activations to torch.int16, and the kernels have torch.int8 or"),
        ("x86", asked_for(torch.int16, -(2**15)), "activations to torch.int16"),
        ("openvino", asked_for(torch.int16, -(2**15)), "activations to torch.int16"),
        ("cortex_m", asked_for(torch.int16, -(2**15)), "activations to torch.int16"),
        (
            "arm",
            asked_for(torch.int16, -(2**15)),
            "activations of 16 bits with torch.per_tensor_affine, the kernels around",
        ),
        ("cortex_m", asked_for(torch.uint8, 0), "activations to torch.uint8, and the kernels have torch.int8"),
        (
            "xnnpack",
            asked_for(torch.int8, -128, torch.uint8),
            "weights to torch.uint8, and the kernels have",
        ),
        ("x86", asked_for(torch.uint8, 0, torch.uint8), "weights to torch.uint8"),
    ],
)
def test_integers_that_no_kernel_has_stay_float_with_the_reason(backend, config, reason):
    """The report called them quantized, and the program computed in float."""
    quantizer, net, x = get_quantizer(backend).set_global(config), nn.Conv2d(8, 8, 3).eval(), torch.randn(1, 8, 8, 8)
    with pytest.raises(ModelError, match=reason):
        quantplug.quantize(net, (x,), quantizer, [x], progress=False)
