"""torch.ao's QConfigMapping as scopes of ours: every kind of setting, in torch.ao's order, and its observers."""

import pytest
import torch
import torch.ao.quantization as ao
import torch.nn.functional as F
from fx_graph_mode import PLAIN, backend_of, everywhere, fx_reference, fx_steps, pattern, qconfig, steps
from models import exported
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, default_weight_observer
from torch.ao.quantization.backend_config import get_native_backend_config
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec

import quantplug
from quantplug import explain
from quantplug.core.errors import ConfigError
from quantplug.quantizers.importer import from_backend_config, from_qconfig, from_qconfig_mapping

X = torch.linspace(-2, 2, 48).reshape(2, 3, 8)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(F.linear(self.second(self.first(x)), self.first.weight), self.second.weight)


class Model(nn.Module):
    """Linear layers as modules at three depths, and as functions."""

    def __init__(self):
        super().__init__()
        self.one, self.inner, self.two = nn.Linear(8, 8), Inner(), nn.Linear(8, 8)

    def forward(self, x):
        return self.two(self.inner(self.one(x)))


NATIVE = from_backend_config(get_native_backend_config())
Q = qconfig(quant_max=255)


def ours(mapping, **options):
    """Which of the model's six linear operators a mapping quantizes, in the order of their calls."""
    model = exported(Model(), X)
    from_qconfig_mapping(mapping, NATIVE, **options).annotate(model)
    return [row.quantized for row in explain(model).rows]


def theirs(mapping):
    found = fx_reference(Model(), X, mapping, get_native_backend_config())
    return [_has_quantized_weight(found, n) for n in found.graph.nodes if n.target is F.linear or _is_layer(n)]


def _is_layer(found):
    return found.op == "call_module"


def _has_quantized_weight(model, found):
    if _is_layer(found):
        return "reference" in type(model.get_submodule(found.target)).__module__
    return found.args[1].target == "dequantize"


MAPPINGS = {
    "global": lambda: QConfigMapping().set_global(Q),
    "nothing": QConfigMapping,
    "module type": lambda: QConfigMapping().set_object_type(nn.Linear, Q),
    "function": lambda: QConfigMapping().set_object_type(F.linear, Q),
    "function off": lambda: QConfigMapping().set_global(Q).set_object_type(F.linear, None),
    "type of the module around": lambda: QConfigMapping().set_object_type(Inner, Q),
    "module name": lambda: QConfigMapping().set_module_name("inner", Q),
    "deeper module name": lambda: QConfigMapping().set_module_name("inner", Q).set_module_name("inner.first", None),
    "regular expression": lambda: QConfigMapping().set_module_name_regex("inner.f.*", Q),
    "expression of a beginning": lambda: QConfigMapping().set_module_name_regex("inner", Q),
    "first expression wins": lambda: (
        QConfigMapping().set_module_name_regex("inner.*first", None).set_module_name_regex("inner.*", Q)
    ),
    "name over expression": lambda: QConfigMapping().set_module_name_regex(".*", None).set_module_name("two", Q),
    "expression over type": lambda: (
        QConfigMapping().set_object_type(nn.Linear, Q).set_module_name_regex("inner.*", None)
    ),
    "call of a module": lambda: QConfigMapping().set_module_name_object_type_order("inner", nn.Linear, 1, Q),
    "call of a function": lambda: QConfigMapping().set_module_name_object_type_order("inner", F.linear, 1, Q),
    "call over name": lambda: (
        QConfigMapping().set_module_name("inner", Q).set_module_name_object_type_order("inner", nn.Linear, 0, None)
    ),
    "call at the root": lambda: QConfigMapping().set_module_name_object_type_order("", nn.Linear, 1, Q),
}


@pytest.mark.parametrize("case", MAPPINGS)
def test_b17_r16_every_setting_covers_what_it_covers_in_fx_graph_mode(case):
    assert ours(MAPPINGS[case]()) == theirs(MAPPINGS[case]())


def test_b17_dictionaries_of_settings():
    rows = {
        "": None,
        "object_type": [(F.linear, Q)],
        "module_name_regex": [("tw.", Q)],
        "module_name": [("one", Q)],
        "module_name_object_type_order": [("inner", nn.Linear, 0, Q)],
    }
    assert ours(rows) == ours(QConfigMapping.from_dict(rows)) == [True, True, False, True, True, True]


def test_b19_items_of_a_piece_with_different_configs_are_named_and_none_is_annotated():
    model = exported(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), X)
    mapping = QConfigMapping().set_object_type(nn.Linear, qconfig()).set_object_type(nn.ReLU, Q)
    backend = from_backend_config(backend_of(pattern((F.linear, F.relu))))
    from_qconfig_mapping(mapping, backend).annotate(model)
    report = explain(model)
    assert report.quantized == 0
    assert "module type 'torch.nn.modules.linear.Linear'" in report.row("relu").reason
    assert "module type 'torch.nn.modules.activation.ReLU'" in report.row("relu").reason


