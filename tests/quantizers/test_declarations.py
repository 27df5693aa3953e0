"""What a declaration means for its configs, and what is none."""

import pytest
import torch

import quantplug
from quantplug.annotators.linear import linear
from quantplug.annotators.presets import config_for
from quantplug.core.errors import ConfigError
from quantplug.core.specs.dtypes import DTypeConfig, DTypeWithConstraints
from quantplug.core.specs.levels import sqnr

UINT8 = DTypeWithConstraints(torch.uint8)


def test_b14_the_scheme_that_a_weight_begins_with_is_the_one_of_its_config():
    for scheme in (torch.per_channel_affine, torch.per_tensor_affine, torch.per_channel_symmetric):
        weight = DTypeWithConstraints(torch.int8, qschemes=(scheme,))
        spec = config_for(DTypeConfig("it", input=UINT8, output=UINT8, weight=weight)).weight
        assert spec.qscheme is scheme
        assert spec.quant_min == (-127 if scheme is torch.per_channel_symmetric else -128)


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: linear().where("at most"), "'linear' has the constraint 'at most'; give a function"),  # type: ignore[arg-type]
        (lambda: linear().within("exact"), "'linear' has level 'exact'; choose one of"),  # type: ignore[arg-type]
        (lambda: linear().shown_by(3), "'linear' has the example 3; give a function"),  # type: ignore[arg-type]
        (
            lambda: DTypeWithConstraints(torch.int8, qschemes=("affine",)),  # type: ignore[arg-type]
            "the scheme 'affine'; give one like",
        ),
    ],
)
def test_r01_what_is_no_declaration_is_an_error_where_it_is_written(declare, words):
    with pytest.raises(ConfigError, match=words):
        declare()


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "openvino"])
def test_weights_of_one_scale_have_a_named_config(backend):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(256, 4))
    calls = [(torch.randn(2, 8, 6, 6),) for _ in range(2)]
    quantizer = quantplug.get_quantizer(backend).set_global("int8_per_tensor")
    prepared = quantplug.prepare_pt2e(torch.export.export(model.eval(), calls[0]).module(), quantizer)
    prepared(*calls[0])
    reference = quantplug.convert_pt2e(prepared)
    assert not [node for node in reference.graph.nodes if "per_channel" in str(node.target)]
    program = quantizer.backend.lower(reference, calls[0])
    assert {found.placement for found in program.ops if "conv" in found.target or "linear" in found.target} == {"int8"}
    assert all(sqnr(reference(*call), program(*call)) > 50 for call in calls)


@pytest.mark.parametrize("lowest", [-8, -7])
def test_convolutions_with_weights_of_four_bits_stay_float_on_xnnpack_and_explain_says_why(lowest):
    config = quantplug.get_symmetric_quantization_config(True, weight_qmin=lowest, weight_qmax=7)
    quantizer = quantplug.get_quantizer("xnnpack", strict=False).set_global(config)
    exported = torch.export.export(torch.nn.Conv2d(4, 8, 3).eval(), (torch.randn(1, 4, 6, 6),)).module()
    prepared = quantplug.prepare_pt2e(exported, quantizer)
    assert "four bits" in quantplug.explain(prepared).rows[0].reason


def test_x86_has_no_config_for_fewer_bits_than_it_stores():
    with pytest.raises(ConfigError, match="store 8 bits"):
        quantplug.get_quantizer("x86").backend.config("int8", weight_bits=4)
