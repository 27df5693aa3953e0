"""torch.ao's BackendConfig as a backend of ours: FX graph mode is the reference, live and as golden text."""

import copy
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from fx_graph_mode import (
    NOT_OBSERVED,
    PLAIN,
    SHARED,
    WEIGHTED,
    DTypeConfig,
    DTypeWithConstraints,
    X,
    backend_of,
    converted,
    everywhere,
    fusion,
    fx_reference,
    fx_steps,
    my_model,
    pattern,
    prepared,
    qconfig,
    steps,
    tutorial_backend,
    tutorial_mapping,
)
from models import exported, needs_vnni, node, operators, settled
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    default_weight_observer,
    get_default_qconfig_mapping,
)
from torch.ao.quantization import backend_config as declared

import quantplug
from quantplug import explain
from quantplug.core.errors import AnnotationError, CalibrationError, ConfigError
from quantplug.core.graph.meta import FOLDINGS, VIOLATIONS
from quantplug.quantizers.framework import names
from quantplug.quantizers.importer import from_backend_config, from_qconfig_mapping, import_backend_config

GOLDEN = Path(__file__).parent.parent / "golden" / "backend_config_tutorial.txt"
KEY = "quantization_annotation"


def default_mapping():
    return get_default_qconfig_mapping("x86")


EXPERIMENTS = {
    "conv-relu and linear": (False, tutorial_mapping),
    "conv-bn-relu without a rule": (True, tutorial_mapping),
    "default qconfig": (False, default_mapping),
}


def golden():
    parts = GOLDEN.read_text().split("# ")[1:]
    return {title: lines for title, *lines in (part.strip().split("\n") for part in parts)}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_b20_b21_the_three_experiments_have_the_tutorials_structure_and_fx_graph_modes_scales(experiment):
    use_bn, mapping = EXPERIMENTS[experiment]
    oracle = fx_steps(fx_reference(my_model(use_bn), X, mapping(), tutorial_backend()))
    ours = steps(converted(my_model(use_bn), X, tutorial_backend(), mapping(), strict=False))
    assert ours == oracle
    assert ours == golden()[experiment]


def test_b01_only_the_declared_pieces_are_annotated():
    backend, report = import_backend_config(tutorial_backend())
    assert report.rules == ("linear", "conv2d_relu")
    assert (backend.name, [row.name for row in backend.rows]) == ("tutorial", ["linear", "conv2d_relu"])
    model = nn.Sequential(nn.Linear(10, 10), nn.Sigmoid(), nn.Conv2d(3, 3, 1), nn.Hardtanh(), nn.MaxPool2d(2))
    annotated = prepared(model, X, tutorial_backend(), observe=False)
    assert [n.name for n in annotated.graph.nodes if KEY in n.meta] == ["linear"]


def test_b02_b03_b12_r12_the_reference_patterns_of_linear_and_of_conv_relu():
    found = converted(my_model(), X, tutorial_backend())
    for first, last in (("linear", "linear"), ("conv2d", "relu")):
        read = node(found, first).args[:2]
        assert all("dequantize_per_tensor" in str(source.target) for source in read)
        (quantize,) = node(found, last).users
        assert "quantize_per_tensor" in str(quantize.target)
        assert all("dequantize_per_tensor" in str(user.target) for user in quantize.users)
        assert read[0].args[1] != quantize.args[1]
    assert list(node(found, "conv2d").users) == [node(found, "relu")]


@pytest.mark.parametrize(
    ("declared_dtype", "stored"),
    [(torch.qint8, torch.int8), (torch.quint8, torch.uint8), (torch.int16, torch.int16)],
)
def test_b04_r11_the_declared_dtypes_reach_the_q_nodes(declared_dtype, stored):
    dtypes = DTypeConfig(input_dtype=declared_dtype, output_dtype=declared_dtype, weight_dtype=torch.qint8)
    chosen = QConfig(MinMaxObserver.with_args(dtype=declared_dtype), default_weight_observer)
    config = backend_of(pattern(nn.Linear, dtypes=dtypes))
    found = converted(nn.Sequential(nn.Linear(10, 4)), X, config, everywhere(chosen))
    quantized = [n for n in found.graph.nodes if "quantize_per_tensor" in str(n.target) and "deq" not in str(n.target)]
    assert [n.args[5] for n in quantized] == [stored] * 2


