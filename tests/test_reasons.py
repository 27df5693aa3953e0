"""What the report calls quantized is int8 in the program, and what it calls float is float for the same reason."""

import pytest
import torch
from test_tables import CASES

import quantplug
from quantplug.lowering.program import LoweredOp

QUICK = {("xnnpack", "kws_dscnn"), ("x86", "kws_dscnn"), ("x86", "mlp")}
SLOW = [
    *(("xnnpack", name) for name in ("resnet18", "mobilenet_v3_small", "GRU")),
    *(("x86", name) for name in ("resnet18", "mobilenet_v3_small", "resnet20", "resnet32", "vit_b_16", "bert")),
]


@pytest.mark.parametrize(
    ("backend", "name"), [*sorted(QUICK), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_what_the_report_calls_quantized_is_int8_in_the_program(backend, name):
    model, sample = CASES[backend, name]()
    data = [sample() for _ in range(2)]
    artefact = quantplug.quantize(model, data[0], backend, data, "int8", progress=False)
    said = {row.node for row in artefact.report.rows if row.quantized}
    # Calls that the lowering itself wrote, such as those of a rewrite, are no operators of the graph.
    placed = {op.node: (op.placement, op.reason) for op in artefact.program.ops if op.node in said}
    assert said
    assert {node: found for node, found in placed.items() if found[0] != "int8"} == {}


X86 = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "vit_b_16", "bert", "mlp", "kws_dscnn")
CONFIGS = ("int8", "int8_per_tensor", "int8_dynamic", "int8_weight_only", "int4_weight_only", "float16")
FLOAT_DTYPES = (torch.float32, torch.bfloat16)
QUICK_X86 = {("mlp", "int8"), ("mlp", "int4_weight_only")}
IN_BOTH_DTYPES = ("mobilenet_v3_small", "vit_b_16", "mlp")
IN_NO_GROUPS = {"resnet18", "resnet50", "mobilenet_v2", "kws_dscnn"}  # no layer of theirs has weights in groups


def told(rows) -> dict[str, tuple[bool, str]]:
    """Returns for each operator of a report or of a program whether it computes in integers, and why not."""
    return {
        row.node: (row.placement == "int8", row.reason) if isinstance(row, LoweredOp) else (row.quantized, row.reason)
        for row in rows
    }


@pytest.mark.parametrize(
    ("name", "config", "float_dtype"),
    [
        pytest.param(name, config, dtype, marks=[] if (name, config) in QUICK_X86 else pytest.mark.slow)
        for name in X86
        for config in CONFIGS
        for dtype in (FLOAT_DTYPES if name in IN_BOTH_DTYPES else FLOAT_DTYPES[:1])
        if config != "int4_weight_only" or name not in IN_NO_GROUPS
    ],
)
def test_x86_computes_in_float_what_the_report_says_for_the_same_reason(name, config, float_dtype):
    model, sample = CASES["x86", name]()
    data = [sample() for _ in range(2)]
    artefact = quantplug.quantize(model, data[0], "x86", data, config, progress=False, float_dtype=float_dtype)
    said, found = told(artefact.report.rows), told(artefact.program.ops)
    assert said.keys() == found.keys()
    is_of_weights = quantplug.get_quantizer("x86").backend.config(config).input_activation is None
    # A config of weights alone quantizes what is stored: which kernel reads it is the lowering's choice.
    differ = {n: (said[n], found[n]) for n in said if said[n] != found[n] and not (is_of_weights and said[n][0])}
    assert differ == {}
    assert all(found[node][0] or found[node][1] for node in found)
