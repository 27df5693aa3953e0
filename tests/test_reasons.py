"""What x86's programs run in float is what the report says is not quantized, for the reasons that it gives."""

import pytest
import torch
from test_tables import CASES
from told import told

import quantplug

X86 = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "vit_b_16", "bert", "mlp", "kws_dscnn")
CONFIGS = ("int8", "int8_per_tensor", "int8_dynamic", "int8_weight_only", "int4_weight_only", "float16")
FLOAT_DTYPES = (torch.float32, torch.bfloat16)
QUICK_X86 = {("mlp", "int8"), ("mlp", "int4_weight_only")}
IN_BOTH_DTYPES = ("mobilenet_v3_small", "vit_b_16", "mlp")
IN_NO_GROUPS = {"resnet18", "resnet50", "mobilenet_v2", "kws_dscnn"}  # no layer of theirs has weights in groups


@pytest.mark.parametrize(
    ("name", "config", "float_dtype"),
    [
        pytest.param(name, config, dtype, marks=[] if (name, config) in QUICK_X86 else pytest.mark.slow)
        for name in X86
        for config in CONFIGS
        for dtype in (FLOAT_DTYPES if name in IN_BOTH_DTYPES else FLOAT_DTYPES[:1])
        if config != "int4_weight_only" or name not in IN_NO_GROUPS
        if (config, dtype) != ("int8", torch.float32) or (name, config) in QUICK_X86
    ],
)
def test_x86_computes_in_float_what_the_report_says_for_the_same_reason(name, config, float_dtype):
    model, sample = CASES["x86", name]()
    data = [sample() for _ in range(2)]
    artefact = quantplug.quantize(model, data[0], "x86", data, config, progress=False, float_dtype=float_dtype)
    report, program = told(artefact)
    if quantplug.get_quantizer("x86").backend.config(config).input_activation is None:
        # A config of weights alone quantizes what is stored: which kernel reads it is the lowering's choice.
        program = {node: reason for node, reason in program.items() if node in report}
    assert report == program
    assert all(op.placement == "int8" or op.reason for op in artefact.program.ops)