def test_b05_a_dynamic_config_has_no_output_pair():
    dynamic = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
    config = backend_of(pattern(nn.Linear, dtypes=dynamic))
    mapping = everywhere(torch.ao.quantization.default_dynamic_qconfig)
    found = operators(converted(nn.Sequential(nn.Linear(10, 4)), X, config, mapping, observe=False))
    assert [name for name in found if name != "dequantize_per_tensor"] == [
        "choose_qparams",
        "quantize_per_tensor",
        "linear",
    ]


def test_b06_r10_a_range_outside_of_the_bounds_is_named_and_one_inside_is_carried():
    wide = {"quant_min": -1, "quant_max": 255}
    with pytest.raises(AnnotationError, match=r"'linear' \(module 'linear'\) breaks quant_min_lower_bound .* found -1"):
        prepared(my_model(), X, tutorial_backend(), everywhere(qconfig(**wide)))
    found = converted(my_model(), X, tutorial_backend())
    assert node(found, "linear").args[0].args[3:6] == (0, 127, torch.uint8)


def test_b18_the_tutorials_activations_in_0_to_127_are_accepted_under_a_bound_of_255():
    rows = explain(converted(my_model(), X, tutorial_backend())).rows
    assert [row.quantized for row in rows] == [True, True, True, False]


def test_b07_scales_of_tiny_tensors_keep_the_lower_bound():
    with pytest.raises(AnnotationError, match=r"breaks scale_min_lower_bound .* the limit is 0\.000244141"):
        prepared(my_model(), X, tutorial_backend(), everywhere(qconfig(eps=1e-6)))
    found = converted(my_model(), X * 1e-9, tutorial_backend())
    scales = [n.args[1] for n in found.graph.nodes if "quantize_per_tensor.default" in str(n.target)]
    assert min(scales[1:]) >= 2**-12


def test_b08_an_upper_bound_and_exact_matches_hold_after_calibration():
    limited = DTypeWithConstraints(dtype=torch.quint8, scale_max_upper_bound=1e-3)
    config = backend_of(pattern(nn.Linear, dtypes=DTypeConfig(limited, torch.quint8, torch.qint8)))
    with pytest.raises(CalibrationError, match=r"breaks scale_max_upper_bound of backend 'mine'"):
        converted(my_model(), X, config)
    exact = DTypeWithConstraints(dtype=torch.quint8, scale_exact_match=1 / 256, zero_point_exact_match=0)
    config = backend_of(pattern(nn.Linear, dtypes=DTypeConfig(torch.quint8, exact, torch.qint8)))
    with pytest.raises(AnnotationError, match=r"breaks scale_exact_match .* found an observed scale"):
        prepared(my_model(), X, config)


