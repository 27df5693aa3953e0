"""Every pattern that torch.ao's BackendConfig may hold, its own configs as a whole, and whole models under them."""

import copy
import enum
import operator
import pickle
from functools import partial

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from fx_graph_mode import (
    OWN,
    PLAIN,
    SHARED,
    WEIGHTED,
    BackendPatternConfig,
    DTypeConfig,
    X,
    backend_of,
    converted,
    everywhere,
    fx_reference,
    fx_steps,
    my_model,
    pattern,
    qconfig,
    steps,
    tutorial_backend,
)
from models import MobileNet, MyModel, ResNet18, exported, settled
from torch import nn
from torch.ao.quantization import (
    QConfigMapping,
)
from torch.ao.quantization import backend_config as declared
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

import quantplug
from quantplug import explain
from quantplug.core.errors import ConfigError
from quantplug.lowering import reference
from quantplug.quantizers.framework.backend import Backend
from quantplug.quantizers.importer import from_backend_config, from_qconfig_mapping, import_backend_config


class Calls(nn.Module):
    """A convolution on either side of what a function does."""

    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), function

    def forward(self, x):
        return self.two(self.function(self.one(x)))


WHOLE_MODELS = {
    "mobilenet": lambda: (settled(MobileNet(), torch.randn(4, 3, 32, 32)), torch.randn(2, 3, 32, 32)),
    "resnet18": lambda: (settled(ResNet18(4, 10), torch.randn(4, 3, 32, 32)), torch.randn(2, 3, 32, 32)),
    **{
        name: partial(lambda function: (Calls(function), torch.randn(2, 3, 8, 8)), function)
        for name, function in {
            "functional relu": F.relu,
            "sum": lambda x: torch.relu(x + x.transpose(2, 3)),
            "number": lambda x: F.relu(x * 2.0) + 1.0,
            "joined": lambda x: torch.cat([x, F.hardtanh(x)], 2),
            "stacked": lambda x: torch.stack([x, x]).mean(0),
            "matmul": lambda x: torch.matmul(x, x.transpose(2, 3)),
            "interpolate": lambda x: F.interpolate(x, scale_factor=2.0),
            "moves": lambda x: x.permute(0, 1, 3, 2).contiguous().reshape(2, 4, 4, 16),
            "clamp": lambda x: torch.clamp(F.leaky_relu(F.hardswish(x)), -1, 1),
            "relu6": lambda x: F.avg_pool2d(F.relu6(x), 2),
            "norms": lambda x: F.group_norm(F.layer_norm(x, (8,)), 2),
        }.items()
    },
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.ReLU()), torch.randn(2, 3, 8, 8)),
    "batch norm alone": lambda: (
        settled(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), torch.randn(8, 3, 8, 8)),
        torch.randn(2, 3, 8, 8),
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", WHOLE_MODELS)
def test_b22_whole_models_equal_fx_graph_modes_reference_model_under_the_native_config(case):
    model, x = WHOLE_MODELS[case]()
    chosen = everywhere(qconfig(quant_max=255))
    oracle = fx_reference(copy.deepcopy(model), x, chosen, declared.get_native_backend_config())
    ours = converted(model, x, declared.get_native_backend_config(), chosen)
    assert _scales(ours) == _fx_scales(oracle)
    # Batch norms are folded in another order of operations: a value on the edge between two steps may fall to either.
    step = float(_scales(ours)[-1].split()[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(x), oracle(x), rtol=0, atol=1.01 * step)


def _scales(model):
    return sorted(step for step in steps(model) if step.startswith("quantize"))


def _fx_scales(model):
    return sorted(step for step in fx_steps(model) if step.startswith("quantize"))


PATTERNS = {
    # The number of patterns of each backend config of torch.ao's, how many became rules, and how many of these.
    "native": (declared.get_native_backend_config, 194, 167, 73),
    "x86": (get_x86_backend_config, 192, 165, 72),
    "fbgemm": (declared.get_fbgemm_backend_config, 192, 165, 72),
    "qnnpack": (declared.get_qnnpack_backend_config, 190, 165, 72),
    "executorch": (declared.get_executorch_backend_config, 84, 77, 32),
    "onednn": (declared.get_onednn_backend_config, 221, 196, 78),
    "tensorrt": (declared.get_tensorrt_backend_config, 149, 129, 58),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_r13_torch_aos_own_backend_configs_are_imported_as_a_whole(name):
    declare, patterns, imported, rules = PATTERNS[name]
    backend, report = import_backend_config(declare())
    assert (len(report.patterns), len(report.imported), len(report.rules)) == (patterns, imported, rules)
    assert sum(report.reasons.values()) == patterns - imported
    assert {row.name for row in backend.rows} >= set(report.rules)
    training = sum(count for reason, count in report.reasons.items() if reason.startswith("training keeps"))
    assert len(report.not_applicable) - training <= 10


class QuantizedOperatorType(enum.Enum):
    """As RFC-0019 declares it."""

    NEED_OBSERVER_FOR_BOTH_INPUTS_AND_OUTPUTS = 0
    OUTPUT_IS_SHARING_OBSERVER_WITH_INPUT = 1


def rfc_dictionary():
    own = {"type": QuantizedOperatorType.NEED_OBSERVER_FOR_BOTH_INPUTS_AND_OUTPUTS}
    quantized = torch.ao.nn.quantized.reference.Conv2d
    convolution = {
        **own,
        "float_to_quantized_operator_mapping": {
            "static": {
                nn.Conv2d: quantized,
                (nn.ReLU, nn.Conv2d): quantized,
                (nn.ReLU, torch.ao.nn.qat.Conv2d): quantized,
                torch.ao.nn.intrinsic.qat.ConvBn2d: quantized,
            }
        },
        "qat_mapping": {
            "static": {
                nn.Conv2d: torch.ao.nn.qat.Conv2d,
                (nn.BatchNorm2d, nn.Conv2d): torch.ao.nn.intrinsic.qat.ConvBn2d,
            }
        },
    }
    return {
        "name": "custom_backend",
        "operator": {
            nn.Conv2d: convolution,
            F.conv2d: own,
            torch.bmm: {**own, "fusions": [(nn.Softmax, torch.bmm)]},
            (torch.sigmoid, torch.bmm): own,
            nn.MaxPool2d: {"type": QuantizedOperatorType.OUTPUT_IS_SHARING_OBSERVER_WITH_INPUT},
        },
    }


def test_r12_r13_r14_the_rfcs_dictionaries_of_operators_with_their_mappings():
    backend, report = import_backend_config(rfc_dictionary())
    assert backend.name == "custom_backend"
    assert report.rules == ("conv2d", "conv2d_relu", "conv2d_bn", "bmm", "bmm_softmax", "bmm_sigmoid", "max_pool2d")
    told = {found.rule: dict(found.effects) for found in reversed(report.imported)}
    for setter in ("set_qat_module", "set_reference_quantized_module"):
        assert told["conv2d"][setter].startswith("not applicable in PT2E because ")
    assert {found.pattern for found in report.not_applicable} == {"(ReLU, Conv2d)", "ConvBn2d"}
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 1)).eval()
    found = steps(converted(model, X, rfc_dictionary()))
    pair = ["quantize", "dequantize"]
    expected = [*pair, "conv2d", "relu", *pair, "max_pool2d", *pair, "conv2d", *pair]
    assert [step.split()[0] for step in found] == expected
    assert found[4] == found[7]
    trained = exported(model, X)
    chosen = from_qconfig_mapping(torch.ao.quantization.get_default_qat_qconfig_mapping("x86"), backend)
    rows = explain(quantplug.prepare_qat_pt2e(trained, chosen)).rows
    assert [row.rule for row in rows if row.operator == "batch_norm"] == ["conv2d_bn"]


