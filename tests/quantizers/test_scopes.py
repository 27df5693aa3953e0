"""Config scopes: the more specific wins, None is float, what matches nothing is an error with the nearest names."""

import pytest
import torch
import torch.nn.functional as F
from models import Function, MobileNet, MyModel, ResNet18, SampleModel, exported, node, operators, reference
from torch import nn
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from quantplug import X86Quantizer, XNNPACKQuantizer, explain, get_quantizer, get_symmetric_quantization_config
from quantplug.core.errors import ConfigError, PatternError
from quantplug.quantizers.framework.scopes import Scopes

X = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
KEY = "quantization_annotation"


def quantized(model, quantizer, x=X, strict=False):
    """The rows of the report that are quantized, by module path."""
    annotated = exported(model, x, strict=strict)
    quantizer.annotate(annotated)
    return {row.module_path for row in explain(annotated).rows if row.quantized}


def config(bits):
    return get_symmetric_quantization_config(True, act_qmin=-(2 ** (bits - 1)), act_qmax=2 ** (bits - 1) - 1)


@pytest.mark.parametrize("strict", [False, True])
def test_the_order_is_module_name_module_type_operator_type_filter_global(strict):
    model = exported(SampleModel(), X, strict=strict)
    conv = node(model, "conv2d")
    steps = (
        (lambda s: s.set_global(config(3)), 3),
        (lambda s: s.set_filter(lambda n: True, config(4)), 4),
        (lambda s: s.set_operator_type("conv2d", config(5)), 5),
        (lambda s: s.set_module_type(nn.Conv2d, config(6)), 6),
        (lambda s: s.set_module_name("conv", config(7)), 7),
    )
    for order in (steps, steps[::-1]):
        scopes = Scopes()
        for set_scope, _ in order:
            set_scope(scopes)
        assert scopes.choose(conv).config is config(7)
    for count, (_, bits) in enumerate(steps, 1):
        scopes = Scopes()
        for set_scope, _ in reversed(steps[:count]):
            set_scope(scopes)
        assert scopes.choose(conv).config is config(bits)


def test_the_deeper_module_wins_and_none_is_float():
    quantizer = XNNPACKQuantizer().set_module_name("layer1", "int8").set_module_name("layer1.0", None)
    quantizer.set_module_name("layer1.0.conv2", "int8")
    found = quantized(ResNet18(4, 4), quantizer)
    assert "layer1.1.conv1" in found
    assert "layer1.0.conv2" in found
    assert "layer1.0.conv1" not in found
    assert "layer2.0.conv1" not in found


def test_e02_none_by_module_name_keeps_a_layer_float():
    quantizer = XNNPACKQuantizer().set_global("int8").set_module_name("conv", None)
    converted = reference(SampleModel(), quantizer, X)
    report = explain(converted)
    assert report.row("conv2d").reason.endswith("float by module name 'conv'")
    assert report.row("linear").quantized
    assert node(converted, "conv2d").args[1].op == "get_attr"


def test_a_path_prefix_that_is_no_module_is_not_covered():
    model = Function(lambda m, x: m.conv10(m.conv1(x)), conv1=nn.Conv2d(3, 3, 1), conv10=nn.Conv2d(3, 3, 1))
    assert quantized(model, XNNPACKQuantizer().set_module_name("conv1", "int8")) == {"conv1"}


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern", ["layer?.0.conv1", "*.0.conv1", "layer[12].0.conv1"])
def test_patterns_of_module_paths(pattern):
    found = quantized(ResNet18(4, 4), XNNPACKQuantizer().set_module_name(pattern, "int8"))
    layers = {1, 2} if "[12]" in pattern else {1, 2, 3, 4}
    assert {path for path in found if "conv" in path} == {f"layer{i}.0.conv1" for i in layers}


def test_a_scope_covers_every_call_of_a_module():
    relu = nn.ReLU()
    model = Function(
        lambda m, x: m.relu(m.two(m.relu(m.one(x)))), one=nn.Conv2d(3, 3, 1), two=nn.Conv2d(3, 3, 1), relu=relu
    )
    annotated = exported(model, X)
    XNNPACKQuantizer().set_global("int8").set_module_name("relu", None).annotate(annotated)
    assert [r.quantized for r in explain(annotated).rows] == [True, False, True, False]


def test_module_types_by_class_and_by_name():
    for kind in (nn.Linear, "Linear", "torch.nn.modules.linear.Linear"):
        assert quantized(SampleModel(), XNNPACKQuantizer().set_module_type(kind, "int8")) == {"fc"}
    with pytest.raises(ConfigError, match=r"set_module_type takes a subclass of torch.nn.Module or its name, found 3"):
        XNNPACKQuantizer().set_module_type(3, "int8")  # type: ignore[arg-type]


def test_two_module_types_of_one_name_stay_apart():
    def block():
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 3, 1)

            def forward(self, x):
                return self.conv(x)

        return Block

    first, second = block(), block()
    second.__qualname__ = "Elsewhere.Block"
    model = Function(lambda m, x: m.two(m.one(x)), one=first(), two=second())
    quantizer = XNNPACKQuantizer().set_module_type(first, "int8").set_module_type(second, None)
    assert quantized(model, quantizer) == {"one.conv"}


