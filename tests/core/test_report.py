"""The report: what is quantized and how, why the rest is not, islands and boundaries, in three forms."""

import json
from html.parser import HTMLParser

import pytest
import torch
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as executorch
from models import Function, MyModel, Transformer, exported, node, observed, reference
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as torchao_convert
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare

from quantplug import XNNPACKQuantizer, calibrate, convert_pt2e, explain, get_quantizer, prepare_pt2e
from quantplug.core.errors import ModelError
from quantplug.core.graph.facts import compute_nodes

X = torch.randn(1, 3, 10, 10, generator=torch.Generator().manual_seed(0))
QDQ = "quantized_decomposed"


@pytest.fixture(scope="module")
def mixed():
    """A transformer, whose norms, softmax and products have no integer rule."""
    torch.manual_seed(0)
    return reference(Transformer(), get_quantizer("xnnpack"), torch.randn(1, 5, 16))


def test_every_compute_operator_has_one_row_in_graph_order(mixed):
    expected = [n.name for n in compute_nodes(mixed.graph) if QDQ not in str(n.target)]
    assert [row.node for row in explain(mixed).rows] == expected


def test_float_operators_between_integer_neighbours_are_not_claimed(mixed):
    report = explain(mixed)
    for name in ("layer_norm", "layer_norm_1"):
        row = report.row(name)
        assert not row.quantized
        assert row.rule == ""
        assert "no rule ends in" in row.reason
        assert row.node in {n for island in report.islands for n in island}


def test_a_float_row_has_a_reason_and_a_quantized_one_has_dtypes(mixed):
    for row in explain(mixed).rows:
        assert bool(row.reason) != row.quantized
        assert bool(row.how) == row.quantized


def test_islands_and_boundaries_fit_the_graph(mixed):
    report = explain(mixed)
    rows = {row.node: row for row in report.rows}
    islands = [set(island) for island in report.islands]
    assert set().union(*islands) == {row.node for row in report.rows if not row.quantized}
    assert sum(map(len, islands)) == len(set().union(*islands))
    for boundary in report.boundaries:
        call = node(mixed, boundary.node)
        assert boundary.kind in str(call.target)
        for consumer in boundary.consumers:
            assert boundary.kind == "quantize" or consumer not in rows or not rows[consumer].quantized
        if boundary.kind == "quantize" and boundary.producer in rows:
            assert not rows[boundary.producer].quantized
        assert boundary.elements == call.meta["val"].numel()


def test_stages_are_told_apart():
    model = exported(MyModel(), X)
    assert explain(model).stage == "exported"
    assert {row.reason for row in explain(model).rows} == {"no quantizer annotated it"}
    prepared = observed(MyModel(), get_quantizer("x86"), X)
    assert explain(prepared).stage == "prepared"
    assert explain(convert_pt2e(prepared)).stage == "converted"