def test_r25_an_operator_is_added_to_a_copy_and_the_base_stays():
    base = rfc_dictionary()
    del base["operator"][torch.bmm]
    before = import_backend_config(base)[1].rules
    own = {"type": QuantizedOperatorType.NEED_OBSERVER_FOR_BOTH_INPUTS_AND_OUTPUTS}
    more = {**base, "operator": {**base["operator"], torch.bmm: own}}
    assert set(import_backend_config(more)[1].rules) - set(before) == {"bmm"}
    assert import_backend_config(base)[1].rules == before


@pytest.mark.parametrize("items", [(nn.ReLU, nn.Conv2d), (nn.Conv2d, nn.ReLU)], ids=["reversed", "forward"])
def test_r13_r14_the_rfcs_dictionaries_in_either_order(items):
    dtypes = {"input_dtype": torch.quint8, "output_dtype": torch.quint8, "weight_dtype": torch.qint8}
    rfc = {
        "name": "rfc",
        "configs": [
            {
                "pattern": items,
                "observation_type": OWN,
                "dtype_configs": [dtypes],
                "fuser_method": torch.ao.quantization.fuser_method_mappings.fuse_conv_bn_relu,
                "fused_module": nni.ConvReLU2d,
            },
            {
                "pattern": nni.ConvReLU2d,
                "observation_type": OWN,
                "dtype_configs": [dtypes],
                "root_module": nn.Conv2d,
                "reference_quantized_module_for_root": torch.ao.nn.quantized.reference.Conv2d,
                "qat_module": torch.ao.nn.intrinsic.qat.ConvReLU2d,
            },
        ],
    }
    found = converted(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), X, rfc)
    assert [step.split()[0] for step in steps(found)] == [
        "quantize",
        "dequantize",
        "conv2d",
        "relu",
        "quantize",
        "dequantize",
    ]


