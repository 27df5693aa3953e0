"""Parameters of run time as numbers: those of the operators that they stand for, bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program
from quantplug.lowering.x86.running import eager_conversions as numbers

QD = torch.ops.quantized_decomposed
EPS = torch.finfo(torch.float32).eps
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
RANGES = st.sampled_from(
    [(0, 255, torch.uint8), (0, 127, torch.uint8), (-128, 127, torch.int8), (-127, 127, torch.int8)]
)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(FINITE, min_size=1, max_size=40), asked=RANGES, factor=st.sampled_from([1.0, 1e-3, 1e-30]))
def test_numbers_are_those_that_the_operators_choose(values, asked, factor):
    x = torch.tensor(values) * factor
    low, high, dtype = asked
    for choose, ours in (
        (QD.choose_qparams, numbers.affine_numbers),
        (QD.choose_qparams_symmetric, numbers.symmetric_numbers),
    ):
        scale, zero_point = choose.tensor(x, low, high, EPS, dtype)
        found = ours(x, low, high, EPS, dtype)
        assert found[0] == scale.item()
        if math.isfinite(found[0]):
            assert found[1] == zero_point.item()
            expected = QD.quantize_per_tensor.tensor(x, scale, zero_point, low, high, dtype)
            assert torch.equal(numbers.integers_of(x, *found, low, high, dtype), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.Linear(16, 32), nn.Conv1d(16, 128, 5)], ids=["linear", "conv1d"])
def test_a_dynamic_program_calls_no_operator_that_chooses_parameters_and_passes_on_what_is_no_number(kind):
    sizes = (64, 16) if isinstance(kind, nn.Linear) else (4, 16, 90)
    x = torch.randn(sizes)
    model = nn.Sequential(kind).eval()
    artefact = quantplug.quantize(model, (x,), "x86", None, "int8_dynamic", progress=False)
    assert isinstance(artefact.program, X86Program)
    called = {str(node.target) for node in artefact.program.module.graph.nodes}
    assert any("choose_qparams" in name for name in map(str, (n.target for n in artefact.reference.graph.nodes)))
    assert not any("choose_qparams" in name for name in called)
    for scale in (1.0, 1e-6, 1e6):
        assert sqnr(artefact.reference(x * scale), artefact(x * scale)) > 60
    for odd in (math.nan, math.inf):
        assert not artefact(torch.full(sizes, odd)).isfinite().any()
