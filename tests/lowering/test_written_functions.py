"""Functions that XNNPACK has no kernel for run inside of its delegates, as those that it has: files against torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Function
from torch import nn

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.rewrites.functions import functions_have_kernels

FUNCTIONS = {
    "softplus": F.softplus,
    "softplus twice as steep": lambda x: F.softplus(x, beta=2.0),
    "softplus of an early threshold": lambda x: F.softplus(x, threshold=16),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "softshrink": F.softshrink,
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "reciprocal of a root": lambda x: 1 / torch.sqrt(x.abs() + 0.5),
    "cube": lambda x: x**3,
    "fourth power": lambda x: x**4,
    "root": lambda x: x.abs() ** 0.5,
    "three quarters": lambda x: (x.abs() + 1) ** 0.75,
    "less than one and a half": lambda x: (x.abs() + 1) ** -1.25,
    "inverse square": lambda x: (x.abs() + 1) ** -2,
}
# What is nearly nothing stays so: far from zero, the numbers are smaller than a rounding of 1.
NUMBERS = torch.cat([torch.linspace(-30, 30, 2001), torch.tensor([-80.0, -1e-3, 0.0, 1e-7, 80.0])])
WIDTH = 16


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def in_float(function, x):
    """Returns the program of a function alone, in float."""
    graph = torch.export.export(Function(lambda _, x: function(x)).eval(), (x,)).module()
    return quantplug.get_quantizer("xnnpack").backend.lower(graph, (x,))


def places(program):
    """Returns how many delegates there are, and how many operators outside of them."""
    return program.counts.delegates, program.counts.portable


def counts(artefact):
    return artefact.program.counts


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_keeps_its_digits_in_the_file(name):
    function = FUNCTIONS[name]
    program = in_float(function, NUMBERS)
    assert places(program) == (1, 0)
    for x in (NUMBERS, NUMBERS.flip(0), NUMBERS):
        wanted = function(x.double())
        # The kernel of exp is a few roundings off, more so where its argument is large.
        assert torch.allclose(program(x).double(), wanted, rtol=1e-5, atol=1e-33)


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_between_layers_is_one_delegate(name, config):
    model = Between(FUNCTIONS[name]).eval()
    batches = [(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, config, progress=False)
    assert places(artefact.program) == (1, 0)
    for [x] in (batches[1], batches[0], batches[1]):
        assert sqnr(artefact(x), artefact.reference(x)) > 35
        assert sqnr(artefact(x), model(x)) > 20


@settings(max_examples=60, deadline=None)
@given(
    x=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    quarters=st.integers(-20, 20),
    beta=st.floats(0.125, 5, width=32),
)
def test_what_is_written_is_the_same_function(x, quarters, beta):
    numbers = torch.tensor(x)

    def function(_, x):
        return F.softplus(x, beta=beta), (x.abs() + 0.5) ** (quarters / 4), F.mish(x), F.logsigmoid(x)

    graph = torch.export.export(Function(function).eval(), (numbers,)).module()
    found = functions_have_kernels(graph)(numbers)
    for one, other in zip(found, function(None, numbers.double()), strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-35, equal_nan=True)


def test_a_step_in_the_function_is_kept():
    """With an early threshold softplus jumps, which the formula does not."""
    graph = torch.export.export(Function(lambda _, x: F.softplus(x, threshold=1)).eval(), (NUMBERS,)).module()
    functions_have_kernels(graph)
    found = graph(NUMBERS)
    assert torch.equal(found, F.softplus(NUMBERS, threshold=1))
    assert not torch.allclose(found, F.softplus(NUMBERS), atol=0.1)


@pytest.mark.slow
def test_halves_of_channels_gate_each_other_in_integers():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(8, 8, 1)

        def forward(self, x):
            return self.last(F.glu(self.first(x), dim=1))

    model = Gated().eval()
    batches = [(torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]
    artefact = quantplug.quantize(model, batches[0], "xnnpack", batches, progress=False)
    assert places(artefact.program) == (1, 0)
    assert counts(artefact).f32 == 0, "the product and the sigmoid are integer kernels"
    for [x] in (batches[1], batches[0], batches[1]):
        assert sqnr(artefact(x), artefact.reference(x)) > 35
        assert sqnr(artefact(x), model(x)) > 20