@pytest.mark.parametrize(
    ("items", "rule"),
    [
        ((nn.ReLU, (nn.BatchNorm2d, nn.Conv2d)), "conv2d_bn_relu"),
        (((nn.Conv2d, nn.BatchNorm2d), F.relu), "conv2d_bn_relu"),
        ((nn.ReLU, operator.add), "add_relu"),
        ((torch.bmm, torch.sigmoid), "bmm_sigmoid"),
        ((nn.Sigmoid, torch.bmm), "bmm_sigmoid"),
        (nni.LinearReLU, "linear_relu"),
        (torch.nn.functional.max_pool2d, "max_pool2d"),
        (operator.iadd, "add"),
        ("hardsigmoid_", "hardsigmoid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_r14_patterns_of_modules_functions_and_methods(items, rule):
    _, report = import_backend_config({"name": "mine", "configs": [{"pattern": items, "dtype_configs": [WEIGHTED]}]})
    assert report.rules == (rule,)


def test_r16_a_function_and_its_module_are_one_rule():
    _, report = import_backend_config(backend_of(pattern(nn.Conv2d), pattern(F.conv2d)))
    assert (len(report.imported), report.rules) == (2, ("conv2d",))
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    one, other = (steps(converted(model, X, backend_of(pattern(kind)))) for kind in (nn.Conv2d, F.conv2d))
    assert one == other
    assert [step.split()[0] for step in one][2:4] == ["conv2d", "quantize"]


def test_r22_a_new_lowering_for_a_stock_set_of_rules():
    seen = []

    def lower(model, example_inputs, **options):
        seen.append(model)
        return reference.lower(model, example_inputs)

    backend = from_backend_config(declared.get_native_backend_config(), lower, "mine")
    quantizer = from_qconfig_mapping(everywhere(qconfig(quant_max=255)), backend)
    artefact = quantplug.quantize(my_model(), (X,), quantizer, [X], progress=False)
    assert seen == [artefact.reference]
    assert torch.equal(artefact(X), artefact.reference(X))


def test_residual_sums_of_either_order_become_one_rule():
    backend = from_backend_config(declared.get_onednn_backend_config())

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return F.relu(x + self.conv(x)) + self.conv(x)

    annotated = exported(Block(), X)
    from_qconfig_mapping(everywhere(qconfig(quant_max=255)), backend).annotate(annotated)
    assert [row.rule for row in explain(annotated).rows] == ["conv2d_add_relu"] * 3 + ["conv2d_add"] * 2


def test_a_fused_module_of_ones_own_is_known_by_what_it_is_made_of():
    class Mine(nn.Sequential):
        pass

    fuses = pattern((nn.Linear, nn.Tanh)).set_fused_module(Mine).set_fuser_method(lambda q, a, b: Mine(a, b))
    _, report = import_backend_config(backend_of(fuses, pattern(Mine)))
    assert report.rules == ("linear_tanh",)
    found = converted(nn.Sequential(nn.Linear(10, 4), nn.Tanh()), X, backend_of(fuses, pattern(Mine)))
    assert [step.split()[0] for step in steps(found)][2:5] == ["linear", "tanh", "quantize"]


def test_a_custom_operator_is_a_pattern_too():
    _, report = import_backend_config(backend_of(pattern((torch.ops.aten.bmm, torch.ops.aten.relu.default))))
    assert report.rules == ("bmm_relu",)


def test_an_imported_backend_is_a_plain_value():
    backend = from_backend_config(declared.get_native_backend_config())
    assert isinstance(backend, Backend)
    assert pickle.loads(pickle.dumps(backend.folds_batch_norm)) == backend.folds_batch_norm


@pytest.mark.parametrize(
    ("configs", "sentence"),
    [
        (3, "takes a BackendConfig or a dictionary with 'configs' or 'operator', found int"),
        ({"configs": [], "wrong": 1}, "backend config has the key 'wrong', which means nothing"),
        ({"configs": [{"patern": nn.Linear}]}, "pattern config has the key 'patern', which means nothing"),
        ({"operator": {nn.Linear: {}}}, "config of operator <class 'torch.nn.modules.linear.Linear'> has no 'type'"),
        ({"operator": {nn.Linear: {"typ": 1}}}, "A config of an operator has the key 'typ', which means nothing"),
        ({"operator": {nn.Linear: {"type": 1, "qat_mapping": {"off": {}}}}}, "A 'qat_mapping' has the key 'off'"),
        ({"configs": [3]}, "configs of a backend config hold a int"),
        ({"configs": [{"dtype_configs": [PLAIN]}]}, "has pattern None and pattern_complex_format None; give one"),
        ({"configs": [{"pattern": 3, "dtype_configs": [PLAIN]}]}, "A pattern holds 3; give a module class"),
        ({"configs": [{"pattern": "liner", "dtype_configs": [PLAIN]}]}, "item 'liner' is no operator .*aten::linear"),
        ({"configs": [{"pattern": MyModel, "dtype_configs": [PLAIN]}]}, "holds the class models.MyModel"),
        ({"configs": [{"pattern": nn.Linear, "dtype_configs": [3]}]}, "dtype configs of pattern Linear hold a int"),
        (
            {"configs": [{"pattern": nn.Linear, "dtype_configs": [{"input_dtype": "int8"}]}]},
            "dtype config of pattern Linear has the dtype 'int8'; give a torch.dtype",
        ),
        (
            {"configs": [{"pattern": nn.Linear, "dtype_configs": [PLAIN], "observation_type": "ALL"}]},
            "Pattern Linear has the observation type ALL; choose one of",
        ),
        (
            {
                "name": "two",
                "configs": [
                    {"pattern": nn.ReLU, "dtype_configs": [PLAIN], "observation_type": SHARED},
                    {"pattern": F.relu, "dtype_configs": [PLAIN]},
                ],
            },
            "The patterns ReLU and relu are one piece 'relu' in an exported graph",
        ),
        ({"name": "none", "configs": [{"pattern": nn.LSTM, "dtype_configs": [PLAIN]}]}, "No pattern .* is applicable"),
        (
            {"configs": [{"pattern": F.layer_norm, "dtype_configs": [WEIGHTED], "input_type_to_index": {"scale": 9}}]},
            "Pattern layer_norm has its scale at argument 9, but its operator has only",
        ),
        (
            {"configs": [{"pattern": (torch.bmm, nn.BatchNorm2d), "dtype_configs": [PLAIN]}]},
            "has a batch norm or a sum with another tensor after 'bmm'",
        ),
    ],
)
def test_what_is_not_understood_is_one_sentence(configs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        from_backend_config(configs)


def test_a_pattern_without_dtype_configs_is_never_quantized_as_in_fx_graph_mode():
    config = backend_of(BackendPatternConfig(nn.Linear), pattern(nn.Sigmoid, dtypes=PLAIN))
    _, report = import_backend_config(config)
    assert report.not_applicable[0].reason.startswith("it has no dtype config")
    model = nn.Sequential(nn.Linear(10, 4))
    found = converted(model, X, config, strict=False, observe=False)
    assert fx_steps(fx_reference(model, X, everywhere(), config)) == steps(found)


def test_half_precision_chosen_at_run_time_is_half_precision_weights():
    half = DTypeConfig(torch.float16, torch.float, torch.float16, torch.float, is_dynamic=True)
    chosen = everywhere(torch.ao.quantization.float16_dynamic_qconfig)
    config = backend_of(pattern(nn.Linear, dtypes=half).add_dtype_config(WEIGHTED))
    found = converted(nn.Sequential(nn.Linear(10, 4)), X, config, chosen, observe=False)
    weights = [value.dtype for value in (*found.parameters(), *found.buffers()) if value.dim() == 2]
    assert weights == [torch.float16]
    only = from_backend_config(backend_of(pattern(nn.Linear, dtypes=half)))
    assert list(only.configs) == ["float16_weight_only"]
    assert only.config().weight.dtype == torch.float16


def test_settings_that_no_qconfig_has_are_object_types_that_models_need_not_have():
    mapping = QConfigMapping().set_global(None).set_object_type(nn.Linear, qconfig()).set_object_type(nn.LSTM, None)
    assert explain(converted(my_model(), X, tutorial_backend(), mapping)).quantized == 1
