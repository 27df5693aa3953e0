"""What the report calls quantized is int8 in the program."""

import pytest
from test_tables import CASES

import quantplug

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
