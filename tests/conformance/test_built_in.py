"""The built-in backends keep what they declare: of a few rules by default, of all in the slow test."""

import pytest

from quantplug import get_quantizer
from quantplug.conformance import verdicts


def broken(name, *rules):
    if name in ("openvino", "onnxruntime"):
        pytest.importorskip(name)
    found = list(verdicts(get_quantizer(name).backend, *rules))
    assert any(verdict.status == "passed" for _, _, verdict in found)
    return [f"{test}-{check}: {v.reason}" for test, check, v in found if v.status == "failed"]


def test_b26_r05_a_built_in_backend_keeps_what_it_declares_of_a_few_rules():
    assert broken("embedding", "embedding") == []


# "native" is the union of x86 and XNNPACK with the graph as artefact: each of its rules is tried here, on kernels.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["xnnpack", "x86", "cortex_m", "embedding", "openvino", "onnxruntime"])
def test_b26_r05_a_built_in_backend_keeps_all_that_it_declares(name):
    assert broken(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["conv_transpose_bn", "bmm", "avg_pool2d", "sum.dim_IntList", "tanh", "flatten"])
def test_arm_keeps_what_it_declares_of_a_rule_of_each_kind(rule):
    """All of its rules take half an hour: `pytest --quantplug-backend arm`."""
    pytest.importorskip("ethosu.vela")
    assert broken("arm", rule) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["conv_bn_relu6", "linear", "matmul", "cat"])
def test_tensorrt_keeps_what_it_declares_of_a_rule_of_each_kind(rule):
    """All of its rules take six minutes: `pytest --quantplug-backend tensorrt`."""
    pytest.importorskip("onnxruntime")
    found = list(verdicts(get_quantizer("tensorrt").backend, rule))
    assert [f"{test}-{check}: {v.reason}" for test, check, v in found if v.status == "failed"] == []
    assert {check for _, check, v in found if v.status == "passed"} >= {"lowered", "delegated", "level"}
