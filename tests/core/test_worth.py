"""Operators that are better left float where only float operators read them."""

import pytest
import torch
from models import Function, exported
from torch import nn

import quantplug
from quantplug import XNNPACKQuantizer, explain
from quantplug.core.graph.multiplications import multiplications

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


class Ends(nn.Module):
    """A small stem, a large body, and a head of one row; the norms between them are float."""

    def __init__(self, *, classes=4, width=64, norm=True):
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, classes)
        self.body = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norm else nn.ReLU() for _ in range(2))

    def forward(self, x):
        x = self.body(self.norms[0](self.stem(x)))
        return self.head(self.norms[1](x)[0, :1])


def taken(model, quantizer):
    """Returns which of the linears are quantized, and the reasons of those that are not."""
    annotated = exported(model, torch.randn(1, 128, 8))
    quantizer.annotate(annotated)
    rows = [row for row in explain(annotated).rows if "linear" in row.operator]
    names = ("stem", "first", "second", "head")
    assert len(rows) == len(names)
    return {n for n, r in zip(names, rows, strict=True) if r.quantized}, [r.reason for r in rows if not r.quantized]


def test_the_small_ends_of_a_model_stay_float_between_float_operators():
    found, reasons = taken(Ends(), quantplug.get_quantizer("x86"))
    assert found == {"first", "second"}
    # 512 multiplications for each of 128 rows of the stem, 65,536 for each of the body, 256 for one row of the head
    assert "alone between float operators, and does 0.8 % of its multiplications" in reasons[0]
    assert "0.003 %" in reasons[1]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Ends(norm=False), {"stem", "first", "second", "head"}),  # integers beside them
        (Ends(classes=4000), {"first", "second", "head"}),  # 3 % of the work
        (Ends(width=1024, classes=1024), {"first", "second"}),
        (Ends(width=1024, classes=1025), {"first", "second", "head"}),  # many weights to keep in float
    ],
)
def test_ends_beside_integers_or_with_many_weights_are_quantized(model, expected):
    assert taken(model, quantplug.get_quantizer("x86"))[0] == expected


def test_ends_that_the_user_names_are_quantized():
    quantizer = quantplug.get_quantizer("x86").set_global("int8").set_module_name("head", "int8")
    assert taken(Ends(), quantizer)[0] == {"first", "second", "head"}


@pytest.mark.parametrize("config", ["int8_dynamic", "int8_weight_only"])
def test_ends_are_quantized_where_activations_have_no_fixed_range(config):
    assert len(taken(Ends(), quantplug.get_quantizer("x86").set_global(config))[0]) == 4


def test_work_is_counted_by_shapes():
    def counts(function, *inputs, **parts):
        graph = exported(Function(function, **parts), *inputs).graph
        return [count for node in graph.nodes if (count := multiplications(node))]

    image, rows = torch.randn(2, 4, 9, 9), torch.randn(2, 3, 8)
    assert counts(lambda m, x: m.c(x), image, c=nn.Conv2d(4, 6, 3, 2)) == [2 * 6 * 4 * 4 * 4 * 9]
    assert counts(lambda m, x: m.c(x), image, c=nn.Conv2d(4, 4, 3, groups=4)) == [2 * 4 * 7 * 7 * 9]
    assert counts(lambda m, x: m.c(x), image, c=nn.ConvTranspose2d(4, 6, 3)) == [2 * 4 * 81 * 6 * 9]
    assert counts(lambda m, x: m.c(x), rows, c=nn.Linear(8, 5)) == [2 * 3 * 8 * 5]
    assert counts(lambda m, x: x @ x.transpose(1, 2), rows) == [2 * 3 * 3 * 8]
    assert counts(lambda m, x: torch.addmm(x[0, 0], x[0], x[1].t() @ x[0]), rows) == [8 * 8 * 3, 3 * 8 * 8]
    attend = nn.functional.scaled_dot_product_attention
    assert counts(lambda m, x: attend(x, x, x), torch.randn(1, 2, 5, 8)) == [2 * 2 * 5 * 5 * 8]


class Chosen(nn.Module):
    """Computes with rows whose number only the data tell."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.body = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 600)

    def forward(self, x):
        return torch.tanh(self.body(self.norm(self.stem(x))[torch.nonzero(x[:, 0] > 0).squeeze(1)]))


def test_sizes_that_only_the_data_tell_do_not_stop_the_counting():
    annotated = exported(Chosen(), torch.randn(64, 8))
    quantplug.get_quantizer("x86").annotate(annotated)
    assert explain(annotated).row("linear_1").quantized
