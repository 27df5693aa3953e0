"""Backends beyond the first two, as proof that another one is a page of declarations."""

import inspect

import pytest
import torch
from models import ResNet18, exported
from torch import nn

from quantplug import explain, get_quantizer, prepare_pt2e, quantize
from quantplug.core.errors import AnnotationError, ConfigError
from quantplug.core.observers import EntropyObserver
from quantplug.core.specs.levels import sqnr
from quantplug.quantizers import native, tensorrt
from quantplug.quantizers.framework.derived import union
from quantplug.quantizers.x86 import X86
from quantplug.quantizers.xnnpack import XNNPACK


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    return ResNet18(8, 10).eval(), torch.randn(4, 3, 48, 48)


def test_b25_the_built_in_backends_are_those_of_server_mobile_both_and_tensorrt():
    for name, module in (("x86", "x86"), ("xnnpack", "xnnpack"), ("native", "native"), ("tensorrt", "tensorrt")):
        assert get_quantizer(name).backend.name == module
    for file, page in ((native, 60), (tensorrt, 100)):
        assert len(inspect.getsource(file).splitlines()) <= page


@pytest.mark.slow
def test_b25_e11_tensorrt_is_symmetric_with_entropy_calibration_and_weights_per_channel(case):
    pytest.importorskip("onnxruntime")
    model, x = case
    prepared = prepare_pt2e(exported(model, x), get_quantizer("tensorrt"))
    assert any(isinstance(observer, EntropyObserver) for observer in prepared.children())
    artefact = quantize(model, (x,), "tensorrt", [x])
    nodes = artefact.reference.graph.nodes
    activations = [n for n in nodes if "quantize_per_tensor" in str(n.target)]
    weights = [n for n in nodes if "dequantize_per_channel" in str(n.target)]
    assert len(activations) > 20
    assert {n.args[2] for n in activations} == {0}
    assert len(weights) == 21
    assert sqnr(artefact(x), model(x)) > 25


def test_b25_tensorrt_refuses_an_affine_config():
    affine = get_quantizer("xnnpack").backend.config("int8")
    with pytest.raises(AnnotationError, match=r"breaks .*zero_point_exact_match|breaks qschemes"):
        get_quantizer("tensorrt").set_global(affine).annotate(exported(nn.Linear(3, 2), torch.randn(2, 3)))


def test_b25_native_is_the_union_of_server_and_mobile(case):
    rows = {row.rule for row in get_quantizer("native").capabilities()}
    assert rows == {r.rule for name in ("x86", "xnnpack") for r in get_quantizer(name).capabilities()}
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.AvgPool2d(2), nn.Conv2d(3, 3, 1), nn.Sigmoid()).eval()
    x = torch.randn(2, 3, 8, 8)
    quantized = {}
    for name in ("x86", "xnnpack", "native"):
        annotated = exported(model, x)
        get_quantizer(name).annotate(annotated)
        quantized[name] = {row.operator for row in explain(annotated).rows if row.quantized}
    assert quantized["native"] == quantized["x86"] | quantized["xnnpack"] == {"conv2d", "sigmoid", "avg_pool2d"}
    assert sqnr(quantize(*(case[0], (case[1],), "native", [case[1]]))(case[1]), case[0](case[1])) > 25


def test_a_union_keeps_the_first_default_and_all_configs():
    both = union("both", XNNPACK, X86)
    assert next(iter(both.configs)) == next(iter(XNNPACK.configs))
    assert set(both.configs) == {*XNNPACK.configs, *X86.configs}
    assert both.configs["int8"] is XNNPACK.configs["int8"]
    assert both.lowering == XNNPACK.lowering
    with pytest.raises(ConfigError, match="Backend 'none' is a union of nothing"):
        union("none")