@pytest.mark.slow
def test_module_names_that_match_nothing_are_errors_and_object_types_are_not():
    assert any(ours(ao.get_default_qconfig_mapping("x86")))
    for mapping, sentence in (
        (QConfigMapping().set_module_name("on", Q), r"module name 'on' matches nothing .* \['one'"),
        (QConfigMapping().set_module_name_regex("iner", Q), r"module name pattern 'iner' .* \['inner'"),
        (
            QConfigMapping().set_module_name_object_type_order("", nn.Linear, 2, Q),
            r"call '2 of torch.nn.modules.linear.Linear in ''' matches nothing",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ours(mapping)
        assert not any(ours(mapping, strict=False))


OBSERVERS = {
    "min-max": (ao.MinMaxObserver, pt2e.MinMaxObserver),
    "moving average": (
        ao.MovingAverageMinMaxObserver.with_args(averaging_constant=0.5),
        pt2e.MovingAverageMinMaxObserver,
    ),
    "histogram": (ao.HistogramObserver.with_args(bins=128), pt2e.HistogramObserver),
    "signed": (ao.MinMaxObserver.with_args(dtype=torch.qint8), pt2e.MinMaxObserver),
    "symmetric": (
        ao.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
        pt2e.MinMaxObserver,
    ),
    "reduced": (ao.HistogramObserver.with_args(reduce_range=True), pt2e.HistogramObserver),
}


@pytest.mark.parametrize("case", OBSERVERS)
def test_b22_the_same_observers_find_the_same_scales(case):
    theirs, expected = OBSERVERS[case]
    dtype = theirs().dtype
    dtypes = ao.backend_config.DTypeConfig(dtype, dtype, torch.qint8, torch.float)
    config, mapping = (
        backend_of(pattern(nn.Linear, dtypes=dtypes)),
        everywhere(QConfig(theirs, default_weight_observer)),
    )
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    prepared = quantplug.prepare_pt2e(exported(model, X), from_qconfig_mapping(mapping, from_backend_config(config)))
    oracle = ao.quantize_fx.prepare_fx(model, mapping, (X,), backend_config=config)
    for batch in (X, X * 2, X.flip(0) * 0.5):
        with torch.no_grad():
            prepared(batch)
            oracle(batch)
    assert {type(m) for m in prepared.modules() if isinstance(m, expected)} == {expected}
    converted = ao.quantize_fx.convert_to_reference_fx(oracle, backend_config=config)
    assert steps(quantplug.convert_pt2e(prepared)) == fx_steps(converted)


def test_weights_per_channel_and_in_training():
    made = from_qconfig(ao.get_default_qat_qconfig("x86"))
    assert made.is_qat
    assert isinstance(made.input_activation.observer_or_fake_quant_ctr(), pt2e.FusedMovingAvgObsFakeQuantize)
    assert (made.weight.qscheme, made.weight.ch_axis) == (torch.per_channel_symmetric, 0)
    assert (made.input_activation.quant_min, made.input_activation.quant_max) == (0, 127)


def test_training_from_the_default_mapping_has_fake_quantizes_that_learn_their_ranges():
    quantizer = from_qconfig_mapping(ao.get_default_qat_qconfig_mapping("x86"), NATIVE)
    prepared = quantplug.prepare_qat_pt2e(exported(Model(), X), quantizer)
    prepared(X).sum().backward()
    converted = quantplug.convert_pt2e(prepared)
    assert explain(converted).quantized == 6
    assert (converted(X) - prepared.eval()(X)).abs().max() < 0.05


def test_fixed_qparams_are_those_of_the_output():
    observer = ao.FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0, dtype=torch.quint8)
    mapping = QConfigMapping().set_global(Q).set_object_type(nn.Sigmoid, QConfig(observer, default_weight_observer))
    config = from_qconfig_mapping(mapping, NATIVE).scopes.settings[-1].config
    assert isinstance(config.output_activation, FixedQParamsQuantizationSpec)
    assert config.input_activation.quant_max == 255
    assert config.input_activation.observer_or_fake_quant_ctr().eps == 2**-12


def test_float_and_dynamic_qconfigs():
    assert from_qconfig(None) is None
    assert from_qconfig(QConfig(ao.PlaceholderObserver, ao.NoopObserver)) is None
    dynamic = from_qconfig(ao.default_dynamic_qconfig)
    assert dynamic.input_activation.is_dynamic
    assert dynamic.output_activation is None
    weights = from_qconfig(QConfig(ao.PlaceholderObserver, default_weight_observer))
    assert weights.input_activation is None
    assert weights.weight.dtype == torch.int8


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (3, "from_qconfig_mapping takes a QConfigMapping or a dictionary, found int"),
        ({"object": []}, "qconfig mapping has the key 'object'; choose from"),
        ({"": 3}, "QConfigMapping holds a int; give a QConfig or None"),
        ({"": QConfig(ao.RecordingObserver, default_weight_observer)}, "has the observer RecordingObserver; choose"),
        ({"": ao.float_qparams_weight_only_qconfig}, "has float zero points, which no quantize operator of PT2E has"),
        ({"object_type": [(3, None)]}, "has the object type 3; give a module class, a function or a method's name"),
        ({"object_type": [("liner", None)]}, "item 'liner' is no operator of an exported graph"),
        ({"module_name_regex": [("(", None)]}, r"module name pattern '\(' is no regular expression"),
    ],
)
def test_what_is_not_understood_is_one_sentence(found, sentence):
    with pytest.raises(ConfigError, match=sentence):
        from_qconfig_mapping(found, NATIVE)


def test_a_dynamic_rule_keeps_static_configs_out():
    dynamic = ao.backend_config.DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
    backend = from_backend_config(backend_of(pattern(nn.Linear, dtypes=dynamic), pattern(torch.add, dtypes=PLAIN)))
    model = exported(Model(), X)
    from_qconfig_mapping(everywhere(Q), backend).annotate(model)
    assert "it has no static kernel" in explain(model).row("linear").reason