def test_b08_known_ranges_keep_their_qparams_and_do_not_clip_the_input():
    model, x = nn.Sequential(nn.Linear(10, 4), nn.Sigmoid()), X * 3
    found = converted(model, x, declared.get_native_backend_config(), default_mapping())
    (quantize,) = node(found, "sigmoid").users
    assert quantize.args[1:6] == (1 / 256, 0, 0, 255, torch.uint8)
    read = node(found, "sigmoid").args[0]
    lone = nn.Sequential(nn.Sigmoid())
    oracle = fx_steps(fx_reference(lone, x, default_mapping(), declared.get_native_backend_config()))
    assert oracle == ["quantize 0.00390625 0", "dequantize", "sigmoid", "quantize 0.00390625 0", "dequantize"]
    lone = converted(nn.Sequential(nn.Sigmoid()), x, declared.get_native_backend_config(), default_mapping())
    assert read.args[1] != 1 / 256
    assert (lone(x) - x.sigmoid()).abs().max() < 0.02


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("set_pattern", "set_fuser_method"), ("_set_pattern_complex_format",)])
def test_b11_every_setter_has_an_effect_or_a_reason(names):
    config = declared.get_native_backend_config() if "set_pattern" in names else declared.get_onednn_backend_config()
    _, report = import_backend_config(config)
    told = {setter: effect for found in reversed(report.imported) for setter, effect in found.effects}
    assert set(names) <= set(told)
    for setter in ("set_root_module", "set_qat_module", "set_reference_quantized_module"):
        assert told[setter].startswith("not applicable in PT2E because ")
    assert told["set_fused_module"].endswith("without one it stays float")
    assert "dtype config 'uint8" in told["add_dtype_config"]
    assert told["_set_num_tensor_args_to_observation_type"] == (
        "1 tensors: inputs and output share one observer; 2 tensors: input and output have observers of their own"
    )
    assert told["_set_input_type_to_index"] == "weight and bias are told from activations"
    assert "set_root_module" in str(report)
    if "_set_pattern_complex_format" in names:
        assert told["_set_root_node_getter"] == told["_set_extra_inputs_getter"]
        assert told["_set_extra_inputs_getter"].startswith("not applicable in PT2E because patterns name the operands")


def test_b13_r12_max_pool_and_cat_use_one_observer_object():
    class Joined(nn.Module):
        def forward(self, x):
            return torch.cat([F.max_pool2d(x, 2), F.max_pool2d(x, 2)])

    config = backend_of(pattern(nn.MaxPool2d, SHARED, PLAIN), pattern(torch.cat, SHARED, PLAIN))
    found = prepared(Joined(), X, config)
    called = [n for n in found.graph.nodes if n.op == "call_module" and "activation" in str(n.target)]
    assert len(called) == 4
    assert len({id(found.get_submodule(str(n.target))) for n in called}) == 1


def test_b13_input_and_output_not_observed():
    config = backend_of(pattern(nn.Linear), pattern(torch.flatten, NOT_OBSERVED, PLAIN))
    model = nn.Sequential(nn.Linear(10, 4), nn.Flatten(), nn.Linear(120, 4))
    found = converted(model, X, config)
    assert "dequantize_per_tensor" in str(node(found, "flatten").args[0].target)
    alone = prepared(nn.Sequential(nn.Flatten()), X, config, strict=False, observe=False)
    assert not [n for n in alone.graph.nodes if n.op == "call_module" and "activation" in str(n.target)]
    _, report = import_backend_config(backend_of(pattern("size", NOT_OBSERVED, PLAIN), pattern(nn.Linear)))
    assert "sizes" in report.not_applicable[0].reason


def test_b14_the_first_dtype_config_that_fits_wins_and_the_report_says_why():
    signed = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    config = backend_of(pattern(nn.Linear, dtypes=signed).add_dtype_config(WEIGHTED))
    row = explain(converted(my_model(), X, config)).row("linear")
    assert row.how.startswith("uint8")
    assert "input dtype is int8, found uint8" in str(explain(converted(my_model(), X, config)))


def test_b15_a_fusion_without_a_config_for_what_it_makes_inserts_nothing_as_in_fx_graph_mode():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    for others in ((), (pattern(nn.Conv2d), pattern(nn.ReLU, SHARED))):
        config = backend_of(fusion(), *others)
        found = converted(copy.deepcopy(model), X, config, strict=False, observe=False)
        assert steps(found) == ["conv2d", "relu"]
        assert explain(found).quantized == 0
        assert explain(found).row("relu").reason.endswith("the rule keeps the piece together in float")
        assert fx_steps(fx_reference(model, X, everywhere(), config)) == ["conv2d", "relu"]


