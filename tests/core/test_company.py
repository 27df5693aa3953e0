"""Operators that are better left float where only float operators read them."""

import pytest
import torch
from models import Function, exported
from torch import nn

from quantplug import XNNPACKQuantizer, explain

X = torch.randn(1, 4, 8)


def quantized(function, *inputs, **parts):
    model = exported(Function(function, **parts), *inputs)
    XNNPACKQuantizer().annotate(model)
    return {row.node for row in explain(model).rows if row.quantized}, explain(model)


def test_a_sum_that_a_softmax_reads_stays_float_and_says_why():
    found, report = quantized(lambda m, x: torch.softmax(x @ x.transpose(1, 2) + 1.0 * x[:, :, :4], -1), X)
    assert found == set()
    assert "only float operators read its result" in report.row("add").reason


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # through views, and several in a row
        (lambda m, x: torch.softmax(((x @ m.w) * m.c + m.b).view(1, 2, 2, 8) + m.b, -1), set()),
        # read by an integer layer
        (lambda m, x: m.fc(x @ m.w + m.b), {"add", "linear"}),
        (lambda m, x: m.fc(((x @ m.w) * m.c + m.b).reshape(4, 8)), {"mul", "add", "reshape", "linear"}),
        # written by one and read by none
        (lambda m, x: torch.softmax(m.fc(x) + x @ m.w, -1), {"linear"}),
        (lambda m, x: torch.softmax(m.fc(x) + m.fc(x * m.b), -1), {"linear", "mul"}),
        # nothing computes what they read, nothing but the output reads them
        (lambda m, x: x + x * m.b, {"add", "mul"}),
        (lambda m, x: m.fc(x) + x, {"add", "linear"}),
        (lambda m, x: torch.softmax(x + m.b, -1), set()),
        # moves of an integer layer's result stay moves of integers, those of a float sum do not
        (lambda m, x: torch.softmax(m.fc(x).view(4, 8) + x.view(4, 8), -1), {"linear", "view"}),
        # one of two readers is an integer layer
        (lambda m, x: (m.fc(y := x @ m.w + m.b), torch.softmax(y * m.c, -1)), {"add", "linear"}),
        # sums of sums, as in a transformer
        (lambda m, x: m.fc(m.norm(y := m.fc(x) + x) + y), {"linear", "add"}),
        (lambda m, x: m.fc(m.norm(y := m.fc(x) + x) @ m.w) + m.norm(y + m.b), {"linear", "add"}),
        (lambda m, x: m.norm(m.fc(m.norm(y := m.fc(x) + x)) + y), {"linear"}),
    ],
)
def test_only_float_readers_leave_an_operator_float(function, expected):
    torch.manual_seed(0)
    parts = {"fc": nn.Linear(8, 8), "norm": nn.LayerNorm(8), **{name: nn.Parameter(torch.randn(8)) for name in "bc"}}
    found, _ = quantized(function, X, w=nn.Parameter(torch.randn(8, 8)), **parts)
    assert {name.partition("_")[0] for name in found} == expected