def test_prepared_and_converted_reports_agree_on_what_is_quantized():
    prepared = observed(Transformer(), get_quantizer("xnnpack"), torch.randn(1, 5, 16))
    before, after = explain(prepared), explain(convert_pt2e(prepared))
    assert [(r.node, r.quantized, r.rule, r.reason) for r in before.rows] == [
        (r.node, r.quantized, r.rule, r.reason) for r in after.rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize("core", ["ours", "torchao"])
def test_foreign_quantizers_are_reported_too(core):
    quantizer = executorch.XNNPACKQuantizer().set_global(executorch.get_symmetric_quantization_config(True))
    prepare, convert = (prepare_pt2e, convert_pt2e) if core == "ours" else (torchao_prepare, torchao_convert)
    prepared = prepare(exported(MyModel(), X), quantizer)
    prepared(X)
    report = explain(convert(prepared))
    assert report.row("linear").quantized
    assert report.row("linear").rule == "annotated"
    assert report.row("conv2d").quantized
    assert report.row("conv2d").how.startswith("int8, int8 per channel")
    assert not report.row("sigmoid").quantized
    assert report.row("sigmoid").owner == ""


def test_two_quantizers_one_after_the_other():
    model = exported(MyModel(), X)
    XNNPACKQuantizer().set_operator_type("linear", "int8").annotate(model)

    class Theirs(executorch.XNNPACKQuantizer):
        pass

    theirs = Theirs().set_global(executorch.get_symmetric_quantization_config(True))
    theirs.annotate(model)
    report = explain(model)
    assert report.row("linear").owner == "xnnpack"
    assert report.row("linear").rule == "linear"
    assert report.row("conv2d").quantized
    assert report.row("conv2d").rule == "annotated"


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.open, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.text = ""

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "td":
            self.rows[-1].append(self.text.strip())


def test_three_forms_carry_the_same(mixed):
    report = explain(mixed)
    read = json.loads(report.json())
    assert read["quantized"] == report.quantized
    assert [row["node"] for row in read["rows"]] == [row.node for row in report.rows]
    assert len(read["boundaries"]) == len(report.boundaries)

    page = report.html("a <title>")
    assert "a &lt;title&gt;" in page
    cells = Cells()
    cells.feed(page)
    assert cells.open == []
    assert [row[0] for row in cells.rows if len(row) == 5] == [row.node for row in report.rows]

    text = report.text()
    assert all(row.node in text for row in report.rows)
    assert report.summary() in text
    assert str(report) == text


def test_brackets_in_paths_and_reasons_are_shown_as_they_are():
    model = exported(Function(lambda m, x: torch.relu(x)), X)
    XNNPACKQuantizer(strict=False).set_global("int8").set_filter(named, None).annotate(model)
    assert "filter 'every[red]node'" in explain(model).text(400)


def named(n):
    return True


named.__name__ = "every[red]node"


def test_fixed_shared_derived_and_dynamic_specs_are_named():
    from quantplug import get_symmetric_quantization_config

    model = Function(lambda m, x: torch.sigmoid(m.fc(x)).reshape(-1), fc=nn.Linear(10, 2))
    x = torch.randn(3, 10)
    prepared = observed(
        model, XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True, int32_bias=True)), x
    )  # fmt: skip
    report = explain(prepared)
    assert "derived int32 per channel" in report.row("linear").how
    assert report.row("sigmoid").how.endswith("-> fixed int8")
    assert "shared with" in report.row("reshape").how
    dynamic = explain(observed(model, XNNPACKQuantizer().set_global("int8_dynamic"), x))
    assert dynamic.row("linear").how.startswith("dynamic int8")


def test_only_graphs_are_explained():
    with pytest.raises(ModelError, match="explain takes an exported graph module, found Linear"):
        explain(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_report_changes_nothing(mixed):
    before = {n.name: sorted(n.meta) for n in mixed.graph.nodes}
    explain(mixed).html()
    assert {n.name: sorted(n.meta) for n in mixed.graph.nodes} == before


def test_operators_inside_control_flow_have_rows_and_scopes_may_name_what_surrounds_them():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            return torch.cond(x.sum() > 0, lambda t: self.one(t), lambda t: self.other(t), (x,))

    model, x = Branches().eval(), torch.randn(4, 8)
    with torch.no_grad():
        graph = torch.export.export(model, (x,)).module()
        prepared = prepare_pt2e(graph, get_quantizer("x86").set_global("int8"))
        calibrate(prepared, [x, -x], progress=False)
        report = explain(convert_pt2e(prepared))
        only_first = get_quantizer("x86").set_module_name("first", "int8")
        partly = explain(prepare_pt2e(graph, only_first))
    assert [row.quantized for row in report.rows if row.operator == "linear"] == [True, True, True]
    assert [row.quantized for row in partly.rows if row.operator == "linear"] == [True, False, False]


def test_the_report_shows_what_became_of_every_batch_norm():
    body = Function(lambda m, x: m.bn(m.conv(x)) + m.alone(x), conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))
    body.alone = nn.BatchNorm2d(3)
    report = explain(prepare_pt2e(exported(body.eval(), X), get_quantizer("x86")))
    assert [folding.folded for folding in report.foldings] == [True, False]
    folded, alone = map(str, report.foldings)
    assert folded == "'batch_norm' (module 'bn') is folded into 'conv2d'."
    assert alone.startswith("'batch_norm_1' (module 'alone') is not folded: ")
    assert folded in report.text(width=1000)
    assert "is folded into" in report.html()
    assert json.loads(report.json())["foldings"][0]["producer"] == "conv2d"