def test_b16_a_backend_of_three_patterns_is_known_by_name(monkeypatch):
    point = EntryPoint("tutorial", "somewhere:BACKEND", names.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: from_backend_config(tutorial_backend()))
    monkeypatch.setattr(names, "BUILT_IN", {})
    monkeypatch.setattr(names, "entry_points", lambda group: [point])
    annotated = exported(my_model(), X)
    quantplug.get_quantizer("tutorial").annotate(annotated)
    report = explain(annotated)
    assert report.row("linear").owner == "tutorial"
    assert report.row("linear").quantized


@pytest.mark.parametrize("name", [None, "renamed"])
def test_b16_the_name_is_that_of_the_config_or_ones_own(name):
    assert from_backend_config(tutorial_backend(), name=name).name == (name or "tutorial")
    with pytest.raises(ConfigError, match="A backend has the name ''"):
        from_backend_config(backend_of(pattern(nn.Linear), name=""))


@needs_vnni
def test_b22_lowered_there_is_one_quantize_and_one_dequantize_around_integers():
    backend = from_backend_config(tutorial_backend(), "quantplug.lowering.x86:lower")
    quantizer = from_qconfig_mapping(tutorial_mapping(), backend)
    found = quantplug.prepare_pt2e(exported(my_model(), X), quantizer)
    quantplug.calibrate(found, [X], progress=False)
    model = quantplug.convert_pt2e(found)
    program: Any = backend.lower(model, (X,))
    assert {op.node: op.placement for op in program.ops} == {
        "linear": "int8",
        "conv2d": "int8",
        "relu": "int8",
        "sigmoid": "float",
    }
    kernels = {str(n.target).split(".")[1]: n for n in program.module.graph.nodes if "onednn" in str(n.target)}
    assert list(kernels) == ["qlinear_pointwise", "qconv_pointwise"]
    assert [str(n.target) for n in program.module.graph.nodes].count("aten.round_.default") == 1
    assert kernels["qlinear_pointwise"] in _producers(kernels["qconv_pointwise"])
    assert torch.equal(program(X), model(X))


def _producers(found):
    """The nodes above a node, through the clamps in between."""
    source = found.args[0]
    while "clamp" in str(source.target):
        source = source.args[0]
    return [source]


def test_b23_conv_bn_relu_without_a_rule_stays_float_and_the_report_names_what_is_missing():
    found = prepared(my_model(use_bn=True), X, tutorial_backend(), tutorial_mapping())
    report = explain(quantplug.convert_pt2e(found))
    assert [row.node for row in report.rows if row.quantized] == ["linear"]
    assert report.row("conv2d").reason.endswith("is quantized only as part of conv2d_relu")
    assert report.row("batch_norm").reason == "no rule ends in aten.batch_norm.default"
    assert "is 'batch_norm'" in report.row("relu").reason
    assert not any(folding.folded for folding in FOLDINGS.get(found))


def test_b23_a_batch_norm_is_folded_where_the_config_declares_its_piece_and_only_there():
    config = backend_of(
        pattern(nn.Linear), pattern(nni.ConvReLU2d), pattern((nn.Conv2d, nn.BatchNorm2d, nn.ReLU)).set_fuser_method(sum)
    )
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(300, 4), nn.BatchNorm1d(4)
    )
    x = torch.randn(4, 3, 10, 10)
    found = FOLDINGS.get(prepared(settled(model, x), x, config))
    assert [folding.folded for folding in found] == [True, False]
    assert found[1].reason == "the backend declares no piece of aten.linear.default and a batch norm"


def test_b24_default_configs_that_break_the_constraints_quantize_nothing_with_a_diagnostic_each():
    found = prepared(my_model(), X, tutorial_backend(), default_mapping(), strict=False, observe=False)
    violations = VIOLATIONS.get(found)
    assert [(v.node, v.constraint) for v in violations] == [
        ("linear", "scale_min_lower_bound"),
        ("conv2d", "scale_min_lower_bound"),
    ]
    assert not any(n.op == "call_module" and "activation" in str(n.target) for n in found.graph.nodes)
    with pytest.raises(AnnotationError, match=r"'linear' .* scale_min_lower_bound .*\(1 more like it\.\)"):
        prepared(my_model(), X, tutorial_backend(), default_mapping())