def test_q15_only_linear_leaves_everything_else_untouched():
    for operator in ("linear", F.linear, torch.ops.aten.linear, torch.ops.aten.linear.default, nn.Linear):
        model = exported(SampleModel(), X)
        before = {n.name: dict(n.meta) for n in model.graph.nodes}
        XNNPACKQuantizer().set_operator_type(operator, "int8").annotate(model)
        annotated = {n.name for n in model.graph.nodes if KEY in n.meta}
        assert annotated == {"linear"}
        for n in model.graph.nodes:
            assert n.name == "linear" or {k: v for k, v in n.meta.items() if k in before[n.name]} == before[n.name]
    converted = reference(SampleModel(), XNNPACKQuantizer().set_operator_type("linear", "int8"), X)
    assert [name for name in operators(converted) if "quantize" not in name] == ["conv2d", "relu", "flatten", "linear"]
    assert operators(converted).count("quantize_per_tensor") == 2


def test_q15_everything_int8_symmetric():
    converted = reference(MobileNet(), XNNPACKQuantizer().set_global("int8"), X)
    assert all(row.quantized for row in explain(converted).rows)


def test_set_object_type_is_the_older_name():
    quantizer = XNNPACKQuantizer().set_object_type(nn.Linear, None).set_global("int8")
    assert "fc" not in quantized(SampleModel(), quantizer)


def test_the_later_setting_of_one_scope_wins():
    quantizer = XNNPACKQuantizer().set_global("int8").set_module_name("fc", None).set_module_name("fc", "int8")
    assert "fc" in quantized(SampleModel(), quantizer)
    first = lambda n: True  # noqa: E731
    quantizer = XNNPACKQuantizer().set_filter(first, None).set_filter(lambda n: "conv" in n.name, "int8")
    assert quantized(SampleModel(), quantizer) == {"conv"}


def test_without_any_scope_the_default_config_is_global():
    assert "fc" in quantized(SampleModel(), XNNPACKQuantizer())
    assert quantized(SampleModel(), XNNPACKQuantizer().set_global(None)) == set()


def test_parts_set_to_float_leave_the_rest_to_the_default_config():
    found = quantized(SampleModel(), XNNPACKQuantizer().set_module_name("conv", None))
    assert "fc" in found
    assert "conv" not in found
    assert "fc" not in quantized(SampleModel(), XNNPACKQuantizer().set_module_name("conv", "int8"))


@pytest.mark.parametrize(
    ("set_scope", "sentence"),
    [
        (lambda q: q.set_module_name("cnv", None), r"module name 'cnv' matches nothing .* nearest names are \['conv'"),
        (lambda q: q.set_module_name("con?v", None), r"module name 'con\?v' matches nothing .*\['conv'"),
        (lambda q: q.set_module_type("Liner", None), r"module type 'Liner' matches nothing .*\['Linear'\]"),
        (lambda q: q.set_module_type(nn.LSTM, None), r"module type 'torch.nn.modules.rnn.LSTM' matches nothing"),
        (lambda q: q.set_operator_type(F.gelu, None), r"operator type 'gelu' matches nothing .*relu"),
        (lambda q: q.set_filter(lambda n: False, None), r"filter '<lambda>' matches nothing in the model; correct"),
    ],
)
def test_a_scope_that_covers_nothing_is_an_error_with_the_nearest_names(set_scope, sentence):
    model = exported(SampleModel(), X)
    quantizer = XNNPACKQuantizer().set_global("int8")
    set_scope(quantizer)
    before = {n.name: sorted(n.meta) for n in model.graph.nodes}
    with pytest.raises(ConfigError, match=sentence):
        quantizer.annotate(model)
    assert {n.name: sorted(n.meta) for n in model.graph.nodes} == before
    quantizer.strict = False
    quantizer.annotate(model)
    assert KEY in node(model, "linear").meta


def test_all_silent_scopes_are_told_at_once():
    quantizer = XNNPACKQuantizer().set_module_name("a", None).set_module_name("b", None)
    with pytest.raises(ConfigError, match=r"module name 'a' .*; module name 'b' .*; correct it or pass strict=False"):
        quantizer.annotate(exported(SampleModel(), X))


def test_unknown_names_fail_when_they_are_set():
    quantizer = XNNPACKQuantizer()
    with pytest.raises(ConfigError, match=r"Backend 'xnnpack' has no config 'int9'; choose one of \['int8'"):
        quantizer.set_global("int9")
    with pytest.raises(ConfigError, match=r"takes a QuantizationConfig, one of the names .* found int"):
        quantizer.set_module_name("conv", 8)
    with pytest.raises(PatternError, match=r"no operator 'liner' in 'aten'.*aten::linear"):
        quantizer.set_operator_type("liner", "int8")
    assert quantizer.scopes.settings == []
    with pytest.raises(ConfigError, match="Config 'int8' of backend 'xnnpack' has no option 'bits'; leave it out"):
        quantizer.backend.config("int8", bits=4)


def test_mixed_modes_by_scope():
    model = MyModel()
    quantizer = X86Quantizer().set_global("int8").set_operator_type("linear", "int8_dynamic")
    converted = reference(model, quantizer, torch.randn(1, 3, 10, 10))
    rows = {row.operator: row for row in explain(converted).rows}
    assert rows["linear"].how.startswith("dynamic uint8")
    assert rows["conv2d"].quantized
    assert rows["conv2d"].how.startswith("uint8")


def test_configs_made_by_hand_are_accepted():
    made = get_symmetric_quantization_config(False)
    by_hand = QuantizationConfig(made.input_activation, made.output_activation, made.weight, None)
    assert "fc" in quantized(SampleModel(), get_quantizer("xnnpack").set_global(by_hand))
